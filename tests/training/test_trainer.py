"""The trainer: bit-exact resumption, faults before the weights change, precision, checkpointing, accounting."""

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from table_policy import TablePolicy, policy_batch, small_llama

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.errors import ConfigurationError, StateError, TrainingDivergedError
from pvg.telemetry.metrics import Metrics
from pvg.telemetry.spans import Tracer
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import (
    MOMENTS,
    OptimizerSettings,
    PartGradient,
    Trainer,
    accumulate,
    checkpoint_layers,
    trainable_parameters,
)
from pvg.workers.models import policy_shards

VOCABULARY = 11
SETTINGS = OptimizerSettings(learning_rate=1e-2, warmup=2, schedule="linear", total_steps=8, gradient_clip=0.5)


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1, thread_name_prefix="trainer") as pool:
        yield pool


def llama(*, dtype=torch.float32, tied=True):
    return small_llama(VOCABULARY, tied=tied, dtype=dtype).train()


def random_batch(seed, rows=6):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(5, 9, rows)
    completions = [length - 3 for length in lengths]
    return policy_batch(
        [generator.integers(0, VOCABULARY, length) for length in lengths],
        [3] * rows,
        generator.choice([-1.0, 1.0, 2.0], rows),
        sampled=[generator.normal(-2.4, 0.2, n) for n in completions],
        reference=[generator.normal(-2.4, 0.2, n) for n in completions],
    )


class Listed:
    """A source of given batches."""

    def __init__(self, batches):
        self.batches = list(batches)

    async def next_batch(self):
        return self.batches.pop(0) if self.batches else None


def policy_objective(loss="grpo", **others):
    return PolicyObjective(Training(loss=loss, **others), Rollouts(), pad_id=0)


def adaptive_objective():
    return policy_objective(micro_batch_tokens=24, kl={"coefficient": 0.1, "target": 0.01})


def make(module, batches, executor, *, objective=None, settings=SETTINGS, **others):
    objective = objective or adaptive_objective()
    return Trainer(module, objective, settings, Listed(batches), executor=executor, **others)


def play(trainer, steps=1):
    async def steps_of():
        return [await trainer.step() for _ in range(steps)]

    return asyncio.run(steps_of())


def bits(module):
    return {name: weight.detach().numpy().tobytes() for name, weight in module.named_parameters()}


# --- resuming ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_resumed_training_is_bit_identical(executor, tmp_path, tied):
    batches = [random_batch(seed) for seed in range(6)]
    straight = make(llama(tied=tied), batches, executor)
    reports = play(straight, 6)

    first = make(llama(tied=tied), batches[:4], executor)
    play(first, 3)
    tensors, meta = first.state()
    save_file(tensors, tmp_path / "trainer.safetensors")
    play(first)

    torch.manual_seed(99)
    fresh = llama(tied=tied)
    with torch.no_grad():
        for weight in fresh.parameters():
            weight.normal_()
    second = make(fresh, batches[3:], executor)
    loaded = load_file(tmp_path / "trainer.safetensors")
    second.load_state(loaded, meta)
    assert second.steps_done == 3
    resumed = play(second, 3)

    assert bits(second.module) == bits(straight.module)
    assert [report.metrics for report in resumed] == [report.metrics for report in reports[3:]]
    assert [report.step for report in resumed] == [3, 4, 5]
    for name, tensor in straight.state()[0].items():
        assert torch.equal(tensor, second.state()[0][name])
        assert torch.equal(loaded[name], tensors[name])  # both are copies, which no later step changes


def test_a_state_of_another_model_is_refused_and_changes_nothing(executor):
    trainer = make(llama(), [random_batch(0)], executor)
    play(trainer)
    tensors, meta = trainer.state()
    before = bits(trainer.module)
    norm = "model.model.norm.weight"
    missing = {name: tensor for name, tensor in tensors.items() if name != norm}
    without_moment = {n: t for n, t in tensors.items() if n != "optimizer.exp_avg_sq.model.norm.weight"}
    faults = [
        (missing, meta, f"lacks tensor {norm}"),
        (without_moment, meta, "lacks tensor optimizer.exp_avg_sq.model.norm.weight"),
        (tensors | {"model.extra": torch.zeros(2)}, meta, "unknown tensor model.extra"),
        (tensors | {norm: torch.zeros(31)}, meta, r"is \(31,\) torch.float32, not \(32,\)"),
        (tensors | {norm: torch.zeros(32, dtype=torch.float64)}, meta, "torch.float64"),
    ]
    for broken, its_meta, message in faults:
        with pytest.raises(StateError, match=message):
            trainer.load_state(broken, its_meta)
    assert bits(trainer.module) == before
    assert trainer.steps_done == 1


# --- faults --------------------------------------------------------------------------------------------------------


