"""Real worker processes: they compute what this process computes, survive real kills, and do not outlive their driver.

One nursery starts in seconds, so each test does several things with its workers.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from worker_stand_ins import DyingSupply, RecordedEvents, kept_supply

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError, MissingRequirementError, WorkerLostError, open_files
from pvg.game.players import Players
from pvg.game.roles import prompt_builder
from pvg.models import open_model
from pvg.models.adapters import attach_adapters
from pvg.models.compute import LiveBytes
from pvg.models.heads import ScoreScales, VerifierEnsemble
from pvg.records import Role
from pvg.rollout.dispatcher import SampleCall
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.seeds import seed_for
from pvg.servers.pool import HttpPool
from pvg.servers.publishing import WeightUpdate
from pvg.tasks import open_task
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer
from pvg.workers import pool as pool_module
from pvg.workers.engine import WorkerEngine
from pvg.workers.frames import Frame, receive, send
from pvg.workers.local import LocalMember, LocalSupply
from pvg.workers.models import ModelInWorkers, policy_fields, policy_shards
from pvg.workers.pool import WorkerPool
from pvg.workers.process import Worker
from pvg.workers.shared import SharedBuffers

pytestmark = pytest.mark.slow


def experiment(workers: int, rank: int = 0, **counts: int) -> Experiment:
    """`counts`: others of the table `cluster`."""
    cluster = {"kind": "local", "workers": workers, **counts} if workers else {"kind": "none"}
    return build_experiment(
        {
            "task": {"kind": "modchain", "problems": 64, "test_problems": 8},
            "models": {"threads": 1},
            "rollout": {
                "group_size": 4,
                "engine": {"max_rows": 64},
                "concurrency": 64,
                "prefetch": "fresh" if "trainers" in counts else "none",
            },
            "cluster": cluster,
            "training": {"adapters": {"rank": rank}},
        }
    )


class OneBatch:
    def __init__(self, batch: PolicyBatch) -> None:
        self._batch: PolicyBatch | None = batch

    async def next_batch(self) -> PolicyBatch | None:
        batch, self._batch = self._batch, None
        return batch


def policy_batch(rollouts) -> PolicyBatch:
    return PolicyBatch(
        sequences=[np.concatenate([r.prompt_ids, r.completion_ids]) for r in rollouts],
        prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], np.int32),
        sampled_logprobs=[r.logprobs for r in rollouts],
        reference_logprobs=None,
        advantages_N=np.linspace(-1, 1, len(rollouts)).astype(np.float32),
        role_ids_N=np.array([r.role.number for r in rollouts], np.int8),
        group_ids_N=np.array([r.group for r in rollouts], np.int32),
        versions_N=np.zeros(len(rollouts), np.int32),
    )


async def one_step(workers: int, watch: Callable[[WorkerPool], None] | None = None, **counts: int) -> dict:
    """Sample, score, compute reference log-probs and one optimizer step, with this many workers."""
    chosen = experiment(workers, **counts)
    players = Players(chosen, open_task(chosen.task), supply=kept_supply() if workers else None)
    try:
        await players.ready()
        if watch is not None:
            assert players.workers is not None
            watch(players.workers)
        with players.divided_workers():
            return await step_of(players, chosen)
    finally:
        await players.close()


async def step_of(players: Players, chosen: Experiment) -> dict:
    """One step of players that are ready."""
    asked = prompt_builder(chosen.prompts, chosen.game.protocol, players.base.tokenizer, players.task)
    problems = list(players.task.problems("train"))[:8]
    orders = [asked.order(p, tuple(Role)[n % 2], n, 4) for n, p in enumerate(problems)]
    groups = await players.dispatcher.sample(
        orders, SampleCall(round=0, source="base", step=0, seed=seed_for(0, "test"), prefix="t")
    )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    verifier = players.open_verifier()
    other = players.open_verifier(member=1, like=verifier)
    for number, member in enumerate((verifier, other), start=1):
        for parameter in member.parameters():  # an untrained one scores 0
            parameter.data += 0.01 * torch.sin(number * torch.arange(parameter.numel()).reshape(parameter.shape))
    scores_N = await players.scorer(verifier).score(rollouts)
    ensemble = VerifierEnsemble([verifier, other], "mean", ScoreScales(np.array([1.0, 0.5]), np.array([0.0, 2.0])))
    ensemble_scores_N = await players.scorer(ensemble).score(rollouts)
    learner = players.base.copy()
    learner.require_gradients()
    objective = PolicyObjective(chosen.training, chosen.rollout, learner.tokenizer.pad_id)
    in_workers = players.prover_workers(chosen.training, chosen.rollout, learner.module)
    batch = policy_batch(rollouts)
    if in_workers is None:
        reference = objective.recompute(players.base.module, batch)
    else:
        reference = await in_workers.logprobs("base", batch)
    batch.reference_logprobs = reference
    trainer = Trainer(
        learner.module,
        objective,
        OptimizerSettings(learning_rate=1e-3),
        OneBatch(batch),
        executor=players.executor,
        workers=in_workers,
    )
    report = await trainer.step()
    assert report is not None
    if in_workers is not None:
        await in_workers.close()
    ensemble.close()
    return {
        "texts": [r.text for r in rollouts],
        "ids": [r.id for r in rollouts],
        "scores": scores_N,
        "ensemble": ensemble_scores_N,
        "reference": np.concatenate(reference),
        "metrics": report.metrics,
        "weights": {name: weight.clone() for name, weight in learner.weights().items()},
        "stats": players.engine.stats,
    }


def test_workers_compute_what_this_process_computes():
    here, two = asyncio.run(one_step(0)), asyncio.run(one_step(2))
    assert_same_step(two, here)


def assert_same_step(two: dict, here: dict) -> None:
    """Up to the rounding of sums."""
    assert two["texts"] == here["texts"]
    assert two["ids"] == here["ids"]
    for kind in ("scores", "ensemble"):
        np.testing.assert_array_equal(two[kind], here[kind])  # a score does not depend on its batch
    assert not np.array_equal(here["scores"], here["ensemble"])
    np.testing.assert_allclose(two["reference"], here["reference"], atol=1e-5)
    assert two["metrics"].keys() == here["metrics"].keys()
    for name, value in here["metrics"].items():
        if name not in ("micro_batches", "padding"):
            assert two["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    # The first step of AdamW moves a weight by the learning rate (1e-3), whatever the size of its gradient. Rounding
    # changes the step of a weight whose gradient is nearly 0, so single weights may differ, but not many.
    for name, weight in here["weights"].items():
        gap = (two["weights"][name] - weight).abs()
        assert gap.max() < 2e-4, name
        assert gap.square().mean().sqrt() < 1e-5, name
    assert two["stats"].tokens == here["stats"].tokens


async def sampled(pool: WorkerPool, number: int) -> list[bytes]:
    engine = WorkerEngine(pool)
    requests = [
        GenerationRequest(f"{number}/{row}", np.array([3, 4, 5, 6], np.int32), Sampling(40, (1,)), row, group=row // 4)
        for row in range(32)
    ]
    done = await asyncio.gather(*(engine.generate(request) for request in requests))
    return [found.token_ids.tobytes() + found.logprobs.tobytes() for found in done]


def workers_of(pool: WorkerPool) -> list[int]:
    return [shard.worker.member.names["pid"] for shard in pool._shards if shard.worker.member is not None]


async def killed_while_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PROBE_S", 0.3)
    events = RecordedEvents()
    pool = WorkerPool(experiment(2), kept_supply(), events)
    await pool.start()
    try:
        expected = await sampled(pool, 0)
        for number, (places, how) in enumerate(
            [((0,), signal.SIGKILL), ((0, 1), signal.SIGKILL), ((1,), signal.SIGSTOP)], start=1
        ):
            pids = workers_of(pool)
            asked = asyncio.create_task(sampled(pool, number))
            await asyncio.sleep(0.02)
            for place in places:
                os.kill(pids[place], how)
            assert await asked == expected
        assert pool.measured()["restarts"] == 4
        hung = "it did not answer, so pvg killed it"
        assert [event["why"] for event in events.of("lost")] == [*["killed by SIGKILL"] * 3, hung]
        assert workers_of(pool) != pids
        await killed_twice_before_it_is_ready(pool, expected)
        await killed_after_its_last_completion(pool, events, expected)
        # What a user can fix keeps its type on the way; the worker goes on.
        impossible = [GenerationRequest("x", np.array([3], np.int32), Sampling(0, (1,)), 0)]
        with pytest.raises(ConfigurationError, match="max_tokens is 0"):
            await pool.submit(0, Frame("generate", {"requests": impossible, "cut": []}))
        with pytest.raises(pool_module.WorkerFailedError, match="KeyError"):
            await pool.submit(0, Frame("close", {"slot": 999}))
        assert await sampled(pool, 9) == expected
    finally:
        await pool.close()


async def killed_twice_before_it_is_ready(pool: WorkerPool, expected: list[bytes]) -> None:
    """The replacement dies too, before it has opened its models. The next one must have the newest policy."""
    with open_model(experiment(2).models.prover, torch.device("cpu")) as model:
        weights = {name: weight + 0.01 for name, weight in model.weights().items()}
    await pool.load_policy(WeightUpdate(7, weights))
    newer = await sampled(pool, 20)
    assert newer != expected
    restarts = pool.measured()["restarts"]
    asked = asyncio.create_task(sampled(pool, 21))
    await asyncio.sleep(0.02)
    first = workers_of(pool)[0]
    os.kill(first, signal.SIGKILL)
    while (second := pool._shards[0].worker.member) is None or second.pid == first:  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(0)
    os.kill(second.pid, signal.SIGKILL)
    assert await asked == newer
    assert await sampled(pool, 22) == newer
    assert pool.measured()["restarts"] == restarts + 2
    expected[:] = newer


def test_of_a_policy_with_adapters_only_these_travel(monkeypatch):
    weighed, chosen, write = list[int](), experiment(2, rank=4), SharedBuffers.write

    async def weighing(buffers: SharedBuffers, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        weighed.append(sum(tensor.nbytes for tensor in tensors.values()))
        return await write(buffers, tensors)

    monkeypatch.setattr(SharedBuffers, "write", weighing)
    alpha = chosen.training.adapters.alpha
    with open_model(chosen.models.prover, torch.device("cpu")) as base, attach_adapters(base, 4, alpha, 1) as policy:
        for name, parameter in policy.module.named_parameters():
            if "lora_B" in name:
                parameter.data += 0.1 * torch.sin(torch.arange(parameter.numel()).reshape(parameter.shape))
        tensors, adapter = policy.policy()

    async def play() -> None:
        pool = WorkerPool(chosen, kept_supply())
        await pool.start()
        try:
            first = await sampled(pool, 0)
            await pool.load_policy(WeightUpdate(1, tensors, adapter=adapter))
            adapted = await sampled(pool, 1)
            os.kill(workers_of(pool)[0], signal.SIGKILL)
            assert await sampled(pool, 2) == adapted != first
            await pool.load_policy(WeightUpdate(2, tensors))
            assert await sampled(pool, 3) == adapted
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(play(), 120))
    small, whole = weighed
    assert small == sum(tensor.nbytes for tensor in adapter.tensors.values()) < whole / 5


def test_a_worker_has_no_second_set_of_the_layers_with_adapters():
    chosen = experiment(1, rank=2)
    alpha = chosen.training.adapters.alpha
    with open_model(chosen.models.prover, torch.device("cpu")) as base, attach_adapters(base, 2, alpha, 1) as policy:
        whole = sum(weight.nbytes for weight in base.weights().values())
        layers = sum(weight.nbytes for name, weight in base.weights().items() if ".layers." in name)
        shared = SharedBuffers()
        place = asyncio.run(shared.write(policy.adapter().tensors))
    answers: list[Frame] = []

    async def load(executor: ThreadPoolExecutor) -> int:
        worker = Worker(answers.append, executor)

        async def ask(kind: str, **fields: Any) -> None:
            worker.take(Frame(kind, {**fields, "id": kind}))
            while not any(answer.fields.get("id") == kind for answer in answers):  # noqa: ASYNC110 - no other sign
                await asyncio.sleep(0.001)
            assert answers[-1].kind == "done", answers[-1].fields

        await ask("start", experiment=chosen.plain(), device="cpu", worker=0)
        live = LiveBytes(worker.base.module)
        await asyncio.wrap_future(executor.submit(live.__enter__))
        await ask("policy", version=1, trace="t", adapted=True, place=place)
        await asyncio.wrap_future(executor.submit(live.__exit__, None, None, None))
        await worker.leave()
        return live.peak

    try:
        with ThreadPoolExecutor(1) as executor:
            assert asyncio.run(load(executor)) < whole + layers / 2  # the weights of the engine count
    finally:
        shared.close()


def test_a_cut_may_come_before_the_engine_has_the_requests():
    """The driver cuts requests that it has sent, also while a new worker takes over."""
    requests = [GenerationRequest(name, np.array([3], np.int32), Sampling(8, ()), 0) for name in "xy"]

    async def early(executor: ThreadPoolExecutor) -> list[Frame]:
        answers: list[Frame] = []
        worker = Worker(answers.append, executor)
        worker.take(Frame("start", {"experiment": experiment(1).plain(), "device": "cpu", "worker": 0, "id": 9}))
        worker.take(Frame("generate", {"requests": requests, "cut": [], "id": 0}))
        worker.take(Frame("cut", {"ids": ["x"]}))
        worker.take(Frame("generate", {"requests": requests, "cut": [], "id": 1}))  # continues what was cut
        worker.take(Frame("generate", {"requests": requests, "cut": ["y"], "id": 2}))  # a predecessor's
        while sum(answer.kind == "done" for answer in answers) < 4:  # noqa: ASYNC110 - no other sign
            await asyncio.sleep(0.001)
        await worker.leave()
        return answers

    with ThreadPoolExecutor(1) as executor:
        answers = asyncio.run(asyncio.wait_for(early(executor), 60))
    tokens = {
        (answer.fields["id"], row): None if found is None else len(found.token_ids)
        for answer in answers
        if answer.kind == "completed"
        for row, found in zip(answer.fields["rows"], answer.fields["found"], strict=True)
    }
    assert tokens == {(0, 0): None, (0, 1): 8, (1, 0): 8, (1, 1): 8, (2, 0): 8, (2, 1): None}


def test_a_shard_that_leaves_a_process_frees_its_models_at_once():
    """Not only when Python looks for cycles, which may take long: a worker and its engine name each other."""

    def models() -> weakref.WeakSet[PreTrainedModel]:
        return weakref.WeakSet(each for each in gc.get_objects() if issubclass(type(each), PreTrainedModel))

    async def left(executor: ThreadPoolExecutor) -> list[int]:
        answers: list[Frame] = []
        worker, chosen, before = Worker(answers.append, executor), experiment(1), models()
        fields = {**policy_fields(chosen.training, chosen.rollout), "slot": 7}
        for kind, own in (("start", {"experiment": chosen.plain(), "device": "cpu", "worker": 0}), ("open", fields)):
            worker.take(Frame(kind, {**own, "id": kind}))
            while not answers or answers[-1].fields["id"] != kind:  # noqa: ASYNC110 - no other sign
                await asyncio.sleep(0.001)
            assert answers[-1].kind == "done", answers[-1].fields
        opened = models() - before
        counts = [len(opened)]
        await worker.leave()
        return [*counts, len(opened)]

    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as executor:
            many, none = asyncio.run(left(executor))
    finally:
        gc.enable()
    assert many >= 2
    assert none == 0


async def killed_after_its_last_completion(pool: WorkerPool, events: RecordedEvents, expected: list[bytes]) -> None:
    """A worker dies between its last completion and its confirmation. The next one must not sample the finished block
    again: the next block would join its rows, and rows of different ages round differently."""
    victim, take = pool._shards[0], pool._take

    def without_confirmation(worker, frame: Frame) -> None:
        request = pool._unanswered.get(frame.fields.get("id", 0))
        generated = request is not None and request.shard is victim and request.frame.kind == "generate"
        if frame.kind == "done" and generated:
            del pool._take  # type: ignore[attr-defined]
            os.kill(worker.member.pid, signal.SIGKILL)
        else:
            take(worker, frame)

    pool._take = without_confirmation  # type: ignore[method-assign]
    replaced = len(events.of("replaced"))
    assert await sampled(pool, 30) == expected
    # When the next worker is ready, it would begin to sample the old block.
    while len(events.of("replaced")) == replaced:  # noqa: ASYNC110 - nothing tells when that is
        await asyncio.sleep(0.001)
    assert await sampled(pool, 31) == expected


@pytest.mark.drill
def test_killed_and_hanging_workers_change_no_bit(monkeypatch):
    asyncio.run(killed_while_sampling(monkeypatch))


def asked(supply: DyingSupply, events: Any = None, idle_s: float = 0.0) -> None:
    """Ask one worker of this supply for scores and for a gradient."""

    async def work() -> None:
        pool = WorkerPool(experiment(1), supply, *([] if events is None else [events]))
        try:
            await pool.start()
            await asyncio.sleep(idle_s)
            await pool.submit(0, Frame("score"))
            await pool.submit(0, Frame("gradient"))
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize("last", ["start", "gradient"])
def test_workers_that_end_again_and_again_are_an_error_that_says_why(last):
    supply = DyingSupply(last)
    with pytest.raises(WorkerLostError, match="exit code 1: no memory") as raised:
        asked(supply)
    assert "cluster=none" in raised.value.remedy
    assert supply.started == pool_module.MOST_LOSSES


def test_a_supply_that_can_start_no_more_workers_ends_the_requests(monkeypatch):
    class LostCluster(DyingSupply):
        async def watch(self) -> None:
            raise WorkerLostError("The head does not answer.", "Resume the run.")

    monkeypatch.setattr(pool_module, "PROBE_S", 0.05)
    with pytest.raises(WorkerLostError, match="The head does not answer"):
        asked(LostCluster(), idle_s=0.3)


def test_an_error_while_a_worker_is_replaced_ends_the_requests():
    class FullDisk:
        def event(self, tag: str, **fields: object) -> None:
            if fields.get("event") == "lost":
                raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        asked(DyingSupply("gradient"), FullDisk())


def test_weights_reach_the_workers_before_the_work_even_if_a_caller_leaves():
    """Two callers at once, one of whom is cancelled while the weights are on their way."""
    kinds: list[str] = []

    class SlowSupply(DyingSupply):
        async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while (frame := await receive(reader)) is not None:
                kinds.append(frame.kind)
                await asyncio.sleep(0.05)
                fields = {"logprobs": np.zeros(1, np.float32)}
                send(writer, Frame("done", {**fields, "id": frame.fields["id"]}))

    async def run() -> None:
        pool = WorkerPool(experiment(1), SlowSupply(""))
        await pool.start()
        try:
            model = ModelInWorkers(pool, {"what": "policy"}, {"weight": torch.zeros(3)}, policy_shards)
            batch = policy_batch([])
            leaving = asyncio.create_task(model.logprobs("base", batch))
            await asyncio.sleep(0.08)  # while the weights are loaded
            leaving.cancel()
            await asyncio.gather(model.prepare(), model.prepare())
            await pool.submit(0, Frame("gradient"))
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert kinds[:2] == ["start", "open"]
    assert "load" in kinds[2:-1]
    assert kinds.count("open") == 1
    assert kinds[-1] == "gradient"


def test_a_worker_that_hangs_from_its_first_moment_on_is_replaced(monkeypatch):
    monkeypatch.setattr(pool_module, "PROBE_S", 0.3)

    stopped, start = list[int](), LocalSupply.start

    async def stop_first(supply: LocalSupply, successor: bool = False) -> LocalMember:
        member = await start(supply)
        if not stopped:
            stopped.append(member.pid)
            os.kill(member.pid, signal.SIGSTOP)
        return member

    monkeypatch.setattr(LocalSupply, "start", stop_first)

    async def run() -> RecordedEvents:
        events = RecordedEvents()
        pool = WorkerPool(experiment(2), kept_supply(), events)
        try:
            await asyncio.wait_for(pool.start(), 120)
            assert stopped[0] not in workers_of(pool)
            # The end of a run does not wait for one that hangs and has not read what it was sent.
            os.kill(workers_of(pool)[1], signal.SIGSTOP)
            pool.submit(1, Frame("score", {"much": np.zeros(1 << 24)}))
        finally:
            await asyncio.wait_for(pool.close(), 60)
        return events

    events = asyncio.run(run())
    assert [event["why"] for event in events.of("lost")] == ["it did not answer, so pvg killed it"]
    assert len(events.of("replaced")) == 1


# A nursery without torch, whose workers only wait for the end of their connection.
LIGHT_NURSERY = """
import json, os, socket, sys, types
sys.path[:] = json.loads(sys.argv[1])
process = sys.modules["pvg.workers.process"] = types.ModuleType("process")
process.work = lambda connection: (connection.recv(1), os._exit(0))
from pvg.workers.local import nurse
nurse(socket.socket(fileno=int(sys.argv[2])))
"""


# As with a limit of processes, which does not hold for root.
ONE_FORK = """
import os
fork, forked = os.fork, []
def limited():
    if forked:
        raise BlockingIOError(11, "full")
    forked.append(True)
    return fork()
