"""The driver's side of the workers: W shards, the processes that serve them, and what every process must know.

The work is divided into shards by fixed rules, so results do not depend on when a worker is free. Every shard gets all
kinds of work, except while duties are `divided`: then some only train, and the others only sample and score.

A worker process serves one or more shards, each with its own models and weights. So the number of processes may
change during a run (pvg.workers.scaling), and no result does: who computes a shard changes, never what is computed.

If a worker ends or hangs, a new process takes over its shards. It gets what its predecessor had: the models and weights
that the predecessor had confirmed, then every request without an answer, in the same order. So nothing is lost, nothing
counts twice, and the bits are those of a run without the loss. A shard moves to another worker in the same way: the new
one repeats what the old one has not answered.

A worker *hangs* if it answers no ping, and uses no processor time, for PROBES_MISSED probes; under Ray, where its
processor time is not known, if it answers no ping for PROBES_UNSEEN probes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import TYPE_CHECKING, Any, Protocol

import pvg.errors
from pvg.config.experiment import Experiment
from pvg.config.operation import LocalCluster, RayCluster, processes_of, shards_of
from pvg.errors import PvgError, WorkerLostError, allow_open_files, open_files
from pvg.telemetry.events import Events, SilentEvents
from pvg.telemetry.waits import usable_cores
from pvg.workers.frames import Frame
from pvg.workers.scaling import Demand, LoadMeter, decide, shards_to_take

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from torch import Tensor

    from pvg.servers.publishing import WeightUpdate

PROBE_S = 2.0
PROBES_MISSED = 3
PROBES_UNSEEN = 8  # of a process whose processor time is not known
MOST_LOSSES = 6  # of workers with the same request: the next one would be lost too
AT_ONCE = 32  # shards asked in one turn of the event loop: 1,000 would block it
# Requests that change what a worker knows. A new worker gets those that its predecessor had confirmed.
STATE = frozenset({"start", "open", "load", "close", "policy"})
LOOK_S = 0.2  # between two looks at what waits
REFUSED_S = 60.0  # after a process could not be started, before pvg tries again to add one


class Member(Protocol):
    """A worker process and the driver's way to it."""

    @property
    def names(self) -> dict[str, Any]:
        """For the event log."""

    def send(self, frame: Frame) -> None:
        """Frames arrive in the order of the calls. One for a process that has ended is lost."""

    async def receive(self) -> Frame | None:
        """Its next frame; None if it has ended, or cannot be reached."""

    def end(self) -> None:
        """Kill it, and send no more. A second call does nothing."""

    def cpu_s(self) -> float | None:
        """The processor time that it has used; None if that is not known."""


class SharedWeights(Protocol):
    """The weights of one model, where the workers can read them."""

    async def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the place of new weights, which a frame may name. It holds them until two calls later."""

    def close(self) -> None: ...


class Supply(Protocol):
    """Starts worker processes, and brings them the weights. It reports to `events`, which the pool sets."""

    events: Events

    async def start(self, successor: bool = False) -> Member:
        """`successor`: of a process that has ended."""

    async def reason(self, member: Member) -> str:
        """Why a process has ended, in words."""

    async def watch(self) -> None:
        """Raises WorkerLostError when it can start no worker any more."""

    def weights(self) -> SharedWeights: ...

    def end(self) -> None:
        """End all workers. Blocks. A second call does nothing."""


class WorkerFailedError(Exception):
    """A defect of pvg in a worker; the message is the worker's traceback."""


@dataclass(eq=False)
class _Request:
    """What a shard's worker has been asked for. `parts` receives the frames that come before the answer. `known`: an
    earlier worker has confirmed it, and every new one must. `losses`: workers that have ended without an answer."""

    shard: _Shard
    frame: Frame
    future: asyncio.Future[Frame]
    parts: Callable[[Frame], None] | None
    known: bool = False
    losses: int = 0


@dataclass(eq=False)
class _Worker:
    """A worker process, and those that take its place when it ends. `used`: it has shards or is to get some. Otherwise
    its process ends, and is not replaced."""

    number: int
    member: Member | None = None
    serving: asyncio.Task[None] | None = None
    used: bool = False
    restarts: int = 0
    lost_at: float | None = None  # when its last process ended, until another one is ready
    missed: int = 0  # probes since it answered or computed
    hangs: bool = False
    cpu_s: float = 0.0


@dataclass(eq=False)
class _Shard:
    """One of the W shards, and what every worker that serves it must know."""

    number: int
    worker: _Worker
    known: dict[tuple[str, int], _Request] = field(default_factory=dict)

    def confirm(self, request: _Request) -> None:
        """Its worker has done what `request` asked for."""
        kind, slot = request.frame.kind, request.frame.fields.get("slot", 0)
        if kind == "close":
            self.known.pop(("open", slot), None)
            self.known.pop(("load", slot), None)
        elif kind in STATE:
            self.known[kind, slot] = request
            request.known, request.losses = True, 0


