"""Micro-batches of pairs: their budget in tokens and in bytes, and pairs whose solutions are in two of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning.test_plan_memory import SavedTensors
from test_pair_losses import Table, run, table_batch
from tiny_verifiers import digits_tokenizer, english_tokenizer, language_model, perturb
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pvg.config.training import ModelSection, Verifier
from pvg.errors import ConfigurationError
from pvg.models import open_model
from pvg.models.heads import VerifierModel, build_verifier
from pvg.models.language_model import LanguageModel
from pvg.training.trainer import checkpoint_layers
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import PairObjective, clusters


def all_pairs(*problems):
    """Every (correct, incorrect) of problems given as (number of correct, number of incorrect) rows."""
    pairs, start = [], 0
    for correct, incorrect in problems:
        pairs += [(start + a, start + correct + b) for a in range(correct) for b in range(incorrect)]
        start += correct + incorrect
    return np.array(pairs, dtype=np.int32), start


def by_walking(pairs):
    """The rows that a chain of pairs connects, as sets."""
    found = []
    for pair in pairs.tolist():
        touched = [rows for rows in found if rows & set(pair)]
        found = [rows for rows in found if not rows & set(pair)] + [set(pair).union(*touched)]
    return found


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), min_size=1, max_size=25))
def test_clusters_are_what_chains_of_pairs_connect(pairs):
    pairs = np.array(pairs, dtype=np.int32)
    numbers = clusters(pairs, 20)
    found = [set(np.flatnonzero(numbers == number).tolist()) for number in np.unique(numbers)]
    assert sorted(map(sorted, (rows for rows in found if len(rows) > 1))) == sorted(map(sorted, by_walking(pairs)))


@given(problems=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6), data=st.data())
def test_each_solution_is_computed_once_and_problems_that_fit_stay_whole(problems, data):
    pairs, rows = all_pairs(*problems)
    lengths = data.draw(st.lists(st.integers(2, 20), min_size=rows, max_size=rows))
    budget = data.draw(st.integers(20, 200))
    batch = table_batch(data.draw(st.permutations(pairs.tolist())), rows, lengths)
    packed = data.draw(st.booleans())
    longest_packed = max(lengths) if packed else 0
    objective = PairObjective(Verifier(micro_batch_tokens=budget), pad_id=0, longest_packed=longest_packed)
    computed, others, whole, table = [], set(), 0, Table([0.0] * rows)
    parts = objective.split(objective.prepare(batch))
    for part in parts:
        own_N = np.ones(len(part.sequences), bool) if part.own_N is None else part.own_N
        own_lengths = part.lengths_N[own_N]
        assert (own_lengths.sum() if packed else len(own_lengths) * own_lengths.max()) <= budget
        assert own_N[part.pairs_M2].any(axis=1).all()
        for ids, own in zip(part.sequences, own_N, strict=True):
            (computed.append if own else others.add)(int(ids[0]))
        whole += 0 if part.own_N is not None else len(part)
    assert sorted(computed) == list(range(rows))
    objective.survey(table, parts)
    assert sorted(row for rows in table.asked for row in rows) == sorted(others)
    problem_of_row = np.repeat(np.arange(len(problems)), [sum(problem) for problem in problems])
    tokens = np.bincount(problem_of_row, weights=lengths)
    if packed and (tokens <= budget).all():
        assert whole == len(pairs)


def test_a_solution_over_the_budget_is_refused_with_what_to_set():
    objective = PairObjective(Verifier(micro_batch_tokens=30), pad_id=0)
    batch = objective.prepare(table_batch([(0, 1)], lengths=[30, 31]))
    with pytest.raises(ConfigurationError, match=r"micro_batch_tokens = 30 is too small for one solution of 31 tokens"):
        objective.split(batch)


OWN = "from torch.nn.functional import softplus\ndef cubed(c, i):\n    return softplus(i - c) ** 3 + 0.1 * c * i\n"


@pytest.mark.parametrize("loss", ["bradley_terry", "cross_entropy", "mine.py:cubed"])
def test_a_gradient_does_not_depend_on_where_pairs_are_cut(loss, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    pairs, rows = all_pairs((3, 4), (1, 1), (2, 2))
    batch = replace(
        table_batch(pairs.tolist(), rows, np.random.default_rng(0).integers(3, 30, rows).tolist()),
        shares_M=np.linspace(0.5, 2.0, len(pairs)).astype(np.float32),
    )
    scores = np.random.default_rng(1).normal(size=rows).tolist()

    def result(budget):
        table = Table(scores).double()
        section = Verifier(loss=loss, score_penalty=0.2, micro_batch_tokens=budget)
        objective = PairObjective(section, pad_id=0)
        return len(objective.split(objective.prepare(batch))), run(objective, table, batch)

    (one, whole), (many, cut) = result(10_000), result(40)
    assert one == 1
    assert many > 4
    assert whole[1]["scores"].dtype == torch.float64
    torch.testing.assert_close(cut[1]["scores"], whole[1]["scores"], rtol=1e-12, atol=1e-15)
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert cut[2] == pytest.approx(whole[2], rel=1e-5)


# --- real models -----------------------------------------------------------------------------------------------------


def open_verifier(kind: str, head: str) -> VerifierModel:
    tokenizer = english_tokenizer() if head == "yes_token" else digits_tokenizer()
    sizes = {"vocab_size": tokenizer.vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    if kind == "llama":
        model = language_model(tokenizer, context=2048)
    elif kind == "embedded":
        model = open_model(ModelSection(source="embedded:modchain-verifier"), torch.device("cpu"))
    else:
        model_class, config = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}[kind]
        more = {"head_dim": 8} if kind == "qwen3" else {}
        model = LanguageModel(model_class(config(**sizes, **heads, **more)).eval(), tokenizer, "tiny")
    model.require_gradients()
    verifier = build_verifier(Verifier(head=head), model)
    perturb(verifier)
    return verifier


def solutions(lengths: list[int], prompt: int = 6) -> VerifierBatch:
    """Solutions of one problem, of which the first half is correct; the first two are equal."""
    random = np.random.default_rng(0)
    start = random.integers(2, 19, prompt)
    rows = [np.append(start, random.integers(2, 19, length)).astype(np.int32) for length in lengths]
    rows[1] = rows[0]
    pairs, _ = all_pairs((len(rows) // 2, len(rows) - len(rows) // 2))
    return VerifierBatch(rows, np.full(len(rows), prompt, np.int32), pairs, None)


HEADS_OF = [(kind, head) for kind in ("llama", "qwen2", "qwen3", "embedded") for head in ("scalar", "implicit")]


@pytest.mark.parametrize(("kind", "head"), [*HEADS_OF, ("llama", "yes_token"), ("qwen3", "yes_token")])
def test_packed_and_cut_rows_train_as_padded_ones(kind, head):
    model, batch = open_verifier(kind, head), solutions([20, 20, 3, 60, 11, 40, 1, 30])

    def result(**how):
        section = Verifier(micro_batch_tokens=how.pop("budget", 10_000))
        return run(PairObjective(section, pad_id=0, **how), model, batch)

    padded, packed, cut = result(longest_packed=0), result(), result(budget=70)
    for loss, gradients, metrics in (packed, cut):
        assert loss == pytest.approx(padded[0], abs=1e-5, rel=1e-5)
        assert metrics["score_gap"] == pytest.approx(padded[2]["score_gap"], abs=1e-5, rel=1e-5)
        assert gradients.keys() == padded[1].keys()
        for name, gradient in padded[1].items():
            scale = max(1.0, gradient.abs().max().item())
            torch.testing.assert_close(gradients[name], gradient, atol=1e-5 * scale, rtol=1e-5, msg=name)
    checkpoint_layers(model.eval())
    again = result(budget=70)
    assert all(torch.equal(again[1][name], gradient) for name, gradient in cut[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("head", ["scalar", "implicit"])
def test_the_budget_bounds_the_memory_whatever_the_length(head):
    """Bytes that autograd saves for a micro-batch, at most: of 64 solutions, and of 4 that are 16 times as long."""

    def most(checkpointed):
        model = open_verifier("llama", head)
        if checkpointed:
            checkpoint_layers(model.eval())
        found = []
        for times in (1, 4, 16):
            objective = PairObjective(Verifier(micro_batch_tokens=1500), pad_id=0)
            batch = objective.prepare(solutions([80 * times] * max(4, 64 // times), prompt=20))
            taken = []
            for part in objective.survey(model, objective.split(batch)):
                meter = SavedTensors(model)
                with meter.forward():
                    objective(model, part)
                taken.append(meter.bytes_taken)
            found.append(max(taken))
        return found

    plain, checkpointed = most(False), most(True)
    assert max(plain) < 1.25 * min(plain)
    assert max(checkpointed) < 0.35 * min(plain)