class Scripted:
    """An objective on a TablePolicy whose batches are functions of its parameters."""

    def prepare(self, batch):
        return batch

    def split(self, batch):
        return list(batch)

    def __call__(self, module, micro_batch):
        loss = micro_batch(module.table_LV)
        metrics = Metrics()
        metrics.add_sum("loss", loss.item())
        return loss, metrics


def scripted(batches, executor, **settings):
    settings = OptimizerSettings(learning_rate=0.1, total_steps=10, **settings)
    module = TablePolicy([[0.5, 0.5]])
    return make(module, batches, executor, objective=Scripted(), settings=settings)


def infinite_gradient(table):
    return (table - table.detach()).abs().sum().sqrt()  # sqrt at 0: the loss is 0, its slope is infinite


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ([lambda t: t.sum(), lambda t: t.sum() * math.nan], "loss of micro-batch 1 is nan"),
        ([lambda t: t.sum() - math.inf], "loss of micro-batch 0 is -inf"),
        ([infinite_gradient], "gradient's norm is (nan|inf)"),
    ],
)
def test_divergence_is_raised_before_any_weight_changes(executor, fault, message):
    good = [lambda t: (t**2).sum()]
    trainer = scripted([good, fault, good], executor)
    twin = scripted([good, good], executor)
    play(trainer)
    before = {name: tensor.clone() for name, tensor in trainer.state()[0].items()}
    with pytest.raises(TrainingDivergedError, match=f"at step 1: the {message}"):
        play(trainer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state()[0].items())
    assert trainer.steps_done == 1
    play(trainer)  # the fault leaves no trace, also not in the gradients
    play(twin, 2)
    assert bits(trainer.module) == bits(twin.module)


def test_a_batch_without_a_signal_moves_nothing(executor):
    """Not even by the momentum of the steps before."""
    silent = replace(random_batch(1), advantages_N=np.zeros(6, dtype=np.float32))
    trainer = make(llama(), [random_batch(0), silent], executor, objective=policy_objective("dapo"))
    play(trainer)
    before = bits(trainer.module)
    (report,) = play(trainer)
    assert report.metrics == {"skipped": 1.0}
    assert bits(trainer.module) == before


def test_cancelling_waits_for_the_running_step(executor):
    started, release = threading.Event(), threading.Event()

    def slow(table):
        started.set()
        assert release.wait(20)
        return (table**2).sum()

    trainer = scripted([[slow]], executor)

    async def cancel_midway():
        step = asyncio.create_task(trainer.step())
        await asyncio.to_thread(started.wait, 20)
        step.cancel()
        await asyncio.sleep(0.05)
        assert not step.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(cancel_midway())
    assert trainer.steps_done == 1


# --- what a step does ----------------------------------------------------------------------------------------------


def test_one_step_by_hand(executor):
    """AdamW's first step is lr x sign(gradient), whatever its size; the schedule's warm-up halves it."""
    trainer = scripted([[lambda t: t[0, 0] * 3, lambda t: t[0, 1] * -4]], executor, warmup=2, gradient_clip=1.0)
    before = trainer.module.table_LV.detach().clone()
    (report,) = play(trainer)
    assert report.metrics["grad_norm"] == pytest.approx(5.0)  # of (3, -4), summed over the micro-batches, unclipped
    assert report.metrics["learning_rate"] == pytest.approx(0.05)
    assert report.metrics["micro_batches"] == 2
    assert trainer.module.table_LV.grad is None  # its memory is free
    step = trainer.module.table_LV.detach() - before
    torch.testing.assert_close(step, torch.tensor([[-0.05, 0.05]]), rtol=1e-4, atol=1e-6)


def test_a_step_works_in_its_thread_and_tells_where_its_time_goes(executor):
    threads = []
    trainer = scripted([[lambda t: threads.append(threading.current_thread().name) or t.sum()]], executor)

    async def work():
        tracer = Tracer()
        with tracer.drive():
            await trainer.step()
            return tracer.close_step().exposed.keys()

    parts = {"wait_for_rollouts", "pack", "forward_backward", "optimizer", "unaccounted"}
    assert asyncio.run(work()) == parts
    assert threads == ["trainer_0"]


def test_the_global_norm_is_clipped(executor):
    """The first moment is (1 - beta1) x the clipped gradient: (3, -4) of norm 5 becomes (0.6, -0.8). The second one is
    (1 - beta2) x its square."""
    trainer = scripted([[lambda t: t[0, 0] * 3 - t[0, 1] * 4]], executor, gradient_clip=1.0)
    play(trainer)
    for moment, expected in (("exp_avg", [0.06, -0.08]), ("exp_avg_sq", [0.018, 0.032])):
        found = trainer.state()[0][f"optimizer.{moment}.table_LV"]
        torch.testing.assert_close(found, torch.tensor([expected]), rtol=1e-4, atol=1e-6)