class WorkerPool:
    """Belongs to one event loop. Call `start` first and `close` last. `training`: the shards that train now.
    `sampling`: the shards that sample and score now. Set `trained_s`, the seconds that the trainer has worked so far,
    and `changed`, which gets each new number of processes and its reason, before `start`."""

    def __init__(
        self, experiment: Experiment, supply: Supply, events: Events | None = None, device: str = "cpu"
    ) -> None:
        """`device`: "cpu", or "cuda" for the GPUs of the machine, which the processes use in turn."""
        cluster = experiment.cluster
        assert isinstance(cluster, LocalCluster | RayCluster)
        self.count = shards_of(cluster) or usable_cores()
        self.training = self.sampling = range(self.count)
        self.trained_s: Callable[[], float] = float
        self.changed: Callable[[int, str], None] = lambda workers, why: None
        self._lowest, self._highest = processes_of(cluster, self.count)
        self._trainers = cluster.trainers
        self._start = Frame("start", {"experiment": experiment.plain(), "device": device})
        self._supply = supply
        self._events = supply.events = events or SilentEvents()
        self._workers = [_Worker(number) for number in range(self._highest)]
        first = [self._workers[number * self._lowest // self.count] for number in range(self.count)]
        self._shards = [_Shard(number, worker) for number, worker in enumerate(first)]
        self._unanswered: dict[int, _Request] = {}  # by number; those of a shard in the order of their sending
        self._memories: list[SharedWeights] = []
        self._policies = self.weights(), self.weights()  # adapters, and whole ones
        self._changing_policy = asyncio.Lock()
        self.numbers = count(1)  # of requests, and slots of models
        self._closing = False
        self.failed: BaseException | None = None  # why all requests fail
        self._tasks: set[asyncio.Task[None]] = set()
        self._meter = LoadMeter()

    def measured(self) -> dict[str, float]:
        opening = self._opening()
        up = [worker.member is not None and worker not in opening for worker in self._workers]
        return self._meter.sample(up, [worker.restarts for worker in self._workers])

    async def start(self) -> None:
        """Start the lowest number of processes. Raises what opening the models raises in one."""
        allow_open_files(self, self._highest, "worker", "cluster.workers")
        started = time.perf_counter()
        ready = [self.submit(shard.number, self._start) for shard in self._shards]
        self.background(self._probe(), "worker probes")  # a worker may hang from its first moment on
        self.background(self._supply.watch(), "supply of workers")
        await asyncio.gather(*(self._begin(worker) for worker in self._workers[: self._lowest]))
        await asyncio.gather(*ready)
        if self._lowest < self._highest:
            self.background(self._scale(), "number of workers")
        self._events.event("workers", event="up", workers=self._lowest, ms=(time.perf_counter() - started) * 1e3)

    async def close(self) -> None:
        """End all workers. Requests in flight fail."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(WorkerLostError("The workers are closed."))
        for worker in self._workers:
            if worker.member is not None:
                worker.member.end()
        await asyncio.to_thread(self._supply.end)
        open_files.pop(self, None)
        for memory in self._memories:
            memory.close()

    @contextmanager
    def divided(self) -> Iterator[None]:
        """Meanwhile, the last `cluster.trainers` shards only train, and the others only sample and score."""
        everywhere = range(self.count)
        if self._trainers is not None:
            self.sampling, self.training = everywhere[: -self._trainers], everywhere[-self._trainers :]
        try:
            yield
        finally:
            self.sampling = self.training = everywhere

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, shard: int, frame: Frame, parts: Callable[[Frame], None] | None = None) -> asyncio.Future[Frame]:
        """The answer of the process that serves this shard. Requests are sent in the order of the calls. The future
        raises the worker's PvgError, WorkerFailedError, or WorkerLostError if workers end again and again."""
        if self.failed is not None:
            raise self.failed
        number = next(self.numbers)
        numbered = Frame(frame.kind, {**frame.fields, "id": number})
        request = _Request(self._shards[shard], numbered, asyncio.get_running_loop().create_future(), parts)
        self._unanswered[number] = request
        self.tell(shard, numbered)
        return request.future

    def tell(self, shard: int, frame: Frame) -> None:
        """Send a frame that has no answer. A process that is being replaced does not get it."""
        worker = self._shards[shard].worker
        if worker.member is not None:
            worker.member.send(Frame(frame.kind, {**frame.fields, "shard": shard, "worker": worker.number}))

    async def ask(self, shards: range, frame: Frame) -> list[Frame]:
        """The answers for these shards. Cancelling the caller does not cancel the requests."""
        answers = []
        for number, shard in enumerate(shards, start=1):
            answers.append(self.submit(shard, frame))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return list(await asyncio.gather(*answers))

    # --- models and weights -------------------------------------------------------------------------------------------

    def weights(self) -> SharedWeights:
        self._memories.append(self._supply.weights())
        return self._memories[-1]

    async def load_policy(self, update: WeightUpdate) -> list[Frame]:
        """Load a new version of the sampled policy in every worker, each between two of its batches. Of a policy with
        adapters only these travel: the workers have the base."""
        adapter = update.adapter
        async with self._changing_policy:
            tensors = update.tensors if adapter is None else adapter.tensors
            place = await self._policies[adapter is None].write(tensors)
            fields = {"version": update.version, "trace": update.trace_id, "adapted": adapter is not None}
            return await self.ask(range(self.count), Frame("policy", {**fields, "place": place}))

    # --- processes ----------------------------------------------------------------------------------------------------

    def _of(self, worker: _Worker) -> list[_Shard]:
        return [shard for shard in self._shards if shard.worker is worker]

    def _opening(self) -> set[_Worker]:
        """The workers that do not know yet what they must know."""
        requests = self._unanswered.values()
        return {one.shard.worker for one in requests if one.known or one.frame.kind == "start"}

    async def _begin(self, worker: _Worker) -> None:
        """Start a process for a worker, which others replace until it is used no more."""
        worker.used = True
        await self._renew(worker)
        worker.serving = self.background(self._serve(worker), f"worker {worker.number}")

    async def _renew(self, worker: _Worker, successor: bool = False) -> None:
        member = await self._supply.start(successor)
        worker.member, worker.missed, worker.cpu_s, worker.hangs = member, 0, 0.0, False
        for shard in self._of(worker):
            self._fill(shard)

    def _fill(self, shard: _Shard) -> None:
        """Send a shard's new worker what its predecessor had confirmed, and what it has not answered."""
        own = [one for one in self._unanswered.values() if one.shard is shard]
        for request in own:
            del self._unanswered[request.frame.fields["id"]]
        # One that is done is known, or its caller has left.
        for request in [*shard.known.values(), *(one for one in own if not one.future.done())]:
            self._unanswered[request.frame.fields["id"]] = request
            self.tell(shard.number, request.frame)

    def _give(self, shard: _Shard, worker: _Worker) -> None:
        """Let another worker serve a shard, as if its old one had ended. One that has no process gets it later."""
        self.tell(shard.number, Frame("leave"))
        shard.worker = worker
        self._fill(shard)

    def background(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Fail all requests if `work` fails, because no one else answers them."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - the callers raise it
                self._fail(error)

        task = asyncio.create_task(guarded(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, worker: _Worker) -> None:
        """Take the frames of a worker's process until it ends; then replace it."""
        while (member := worker.member) is not None:
            while worker.used and (frame := await member.receive()) is not None:
                worker.missed = 0
                self._take(worker, frame)
            member.end()
            worker.member = None
            if self._closing:
                return
            ended, left = time.perf_counter(), [one for one in self._unanswered.values() if one.shard.worker is worker]
            why = await self._supply.reason(member)
            if not worker.used:
                return
            why = "it did not answer, so pvg killed it" if worker.hangs else why
            lost = {"worker": worker.number, **member.names, "why": why, "requests": len(left)}
            self._events.event("workers", event="lost", **lost)
            worker.lost_at = worker.lost_at or ended
            worker.restarts += 1
            for request in left:
                request.losses += 1
                if request.losses == MOST_LOSSES:
                    again = f"ended {MOST_LOSSES} times with the same request ({request.frame.kind})"
                    remedy = "Play without workers: -s cluster=none"
                    raise WorkerLostError(f"Worker {worker.number} {again}: {why}.", remedy)
            await self._renew(worker, successor=True)

    def _take(self, worker: _Worker, frame: Frame) -> None:
        if frame.kind == "pong":
            self._meter.report(worker.number, frame.fields)
            return
        if frame.kind == "event":
            self._events.event(frame.fields["tag"], **{**frame.fields["event"], "worker": worker.number})
            return
        request = self._unanswered.get(frame.fields["id"])
        if request is None or request.shard.worker is not worker:  # another worker serves the shard by now
            return
        if frame.kind == "completed":
            if request.parts is not None:
                request.parts(frame)
            return
        del self._unanswered[frame.fields["id"]]
        if frame.kind == "done":
            request.shard.confirm(request)
            if not request.future.done():  # otherwise the caller has left, or has its answer
                request.future.set_result(frame)
        elif not request.future.done():
            request.future.set_exception(error_of(frame))
        elif request.known:
            self._fail(error_of(frame))
        if worker.lost_at is not None and worker not in self._opening():
            ms, worker.lost_at = (time.perf_counter() - worker.lost_at) * 1e3, None
            self._events.event("workers", event="replaced", worker=worker.number, ms=ms)

    def _fail(self, error: BaseException) -> None:
        """Fail every request, now and from now on. The first error counts."""
        self.failed = self.failed or error
        waiting, self._unanswered = [request.future for request in self._unanswered.values()], {}
        for future in waiting:
            if not future.done():
                future.set_exception(self.failed)
                future.exception()  # marks it as retrieved: its caller may have left

    async def _probe(self) -> None:
        """Probe each worker every PROBE_S, one after the other: 1,000 at once would block the event loop."""
        for worker in cycle(self._workers):
            await asyncio.sleep(PROBE_S / len(self._workers))
            if (member := worker.member) is None:
                continue
            cpu_s = member.cpu_s()
            moved, worker.cpu_s = cpu_s is not None and cpu_s > worker.cpu_s, cpu_s or 0.0
            worker.missed = 0 if moved else worker.missed + 1
            if worker.missed > (PROBES_UNSEEN if cpu_s is None else PROBES_MISSED):
                worker.hangs = True
                member.end()
            else:
                member.send(Frame("ping"))

    # --- the number of processes --------------------------------------------------------------------------------------

    async def _scale(self) -> None:
        while True:
            demand, decision, at, trained_s = Demand(), None, time.monotonic(), self.trained_s()
            while decision is None:
                await asyncio.sleep(LOOK_S)
                now, trained_now_s = time.monotonic(), self.trained_s()
                used = [worker.number for worker in self._workers if worker.used]
                demand.add(now - at, self._work(), used, trained_now_s - trained_s)
                at, trained_s = now, trained_now_s
                decision = decide(demand, lowest=self._lowest, highest=self._highest)
            if decision.remove is None:
                await self.add(decision.why, demand.shards)
            else:
                await self.remove(decision.remove, decision.why)

    def _work(self) -> dict[int, dict[int, list[str]]]:
        """The kinds of the requests in flight, by worker and shard."""
        work: dict[int, dict[int, list[str]]] = {}
        for request in self._unanswered.values():
            if request.frame.kind not in STATE:
                shards = work.setdefault(request.shard.worker.number, {})
                shards.setdefault(request.shard.number, []).append(request.frame.kind)
        return work

    async def add(self, why: str, busy: Mapping[int, float]) -> None:
        """Start one more process, which gets shards of the others. `busy`: as `Demand.shards`. One that cannot be
        started is reported only. Call neither `add` nor `remove` meanwhile."""
        worker = next(worker for worker in self._workers if not worker.used)
        began = time.perf_counter()
        try:
            await self._begin(worker)
        except PvgError as error:
            worker.used = False
            self._events.event("workers", event="not added", worker=worker.number, why=str(error))
            await asyncio.sleep(REFUSED_S)
            return
        others = [other for other in self._workers if other.used and other is not worker]
        served = {other.number: [shard.number for shard in self._of(other)] for other in others}
        for number in shards_to_take(served, busy):
            self._give(self._shards[number], worker)
        self._tell_change("added", worker, why, began)

    async def remove(self, number: int, why: str) -> None:
        """End a process; the others get its shards. There must be others."""
        worker, began = self._workers[number], time.perf_counter()
        worker.used, worker.lost_at = False, None
        for shard in self._of(worker):
            others = [other for other in self._workers if other.used]
            self._give(shard, min(others, key=lambda other: len(self._of(other))))
        if worker.member is not None:  # otherwise it has died, and may be being replaced
            worker.member.end()
        assert worker.serving is not None
        await worker.serving
        self._tell_change("removed", worker, why, began)

    def _tell_change(self, what: str, worker: _Worker, why: str, began: float) -> None:
        workers = sum(other.used for other in self._workers)
        ms = (time.perf_counter() - began) * 1e3
        self._events.event("workers", event=what, worker=worker.number, workers=workers, why=why, ms=ms)
        self.changed(workers, f"{what} worker {worker.number}: {why}")


def error_of(frame: Frame) -> Exception:
    """The exception that a worker reported."""
    fields = frame.fields
    if frame.kind == "failed":
        return WorkerFailedError(fields["traceback"])
    refused: PvgError = getattr(pvg.errors, fields["type"], PvgError)(fields["message"], fields["remedy"])
    refused.exit_code = fields["exit_code"]
    return refused
