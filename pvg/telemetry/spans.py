"""Spans: which work ran when and in which thread or task, and which parts each step waited for.

    tracer = Tracer()
    with tracer.drive():                      # this task drives the steps; a budget divides its wall time
        with span("rollout"):
            await sample()                    # spans of tasks created here know that they work for "rollout"
        await run_in(executor, train)         # spans inside the thread nest as in a direct call
        record = tracer.close_step()          # seconds by part, exposed and busy

`span` finds its tracer through the context, so libraries need no parameter for it. Without a tracer it records nothing
and costs almost nothing.

A *track* is one line of execution in which spans nest: the driver's, and one for each task or thread that works at the
same time. A thread that a track waits for (`run_in`) belongs to that track.

Invariants:
- The exposed seconds of a step, including `unaccounted`, sum to its wall time. Each moment of the driver's track
  belongs to the innermost span.
- If the driver waits inside a span while spans of other tracks work for it, their time is exposed, and the span keeps
  the rest. Each moment goes to the most deeply nested of them, then to the one that began first.
- The driver's time outside all spans is `unaccounted`, even if other tracks work then.
- Busy seconds are the work of every part on all tracks, so busy - exposed is the work hidden by overlap.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch.cuda import Event

SHORTEST_SPAN_S = 0.2e-3  # shorter spans count in the budget but are not written: they would be most of spans.jsonl
UNACCOUNTED = "unaccounted"
DRIVER = "driver"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Span:
    """One finished span. Times in seconds since 1970. `depth`: 0 for the outermost of its track. `track`: "driver", or
    the name of its thread, or "loop" for a task. `device_s`: seconds between two marks on the device, if measured."""

    name: str
    start_s: float
    end_s: float
    depth: int
    track: str
    device_s: float | None = None


def span_rows(spans: Iterable[Span], **place: Any) -> Iterator[dict[str, Any]]:
    """Spans as lines of spans.jsonl. `place`: their round, phase and step."""
    for span in spans:
        yield {name: value for name, value in asdict(span).items() if value is not None} | place


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The wall time of one step in seconds by part. `exposed` sums to `wall_s`; `busy` includes overlapped work;
    `device_s` was measured on the device."""

    wall_s: float
    exposed: Mapping[str, float]
    busy: Mapping[str, float]
    device_s: Mapping[str, float] = field(default_factory=dict)


def add_seconds(totals: dict[str, float], more: Mapping[str, float]) -> None:
    for part, seconds in more.items():
        totals[part] = totals.get(part, 0.0) + seconds


