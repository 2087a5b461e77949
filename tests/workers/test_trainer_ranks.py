"""A trainer on several real processes over gloo (`cluster.trainer_ranks`), against the trainer of one process.

A group of ranks starts in seconds, so each test does several things with one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from new_process import in_new_process
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from worker_stand_ins import DyingSupply, RecordedEvents

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment, changed
from pvg.config.operation import LocalCluster, NoCluster, RayCluster
from pvg.errors import ConfigurationError, PvgError, StateError, TrainingDivergedError, WorkerLostError
from pvg.models import open_model
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer, trainable_parameters
from pvg.workers import rank_group as rank_group_module
from pvg.workers.choice import cluster_settings, with_workers
from pvg.workers.frames import Frame, receive, send
from pvg.workers.local import LocalMember
from pvg.workers.rank_group import RankEndedError, RankGroup, open_store
from pvg.workers.ranks import ModelInRanks, rank_fields

State = tuple[dict[str, Tensor], dict[str, Any]]
SETTINGS = OptimizerSettings(learning_rate=1e-3, total_steps=8, gradient_clip=0.05)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights as a Hugging Face directory. No size is a multiple of 2 x 3, so that ranks have parts
    of different sizes."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=20,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    with LanguageModel(LlamaForCausalLM(config), Tokenizer(modchain_tokenizer()), "tiny") as model:
        model.save(folder)
    return folder


def experiment(source: Path | str, **training: Any) -> Experiment:
    sections = {
        "models": {"prover": {"source": str(source)}, "device": "cpu", "threads": 1},
        "rollout": {"max_tokens": 8},
        "training": {"micro_batch_tokens": 40, "kl": {"target": 0.001}, **training},
    }
    return build_experiment(sections)


def batch(seed: int, groups: int = 5) -> PolicyBatch:
    """Groups of two rows, with prompts of three tokens and completions of different lengths."""
    generator = np.random.default_rng(seed)
    rows = 2 * groups
    counts = generator.integers(2, 12, rows)
    prompts = generator.integers(2, 19, (groups, 3))
    sampled = [generator.normal(-2.9, 0.2, count).astype(np.float32) for count in counts]
    return PolicyBatch(
        sequences=[
            np.concatenate([prompts[row // 2], generator.integers(2, 19, count)]).astype(np.int32)
            for row, count in enumerate(counts)
        ],
        prompt_lengths=np.full(rows, 3, np.int32),
        sampled_logprobs=sampled,
        reference_logprobs=[logprobs + np.float32(0.05) for logprobs in sampled],
        advantages_N=generator.choice([-1.0, 0.5, 2.0], rows).astype(np.float32),
        role_ids_N=np.zeros(rows, np.int8),
        group_ids_N=(np.arange(rows) // 2).astype(np.int32),
        versions_N=np.zeros(rows, np.int32),
    )


class Listed:
    def __init__(self, batches: list[PolicyBatch]) -> None:
        self._batches = list(batches)

    async def next_batch(self) -> PolicyBatch | None:
        return self._batches.pop(0) if self._batches else None


@dataclass
class Training:
    """A trainer, its ranks if it has some, and its commits."""

    trainer: Trainer[PolicyBatch]
    learner: LanguageModel
    model: ModelInRanks | None
    group: RankGroup
    committed: list[State]
    events: RecordedEvents
    metrics: list[dict[str, float]] = field(default_factory=list)

    async def play(self, steps: int) -> None:
        for _ in range(steps):
            report = await self.trainer.step()
            assert report is not None
            self.metrics.append(report.metrics)

    async def commit(self) -> State:
        self.committed.append(await asyncio.to_thread(self.trainer.state))
        return self.committed[-1]

    @property
    def bits(self) -> dict[str, bytes]:
        return {name: weight.numpy().tobytes() for name, weight in self.learner.weights().items()}


def with_ranks(work: Callable[[RankGroup], Awaitable[None]]) -> None:
    """Run `work` with a group for several trainings in turn: the process that forks ranks takes seconds to start."""

    async def run() -> None:
        group = RankGroup(2, "cpu")
        try:
            await asyncio.wait_for(work(group), 300)
        finally:
            await group.close()

    asyncio.run(run())


@asynccontextmanager
async def training(
    group: RankGroup, chosen: Experiment, ranks: int, batches: list[PolicyBatch], start: State | None = None
) -> AsyncIterator[Training]:
    """A training with so many ranks of `group`; 0: in this process."""
    events, committed = RecordedEvents(), [] if start is None else [start]
    learner = open_model(chosen.models.prover, torch.device("cpu"))
    learner.require_gradients()
    model = None
    if ranks:
        group.count, group.events = ranks, events
        parameters = trainable_parameters(learner.module)
        model = ModelInRanks(
            group,
            rank_fields(chosen.training, chosen.rollout, chosen.models),
            SETTINGS,
            parameters,
            lambda: committed[-1] if committed else None,
        )
    with ThreadPoolExecutor(1) as executor:
        trainer = Trainer(
            learner.module,
            PolicyObjective(chosen.training, chosen.rollout, learner.tokenizer.pad_id, chosen.models.compute_dtype),
            SETTINGS,
            Listed(batches),
            executor=executor,
            precision=chosen.models.compute_dtype,
            gradient_checkpointing=chosen.training.gradient_checkpointing,
            ranks=model,
        )
        try:
            if start is not None:
                trainer.load_state(*start)
            if model is not None:
                await model.prepare()
            yield Training(trainer, learner, model, group, committed, events)
        finally:
            if model is not None:
                await model.close()


def addresses(pids: list[int]) -> set[str]:
    """Where the processes listen and to whom they are connected."""
    found = [connection for pid in pids for connection in psutil.Process(pid).net_connections("inet")]
    ends = [address for connection in found for address in (connection.laddr, connection.raddr) if address]
    return {address.ip.removeprefix("::ffff:") for address in ends}  # torch connects to its store with IPv6


def assert_same_steps(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0, abs=1e-6)
        assert one.keys() == other.keys()
        for name, value in other.items():
            if name not in ("micro_batches", "padding"):  # the parts of ranks are smaller
                assert one[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)


# --- the same training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="packed"),
        pytest.param(
            {"shared_prompts": False, "gradient_checkpointing": True, "entropy_bonus": 0.001},
            id="padded and checkpointed, with an entropy bonus",
            marks=pytest.mark.drill,
        ),
    ],
)
@pytest.mark.slow
def test_ranks_train_as_one_process_does_and_each_keeps_its_part(model_folder: Path, settings: dict[str, Any]) -> None:
    async def work(group: RankGroup) -> None:
        chosen, batches = experiment(model_folder, **settings), [batch(seed) for seed in range(6)]
        async with training(group, chosen, 0, batches) as one:
            await one.play(6)
            alone = await one.commit()
        assert one.metrics[0]["grad_norm"] > SETTINGS.gradient_clip  # the clip is tested too
        bits = []
        for ranks in (2, 2, 3) if not settings else (2,):
            async with training(group, chosen, ranks, batches) as several:
                await several.play(6)
                together = await several.commit()
                assert_same_steps(several.metrics, one.metrics)
                assert_close(together[0], alone[0])
                assert together[1]["step"] == alone[1]["step"]
                bits.append(several.bits)
                whole = 4 * 4 * sum(weight.numel() for weight in several.learner.weights().values())
                assert several.model is not None
                # Rows cannot be cut, and AdamW counts the steps of every parameter.
                assert max(several.model.held_bytes) < 1.1 * whole / ranks
                assert sum(several.model.held_bytes) == pytest.approx(whole, rel=0.01)
        if not settings:
            assert bits[0] == bits[1]

    with_ranks(work)


AUDITED = """
import sys
def seen(event, arguments):
    if event == "pickle.find_class":
        with open({log!r}, "a") as file:
            file.write(f"{{arguments}}\\n")
