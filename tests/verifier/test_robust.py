"""Losses over environments: each against its definition written out with autograd, however the batch is cut."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from pvg.config.training import Verifier
from pvg.training.trainer import OptimizerSettings, SurveysBatch, Trainer
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import PairObjective, RobustObjective, objective_for

SCORES = [2.0, -1.0, 0.3, 0.1, -0.7, 1.1, 0.0, 3.0]
PAIRS = [(0, 1), (2, 3), (0, 4), (5, 6), (7, 6), (2, 1), (7, 3)]
SOURCES = [0, 2, 0, 2, 3, 3, 0]  # source 1 has no pair in the batch


class Scores(nn.Module):
    """A table of scores, looked up by a row's first token."""

    def __init__(self, scores=SCORES):
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores))

    def forward(self, input_ids_BL, lengths_B, prompt_lengths_B, reference_B=None):
        return self.scores[input_ids_BL[:, 0]]


def made(pairs=PAIRS, sources=SOURCES, shares=None, step=0):
    rows = len(SCORES)
    return VerifierBatch(
        sequences=[np.full(4, row, dtype=np.int32) for row in range(rows)],
        prompt_lengths_N=np.ones(rows, dtype=np.int32),
        pairs_M2=np.array(pairs, dtype=np.int32),
        references_N=None,
        sources_M=np.array(sources, dtype=np.int16),
        shares_M=None if shares is None else np.array(shares, dtype=np.float32),
        step=step,
    )


def section(**chosen):
    return Verifier(**({"score_penalty": 0.0, "micro_batch_tokens": 10_000} | chosen))


def gradient(objective, batch, module=None):
    module = module or Scores()
    micro_batches = objective.split(objective.prepare(batch))
    micro_batches, metrics = objective.weigh(micro_batches, [objective.measure(module, part) for part in micro_batches])
    for micro_batch in micro_batches:
        loss, found = objective(module, micro_batch)
        loss.backward()
        metrics.merge(found)
    return module.scores.grad, metrics.result(), len(micro_batches)


def risks(scores, batch, loss, multiplier=1.0):
    """R_e of the sources that have pairs, written out."""
    shares = np.ones(len(batch)) if batch.shares_M is None else batch.shares_M
    found = []
    for source in np.unique(batch.sources_M):
        total = weight = 0.0
        for (correct, incorrect), share, own in zip(batch.pairs_M2, shares, batch.sources_M, strict=True):
            if own != source:
                continue
            v_c, v_i = multiplier * scores[correct], multiplier * scores[incorrect]
            if loss == "bradley_terry":
                value = -logsigmoid(v_c - v_i)
            else:
                one, zero = torch.ones(()), torch.zeros(())
                value = 0.5 * (binary_cross_entropy_with_logits(v_c, one) + binary_cross_entropy_with_logits(v_i, zero))
            total, weight = total + float(share) * value, weight + float(share)
        found.append(total / weight)
    return torch.stack(found)


def defined(robust, strength, batch, loss):
    """The definition's gradient, by autograd."""
    scores = torch.tensor(SCORES, requires_grad=True)
    if robust == "irm":
        one = torch.ones((), requires_grad=True)
        each = risks(scores, batch, loss, one)
        slopes = torch.stack([torch.autograd.grad(risk, one, create_graph=True)[0] for risk in each])
        value = each.mean() + strength * slopes.square().mean()
    else:
        each = risks(scores, batch, loss)
        value = each.mean() + (strength * each.var(correction=0) if robust == "vrex" else 0.0)
    value.backward()
    return scores.grad


