"""Worlds that the real pipeline plays in virtual time, to compare it with the planner (benchmarks/planning.py).

`play_world(world)` runs pvg's Pipeline, group buffer, admission gate, Dispatcher, deadlines and grading. The engine and
the trainer compute nothing. They wait as long as the world says, on an event loop whose clock jumps to the next timer
(benchmarks.virtual_time). So the result does not depend on the machine.

The engine (`SteppingEngine`) decodes step by step, as a server does: a step gives each row one token, and requests join
between two steps. The planner has no steps. It draws other lengths and failures than the engine: `seed` differs.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.stand_in import StandInEngine
from benchmarks.virtual_time import run_in_virtual_time
from pvg.config.task import ModchainTask
from pvg.models.characters import modchain_tokenizer
from pvg.models.tokenizer import Tokenizer
from pvg.planning.world import AheadLimits, Cut, Lengths, World, lognormal_lengths
from pvg.records import BASE_SOURCE, Group, Problem, Role, VersionSpan
from pvg.rollout.dispatcher import Dispatcher, GroupOrder
from pvg.rollout.engine import Completion, GenerationRequest, Sampling
from pvg.rollout.gathering import Deadline
from pvg.rollout.pipeline import AdmissionGate, Pipeline
from pvg.servers.publishing import SyncTiming, WeightUpdate
from pvg.tasks import open_task
from pvg.tasks.task import problems_of_half

LONGEST = 2048
TURNS = 20  # of the event loop between two steps, in which the requests that follow on a reply join the next step


def lengths_of(helpful: float, sneaky: float, sigma: float) -> dict[Role, Lengths]:
    return {
        Role.HELPFUL: lognormal_lengths(helpful, sigma, LONGEST),
        Role.SNEAKY: lognormal_lengths(sneaky, sigma, LONGEST),
    }


BALANCED = World(
    groups=16,
    group_size=8,
    lengths=lengths_of(100, 100, 1.0),
    workers=4,
    slots=16,
    concurrency=64,
    token_s=0.1,
    train_token_s=0.0016,
    update_s=1.0,
    pause_s=0.5,
    ahead=AheadLimits(1, 2),
)
# What each world is about -> the world.
WORLDS: dict[str, World] = {
    "sampling and training balanced, one batch ahead, freshest first": BALANCED,
    "sampling is slow, and a full worker decodes slower; two batches ahead": replace(
        BALANCED,
        workers=3,
        slots=32,
        concurrency=96,
        token_s=0.08,
        row_s=0.005,
        train_token_s=0.0005,
        other_s=1.0,
        pause_s=0.0,
        ahead=AheadLimits(2, 3),
    ),
    "training is slow, oldest first": replace(
        BALANCED,
        slots=32,
        concurrency=128,
        train_token_s=0.003,
        other_s=2.0,
        update_s=2.0,
        pause_s=2.0,
        ahead=AheadLimits(1, 2, "old"),
    ),
    "in turns": replace(BALANCED, pause_s=1.0, ahead=None),
    "sneaky solutions twice as long, at most one version behind, long updates": replace(
        BALANCED,
        groups=24,
        group_size=4,
        lengths=lengths_of(60, 120, 0.8),
        sneaky_share=0.4,
        update_s=3.0,
        pause_s=3.0,
        score_s=0.5,
        ahead=AheadLimits(1, 1),
    ),
    "each worker fails every 10 minutes; groups are cut at a deadline": replace(
        BALANCED, workers=8, concurrency=96, pause_s=0.0, mtbf_s=600.0, restart_s=30.0, cut=Cut(60.0, 4)
    ),
}


@dataclass(frozen=True, slots=True)
class PlayedBatches:
    """What the real pipeline did in the counted batches: means, as in pvg.planning.simulation.Outcome."""

    batch_s: float
    idle: float
    waiting: float
    staleness: float
    dropped: float


def play_world(world: World, batches: int, fill: int, seed: int) -> PlayedBatches:
    """Play `fill` batches, then count `batches`."""
    found: PlayedBatches = run_in_virtual_time(_Game(world, seed).play(batches, fill))
    return found


# --- an engine that decodes in steps ---------------------------------------------------------------------------------


@dataclass(eq=False)
class _Row:
    left: int
    ended: asyncio.Future[bool]  # False: its worker has failed
    version: int | None = None


@dataclass(eq=False)
class _Worker:
    outstanding: int = 0
    up: bool = True
    rows: list[_Row] = field(default_factory=list)
    waiting: deque[_Row] = field(default_factory=deque)
    came: asyncio.Event = field(default_factory=asyncio.Event)


class SteppingEngine(StandInEngine):
    """Workers that decode in steps, pause for updates, and fail. `lengths`: by request id."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world.concurrency)
        self.lengths: dict[str, int] = {}
        self._world = world
        self._chance = np.random.default_rng([seed, 9])
        self._workers = [_Worker() for _ in range(world.workers)]
        self._running, self._some_up = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._some_up.set()
        self._tasks = [asyncio.create_task(self._decode(worker)) for worker in self._workers]
        if math.isfinite(world.mtbf_s):
            self._tasks += [asyncio.create_task(self._fail(worker)) for worker in self._workers]

    async def generate(self, request: GenerationRequest) -> Completion:
        length, ended = self.lengths.pop(request.id), False
        while not ended:
            await self._some_up.wait()
            worker = min((w for w in self._workers if w.up), key=lambda w: w.outstanding)
            row = _Row(length, asyncio.get_running_loop().create_future())
            worker.outstanding += 1
            worker.waiting.append(row)
            worker.came.set()
            try:
                ended = await row.ended
            finally:
                worker.outstanding -= 1
                for rows in (worker.rows, worker.waiting):
                    if row in rows:
                        rows.remove(row)
                worker.came.set()
        assert row.version is not None
        ids, logprobs = np.full(length, int(request.prompt_ids[-1]), np.int32), np.full(length, -1.0, np.float32)
        self.count(request, length, 0.0)
        spans, timing = (VersionSpan(0, row.version),), request.timing(0.0, 0.0)
        return Completion(request.id, ids, logprobs, spans, "length", timing)

    async def load_weights(self, update: WeightUpdate) -> SyncTiming:
        world = self._world
        await asyncio.sleep(world.update_s - world.pause_s)
        if world.pause_s:
            self._running.clear()
            await asyncio.sleep(world.pause_s)
            self._running.set()
        return await super().load_weights(update)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _decode(self, worker: _Worker) -> None:
        while True:
            while worker.waiting and len(worker.rows) < self._world.slots:
                worker.rows.append(worker.waiting.popleft())
            if not worker.rows:
                worker.came.clear()
                await worker.came.wait()
                continue
            await self._running.wait()
            if not worker.rows:  # all were cancelled in the pause
                continue
            for row in worker.rows:
                if row.version is None:
                    row.version = self.version
            rows = list(worker.rows)
            await asyncio.sleep(self._world.decoding_s(len(rows)))
            for row in rows:
                row.left -= 1
                if row.left == 0 and row in worker.rows:
                    worker.rows.remove(row)
                    if not row.ended.done():
                        row.ended.set_result(True)
            for _ in range(TURNS):
                await asyncio.sleep(0)

    async def _fail(self, worker: _Worker) -> None:
        world = self._world
        while True:
            await asyncio.sleep(self._chance.exponential(world.mtbf_s))
            worker.up = False
            if not any(other.up for other in self._workers):
                self._some_up.clear()
            for row in (*worker.rows, *worker.waiting):
                if not row.ended.done():
                    row.ended.set_result(False)
            worker.rows.clear()
            worker.waiting.clear()
            await asyncio.sleep(world.restart_s + world.update_s)
            worker.up = True
            self._some_up.set()