def test_precision_decides_what_the_matrix_products_run_in(executor):
    for precision, expected in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        module, found = llama(), set()
        module.model.layers[0].mlp.down_proj.register_forward_hook(
            lambda _m, _i, out, found=found: found.add(out.dtype)
        )
        (report,) = play(make(module, [random_batch(0)], executor, precision=precision))
        assert found == {expected}
        assert math.isfinite(report.metrics["loss"])
        assert {weight.dtype for weight in module.parameters()} == {torch.float32}


# --- other processes -----------------------------------------------------------------------------------------------


class Workers:
    """Compute two shards of a batch with the trainer's own module."""

    def __init__(self, module):
        self.module, self.objective, self.asked, self.changes = module, adaptive_objective(), [], 0

    def shards(self, batch):
        return policy_shards(batch, 2)

    def weights_changed(self):
        self.changes += 1

    def gradients(self, parts, state):
        self.asked.append((len(parts), state))
        self.objective.load_state(state)
        return [self.gradient(part) for part in parts]

    def gradient(self, part):
        self.module.zero_grad()
        losses, metrics = accumulate(self.module, self.objective, part, "float32")
        gradient = torch.cat([weight.grad.flatten() for weight in trainable_parameters(self.module).values()])
        return PartGradient(gradient, losses, metrics)


def test_workers_train_as_one_process_does(executor):
    batches, module = [random_batch(seed) for seed in range(2)], llama()
    workers = Workers(module)
    expected = play(make(llama(), batches, executor), 2)
    for step, found in enumerate(play(make(module, batches, executor, workers=workers), 2)):
        for name in ("loss", "grad_norm", "kl_coefficient", "ratio_max"):
            assert found.metrics[name] == pytest.approx(expected[step].metrics[name], rel=1e-4, abs=1e-6)
    assert expected[0].metrics["padding"] == 0.0  # prompts are shared
    assert workers.asked == [(2, {"kl": pytest.approx(report.metrics["kl_coefficient"])}) for report in expected]
    assert workers.changes == 2


class Ranks:
    """Change the weights of the trainer's module, and have moments in memory that nothing changes."""

    def __init__(self, module, on_gpus):
        self.module, self.on_gpus, self.updates = module, on_gpus, 0

    def shards(self, batch):
        return [batch]

    def gradients(self, parts, state):
        return [PartGradient(None, [0.0], Metrics())]

    def update(self, rate, clip):
        self.updates += 1
        for weight in self.module.parameters():
            weight.data.fill_(self.updates)
        return 1.0

    def moments(self):
        return {
            f"{moment}.{name}": torch.full(() if moment == "step" else weight.shape, float(self.updates))
            for name, weight in self.module.named_parameters()
            for moment in MOMENTS
        }


@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_step_leaves_the_state_of_ranks_on_gpus_to_the_disk(executor, monkeypatch, on_gpus):
    """However large it is, and although the driver has the weights on the CPU. On CPUs it is not copied."""
    monkeypatch.setattr("pvg.training.trainer.KEPT_BYTES", 0)
    module = llama()
    trainer = make(module, [random_batch(seed) for seed in range(2)], executor, ranks=Ranks(module, on_gpus))
    play(trainer)
    tensors, meta = trainer.state()
    assert trainer.copies_state is on_gpus
    play(trainer)
    of_model = {float(tensor.max()) for name, tensor in tensors.items() if name.startswith("model.")}
    assert of_model == ({1.0} if on_gpus else {2.0})
    assert {float(tensor.max()) for name, tensor in tensors.items() if name.startswith("optimizer.")} == {1.0}
    assert meta["step"] == 1


# --- gradient checkpointing ----------------------------------------------------------------------------------------


class Counted(torch.nn.Module):
    """An activation that layers call as it is: most of their other modules are computed inside larger functions."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, gate):
        self.calls.append(1)
        return torch.nn.functional.silu(gate)


def test_checkpointed_layers_run_twice_and_give_the_same_weights(executor):
    results = {}
    for switch in (False, True):
        module, calls = llama(), []
        module.model.layers[0].mlp.act_fn = Counted(calls)
        objective = policy_objective()  # one micro-batch
        trainer = make(module, [random_batch(0)], executor, objective=objective, gradient_checkpointing=switch)
        from_checks = 2 + 3 + 1  # forwards of a few tokens by which the head and the shared prompts are checked
        play(trainer)
        assert len(calls) - from_checks == (2 if switch else 1)
        results[switch] = bits(module)
    assert results[True] == results[False]


def test_layers_that_cannot_be_checkpointed_are_refused():
    module = llama()
    module.model.layers[1].dropout = 0.1
    for refused, message in (
        (TablePolicy([[0.5, 0.5]]), "no layers that support"),
        (module, r"applies dropout \(0.1\)"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            checkpoint_layers(refused)


def test_parameters_that_cannot_be_trained_are_refused():
    for module, message in (
        (llama(dtype=torch.bfloat16), "must be float32"),
        (torch.nn.ReLU(), "no parameter to train"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            trainable_parameters(module)