sys.addaudithook(seen)
"""


@pytest.mark.drill
def test_unusual_batches_and_bfloat16_as_in_one_process_and_nothing_is_unpickled(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch.distributed has calls that exchange pickles. Ranks accept connections that prove nothing."""
    log = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(AUDITED.format(log=str(log)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def work(group: RankGroup) -> None:
        await without_work_or_signal(group, model_folder)
        await in_bfloat16(group, model_folder)
        await not_finite(group, model_folder)

    with_ranks(work)
    assert not log.exists()
    unpickles = "import pickle, pathlib; pickle.loads(pickle.dumps(pathlib.Path()))"
    subprocess.run([sys.executable, "-c", unpickles], check=True)
    assert "Path" in log.read_text()  # the hook is there


async def without_work_or_signal(group: RankGroup, model: Path) -> None:
    """A batch without work for every rank, and one without a signal."""
    chosen = experiment(model, loss="dapo", kl={"coefficient": 0.0})
    silent = batch(1)
    silent.advantages_N[:] = 0.0
    batches = [batch(0, groups=1), silent, batch(2, groups=2)]
    async with training(group, chosen, 0, batches) as one, training(group, chosen, 3, batches) as three:
        await one.play(3)
        await three.play(3)
        await three.commit()
        assert three.metrics[1] == one.metrics[1] == {"skipped": 1.0}
        assert addresses([*three.group.pids, os.getpid()]) == {"127.0.0.1"}
        assert_same_steps([three.metrics[0], three.metrics[2]], [one.metrics[0], one.metrics[2]])
        assert_close(three.learner.weights(), one.learner.weights())


async def in_bfloat16(group: RankGroup, model: Path) -> None:
    chosen, batches = changed(experiment(model), {"models.precision": "bfloat16"}), [batch(seed) for seed in range(2)]
    assert chosen is not None
    async with training(group, chosen, 0, batches) as one, training(group, chosen, 2, batches) as two:
        await one.play(2)
        await two.play(2)
        for found, expected in zip(two.metrics, one.metrics, strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], abs=0.02)
            assert found["entropy"] == pytest.approx(expected["entropy"], rel=0.01)


async def not_finite(group: RankGroup, model: Path) -> None:
    """A gradient that is not finite changes no weight."""
    good, bad = batch(0), batch(1)
    bad.advantages_N[0] = 1e38
    async with training(group, experiment(model, kl={"coefficient": 0.0}), 2, [good, bad]) as found:
        await found.play(1)
        before = found.bits
        with pytest.raises(TrainingDivergedError, match="step 1: the gradient's norm is"):
            await found.play(1)
        assert found.bits == before


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.drill
def test_a_checkpoint_of_any_number_of_ranks_continues_with_any_other(model_folder: Path) -> None:
    async def begun(group: RankGroup, ranks: int) -> State:
        async with training(group, chosen, ranks, batches[:3]) as first:
            await first.play(3)
            return await first.commit()

    async def work(group: RankGroup) -> None:
        async with training(group, chosen, 0, batches) as whole:
            await whole.play(6)
            end = await whole.commit()
        for ranks, others in ((2, (0, 3)), (0, (2,))):
            state = await begun(group, ranks)
            for other in others:
                async with training(group, chosen, other, batches[3:], state) as second:
                    read = await second.commit()
                    assert read[1] == state[1]
                    assert read[0].keys() == state[0].keys()
                    for name, tensor in state[0].items():
                        assert torch.equal(read[0][name], tensor), name
                    await second.play(3)
                    assert second.trainer.steps_done == 6
                    assert_close((await second.commit())[0], end[0])

    chosen, batches = experiment(model_folder), [batch(seed) for seed in range(6)]
    with_ranks(work)


# --- ranks that end ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_an_error_in_a_rank_ends_the_others(model_folder: Path) -> None:
    """The steps since the commit are repeated; the error keeps its type."""

    async def played(group: RankGroup, kill: bool) -> Training:
        async with training(group, chosen, 2, batches) as found:
            await found.play(1)
            await found.commit()
            await found.play(1)
            if kill:
                os.kill(found.group.pids[1], signal.SIGKILL)
            await found.play(1)
            return found

    async def work(group: RankGroup) -> None:
        undisturbed, disturbed = await played(group, False), await played(group, True)
        assert disturbed.bits == undisturbed.bits
        (lost,) = disturbed.events.of("rank lost")
        assert (lost["rank"], lost["why"]) == (1, "killed by SIGKILL")
        assert [event["repeated"] for event in disturbed.events.of("ranks up")] == [0, 1]
        await refused(group)

    async def refused(group: RankGroup) -> None:
        fields = rank_fields(chosen.training, chosen.rollout, chosen.models)
        fields["models"]["prover"] = {"source": str(model_folder / "missing")}
        with open_model(chosen.models.prover, torch.device("cpu")) as learner:
            learner.require_gradients()
            parameters = trainable_parameters(learner.module)
            model = ModelInRanks(group, fields, SETTINGS, parameters, lambda: None)
            with pytest.raises(PvgError, match="missing"):
                await model.prepare()
            assert not group.running
            await model.close()

    chosen, batches = experiment(model_folder), [batch(seed) for seed in range(3)]
    with_ranks(work)


class OnNode(LocalMember):
    @property
    def names(self) -> dict[str, Any]:
        return {"node": "first", "pid": self.pid}

    def kill(self) -> None:
        self.writer.transport.abort()


class ApartSupply(DyingSupply):
    """Ranks that run, but cannot reach each other."""

    member = OnNode

    async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (frame := await receive(reader)) is not None:
            if frame.kind == "rank":
                fields = {"type": "WorkerLostError", "message": "its connection broke", "remedy": "", "exit_code": 1}
                send(writer, Frame("refused", {**fields, "id": frame.fields["id"]}))
        writer.close()


class DyingGroup:
    """Ranks that end with every gradient."""

    count = 2
    running = on_cluster = False
    nodes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.events = RecordedEvents()

    async def start(self) -> None:
        return

    async def ask(self, frames: list[Frame]) -> list[Frame]:
        if frames[0].fields["do"] == "gradient":
            raise RankEndedError(1, "exit code 1: no memory")
        return [Frame("done")] * len(frames)

    async def end(self) -> None:
        return


def model_of(group: Any, committed: Any) -> AbstractAsyncContextManager[ModelInRanks]:
    @asynccontextmanager
    async def opened():
        model = ModelInRanks(group, {}, SETTINGS, {"weight": torch.nn.Parameter(torch.zeros(3))}, committed)
        await model.prepare()
        yield model
        await model.close()

    return opened()


def test_ranks_that_end_again_and_again_are_an_error_that_says_why() -> None:
    async def work() -> None:
        group = DyingGroup()
        async with model_of(group, lambda: None) as model:
            part = batch(0).with_weights(np.ones(10, np.float32))
            with pytest.raises(WorkerLostError, match="exit code 1: no memory") as raised:
                await asyncio.to_thread(model.gradients, [[part]], {})
        assert "cluster=none" in raised.value.remedy
        assert len(group.events.of("rank lost")) == 6

    asyncio.run(asyncio.wait_for(work(), 30))


def test_ranks_that_run_but_lose_each_other_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall, or a network that breaks: no process has ended."""

    async def work() -> None:
        supply: Any = ApartSupply()
        group = RankGroup(2, "cpu", supply=supply)
        with pytest.raises(RankEndedError, match="rank 0: its connection broke, on node first"):
            await group.start()
        assert not group.running
        await group.close()

    monkeypatch.setattr(rank_group_module, "GRACE_S", 0.1)
    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_lost_cluster_ends_the_run_of_ranks_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class LostCluster(ApartSupply):
        def check(self) -> None:
            raise WorkerLostError("The head does not answer.", "Resume the run.")

        async def _work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()  # until the driver closes it
            writer.close()

    async def work() -> None:
        supply: Any = LostCluster()
        group = RankGroup(2, "cpu", supply=supply)
        with pytest.raises(WorkerLostError, match="The head does not answer"):
            await group.start()
        await group.close()

    monkeypatch.setattr(rank_group_module, "PROBE_S", 0.05)
    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.drill
@in_new_process
def test_a_rank_that_cannot_reach_the_others_says_so_in_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from pvg.workers import rank

    monkeypatch.setattr(rank, "JOIN_S", 1.0)
    store, port = open_store("127.0.0.1")
    with pytest.raises(WorkerLostError, match=r"it cannot reach the other ranks from 127\.0\.0\.1: ") as raised:
        rank.Rank(rank.RankPlace(0, 2, "cpu", "127.0.0.1", port), "127.0.0.1")
    assert "\n" not in raised.value.message
    del store
    with pytest.raises(WorkerLostError, match="it cannot reach the other ranks"):
        rank.Rank(rank.RankPlace(0, 2, "cpu", "127.0.0.1", port), "127.0.0.1")


def test_steps_that_can_no_longer_be_repeated_are_an_error() -> None:
    """A commit that does not fit the steps would give other weights."""

    async def work() -> None:
        newer = {"model.weight": torch.zeros(3)}
        newer |= {f"optimizer.{moment}.weight": torch.zeros(3) for moment in ("exp_avg", "exp_avg_sq")}
        newer["optimizer.step.weight"] = torch.tensor(4.0)
        async with model_of(DyingGroup(), lambda: (newer, {})) as model:
            part = batch(0).with_weights(np.ones(10, np.float32))
            with pytest.raises(StateError, match="has 4 optimizer steps"):
                await asyncio.to_thread(model.gradients, [[part]], {})

    asyncio.run(asyncio.wait_for(work(), 30))


# --- settings ---------------------------------------------------------------------------------------------------------

RANKS = {"kind": "local", "trainer_ranks": 2}
ON_NODES = {"kind": "ray", "trainer_ranks": 2}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"adapters": {"rank": 16}}}, r"set training\.adapters\.rank to 0"),
        ({"training": {"router_replay": True}}, r"set training\.router_replay to false"),
        ({"models": {"device": "cuda:1"}}, r"set models\.device to 'cpu' or 'cuda'"),
        (
            {"cluster": {**RANKS, "workers": 2, "trainers": 1}, "rollout": {"prefetch": "fresh"}},
            r"leave out cluster\.trainers",
        ),
        ({"cluster": {"kind": "local", "workers": 0}}, "set cluster to 'none'"),
        ({"cluster": {"kind": "ray", "workers": 0}}, "set cluster to 'none'"),
        ({"cluster": ON_NODES, "rollout": {"engine": "vllm"}, "training": {"router_replay": True}}, "router_replay"),
        ({"cluster": {**ON_NODES, "workers": 0}, "rollout": {"engine": "vllm"}}, "no server on the cluster"),
    ],
)
def test_what_ranks_cannot_do_is_refused_in_one_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        build_experiment({"cluster": RANKS, **sections})
    assert "\n" not in raised.value.message


def test_ranks_need_no_workers_and_may_have_some() -> None:
    with_ranks = build_experiment({"cluster": RANKS})
    assert with_workers(with_ranks).cluster == LocalCluster(workers=0, trainer_ranks=2)
    both = build_experiment({"cluster": {**RANKS, "workers": 3}})
    assert with_workers(both).cluster == LocalCluster(workers=3, trainer_ranks=2)
    on_gpus = build_experiment({"cluster": RANKS, "models": {"device": "cuda"}})
    assert with_workers(on_gpus).cluster == LocalCluster(workers=0, trainer_ranks=2)
    on_nodes = build_experiment({"cluster": {**ON_NODES, "address": "10.0.0.1:6379"}})
    assert with_workers(on_nodes).cluster == RayCluster(workers=0, trainer_ranks=2, address="10.0.0.1:6379")
    beside_servers = build_experiment({"cluster": ON_NODES, "rollout": {"engine": "vllm"}})
    assert with_workers(beside_servers).cluster == RayCluster(workers=1, trainer_ranks=2)


def test_a_run_resumes_with_another_number_of_ranks_or_with_none() -> None:
    begun = build_experiment({"cluster": {**RANKS, "workers": 0}})
    for cluster in ({**RANKS, "trainer_ranks": 3}, ON_NODES, {"kind": "none"}):
        other = build_experiment({"cluster": cluster})
        assert other.hashed() == begun.hashed()
    assert with_workers(build_experiment({"cluster": {**RANKS, "trainer_ranks": 3}}), begun).cluster == LocalCluster(
        workers=0, trainer_ranks=3
    )
    assert with_workers(build_experiment({"cluster": "none"}), begun).cluster == NoCluster()
    assert with_workers(Experiment(), begun).cluster == begun.cluster
    assert cluster_settings("local", begun.cluster) == ["cluster=local", "cluster.trainer_ranks=2"]
    assert cluster_settings("ray", begun.cluster) == ["cluster=ray", "cluster.trainer_ranks=2"]
    address = ["cluster=ray", "cluster.address=10.0.0.1:6379", "cluster.trainer_ranks=2"]
    assert cluster_settings("10.0.0.1:6379", begun.cluster) == address
    assert cluster_settings("ray", RayCluster(workers=2)) == ["cluster=ray", "cluster.workers=2"]
