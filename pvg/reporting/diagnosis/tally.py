"""All quantities that the diagnosis reads from logs, collected event by event.

    tally = read_logs(["events.log", "server.log.gz"])
    tally.quantity("queue_ms").quantile(0.95)

Quantities are named as in the log (`wall_ms`, `queue_ms`, `rpc_ms`, `write_ms`, `wait_ms`, `dur_ms`, ...), with a
prefix where two tags share a name (`step.wall_ms`).

Several logs are merged in the order of their times. The load of generation at a line comes from the lines before it. If
the clocks of the logs differ, this order means nothing and `load_known` is False.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from pvg.reporting.diagnosis.log_events import (
    SERVER_EVENTS,
    STDIN,
    Event,
    EventReader,
    LineCounts,
    LoggedUpdate,
    MalformedLineError,
    UpdatePairing,
    open_log,
)
from pvg.telemetry.waits import CoreTime

RESTART_S = 3600.0  # a clock that jumps by more belongs to another session (or machine); no step takes longer
TICK_MS = 100.0  # between two samples of the event loop, where its line does not say: 10 Hz
NAMES = 64  # most kinds of events and phases; a log of garbage must not fill the memory
REST = "(others)"

# Fields that are collected unchanged: tag, event, field -> name of the quantity. Fields of [weights] and [step] have
# separate functions.
PLAIN = {
    ("ckpt", "write.done"): {"write_ms": "write_ms"},
    ("ckpt", "wait.done"): {"wait_ms": "wait_ms"},
    ("gen", "batch.done"): {"dur_ms": "dur_ms", "longest_ms": "longest_ms"},
    ("rollout", "batch"): {"group_p50_ms": "group_p50_ms", "group_max_ms": "group_max_ms"},
    ("workers", "sample"): {"busy": "workers.busy", "busy_most": "workers.most", "core_wait": "workers.core_wait"},
    ("loop", "lag"): {"p50_ms": "lag.p50_ms", "p90_ms": "lag.p90_ms", "p99_ms": "lag.p99_ms", "max_ms": "lag.max_ms"},
}
# Other fields that are read from a tag's lines.
MORE = {
    "gen": ("inflight", "completions"),
    "loop": ("samples", "period_ms", "ran_ms", "waited_ms", "longest_wait_ms"),
    "machine": ("cores", "busy_cores", "own_cores"),
    "rollout": ("trunc_pct",),
    "run": ("threads", "cores"),
    "workers": ("up", "ran_ms", "waited_ms", "longest_wait_ms"),
}
# Quantities that are compared with the load of generation.
RELATED = frozenset({"queue_ms", "rpc_ms", "write_ms", "wait_ms"})


@dataclass(slots=True)
class LogSpan:
    """The time that one log's driver lines span, in seconds, without the gaps between its sessions."""

    total: float = 0.0
    _last: float | None = None

    def see(self, event: Event) -> None:
        began = event.tag == "run" and event.name == "start"
        if self._last is None or began or abs(event.t - self._last) > RESTART_S:
            self._last = event.t
        elif event.t > self._last:  # lines of several threads may be in another order than their times
            self.total += event.t - self._last
            self._last = event.t


