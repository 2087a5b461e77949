"""training.micro_batch_memory_mb: what is measured, the budget that follows, the same gradient, a resume."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_policy import policy_batch
from test_bucketing import llama, mixed_batch, trained_on
from test_trainer import Scripted, bits, make, play, scripted

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.training.losses import PolicyObjective
from pvg.training.memory import AllocatorPeak, MicroBatchMemory, MicroBatchSize, SavedTensors
from pvg.training.trainer import checkpoint_layers


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1, thread_name_prefix="trainer") as pool:
        yield pool


class Told:
    """Keeps events."""

    def __init__(self):
        self.events = []

    def event(self, tag, **fields):
        self.events.append((tag, fields))


def objective(**others):
    return PolicyObjective(Training(kl={"coefficient": 0.1}, **others), Rollouts(max_tokens=64), pad_id=0)


def batch_of(seed, longest, rows=24):
    random = np.random.default_rng(seed)
    lengths = [longest, *random.integers(4, longest + 1, rows - 1).tolist()]
    logprobs = [random.normal(-2.4, 0.3, length - 2) for length in lengths]
    return policy_batch(
        [random.integers(3, 12, length) for length in lengths],
        [2] * rows,
        random.normal(0, 1, rows),
        sampled=logprobs,
        reference=logprobs,
    )


def trainer(module, batches, executor, *, events=None, **settings):
    policy = objective(**settings)
    return make(module, batches, executor, objective=policy, memory=policy.memory, events=events)


# --- the figure and the budget -------------------------------------------------------------------------------------


def memory(limit=1_000_000, most=16_384):
    return MicroBatchMemory(limit, most, size=lambda size: size)


def test_the_budget_by_hand():
    learned = memory()
    assert learned.budget(30) == 30  # unknown: the longest row alone
    learned.learn([(MicroBatchSize(30, 30), 30 * 2000)])
    assert learned.budget(30) == 500
    assert learned.bytes_per_token(30) == 2000
    learned.learn([(MicroBatchSize(30, 500), 500 * 1000)])  # down half way
    assert learned.bytes_per_token(30) == 1500
    learned.learn(
        [(MicroBatchSize(30, 600), 600 * 4000), (MicroBatchSize(9, 200), 200 * 9000)]
    )  # up at once; the small one does not count
    assert learned.budget(30) == 250
    assert learned.budget(8) == 250  # a shorter class that was never measured
    assert learned.budget(60) == 125  # twice as long: as if all of it grew with the square of the length
    assert memory(most=100).budget(101) == 100  # over micro_batch_tokens, which the split refuses


def test_the_token_budget_bounds_it_and_a_row_alone_is_trained_anyway():
    learned = memory(most=300)
    learned.learn([(MicroBatchSize(30, 30), 30)])
    assert learned.budget(30) == 300
    learned = memory(limit=1000)
    learned.learn([(MicroBatchSize(30, 30), 30_000)])
    assert (learned.fits(30), learned.budget(30)) == (False, 30)
    assert learned.fits(1)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9), st.integers(1, 10**9)), min_size=1, max_size=9))
def test_the_state_is_all_there_is_to_know(steps):
    one, other = memory(), memory()
    for longest, rows, taken in steps:
        one.learn([(MicroBatchSize(longest, longest * rows), taken)])
    other.load_state(orjson.loads(orjson.dumps(one.state())))
    assert [one.budget(longest) for longest in range(1, 600)] == [other.budget(longest) for longest in range(1, 600)]
    assert all(longest <= one.budget(longest) <= 16_384 for longest in range(1, 600))


# --- measuring -----------------------------------------------------------------------------------------------------


def test_saved_tensors_are_counted_once_and_weights_not_at_all():
    layer = torch.nn.Linear(8, 4, bias=False)
    meter = SavedTensors(layer, transient_bytes=5)
    inputs = torch.ones(16, 8)
    with meter.forward():
        loss = (layer(inputs) + layer(inputs[:3]).sum()).exp().sum()
    with meter.backward():
        loss.backward()
    assert meter.bytes_taken == 5 + 16 * 8 * 4 + 16 * 4 * 4  # the inputs of both products share memory; exp's output


@pytest.mark.parametrize("shared", [True, False])
def test_measuring_changes_no_bit_and_sees_the_layer_that_is_computed_again(shared):
    policy, found = objective(micro_batch_memory_mb=1, shared_prompts=shared), {}
    for checkpointed in (False, True):
        gradients = []
        for measured in (False, True):
            module = llama()
            if checkpointed:
                checkpoint_layers(module)
            batch = policy.prepare(mixed_batch())
            meter = policy.memory.meter(batch, module, torch.device("cpu"))
            if measured:
                with meter.forward():
                    loss, _ = policy(module, batch)
                assert all(layer.gradient_checkpointing == checkpointed for layer in module.model.layers)
            else:
                loss, _ = policy(module, batch)
            loss.backward()
            gradients.append([weight.grad.numpy().tobytes() for weight in module.parameters()])
            found[checkpointed] = meter.bytes_taken
        assert gradients[0] == gradients[1]
    assert 0.5 < found[True] / found[False] < 0.75  # one of two layers, and what is not a layer


def test_the_allocators_peak_leaves_the_gradients_out(monkeypatch):
    """The books of CUDA's allocator, scripted: 100 held, then 350 at most, then 700 with 400 of gradients."""
    layer = torch.nn.Linear(10, 10, bias=False)
    peaks = iter([350, 700])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(peaks))
    meter = AllocatorPeak(layer, torch.device("cuda"))
    with meter.forward():
        loss = layer(torch.ones(1, 10)).sum()
    assert meter.bytes_taken == 250
    with meter.backward():
        loss.backward()
    assert meter.bytes_taken == max(250, 700 - 100 - 400)