def total_seconds(budgets: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by part, summed; the largest first, `unaccounted` last."""
    totals: dict[str, float] = {}
    for budget in budgets:
        add_seconds(totals, budget)
    return {part: totals[part] for part in sorted(totals, key=lambda part: (part == UNACCOUNTED, -totals[part]))}


@dataclass(slots=True, eq=False)
class _Track:
    owner: object  # the task, or the thread's number
    name: str
    stack: list[_Open] = field(default_factory=list)  # the open spans, innermost last


@dataclass(slots=True, eq=False)
class _Open:
    """A running span, which is also its context manager. `marks` are on the device, None if it is not measured."""

    tracer: Tracer
    name: str
    parent: _Open | None
    marks: list[Any] | None
    anchor: _Open | None = None  # the driver's span for which this span of another track works
    gaps: list[tuple[float, float]] = field(default_factory=list)  # when spans nested in this one ran
    end: float | None = None
    counted_s: float = 0.0  # busy seconds counted in earlier steps
    where: str = ""  # the thread, if it works on another owner's track
    track: _Track = field(init=False)
    start: float = field(init=False)
    token: contextvars.Token[_Open | None] = field(init=False)

    def __enter__(self) -> None:
        tracer = self.tracer
        with tracer._lock:
            tracer._place(self)
            self.track.stack.append(self)
            self.start = tracer._clock()
        self.token = _CURRENT.set(self)
        if self.marks is not None:
            self.marks.append(tracer._device_clock.mark())  # type: ignore[union-attr]

    def __exit__(self, *_: object) -> None:
        tracer = self.tracer
        if self.marks is not None:
            self.marks.append(tracer._device_clock.mark())  # type: ignore[union-attr]
        _CURRENT.reset(self.token)
        with tracer._lock:
            self.end = tracer._clock()
            tracer._leave(self)

    @property
    def foreign(self) -> bool:
        return self.track is not self.tracer._driver

    def own_s(self, now: float) -> float:
        """Seconds that it ran until `now`, without those of nested spans."""
        end = now if self.end is None else self.end
        inner = sum(until - since for since, until in self.gaps)
        if self.end is None:  # a nested span may still run
            above = self.track.stack[self.track.stack.index(self) + 1 :]
            inner += now - above[0].start if above else 0.0
        return end - self.start - inner


_CURRENT: contextvars.ContextVar[_Open | None] = contextvars.ContextVar("pvg_span", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()


def span(name: str, *, device: bool = False) -> AbstractContextManager[None]:
    """Record the body as `name`, in any thread or task. `device`: also measure it with the device's clock."""
    parent = _CURRENT.get()
    if parent is None:
        return _NOTHING
    tracer = parent.tracer
    return _Open(tracer, name, parent, [] if device and tracer._device_clock is not None else None)


async def run_in(executor: Executor | None, work: Callable[..., T], *arguments: Any) -> T:
    """Run `work(*arguments)` in the executor, with the caller's spans as its parents, and wait for it."""
    return await submit_in(executor, work, *arguments)


def submit_in(executor: Executor | None, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """As `run_in`, but returns the future, for callers that must not be interrupted while they wait."""
    carried = partial(contextvars.copy_context().run, work, *arguments)
    return asyncio.get_running_loop().run_in_executor(executor, carried)


async def run_whole(executor: Executor | None, work: Callable[..., T], *arguments: Any) -> T:
    """As `run_in`, but a cancelled caller still waits for the work to end."""
    running = submit_in(executor, work, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # marks it as retrieved
        raise


class Tracer:
    """Collects the spans of one run. One task at a time drives it; spans may come from any thread or task."""

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, device_clock: CudaClock | None = None
    ) -> None:
        self._clock = clock
        self._device_clock = device_clock
        self._lock = threading.Lock()
        self._origin = time.time() - clock()
        self._driver = _Track(None, DRIVER)
        self._own: list[_Open] = []  # the driver's spans that ended in this step
        self._foreign: list[_Open] = []  # spans of other tracks that ended in this step
        self._running: dict[int, _Open] = {}  # open spans of other tracks
        self._on_device: list[tuple[Span, list[Any]]] = []  # ended spans whose device time is not read yet
        self._finished: list[Span] = []
        self._trained_s = 0.0  # of ended spans
        self._began = clock()

    @contextmanager
    def drive(self) -> Iterator[None]:
        """The caller's task drives the steps in the body. Raises RuntimeError if another task already does."""
        if self._driver.stack:
            raise RuntimeError("The tracer is driven already.")
        root = _Open(self, UNACCOUNTED, None, None)
        root.track, root.start = self._driver, self._clock()
        self._driver.owner = _task() or threading.get_ident()
        self._driver.stack.append(root)
        token = _CURRENT.set(root)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            with self._lock:
                self._detach_above(root)  # spans that a thread still works on continue without the driver
                self._driver.stack.clear()

    def close_step(self) -> StepBudget:
        """The budget since the last close. Raises RuntimeError inside a span of the driver."""
        with self._lock:
            if len(self._driver.stack) > 1 and self._driver.stack[1].where:
                self._detach_above(self._driver.stack[0])  # spans of a thread that the driver did not wait for
            if len(self._driver.stack) > 1:
                raise RuntimeError(f"close_step inside the open span {self._driver.stack[-1].name!r}.")
            now = self._clock()
            own, self._own = self._own, []
            foreign = [*self._foreign, *self._running.values()]
            self._foreign = []
            for root in self._driver.stack:
                root.gaps.clear()
            exposed, busy = _seconds(own, foreign, list(_claims(own, foreign, now)), now)
            wall_s, self._began = now - self._began, now
            exposed[UNACCOUNTED] = busy[UNACCOUNTED] = wall_s - sum(exposed.values())
            return StepBudget(wall_s, exposed, busy, self._read_device())

    def trained_s(self) -> float:
        """Seconds in which the trainer has worked so far, also in spans that still run. Any thread may call this."""
        with self._lock:
            now = self._clock()
            running = [*self._driver.stack, *self._running.values()]
            return self._trained_s + sum(now - opened.start for opened in running if opened.name in TRAINING_PARTS)

    def use_device_clock(self, clock: CudaClock) -> None:
        """Also measure later spans with `device=True` on this clock."""
        self._device_clock = clock

    def take_spans(self) -> list[Span]:
        """The spans that ended since the last call, in that order. A span that the device has not finished at the close
        of its step follows in a later call."""
        with self._lock:
            spans, self._finished = self._finished, []
            return spans

    # --- under the lock ------------------------------------------------------------------------------------------

    def _place(self, opened: _Open) -> None:
        """Choose the track: the parent's if the same line of execution continues, otherwise a new one."""
        parent = opened.parent
        assert parent is not None
        task, track = _task(), parent.track
        owner = task or threading.get_ident()
        if owner == track.owner and parent in track.stack:
            self._detach_above(parent)
        elif task is not None or not track.stack or track.stack[-1] is not parent:
            opened.track = _Track(owner, _track_name())
            opened.anchor = parent.anchor if parent.foreign else parent
            self._running[id(opened)] = opened
            return
        # The owner itself, or a thread or callback with its context, for which, as far as we know, the owner waits.
        opened.track, opened.anchor = track, parent.anchor
        if owner != track.owner:
            opened.where = _track_name()
        if opened.foreign:
            self._running[id(opened)] = opened

    def _detach_above(self, opened: _Open) -> None:
        """Move everything above `opened` to a new track, because it did not delay the track."""
        stack = opened.track.stack
        detached = stack[stack.index(opened) + 1 :]
        if not detached:
            return
        del stack[-len(detached) :]
        track = _Track(None, detached[0].where or opened.track.name, detached)
        for open_span in detached:
            open_span.anchor = opened.anchor if opened.foreign else opened
            open_span.track = track
            self._running[id(open_span)] = open_span

    def _leave(self, closed: _Open) -> None:
        self._detach_above(closed)
        stack = closed.track.stack
        stack.pop()
        assert closed.end is not None
        if closed.name in TRAINING_PARTS:
            self._trained_s += closed.end - closed.start
        if stack:
            stack[-1].gaps.append((closed.start, closed.end))
        if closed.foreign:
            del self._running[id(closed)]
            self._foreign.append(closed)
        else:
            self._own.append(closed)
        depth = len(stack) - (0 if closed.foreign else 1)
        start_s, end_s = self._origin + closed.start, self._origin + closed.end
        finished = Span(closed.name, start_s, end_s, depth, closed.track.name)
        if closed.marks is None:
            self._finished.append(finished)
        else:
            self._on_device.append((finished, closed.marks))

    def _read_device(self) -> dict[str, float]:
        """Device seconds by part of the spans that the device has finished; the others count in a later step."""
        seconds: dict[str, float] = {}
        waiting = []
        for finished, marks in self._on_device:
            assert self._device_clock is not None
            elapsed = self._device_clock.elapsed_s(*marks)
            if elapsed is None:
                waiting.append((finished, marks))
            else:
                seconds[finished.name] = seconds.get(finished.name, 0.0) + elapsed
                self._finished.append(replace(finished, device_s=elapsed))
        self._on_device = waiting
        return seconds


Claims = tuple[_Open, dict[str, float]]


def _seconds(
    own: list[_Open], foreign: list[_Open], claims: list[Claims], now: float
) -> tuple[dict[str, float], dict[str, float]]:
    """The exposed and the busy seconds by part. Exposed: the time of the driver's spans, with the claims of other
    tracks' spans on it. Busy: each span's own work in this step. The driver's waiting for other tracks is not work."""
    exposed: dict[str, float] = {}
    for opened in own:
        add_seconds(exposed, {opened.name: opened.own_s(now)})
    busy = dict(exposed)
    for waiting, by_part in claims:
        add_seconds(exposed, by_part)
        for seconds in (exposed, busy):
            seconds[waiting.name] -= sum(by_part.values())
    for opened in foreign:
        so_far = opened.own_s(now)
        add_seconds(busy, {opened.name: so_far - opened.counted_s})
        opened.counted_s = so_far
    return exposed, busy


def _claims(own: list[_Open], foreign: list[_Open], now: float) -> Iterator[Claims]:
    """The driver's spans for which other tracks worked, each with the seconds by part that these tracks claim."""
    workers: dict[int, list[_Open]] = {}
    for opened in foreign:
        if opened.anchor is not None:
            workers.setdefault(id(opened.anchor), []).append(opened)
    for waiting in own:
        if id(waiting) in workers:
            yield waiting, _shared_out(waiting, workers[id(waiting)], now)


def _shared_out(waiting: _Open, workers: list[_Open], now: float) -> dict[str, float]:
    """Sweep over the time in which `waiting` was innermost: seconds by part of the span that worked at each moment."""
    assert waiting.end is not None
    edges: list[tuple[float, int, _Open]] = []
    for worker in workers:
        edges += [(worker.start, 1, worker), (now if worker.end is None else worker.end, -1, worker)]
    for since, until in waiting.gaps:
        edges += [(since, -1, waiting), (until, 1, waiting)]
    edges += [(waiting.start, 1, waiting), (waiting.end, -1, waiting)]
    edges.sort(key=lambda edge: (edge[0], edge[1]))
    seconds: dict[str, float] = {}
    active: dict[int, tuple[int, float, _Open]] = {}
    innermost, last = 0, waiting.start
    for moment, change, opened in edges:
        if active and innermost > 0 and moment > last:
            _, _, best = max(active.values(), key=lambda entry: entry[:2])
            seconds[best.name] = seconds.get(best.name, 0.0) + moment - last
        last = max(last, moment)
        if opened is waiting:
            innermost += change
        elif change > 0:
            active[id(opened)] = (_depth(opened), -opened.start, opened)
        else:
            active.pop(id(opened), None)
    return seconds


def _depth(opened: _Open) -> int:
    """The number of enclosing spans, over all tracks."""
    depth, parent = 0, opened.parent
    while parent is not None:
        depth, parent = depth + 1, parent.parent
    return depth


def _task() -> asyncio.Task[Any] | None:
    """The running task; None in a thread without an event loop, and in a callback of the loop."""
    loop = asyncio._get_running_loop()
    return None if loop is None else asyncio.current_task(loop)


def _track_name() -> str:
    return "loop" if _task() is not None else threading.current_thread().name


# --- the device's clock and the trainer's parts -----------------------------------------------------------------------


class CudaClock:
    """Marks on the time line of one GPU: events on the calling thread's current stream. Reading it never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Event:
        import torch

        event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))  # without it: a stream of the thread's current GPU
        return event

    def elapsed_s(self, start: Event, end: Event) -> float | None:
        """Seconds between two marks; None if the GPU has not reached them yet."""
        if not end.query():  # type: ignore[no-untyped-call]
            return None
        return float(start.elapsed_time(end)) / 1e3


# The parts of a budget that are the trainer's work, including log-probs computed for it. `trainer_idle` is the share of
# all other time.
TRAINING_PARTS = ("reference", "recompute", "pack", "forward_backward", "optimizer")


def trained_seconds(budget: Mapping[str, float]) -> float:
    """Seconds of a budget in which the trainer worked; missing parts count as 0."""
    return sum(budget.get(part, 0.0) for part in TRAINING_PARTS)