@dataclass(slots=True)
class LogTally:
    sources: tuple[str, ...]
    lines: LineCounts = field(default_factory=LineCounts)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    quantities: dict[str, Quantity] = field(default_factory=lambda: defaultdict(Quantity))
    relations: dict[str, LoadRelation] = field(default_factory=lambda: defaultdict(LoadRelation))
    worst: dict[str, WorstEvents] = field(default_factory=lambda: defaultdict(WorstEvents))
    phases: dict[str, dict[str, float]] = field(default_factory=dict)  # phase -> steps, wall_ms, train_ms, idle_ms
    # name -> its total and the wall time, in ms, of the updates that have both
    of_wall: dict[str, tuple[float, float]] = field(default_factory=dict)
    lagged_ms: float = 0.0  # a lower bound of the time in which the event loop was blocked
    lagged_shared_ms: float = 0.0  # the part in windows in which threads waited for cores
    # Of the driver, and of its workers: sums over the windows that have it; `longest_s` sums the longest wait of each.
    cores: CoreTime | None = None
    worker_cores: CoreTime | None = None
    threads: float | None = None  # torch's threads in the newest process, and the cores that it may use
    usable_cores: float | None = None
    machine_cores: float | None = None
    truncated: bool = False  # whether any rollout hit the length limit
    most_workers: float = 0.0  # worker processes at the same time
    pairing: UpdatePairing = field(init=False)
    _driver: dict[int, LogSpan] = field(default_factory=lambda: defaultdict(LogSpan))
    _all: dict[int, LogSpan] = field(default_factory=lambda: defaultdict(LogSpan))
    _load: dict[int, float] = field(default_factory=dict)  # requests in generation, by log

    def __post_init__(self) -> None:
        self.pairing = UpdatePairing(self._update)

    # --- asking -------------------------------------------------------------------------------------------------------

    def quantity(self, name: str) -> Quantity:
        return self.quantities.get(name) or Quantity()

    @property
    def elapsed_s(self) -> float:
        """The time that the logs span, in seconds; the sum over several runs. 0 for a single line."""
        clocks = self._driver or self._all
        return sum(clock.total for clock in clocks.values())

    @property
    def load_known(self) -> bool:
        """Whether the load at an update can be read from the lines before it."""
        return bool(self._load) and (len(self.sources) == 1 or self.pairing.offset.same_clock)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the logs in citations: file names, or whole paths if file names are not unique."""
        names = tuple(Path(source).name for source in self.sources)
        return names if len(set(names)) == len(names) else self.sources

    @property
    def all_cores(self) -> CoreTime | None:
        """Of the driver and its workers. They wait at the same time, so `longest_s` is the longer of both."""
        both = _sum(self.cores, self.worker_cores)
        found = [cores.longest_s for cores in (self.cores, self.worker_cores) if cores is not None]
        return None if both is None else replace(both, longest_s=max(found))

    def where(self, event: Event) -> str:
        return f"{self.labels[event.source]}:{event.line}"

    # --- gathering ----------------------------------------------------------------------------------------------------

    def add(self, event: Event) -> None:
        """Add an event. Raises MalformedLineError; then only the time of the line has been noted."""
        self._time(event)
        if event.tag == "weights":
            if (load := event.number("inflight")) is not None:
                self._load[event.source] = load
            self.pairing.add(event, self.load)
        elif event.tag == "step" and event.name == "done":
            self._step(event)
        else:
            self._plain(event)
        kind = (event.tag, event.name)
        self.kinds[kind if kind in self.kinds or len(self.kinds) < NAMES else (REST, REST)] += 1

    @property
    def load(self) -> float | None:
        """Requests in generation, over all engines; None before the first line that says so."""
        return sum(self._load.values()) if self._load else None

    def _time(self, event: Event) -> None:
        self._all[event.source].see(event)
        if event.name not in SERVER_EVENTS and event.tag != "gen":  # these may have another machine's clock
            self._driver[event.source].see(event)

    def _plain(self, event: Event) -> None:
        names = PLAIN.get((event.tag, event.name), {})
        values = {key: event.number(key) for key in (*names, *MORE.get(event.tag, ()))}
        for key, name in names.items():
            self._note(name, values[key], event)
        if event.tag == "gen":
            self._generation(event, values)
        elif event.tag == "rollout":
            middle_ms, longest_ms = values.get("group_p50_ms"), values.get("group_max_ms")
            if middle_ms is not None and longest_ms is not None:
                self._note("group_excess_ms", max(0.0, longest_ms - middle_ms), event)
            self.truncated = self.truncated or bool(values["trunc_pct"])
        elif event.tag == "loop" and event.name == "lag":
            self._lag(values, event)
        elif event.tag == "machine":
            self._machine(values, event)
        elif event.tag == "workers":
            self.most_workers = max(self.most_workers, values["up"] or 0.0)
            window = self._window(values, event)
            self.worker_cores = _sum(self.worker_cores, window)
        elif event.tag == "run" and values["threads"] is not None:
            self.threads, self.usable_cores = values["threads"], values["cores"]

    def _machine(self, values: dict[str, float | None], event: Event) -> None:
        """How many cores of the machine all programs used, and how many of them pvg."""
        cores, busy, own = values["cores"], values["busy_cores"], values["own_cores"]
        if cores is None or busy is None or own is None:
            return
        self.machine_cores = cores
        self._note("machine.busy", busy, event)
        self._note("machine.others", max(0.0, busy - own), event)

    def _generation(self, event: Event, values: dict[str, float | None]) -> None:
        inflight, completions = values["inflight"], values["completions"]
        if inflight is not None:
            self._load[event.source] = inflight
        elif event.name == "batch.done" and completions is not None and event.source in self._load:
            self._load[event.source] = max(0.0, self._load[event.source] - completions)

    def _lag(self, values: dict[str, float | None], event: Event) -> None:
        """Add a lower bound of the time in which the loop was blocked. Each sample is the lag of one tick. During a
        stall over several ticks each tick counts the rest of it, so a sample counts at most until the next tick. From
        percentiles: at least 40% of the samples are above p50, a further 9% above p90, and 1% above p99."""
        period = TICK_MS if values["period_ms"] is None else values["period_ms"]
        p50, p90, p99 = (min(period, values[key] or 0.0) for key in ("p50_ms", "p90_ms", "p99_ms"))
        from_shares = (values["samples"] or 0.0) * (0.4 * p50 + 0.09 * p90 + 0.01 * p99)
        lagged_ms = max(from_shares, values["max_ms"] or 0.0)
        self.lagged_ms += lagged_ms
        window = self._window(values, event)
        self.lagged_shared_ms += lagged_ms if window is not None and window.shared else 0.0
        self.cores = _sum(self.cores, window)

    def _window(self, values: dict[str, float | None], event: Event) -> CoreTime | None:
        """The waits for cores that a line tells; None if not on Linux, in an older log, and without such a line."""
        ran_ms, waited_ms, longest_ms = values["ran_ms"], values["waited_ms"], values["longest_wait_ms"]
        if ran_ms is None or waited_ms is None or longest_ms is None:
            return None
        self._note("longest_wait_ms", longest_ms, event)
        return CoreTime(ran_ms / 1e3, waited_ms / 1e3, longest_ms / 1e3)

    def _step(self, event: Event) -> None:
        wall, train, idle = (event.number(key) for key in ("wall_ms", "train_ms", "idle_ms"))
        self._note("step.wall_ms", wall, event)
        self._note("step.train_ms", train, event)
        self._note("step.idle_ms", idle, event)
        if wall is None or idle is None:
            return
        phase = event.fields.get("phase", REST)[:NAMES]
        phase = phase if phase in self.phases or len(self.phases) < NAMES else REST
        sums = self.phases.setdefault(phase, {"steps": 0.0, "wall_ms": 0.0, "train_ms": 0.0, "idle_ms": 0.0})
        for key, value in (("steps", 1.0), ("wall_ms", wall), ("train_ms", train or 0.0), ("idle_ms", idle)):
            sums[key] += value

    def _update(self, update: LoggedUpdate) -> None:
        for name, value in (
            ("wall_ms", update.wall_ms),
            ("rpc_ms", update.rpc_ms),
            ("queue_ms", update.queue_ms),
            ("in_server_ms", update.in_server_ms),
        ):
            self._note(name, value, update.event, update.load)
        for name, value in (("rpc_ms", update.rpc_ms), ("queue_ms", update.queue_ms)):
            if value is not None and update.wall_ms is not None:
                part, wall = self.of_wall.get(name, (0.0, 0.0))
                self.of_wall[name] = part + value, wall + update.wall_ms

    def part_of_wall(self, name: str) -> tuple[float, float] | None:
        """The total of `name` (ms) and its share of the wall time, over the updates that have both; None without such
        updates. The logs of two processes need not have the same updates."""
        part, wall = self.of_wall.get(name, (0.0, 0.0))
        return (part, part / wall) if wall else None

    def _note(self, name: str, value: float | None, event: Event, load: float | None = None) -> None:
        if value is None:
            return
        self.quantities[name].add(value)
        self.worst[name].add(value, event)
        load = self.load if load is None and name in ("write_ms", "wait_ms") else load
        if name in RELATED and load is not None:
            self.relations[name].add(load, value)


def _sum(one: CoreTime | None, other: CoreTime | None) -> CoreTime | None:
    return one if other is None else other if one is None else one + other


def read_logs(sources: Sequence[str | Path]) -> LogTally:
    """Read all of `sources` (files, plain or gzip; "-" is standard input) once. Raises UsageError for a missing log."""
    tally = LogTally(tuple("standard input" if str(source) == STDIN else str(source) for source in sources))
    with ExitStack() as stack:
        readers = [
            EventReader(stack.enter_context(open_log(source)), label, tally.lines, number)
            for number, (source, label) in enumerate(zip(sources, tally.labels, strict=True))
        ]
        for event in _side_by_side(readers):
            try:
                tally.add(event)
            except MalformedLineError as error:
                tally.lines.events -= 1
                tally.lines.reject(tally.where(event), str(error), event.text)
    tally.pairing.close()
    return tally


def _side_by_side(readers: Sequence[Iterable[Event]]) -> Iterator[Event]:
    """All events in the order of their times; those of one log in the order of its lines."""
    if len(readers) == 1:
        return iter(readers[0])
    streams = (_with_time_so_far(reader, number) for number, reader in enumerate(readers))
    return (event for _, _, event in heapq.merge(*streams, key=lambda entry: entry[:2]))


def _with_time_so_far(events: Iterable[Event], number: int) -> Iterator[tuple[float, int, Event]]:
    latest = -math.inf
    for event in events:
        latest = max(latest, event.t)
        yield latest, number, event


# Numbers of a log, 8 bytes each: quantiles, the correlation of two quantities, the largest values.

WORST = 3  # lines of evidence per quantity


class Quantity:
    """All values of one quantity, not negative."""

    def __init__(self) -> None:
        self.total = 0.0
        self.largest = 0.0
        self._values = array("d")

    @property
    def n(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self.total += value
        self.largest = max(self.largest, value)
        self._values.append(value)

    def quantile(self, share: float) -> float:
        """The value below which `share` of all lie, interpolated. Raises ValueError without values."""
        if not self.n:
            raise ValueError("A quantity without values has no quantiles.")
        return float(np.quantile(np.array(self._values), share))

    def excess_over(self, level: float) -> float:
        """The sum of the amounts above `level`."""
        return sum(value - level for value in self._values if value > level)


@dataclass(frozen=True, slots=True)
class LoadCorrelation:
    """A quantity and the load: Spearman's rank correlation, and the medians of both halves of the load."""

    n: int
    correlation: float
    idle_load: float
    busy_load: float
    idle: float
    busy: float