# --- in the trainer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_it_keeps_the_limit_and_learns_from_what_it_took(executor, shared):
    module = llama()
    trained = trainer(
        module, [batch_of(0, 30) for _ in range(6)], executor, micro_batch_memory_mb=1, shared_prompts=shared
    )
    reports = [report.metrics for report in play(trained, 6)]
    assert all(metrics["micro_batches"] >= 2 for metrics in reports)
    assert all(metrics["micro_batch_budget"] * metrics["bytes_per_token"] <= 1.02e6 for metrics in reports)
    # and no more micro-batches than it takes
    assert reports[-1]["micro_batch_budget"] * reports[-1]["bytes_per_token"] > 0.8e6
    one = trainer(llama(), [batch_of(0, 30)], executor, micro_batch_memory_mb=100, shared_prompts=shared)
    (report,) = play(one)
    assert (report.metrics["micro_batches"], report.metrics["micro_batch_budget"]) == (1, 16_384)


def test_off_it_is_the_trainer_of_before(executor):
    trained = trainer(llama(), [batch_of(0, 30)], executor)
    (report,) = play(trained)
    assert not {"micro_batch_budget", "bytes_per_token"} & report.metrics.keys()
    assert trained.state()[1] == {"format": 1, "step": 1}


@pytest.mark.parametrize("shared", [True, False])
def test_the_gradient_is_the_same_at_any_limit(shared):
    module, batch = llama(), mixed_batch()
    expected_loss, expected, _ = trained_on(objective(shared_prompts=shared), module, batch)
    counts = set()
    for limit in (30_000, 60_000, 100_000, 400_000, 10_000_000):
        policy = objective(micro_batch_memory_mb=1, shared_prompts=shared)
        policy.memory.limit_bytes = limit
        policy.memory.learn([(MicroBatchSize(30, 30), 30 * 1000)])
        loss, gradient, _ = trained_on(policy, module, batch)
        counts.add(len(policy.split(policy.prepare(batch))))
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert float((gradient - expected).norm() / expected.norm()) < 1e-5
    assert len(counts) == 5


