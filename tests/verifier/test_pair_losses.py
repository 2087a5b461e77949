from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_verifiers import verifier
from torch import nn

from pvg.config.training import Verifier
from pvg.telemetry.metrics import Metrics
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import LOSSES, PairObjective


class Table(nn.Module):
    """Not a verifier but a table of scores, so that losses can be computed by hand: the score of a row is looked up
    by its first token, minus its reference. Keeps what it is asked for."""

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores))
        self.asked, self.packed = [], set()

    def forward(self, input_ids_BL, lengths_B, prompt_lengths_B, reference_B=None, *, packed=False):
        self.asked.append(input_ids_BL[:, 0].tolist())
        self.packed.add(packed)
        return self.scores[input_ids_BL[:, 0]] - (0 if reference_B is None else reference_B)


def table_batch(pairs, rows=None, lengths=None):
    rows = rows or 1 + max(max(pair) for pair in pairs)
    lengths = lengths or [4] * rows
    return VerifierBatch(
        sequences=[np.full(length, row, dtype=np.int32) for row, length in enumerate(lengths)],
        prompt_lengths_N=np.ones(rows, dtype=np.int32),
        pairs_M2=np.array(pairs, dtype=np.int32),
        references_N=None,
    )


def objective(loss="bradley_terry", penalty=0.005, budget=10_000):
    return PairObjective(Verifier(loss=loss, score_penalty=penalty, micro_batch_tokens=budget), pad_id=0)


def run(objective, module, batch):
    """Loss, gradients by parameter, metrics, over the micro-batches."""
    module.zero_grad()
    total, metrics = 0.0, Metrics()
    for micro_batch in objective.survey(module, objective.split(objective.prepare(batch))):
        loss, found = objective(module, micro_batch)
        loss.backward()
        total += loss.item()
        metrics.merge(found)
    gradients = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    return total, gradients, metrics.result()


def test_bradley_terry_by_hand():
    # Scores 2, -1, 0.5; pairs (0, 1) and (2, 1): gaps 3 and 1.5.
    # -log sigmoid(3) = 0.0485874, -log sigmoid(1.5) = 0.2014133, mean 0.1250003.
    # V^2 over the three solutions: (4 + 1 + 0.25) / 3 = 1.75, times 0.1.
    batch = replace(table_batch([(0, 1), (2, 1)]), references_N=np.array([1.0, 2.0, 0.0], dtype=np.float32))
    loss, gradients, metrics = run(objective(penalty=0.1), Table([3.0, 1.0, 0.5]), batch)
    assert loss == pytest.approx(0.1250003 + 0.175, abs=1e-6)
    # dL/dV_0 = -(1 - sigmoid(3)) / 2 + 0.1 * 2 * 2 / 3 = -0.0237129 + 0.1333333
    # dL/dV_2 = -(1 - sigmoid(1.5)) / 2 + 0.1 * 2 * 0.5 / 3 = -0.0912128 + 0.0333333
    # dL/dV_1 = 0.0237129 + 0.0912128 - 0.1 * 2 / 3
    expected = [0.1096204, 0.0482590, -0.0578794]
    assert gradients["scores"].tolist() == pytest.approx(expected, abs=1e-6)
    del metrics["padding"]
    expected = {"loss": loss, "pair_accuracy": 1.0, "score_mean": 0.5, "score_gap": 2.25, "pairs": 2}
    assert metrics == pytest.approx(expected)


def test_cross_entropy_by_hand():
    # Correct: -log sigmoid(2) = 0.1269280, -log sigmoid(0.5) = 0.4740770.
    # Incorrect, twice: -log sigmoid(1) = 0.3132617. Mean of the four: 0.3068821.
    table = Table([2.0, -1.0, 0.5])
    loss, gradients, _ = run(objective("cross_entropy", penalty=0.0), table, table_batch([(0, 1), (2, 1)]))
    assert loss == pytest.approx(0.3068821, abs=1e-6)
    # sigmoid(V) - label, each a quarter: (0.8807971 - 1) / 4, 2 * 0.2689414 / 4, (0.6224593 - 1) / 4.
    assert gradients["scores"].tolist() == pytest.approx([-0.0298007, 0.1344707, -0.0943852], abs=1e-6)