# --- the game --------------------------------------------------------------------------------------------------------


class _Game:
    def __init__(self, world: World, seed: int) -> None:
        self._world, self._seed = world, seed
        self._chance = np.random.default_rng([seed, 8])
        self._numbers = Counter[str]()

    async def play(self, batches: int, fill: int) -> PlayedBatches:
        world, loop = self._world, asyncio.get_running_loop()
        self._engine = SteppingEngine(world, self._seed)
        tokenizer = Tokenizer(modchain_tokenizer())
        task = open_task(ModchainTask(problems=16, test_problems=1))
        self._problem: Problem = problems_of_half(task, "prover")[0]
        self._prompt = np.array([1, 2, 3], dtype=np.int32)
        sampling = Sampling(LONGEST, (tokenizer.eos_id,))
        self._dispatcher = Dispatcher(self._engine, task, tokenizer, sampling, world.concurrency)
        pipeline = self._opened()
        began, waited, trained, behind, rollouts, before = 0.0, 0.0, 0.0, 0, 0, 0
        for number in range(fill + batches):
            if number == fill:
                began, waited, trained, behind, rollouts = loop.time(), 0.0, 0.0, 0, 0
                before = 0 if pipeline is None else self._lost(pipeline)
            asked = loop.time()
            groups = await self._batch(number) if pipeline is None else [b.group for b in await pipeline.take()]
            waited += loop.time() - asked
            everything = [rollout for group in groups for rollout in group.rollouts]
            seconds = world.training_s(sum(len(rollout.completion_ids) for rollout in everything))
            behind += sum(self._engine.version - rollout.version for rollout in everything)
            rollouts += len(everything)
            trained += seconds
            await asyncio.sleep(seconds + world.other_s)
            version = self._engine.version + 1
            await self._engine.load_weights(WeightUpdate(version, {}))
            if pipeline is not None:
                pipeline.published(version)
        wall = loop.time() - began
        lost = 0 if pipeline is None else self._lost(pipeline) - before
        if pipeline is not None:
            await pipeline.close()
        await self._engine.close()
        return PlayedBatches(
            wall / batches, 1 - trained / wall, waited / wall, behind / rollouts, lost / (lost + rollouts)
        )

    def _opened(self) -> Pipeline | None:
        ahead = self._world.ahead
        if ahead is None:
            return None
        pipeline = Pipeline(
            self._sample,
            self._shares,
            ahead=ahead.batches,
            budget=ahead.budget,
            concurrency=self._world.concurrency,
            version=0,
            prefer=ahead.prefer,
        )
        pipeline.start()
        return pipeline

    def _lost(self, pipeline: Pipeline) -> int:
        lost = pipeline.lost
        return lost.groups_cancelled * self._world.group_size + lost.on_arrival + lost.waiting

    def _shares(self, number: int) -> Counter[Role]:
        """As pvg.game.roles.assign_roles: the share, rounded at random to whole groups."""
        exact = self._world.groups * self._world.sneaky_share
        up = np.random.default_rng([self._seed, 7, number]).random() < exact - int(exact)
        sneaky = int(exact) + int(up)
        return Counter({Role.HELPFUL: self._world.groups - sneaky, Role.SNEAKY: sneaky})

    async def _sample(self, role: Role, gate: AdmissionGate) -> Group:
        groups = await self._dispatched([self._order(role)], gate)
        await asyncio.sleep(self._world.score_s)
        return groups[0]

    async def _batch(self, number: int) -> list[Group]:
        roles = list(self._shares(number).elements())
        return await self._dispatched([self._order(roles[place]) for place in self._chance.permutation(len(roles))])

    def _order(self, role: Role) -> GroupOrder:
        world, number = self._world, sum(self._numbers.values())
        self._numbers[role] += 1
        for index, length in enumerate(self._chance.choice(world.lengths[role], world.group_size)):
            self._engine.lengths[f"game/{number:05d}/{index:02d}"] = int(length)
        return GroupOrder(self._problem, role, self._prompt, number, world.group_size)

    async def _dispatched(self, orders: list[GroupOrder], gate: AdmissionGate | None = None) -> list[Group]:
        cut = self._world.cut
        deadline = None if cut is None else Deadline(cut.seconds, cut.least, "batch" if cut.whole_batch else "group")
        return await self._dispatcher.sample(
            orders,
            round_=0,
            source=BASE_SOURCE,
            step=0,
            seed=self._seed,
            prefix="game",
            gate=gate,
            deadline=deadline,
        )