def test_a_resumed_training_cuts_its_batches_alike_and_is_bit_identical(executor):
    batches = [batch_of(seed, longest) for seed, longest in enumerate((30, 12, 30, 50, 28, 12))]
    straight = trainer(llama(), batches, executor, micro_batch_memory_mb=1)
    reports = play(straight, 6)
    for done in (1, 3, 5):
        first = trainer(llama(), batches[:done], executor, micro_batch_memory_mb=1)
        play(first, done)
        tensors, meta = first.state()
        second = trainer(llama(), batches[done:], executor, micro_batch_memory_mb=1)
        second.load_state(tensors, orjson.loads(orjson.dumps(meta)))
        resumed = play(second, 6 - done)
        assert [report.metrics for report in resumed] == [report.metrics for report in reports[done:]]
        assert bits(second.module) == bits(straight.module)
        assert second.state()[1] == straight.state()[1]

    # The test can fail: without the learned figures the next batch is cut otherwise.
    forgetful = trainer(llama(), batches[3:], executor, micro_batch_memory_mb=1)
    forgetful.load_state(tensors=_until(batches, 3, executor)[0], meta={"format": 1, "step": 3})
    assert play(forgetful)[0].metrics != reports[3].metrics


def _until(batches, done, executor):
    first = trainer(llama(), batches[:done], executor, micro_batch_memory_mb=1)
    play(first, done)
    return first.state()


def test_a_row_that_does_not_fit_is_trained_and_told_of_once(executor):
    told, module = Told(), llama()
    trained = trainer(module, [batch_of(0, 30), batch_of(1, 30)], executor, events=told, micro_batch_memory_mb=1)
    trained._memory.limit_bytes = 1000
    before = bits(module)
    reports = play(trained, 2)
    assert [report.metrics["micro_batch_budget"] for report in reports] == [30, 30]
    assert all(math.isfinite(report.metrics["loss"]) for report in reports)
    assert bits(module) != before
    ((tag, fields),) = told.events
    assert (tag, fields["event"], fields["tokens"], fields["limit"]) == ("memory", "row.over_limit", 30, 1000)
    assert fields["bytes"] > 1000


def test_a_row_over_the_token_budget_is_refused_as_without_it(executor):
    trained = trainer(llama(), [batch_of(0, 30)], executor, micro_batch_memory_mb=1, micro_batch_tokens=29)
    with pytest.raises(ConfigurationError, match=r"30 tokens .* over the token budget of 29"):
        play(trained)


def test_a_batch_without_a_signal_is_not_measured(executor):
    silent = policy_batch([[3, 4, 5]] * 2, [1, 1], [0.0, 0.0])
    trained = trainer(llama(), [silent], executor, micro_batch_memory_mb=1, loss="dapo")
    (report,) = play(trained)
    assert report.metrics == {"skipped": 1.0}
    assert trained.state()[1]["memory"] == {}


@pytest.mark.parametrize(
    ("section", "more"), [("training", ["training.micro_batch_memory_mb", "pvg evaluate RUN"]), ("verifier", [])]
)
def test_a_gpu_without_memory_left_is_an_error_that_names_the_setting_and_how_to_continue(executor, section, more):
    def exhausted(_table):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    good = [lambda table: (table**2).sum()]
    module = scripted([], executor).module
    trained = make(module, [[exhausted], good], executor, objective=Scripted(), section=section)
    before = bits(module)
    with pytest.raises(MissingRequirementError, match=r"for a micro-batch of step 0\. Lower ") as failed:
        play(trained)
    setting = f"{section}.micro_batch_tokens"
    for text in (f"Lower {setting}", f"pvg train --resume RUN -s {setting}=N", *more):
        assert text in failed.value.remedy
    assert bits(module) == before
    play(trained)
