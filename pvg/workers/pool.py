"""The driver's side of the workers: W places, each with one worker process, and what every worker must know.

    pool = WorkerPool(experiment, 2, LocalSupply(), events)
    await pool.start()
    answer = await pool.submit(shard, Frame("score", {...}, arrays))      # the worker in place `shard`

Each shard of work belongs to a fixed place, so results do not depend on when a worker is free. All places do all kinds
of work, except while their duties are `divided`: then some only train, and the others only sample and score.

If a worker ends or hangs, a new one takes its place. It gets what its predecessor had: the models and weights that the
predecessor had confirmed, then every request without an answer, in the same order. So nothing is lost, nothing counts
twice, and the bits are those of a run without the loss.

A worker *hangs* if it answers no ping, and uses no processor time, for PROBES_MISSED probes. A worker that waits for a
core on a busy machine does not hang. A computation that never ends does not count as hanging.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pvg.errors
from pvg.config.experiment import Experiment
from pvg.errors import MissingRequirementError, PvgError, WorkerLostError, counted, system_module
from pvg.telemetry.events import Events, SilentEvents
from pvg.workers.frames import Frame, receive
from pvg.workers.load import LoadMeter
from pvg.workers.local import Member
from pvg.workers.shared import SharedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from torch import Tensor

PROBE_S = 2.0
PROBES_MISSED = 3
# A place that loses its worker so often before the worker is ready, or with the same request, would lose the next one.
MOST_ATTEMPTS = 6
# What the driver has open besides its connections to workers.
OTHER_FILES = 256
# Places that are asked, or probed, in one turn of the event loop: 1,000 at once would block it.
AT_ONCE = 32
# Requests that change what a worker knows. A new worker gets those that its predecessor had confirmed.
STATE = frozenset({"open", "load", "close", "policy"})


class Supply(Protocol):
    """Starts worker processes, says why they ended, and brings them the weights. It reports to `events`, which the
    pool sets."""

    events: Events

    async def start(self) -> Member: ...

    async def reason(self, member: Member) -> str: ...

    def check(self) -> None:
        """Raises WorkerLostError if it can start no worker any more. Called at least every PROBE_S."""
        ...

    async def share(self, shared: SharedTensors) -> None:
        """Bring what is in this memory to all machines with workers. A frame may name its place from now on."""
        ...

    def withdraw(self, shared: SharedTensors) -> None:
        """No frame names this memory from now on."""
        ...

    async def close(self) -> None: ...

    def end(self) -> None:
        """As `close`, without an event loop."""
        ...


class WorkerFailedError(Exception):
    """A defect of pvg in a worker; the message is the worker's traceback."""


@dataclass(eq=False)
class _Request:
    """A request in flight. `parts` receives the frames that come before the answer."""

    frame: Frame
    future: asyncio.Future[Frame]
    parts: Callable[[Frame], None] | None
    attempts: int = 0


@dataclass
class _Place:
    """One of the W places. `sending`: its worker exists, and has been sent all that it must know."""

    number: int
    member: Member | None = None
    serving: asyncio.Task[None] | None = None
    sending: bool = False
    ready: asyncio.Future[Frame] | None = None  # its first worker has opened its models, or a later one
    setup: set[int] = field(default_factory=set)  # what its worker must know and has not confirmed
    pending: dict[int, _Request] = field(default_factory=dict)
    confirmed: dict[tuple[str, int], Frame] = field(default_factory=dict)  # what a new worker must be sent
    deaths: int = 0  # since a worker was ready
    restarts: int = 0
    why: str = ""  # its last worker ended
    lost_at: float | None = None  # when its last worker ended, until another one is ready
    missed: int = 0  # probes since it answered or computed
    cpu_s: float = 0.0

    def confirm(self, frame: Frame) -> None:
        """The worker has done what `frame` asked for."""
        slot = frame.fields.get("slot", 0)
        if frame.kind == "close":
            self.confirmed.pop(("open", slot), None)
            self.confirmed.pop(("load", slot), None)
        elif frame.kind in STATE:
            self.confirmed[frame.kind, slot] = frame