def test_losses_stay_finite_for_scores_that_are_large():
    for loss in LOSSES.values():
        assert loss(torch.tensor([-400.0]), torch.tensor([400.0])).item() in (800.0, 400.0)
        assert loss(torch.tensor([400.0]), torch.tensor([-400.0])).item() == 0.0


def test_a_tie_is_half_a_win():
    _, _, metrics = run(objective(), Table([1.0, 1.0, 0.0, 2.0, 0.5]), table_batch([(0, 1), (2, 3), (0, 4)]))
    assert metrics["pair_accuracy"] == 0.5
    assert metrics["score_mean"] == pytest.approx(0.9)


@pytest.mark.parametrize(("longest_packed", "padding"), [(0, 3 / 12), (3, 3 / 12), (4, 0.0)])
def test_packed_rows_have_no_padding(longest_packed, padding):
    made = PairObjective(Verifier(), pad_id=0, longest_packed=longest_packed)
    table = Table([2.0, -1.0, 0.5])
    _, _, metrics = run(made, table, table_batch([(0, 1), (2, 1)], lengths=[4, 2, 3]))
    assert metrics["padding"] == padding
    assert table.packed == {padding == 0.0}


def test_a_pair_weighs_its_share_and_a_solution_in_no_pair_nothing():
    shares_M = np.array([1, 3], dtype=np.float32)
    found = objective().prepare(replace(table_batch([(0, 1), (2, 3)], rows=5), shares_M=shares_M))
    assert found.pair_weights_M.tolist() == [0.25, 0.75]
    assert found.row_weights_N.tolist() == [0.25] * 4 + [0.0]
    assert (found.pair_weights_M.dtype, found.row_weights_N.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pairs_M2": [(0, 3)]}, "outside 0..2"),
        ({"pairs_M2": [(-1, 2)]}, "outside 0..2"),
        ({"pairs_M2": [(0, 1), (1, 2)]}, "row 1 is both"),
        ({"pairs_M2": [(0, 1, 2)]}, "pairs_M2 has shape"),
        ({"prompt_lengths_N": [1, 1]}, "prompt_lengths_N has shape"),
        ({"shares_M": [1.0, 1.0]}, "shares_M has shape"),
    ],
)
def test_a_batch_whose_parts_do_not_match_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        replace(table_batch([(0, 1)], rows=3), **{name: np.array(values) for name, values in changed.items()})


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@settings(deadline=None, max_examples=25)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(4, 7)), min_size=1, max_size=12), budget=st.integers(8, 40)
)
def test_micro_batches_add_up_to_the_unsplit_batch(loss, pairs, budget):
    scores = [2.0, -1.0, 0.3, 0.1, -0.7, 1.1, 0.0, 3.0]
    batch = table_batch(pairs, rows=8)
    whole, whole_gradients, whole_metrics = run(objective(loss, penalty=0.3), Table(scores), batch)
    split, split_gradients, split_metrics = run(objective(loss, penalty=0.3, budget=budget), Table(scores), batch)
    assert split == pytest.approx(whole, abs=1e-5)
    torch.testing.assert_close(split_gradients, whole_gradients, atol=1e-6, rtol=1e-5)
    del split_metrics["padding"], whole_metrics["padding"]  # it is the split's doing
    assert split_metrics == pytest.approx(whole_metrics, abs=1e-5)


@pytest.mark.parametrize("head", ["scalar", "implicit"])
def test_micro_batches_of_a_real_verifier_add_up(head):
    model, rng = verifier(head), np.random.default_rng(0)
    lengths = rng.integers(6, 30, 8)
    pairs = np.array([(0, 4), (1, 5), (1, 6), (2, 6), (3, 7), (0, 7)], dtype=np.int32)
    batch = VerifierBatch(
        sequences=[rng.integers(2, 19, length).astype(np.int32) for length in lengths],
        prompt_lengths_N=np.full(8, 4, dtype=np.int32),
        pairs_M2=pairs,
        references_N=None,
    )
    small = objective(budget=40)
    assert any(part.own_N is not None for part in small.split(small.prepare(batch)))
    whole, whole_gradients, _ = run(objective(), model, batch)
    split, split_gradients, _ = run(small, model, batch)
    assert split == pytest.approx(whole, abs=1e-5)
    for name, gradient in whole_gradients.items():
        torch.testing.assert_close(split_gradients[name], gradient, atol=2e-5, rtol=1e-3, msg=name)