@pytest.mark.parametrize("robust", ["balanced", "vrex", "irm"])
@pytest.mark.parametrize("loss", ["bradley_terry", "cross_entropy"])
@settings(deadline=None, max_examples=25)
@given(
    budget=st.sampled_from([8, 12, 20, 10_000]),
    strength=st.sampled_from([0.0, 0.2, 0.4]),
    shares=st.none() | st.lists(st.floats(0.1, 3.0), min_size=len(PAIRS), max_size=len(PAIRS)),
    sources=st.lists(st.integers(0, 3), min_size=len(PAIRS), max_size=len(PAIRS)),
)
def test_the_gradient_is_that_of_the_definition_however_the_batch_is_cut(
    robust, loss, budget, strength, shares, sources
):
    kind = {"kind": robust} | ({} if robust == "balanced" else {"strength": strength})
    chosen = section(robust=kind, loss=loss, micro_batch_tokens=budget)
    batch = made(sources=sources, shares=shares)
    found, _, parts = gradient(RobustObjective(chosen, 0, environments=4), batch)
    assert parts > 1 or budget > 12
    torch.testing.assert_close(found, defined(robust, strength, batch, loss), atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize(
    "chosen",
    [
        {"robust": {"kind": "vrex", "strength": 30.0}},  # clamped: some weights are below 0 before it
        {"robust": {"kind": "vrex", "strength": 5.0, "warmup": 4}},
        {"robust": {"kind": "vrex", "strength": 30.0, "warmup": 4}, "score_penalty": 0.3},
        {"robust": {"kind": "irm", "strength": 5.0, "warmup": 4}},
        {"robust": {"kind": "group_dro", "strength": 2.0}},
        {"robust": {"kind": "group_dro", "strength": 2.0}, "score_penalty": 0.3},
    ],
)
def test_a_batch_in_parts_gives_the_gradients_of_the_whole_also_clamped_warmed_up_and_with_a_memory(chosen):
    whole, cut = (RobustObjective(section(**chosen, micro_batch_tokens=n), 0, environments=4) for n in (10_000, 8))
    last = None
    for step in (1, 2, 3):  # group_dro's weights move with every batch
        batch = made(sources=np.roll(SOURCES, step), step=step)
        expected, _, one = gradient(whole, batch)
        found, _, parts = gradient(cut, batch)
        assert (one, parts > 2) == (1, True)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
        assert last is None or not torch.allclose(found, last)
        last = found
    assert cut.state()["log_q"] == pytest.approx(whole.state()["log_q"], abs=1e-6)


@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (5, 0.5), (10, 1.0), (25, 1.0)])
def test_the_penalty_grows_over_the_warmup(step, share):
    chosen = section(robust={"kind": "vrex", "strength": 2.0, "warmup": 10})
    found, _, _ = gradient(RobustObjective(chosen, 0, environments=4), made(step=step))
    torch.testing.assert_close(found, defined("vrex", 2.0 * share, made(), "bradley_terry"), atol=1e-6, rtol=1e-5)


def test_group_dro_by_hand():
    """Two steps of q_e <- q_e exp(s R_e): with no environment missing, after two equal batches q = softmax(2 s R)."""
    batch = made(pairs=[(0, 1), (4, 5)], sources=[0, 1])
    objective = RobustObjective(section(robust={"kind": "group_dro", "strength": 0.5}), 0, environments=2)
    each = risks(torch.tensor(SCORES), batch, "bradley_terry")
    for steps in (1, 2):
        found, _, _ = gradient(objective, batch)
        q = torch.softmax(0.5 * steps * each, 0)
        slope = -torch.sigmoid(torch.tensor(SCORES[5] - SCORES[4]))
        assert found[4].item() == pytest.approx((q[1] * slope).item(), rel=1e-5)
    assert math.exp(objective.state()["log_q"][1]) == pytest.approx(q[1].item(), rel=1e-5)


def test_none_is_the_plain_objective_and_is_not_surveyed():
    assert type(objective_for(section(), 0, environments=3)) is PairObjective
    assert not isinstance(objective_for(section(), 0, environments=3), SurveysBatch)
    assert isinstance(objective_for(section(robust="irm"), 0, environments=3), SurveysBatch)


class Endless:
    def __init__(self, step=0):
        self.step = step

    async def next_batch(self):
        self.step += 1
        return made(step=self.step - 1)


def trainer(executor, step=0):
    chosen = section(robust={"kind": "group_dro", "strength": 0.3}, micro_batch_tokens=12)
    objective = RobustObjective(chosen, 0, environments=4)
    return Trainer(Scores(), objective, OptimizerSettings(learning_rate=0.05), Endless(step), executor=executor)


async def two_by_two():
    with ThreadPoolExecutor(1) as executor:
        whole, first = trainer(executor), trainer(executor)
        for _ in range(4):
            report = await whole.step()
        for _ in range(2):
            await first.step()
        second = trainer(executor, step=2)
        second.load_state(*first.state())
        for _ in range(2):
            await second.step()
    return whole, second, report


def test_a_trainer_goes_on_with_the_weights_of_its_environments():
    whole, second, report = asyncio.run(two_by_two())
    assert report.metrics["environments"] == 3
    assert torch.equal(whole.module.scores, second.module.scores)
    assert whole.state()[1] == second.state()[1]