class _Buffers:
    """Two pieces of shared memory, written in turn. One is written again only after all workers have confirmed what is
    in the other one, so no worker ever reads memory that is being written."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self._both: list[SharedTensors] = []

    async def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the place of the memory that now holds `tensors`."""
        if len(self._both) < 2:
            self._both.append(SharedTensors(tensors))
        else:
            self._both.reverse()
        newest = self._both[-1]
        await asyncio.get_running_loop().run_in_executor(None, newest.write, tensors)
        await self._supply.share(newest)
        return newest.place

    def close(self) -> None:
        for shared in self._both:
            self._supply.withdraw(shared)
            shared.close()


@dataclass
class _Slot:
    """An open model: the places that have it, and its weights."""

    places: range
    memory: _Buffers


class WorkerPool:
    """Belongs to one event loop. Call `start` first and `close` last.

    `training`: the places that train now. `sampling`: the places that sample and score now.
    """

    def __init__(
        self,
        experiment: Experiment,
        count: int,
        supply: Supply,
        events: Events | None = None,
        trainers: int | None = None,
    ) -> None:
        """`trainers`: places that only train while duties are `divided`; None: duties are never divided."""
        self.count = count
        self.training = self.sampling = range(count)
        self._trainers = trainers
        self._start = Frame("start", {"experiment": experiment.plain()})
        self._supply = supply
        self._events = supply.events = events or SilentEvents()
        self._places = [_Place(number) for number in range(count)]
        self._slots: dict[int, _Slot] = {}
        self._policy = _Buffers(supply)
        # A policy waits for the rows that run, and the other models must not wait for it.
        self._changing = asyncio.Lock()
        self._changing_policy = asyncio.Lock()
        self._numbers = 0
        self._closing = False
        self._failed: BaseException | None = None
        self._prober: asyncio.Task[None] | None = None
        self._meter = LoadMeter(count)

    @property
    def restarts(self) -> int:
        """Workers that took the place of one that ended."""
        return sum(place.restarts for place in self._places)

    def measured(self) -> dict[str, float]:
        """The metrics of the place `workers` (pvg.telemetry.catalogue) since the last call."""
        up = [place.sending and not place.setup for place in self._places]
        return self._meter.sample(up, [place.restarts for place in self._places])

    async def start(self) -> None:
        """Start all workers. Raises MissingRequirementError if none can be started, and what opening the models raises
        in a worker."""
        allow_open_files(self.count)
        started = time.perf_counter()
        for place in self._places:
            place.ready = _future()
        await asyncio.gather(*(self._fill(place) for place in self._places))
        await asyncio.gather(*(place.ready for place in self._places if place.ready is not None))
        self._prober = asyncio.create_task(self._guarded(self._probe()), name="worker probes")
        self._events.event("workers", event="up", workers=self.count, ms=(time.perf_counter() - started) * 1e3)

    async def close(self) -> None:
        """End all workers. Requests in flight fail."""
        self._closing = True
        tasks = [place.serving for place in self._places if place.serving is not None]
        for task in [*tasks, *([self._prober] if self._prober is not None else [])]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(WorkerLostError("The workers are closed."))
        members = [place.member for place in self._places if place.member is not None]
        for member in members:
            member.writer.close()
        await asyncio.gather(*(member.writer.wait_closed() for member in members), return_exceptions=True)
        await self._supply.close()
        for memory in [*(slot.memory for slot in self._slots.values()), self._policy]:
            memory.close()

    @contextmanager
    def divided(self) -> Iterator[None]:
        """Meanwhile, the last `trainers` places only train and the others only sample and score, so neither kind of
        work waits for the other."""
        everywhere = range(self.count)
        if self._trainers is not None:
            self.sampling, self.training = everywhere[: -self._trainers], everywhere[-self._trainers :]
        try:
            yield
        finally:
            self.sampling = self.training = everywhere

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, place: int, frame: Frame, parts: Callable[[Frame], None] | None = None) -> asyncio.Future[Frame]:
        """The answer of the worker in this place. Requests are sent in the order of the calls. The future raises the
        worker's PvgError, WorkerFailedError, or WorkerLostError if workers end again and again."""
        if self._failed is not None:
            raise self._failed
        found, request = self._places[place], _Request(self._numbered(frame), _future(), parts)
        found.pending[request.frame.fields["id"]] = request
        if found.sending:
            self._send(found, request)
        return request.future

    def tell(self, place: int, frame: Frame) -> None:
        """Send a frame that has no answer. A worker that is being replaced does not get it."""
        found = self._places[place]
        if found.sending and found.member is not None:
            found.member.send(frame)

    async def ask(self, places: range, frame: Frame) -> list[Frame]:
        """The answers of the workers in these places. Cancelling the caller does not cancel the requests."""
        answers = []
        for number, place in enumerate(places, start=1):
            answers.append(self.submit(place, frame))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return list(await asyncio.gather(*answers))

    def _numbered(self, frame: Frame) -> Frame:
        self._numbers += 1
        return Frame(frame.kind, {**frame.fields, "id": self._numbers}, frame.arrays)

    def _send(self, place: _Place, request: _Request) -> None:
        assert place.member is not None
        request.attempts += 1
        place.member.send(request.frame)

    # --- models and weights -------------------------------------------------------------------------------------------

    async def open(self, fields: Mapping[str, Any], places: range | None = None) -> int:
        """Open a model in the workers of these places, None: in all; returns its slot. Load its weights before its
        first use."""
        self._numbers += 1
        chosen = range(self.count) if places is None else places
        number, slot = self._numbers, _Slot(chosen, _Buffers(self._supply))
        self._slots[number] = slot
        await self.ask(slot.places, Frame("open", {**fields, "slot": number}))
        return number

    async def load(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights into the model of a slot, in every worker that has it. Goes on if the caller is cancelled."""
        await asyncio.shield(asyncio.create_task(self._load(slot, tensors)))

    async def _load(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        async with self._changing:
            found = self._slots[slot]
            place = await found.memory.write(tensors)
            await self.ask(found.places, Frame("load", {"slot": slot, "place": place}))

    async def close_slot(self, slot: int) -> None:
        """Close the model of a slot in every worker that has it. Does nothing if the pool has failed."""
        if self._failed is None:
            await self.ask(self._slots[slot].places, Frame("close", {"slot": slot}))
        self._slots.pop(slot).memory.close()

    async def load_policy(self, tensors: Mapping[str, Tensor], version: int, trace: str) -> list[Frame]:
        """Load a new version of the sampled policy in every worker, each between two of its batches. Goes on if the
        caller is cancelled."""
        return await asyncio.shield(asyncio.create_task(self._load_policy(tensors, version, trace)))

    async def _load_policy(self, tensors: Mapping[str, Tensor], version: int, trace: str) -> list[Frame]:
        async with self._changing_policy:
            place = await self._policy.write(tensors)
            frame = Frame("policy", {"version": version, "trace": trace, "place": place})
            return await self.ask(range(self.count), frame)

    # --- places -------------------------------------------------------------------------------------------------------

    async def _fill(self, place: _Place) -> None:
        """Start a worker, and send what its predecessor had confirmed and what it has not answered."""
        place.pending = {number: request for number, request in place.pending.items() if not request.future.done()}
        for request in place.pending.values():
            if request.attempts >= MOST_ATTEMPTS:
                raise self._lost(place, f"with the same request ({request.frame.kind})")
        member = place.member = await self._supply.start()
        place.missed, place.cpu_s = 0, 0.0
        known = [self._start, *place.confirmed.values()]
        place.setup = set()
        for frame in map(self._numbered, known):
            place.setup.add(frame.fields["id"])
            member.send(frame)
        for request in place.pending.values():
            self._send(place, request)
        place.sending = True
        place.serving = asyncio.create_task(self._guarded(self._serve(place, member)), name=f"worker {place.number}")

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Fail all requests if `work` fails, because no one else answers them."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the callers raise it
            self._fail(error)

    async def _serve(self, place: _Place, member: Member) -> None:
        """Take a worker's frames until it ends; then replace it."""
        while (frame := await receive(member.reader)) is not None:
            place.missed = 0
            self._take(place, frame)
        place.sending = False
        member.writer.close()
        if self._closing:
            return
        place.lost_at = place.lost_at or time.perf_counter()
        place.why = await self._supply.reason(member)
        place.deaths += 1
        place.restarts += 1
        self._events.event(
            "workers", event="lost", worker=place.number, **member.names, why=place.why, requests=len(place.pending)
        )
        if place.deaths >= MOST_ATTEMPTS:
            raise self._lost(place, "before it was ready")
        await self._fill(place)

    def _lost(self, place: _Place, when: str) -> WorkerLostError:
        return WorkerLostError(
            f"Worker {place.number} ended {MOST_ATTEMPTS} times {when}: {place.why}.",
            "Play without workers: -s cluster=none",
        )

    def _take(self, place: _Place, frame: Frame) -> None:
        if frame.kind == "pong":
            self._meter.report(place.number, frame.fields)
            return
        if frame.kind == "event":
            self._events.event(frame.fields["tag"], **{**frame.fields["event"], "worker": place.number})
            return
        number = frame.fields["id"]
        if number in place.setup:
            self._take_setup(place, frame)
            return
        request = place.pending.get(number)
        if request is None:
            return
        if frame.kind == "completed":
            if request.parts is not None:
                request.parts(frame)
            return
        del place.pending[number]
        if frame.kind == "done":
            place.confirm(request.frame)
        if request.future.done():  # the caller has left
            return
        if frame.kind == "done":
            request.future.set_result(frame)
        else:
            request.future.set_exception(_error_of(frame))

    def _take_setup(self, place: _Place, frame: Frame) -> None:
        if frame.kind != "done":
            self._fail(_error_of(frame))
            return
        place.setup.discard(frame.fields["id"])
        if not place.setup:
            place.deaths = 0
            if place.lost_at is not None:
                ms, place.lost_at = (time.perf_counter() - place.lost_at) * 1e3, None
                self._events.event("workers", event="replaced", worker=place.number, ms=ms)
            if place.ready is not None and not place.ready.done():
                place.ready.set_result(frame)

    def _fail(self, error: BaseException) -> None:
        """Fail every request, now and from now on. The first error counts."""
        self._failed = self._failed or error
        for place in self._places:
            waiting = [request.future for request in place.pending.values()]
            place.pending = {}
            for future in [*waiting, place.ready]:
                if future is not None and not future.done():
                    future.set_exception(self._failed)
                    future.exception()  # marks it as retrieved: its caller may have left

    async def _probe(self) -> None:
        """Probe each place every PROBE_S, a few places at a time. Raises WorkerLostError if no worker can be replaced
        any more."""
        while True:
            for first in range(0, self.count, AT_ONCE):
                places = self._places[first : first + AT_ONCE]
                await asyncio.sleep(PROBE_S * len(places) / self.count)
                self._supply.check()
                for place in places:
                    self._probe_one(place)

    def _probe_one(self, place: _Place) -> None:
        """Send a ping, or kill a worker that hangs."""
        member = place.member
        if member is None or not place.sending:
            return
        cpu_s = member.cpu_s()
        moved, place.cpu_s = cpu_s is not None and cpu_s > place.cpu_s, cpu_s or 0.0
        place.missed = 0 if moved else place.missed + 1
        if place.missed > PROBES_MISSED:
            self._events.event("workers", event="hangs", worker=place.number, **member.names)
            member.kill()
        else:
            member.send(Frame("ping"))


def allow_open_files(workers: int) -> None:
    """Raise this process's limit of open files to what `workers` connections need. Raises MissingRequirementError if
    the system does not allow that."""
    resource = system_module("resource")
    needed = workers + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (OSError, ValueError):
        raise MissingRequirementError(
            f"{counted(workers, 'worker')} need {needed:,} open files, but this process may open only {hard:,}.",
            f"Use fewer workers (-s cluster.workers=N), or raise the limit: ulimit -n {needed}",
        ) from None


def _future() -> asyncio.Future[Frame]:
    return asyncio.get_running_loop().create_future()


def _error_of(frame: Frame) -> Exception:
    """The exception that a worker reported."""
    fields = frame.fields
    if frame.kind == "failed":
        return WorkerFailedError(fields["traceback"])
    kind = getattr(pvg.errors, fields["type"], None)
    if kind is not None:
        refused: PvgError = kind(fields["message"], fields["remedy"])
        return refused
    other = PvgError(fields["message"], fields["remedy"])
    other.exit_code = fields["exit_code"]
    return other