class LoadRelation:
    def __init__(self) -> None:
        self._loads, self._values = array("d"), array("d")

    def add(self, load: float, value: float) -> None:
        self._loads.append(load)
        self._values.append(value)

    def related(self, least: int) -> LoadCorrelation | None:
        """None with fewer than `least` pairs, or where the load never changed."""
        loads, values = np.array(self._loads), np.array(self._values)
        if len(loads) < max(least, 1):
            return None
        border = float(np.median(loads))
        busy = loads > border if border < loads.max() else loads >= border
        if busy.all():
            return None
        return LoadCorrelation(
            n=len(loads),
            correlation=0.0 if np.ptp(values) == 0 else float(spearmanr(loads, values).statistic),
            idle_load=float(np.median(loads[~busy])),
            busy_load=float(np.median(loads[busy])),
            idle=float(np.median(values[~busy])),
            busy=float(np.median(values[busy])),
        )


class WorstEvents:
    """The lines with the largest values, largest first; the earlier of equals."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event]] = []
        self._order = count(0, -1)

    def add(self, value: float, event: Event) -> None:
        entry = (value, next(self._order), event)
        if len(self._heap) < WORST:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)

    def events(self) -> list[Event]:
        return [event for _, _, event in sorted(self._heap, reverse=True)]