os.fork = limited
"""


@contextmanager
def ended(supply: LocalSupply) -> Iterator[LocalSupply]:
    try:
        yield supply
    finally:
        supply.end()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(monkeypatch):
    async def run() -> None:
        monkeypatch.setattr("pvg.workers.local.NURSERY", LIGHT_NURSERY)
        with ended(LocalSupply()) as supply:
            member = await supply.start()
            supply._patience_s = 0.1
            os.kill(supply._nursery.pid, signal.SIGSTOP)
            member.end()
            assert await supply.reason(member) == "its parent process was killed"
            os.kill(supply._nursery.pid, signal.SIGCONT)
            other = await supply.start()
            assert other.pid > 100
            assert lives(other.pid)
            other.end()

    asyncio.run(run())


def test_a_wait_for_the_process_that_starts_workers_says_so_and_ends(monkeypatch):
    """It hangs, and so does the one that takes its place."""
    events, begin = RecordedEvents(), LocalSupply._begin

    def begin_stopped(supply: LocalSupply) -> None:
        begin(supply)
        os.kill(supply._nursery.pid, signal.SIGSTOP)

    async def run() -> None:
        with ended(LocalSupply()) as supply:
            supply.events = events
            await supply.start()

    monkeypatch.setattr("pvg.workers.local.NURSERY", LIGHT_NURSERY)
    monkeypatch.setattr("pvg.workers.local.START_S", 0.2)
    monkeypatch.setattr("pvg.telemetry.events.QUIET_S", 0.01)
    monkeypatch.setattr(LocalSupply, "_begin", begin_stopped)
    with pytest.raises(MissingRequirementError, match=r"did not answer within 0\.2 s"):
        asyncio.run(asyncio.wait_for(run(), 60))
    assert [("starts workers" in event["why"], event["event"]) for event in events.seen] == [(True, "waits")] * 2


def test_a_worker_is_not_mixed_up_with_one_that_was_started_too_late(monkeypatch):
    async def run() -> None:
        monkeypatch.setattr("pvg.workers.local.NURSERY", LIGHT_NURSERY)
        monkeypatch.setattr("pvg.workers.local.START_S", 0.0)
        with ended(LocalSupply()) as supply:
            with pytest.raises(MissingRequirementError, match="the first process did not answer within 0 s"):
                await supply.start()
            monkeypatch.setattr("pvg.workers.local.START_S", 120.0)
            supply._patience_s = 120.0
            member = await supply.start()
            os.kill(member.pid, signal.SIGKILL)
            assert await asyncio.wait_for(member.reader.read(), 30) == b""  # its own process has ended

    asyncio.run(run())


def test_a_worker_that_cannot_be_started_costs_no_other_one(monkeypatch):
    """A limit of processes must not end the workers that are there."""

    async def run() -> None:
        monkeypatch.setattr("pvg.workers.local.NURSERY", ONE_FORK + LIGHT_NURSERY)
        with ended(LocalSupply()) as supply:
            member = await supply.start()
            with pytest.raises(MissingRequirementError, match="Resource temporarily unavailable"):
                await supply.start()
            assert lives(member.pid)

    asyncio.run(run())


def test_the_end_of_a_supply_without_workers_does_not_wait_for_its_imports():
    supply = LocalSupply()
    os.kill(supply._nursery.pid, signal.SIGSTOP)
    supply.end()
    assert supply._nursery.returncode == -signal.SIGKILL


def test_the_limit_of_open_files_is_raised_for_connections_or_refuses_them(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    open_files.clear()
    try:
        first = HttpPool.of(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (456, before[1])
        second = HttpPool.of(100, "rollout.concurrency")  # another client of the same process
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (556, before[1])
        asyncio.run(first.close())
        third = HttpPool.of(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (556, before[1])
        for pool in (second, third):
            asyncio.run(pool.close())
        assert not open_files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    supply = DyingSupply("")
    with pytest.raises(MissingRequirementError, match="200 workers need 456 open files") as raised:
        asyncio.run(WorkerPool(experiment(200), supply).start())
    assert "ulimit -n 456" in raised.value.remedy
    with pytest.raises(MissingRequirementError, match="100 requests need 356 open files") as raised:
        HttpPool.of(100, "rollout.concurrency")
    assert "-s rollout.concurrency=N" in raised.value.remedy
    assert supply.started == 0


DRIVER = """
import asyncio, sys
from pvg.config.load import build_experiment
from pvg.workers.local import LocalSupply
from pvg.workers.pool import WorkerPool

async def main():
    supply = LocalSupply()
    pool = WorkerPool(build_experiment({"cluster": {"kind": "local", "workers": 2}}), supply)
    await pool.start()
    print(supply._nursery.pid, *(shard.worker.member.pid for shard in pool._shards), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_worker_outlives_a_killed_driver():
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)], stdout=subprocess.PIPE, cwd=root, text=True
    ) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(lives, pids))
        os.kill(pids[1], signal.SIGSTOP)  # even one that hangs
        driver.kill()
    deadline = time.monotonic() + 30
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(lives, pids))


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state != b"Z"
