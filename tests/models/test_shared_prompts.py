"""Rows that are computed once where they begin alike, against the same rows in a padded batch and each row alone."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pvg.errors import ConfigurationError
from pvg.models import packing
from pvg.models.adapters import attach_adapters
from pvg.models.heads import ImplicitHead, ScalarHead
from pvg.models.language_model import LanguageModel
from pvg.models.logprobs import completion_logprobs, shared_prompt_logprobs
from pvg.models.packing import Trie, pack_rows, pad_right, row_batches
from pvg.models.shared_prompts import check_packing
from pvg.training.trainer import checkpoint_layers

VOCABULARY = 37
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(family="llama", **others):
    torch.manual_seed(0)
    kinds = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
        "granite": (transformers.GraniteForCausalLM, transformers.GraniteConfig),
    }
    model_class, config_class = kinds[family]
    return model_class(config_class(**(SIZES | others))).eval()


def rows_of(groups, seed=0):
    """Rows from (prompt length, completion lengths) of each group."""
    generator = np.random.default_rng(seed)

    def draw(count):
        return generator.integers(1, VOCABULARY, count).astype(np.int32)

    rows, lengths = [], []
    for prompt_length, completions in groups:
        prompt = draw(prompt_length)
        rows += [np.concatenate([prompt, draw(count)]) for count in completions]
        lengths += [prompt_length] * len(completions)
    return rows, np.array(lengths, dtype=np.int32)


def both_ways(model, rows, prompt_lengths, **how):
    ids_BL, lengths_B = pad_right(rows, 0)
    starts_B = torch.from_numpy(prompt_lengths.astype(np.int64))
    return (
        shared_prompt_logprobs(model, rows, prompt_lengths, **how),
        completion_logprobs(model, ids_BL, lengths_B, starts_B, **how),
    )


def gradients(model, logprobs_BL):
    model.zero_grad()
    weights_BL = torch.linspace(-1.0, 2.0, logprobs_BL.numel()).reshape(logprobs_BL.shape)
    (weights_BL * logprobs_BL).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same(model, rows, prompt_lengths, **how):
    found, expected = both_ways(model, rows, prompt_lengths, **how)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    found_gradients, expected_gradients = gradients(model, found), gradients(model, expected)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


MIXED = [(4, [5, 1, 9]), (7, [3, 3]), (2, [8, 0, 2]), (4, [6])]
# Attention computes these in several blocks, with masks where the prompt is longer, and without where it is not.
UNEVEN = [(3, [90, 2, 30]), (70, [5, 60, 1]), (30, [29, 31, 4])]


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
def test_values_and_all_gradients_are_those_of_the_padded_rows(family):
    assert_same(build(family), *rows_of(MIXED), temperature=0.7)


def test_rows_of_any_lengths_are_those_of_the_padded_rows():
    assert len(pack_rows(*rows_of(UNEVEN), "cpu").blocks) > 3
    assert_same(build(max_position_embeddings=160), *rows_of(UNEVEN))


def test_a_prompt_is_the_same_where_its_tokens_are_whatever_the_group():
    rows, prompt_lengths = rows_of([(4, [2, 3]), (4, [2])])
    rows[2] = np.concatenate([rows[0][:4], rows[2][4:]])
    packed = pack_rows(rows, prompt_lengths, "cpu")
    assert packed.ids_1T.shape == (1, 4 + 1 + 2 + 1)
    assert packed.positions_1T[0].tolist() == [0, 1, 2, 3, 4, 5, 4, 4], "similar lengths are next to each other"
    assert_same(build(), rows, prompt_lengths)


# --- more than prompts -----------------------------------------------------------------------------------------------


def alone(model, rows, prompt_lengths):
    """The log-probs of each row, each in a separate forward pass."""
    longest = max(map(len, rows))
    found = [
        completion_logprobs(model, torch.from_numpy(row).long()[None], torch.tensor([len(row)]), torch.tensor([start]))
        for row, start in zip(rows, prompt_lengths.tolist(), strict=True)
    ]
    return torch.cat([torch.nn.functional.pad(each, (0, longest - each.shape[1])) for each in found])


def assert_as_alone(model, rows, prompt_lengths):
    found, expected = shared_prompt_logprobs(model, rows, prompt_lengths), alone(model, rows, prompt_lengths)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    assert_alike(gradients(model, found), gradients(model, expected))


def assert_alike(found, expected):
    """Gradients within 1e-5 of their norm."""
    assert found.keys() == expected.keys()
    one, other = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in (found, expected))
    assert (one - other).norm() <= 1e-5 * other.norm()


def turns(episodes, count, seed=0):
    """A row for each turn of episodes with one prompt: all before is its prompt. Turns have 3 tokens and 2 of a
    reply."""
    generator = np.random.default_rng(seed)
    prompt = generator.integers(1, VOCABULARY, 40)
    rows, starts = [], []
    for _ in range(episodes):
        row = prompt
        for _ in range(count):
            rows.append(np.append(row, generator.integers(1, VOCABULARY, 3)).astype(np.int32))
            starts.append(len(row))
            row = np.append(rows[-1], generator.integers(1, VOCABULARY, 2))
    return rows, np.array(starts, dtype=np.int32)


def forks():
    """Rows that part twice; one ends where others part, one repeats another, two differ in their last token."""
    generator = np.random.default_rng(0)
    stem, *branches = (generator.integers(1, VOCABULARY, 24).astype(np.int32) for _ in range(4))
    rows = [np.concatenate([stem[:cut], branch]) for cut in (8, 24) for branch in branches]
    rows += [stem, rows[1].copy(), np.append(rows[2][:-1], 1 + rows[2][-1] % 30).astype(np.int32)]
    rows += [np.concatenate([stem, branches[0][:20], branches[2]])]
    return rows, np.full(len(rows), 4, dtype=np.int32)


def test_a_token_without_a_prediction_has_an_id_as_its_target():
    """Memory that nothing has written would be any number: torch refuses one beyond the vocabulary, in some steps."""
    texts = ("12", "12222312", "1212", "12222", "1212", "12222312221111", "1223123", "12222312311212", "12223231")
    rows, starts = [np.array([*map(int, text)], dtype=np.int32) for text in texts], [1, 1, 4, 4, 3, 2, 4, 2, 1]
    garbage = patch.object(np, "empty", lambda shape, dtype=float: np.full(shape, 310, dtype=dtype))
    with patch.object(packing, "LEAST_SHARED", 5), garbage:
        packed = packing.pack_rows(rows, np.array(starts), "cpu")
    assert len(packed.picks_W.unique()) < len(packed.targets_M)
    assert packed.targets_M.max() <= 3


STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 12), st.lists(st.integers(1, 3), max_size=6), st.integers(1, 4)),
    max_size=8,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(STEPS, st.integers(1, 5), st.booleans())
def test_rows_of_any_trie_have_the_gradients_of_each_row_alone(steps, least, prompts_alone):
    rows, starts = [np.array([1, 2], dtype=np.int32)], [1]
    for other, kept, tokens, start in steps:  # continues an earlier row from some place
        rows.append(np.append(rows[other % len(rows)][:kept], tokens).astype(np.int32))
        starts.append(min(start, len(rows[-1])))
    prompt_lengths = np.array(starts, dtype=np.int32)
    with patch.object(packing, "LEAST_SHARED", least):
        trie = Trie.of(rows, prompt_lengths, prompts_alone=prompts_alone)
        for row, leaf in zip(rows, trie.leaves_N, strict=True):
            found = trie.tokens_of(rows)[trie.paths[leaf]][: len(row) - 1]
            assert found.tolist() == row[:-1].tolist()
        assert_as_alone(build(max_position_embeddings=64), rows, prompt_lengths)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [turns(3, 4), forks()], ids=["turns", "forks"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_turns_and_forks_have_the_gradients_of_each_row_alone(family, rows):
    model = build(family, max_position_embeddings=96)
    assert_as_alone(model, *rows)
    found = gradients(model, shared_prompt_logprobs(model, *rows))
    assert all(
        torch.equal(found[name], g) for name, g in gradients(model, shared_prompt_logprobs(model, *rows)).items()
    )
    checkpoint_layers(model)
    again = gradients(model, shared_prompt_logprobs(model, *rows))
    assert all(torch.equal(again[name], gradient) for name, gradient in found.items())


@pytest.mark.slow
def test_adapters_learn_from_turns_as_from_each_row_alone():
    pytest.importorskip("peft", reason="`make install`")
    with LanguageModel(build("qwen2"), None, "tiny") as base, attach_adapters(base, 2, 4.0, seed=0) as learner:
        assert_as_alone(learner.module, *turns(3, 4))


@pytest.mark.parametrize("head", [ScalarHead, lambda model: ImplicitHead(model, 0.5)], ids=["scalar", "implicit"])
def test_scores_of_forks_have_the_gradients_of_each_row_alone(head):
    rows, starts = forks()
    ids_NL, lengths_N = pad_right(rows, 0)
    starts_N = torch.from_numpy(starts).long()
    found = []
    for packed in (True, False):
        with LanguageModel(build(max_position_embeddings=96), None, "tiny") as language_model:
            verifier = head(language_model)
            if isinstance(verifier, ScalarHead):
                verifier.start_elsewhere(0)
            scores_N = verifier(ids_NL, lengths_N, starts_N, packed=packed)
            found.append((scores_N.detach(), gradients(verifier, scores_N)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert_alike(found[0][1], found[1][1])


def test_what_rows_have_in_common_is_computed_once():
    rows, starts = turns(3, 4)
    assert pack_rows(rows, starts, "cpu").ids_1T.shape[1] == 40 + 3 * (4 * 3 + 3 * 2 - 1)
    apart = [np.append(row[:1] + number, row[1:]).astype(np.int32) for number, row in enumerate(rows)]
    assert pack_rows(apart, starts, "cpu").ids_1T.shape[1] == sum(len(row) - 1 for row in rows)
    assert len(row_batches(rows, starts, 40 + 3 * 18)) == 1


# --- models that cannot ----------------------------------------------------------------------------------------------


def test_models_whose_tokens_meet_outside_of_attention_are_refused():
    class Mixing(transformers.LlamaForCausalLM):
        def get_decoder(self):
            def decoder(*args, **kwargs):
                output = self.model(*args, **kwargs)
                output.last_hidden_state = output.last_hidden_state.cumsum(1)
                return output

            return decoder

    torch.manual_seed(0)
    model = Mixing(transformers.LlamaConfig(**SIZES)).eval()
    for _ in range(2):  # refused every time, not only the first
        with pytest.raises(ConfigurationError, match=r"Mixing cannot compute rows.*shared_prompts = false"):
            check_packing(model, fused_layers=True)


def test_layers_with_a_mask_of_their_own_are_refused():
    torch.manual_seed(0)
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES)).eval()
    with pytest.raises(ConfigurationError, match="DogeAttention cannot compute rows that share a prompt"):
        check_packing(model)  # the mask's weights are 0, so that the numbers are right until they are trained


def test_a_defect_in_the_layers_of_pvg_is_not_the_models(monkeypatch):
    def broken(*_, **__):
        raise IndexError("a defect")

    monkeypatch.setattr("pvg.models.shared_prompts.packed_attention", broken)
    with pytest.raises(IndexError):
        check_packing(build())
    with pytest.raises(ConfigurationError, match="a defect"):
        check_packing(build("granite"))


def test_rows_longer_than_a_sliding_window_are_refused():
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=12)
    model = transformers.MistralForCausalLM(config).eval()
    assert_same(model, *rows_of([(4, [5, 8])]))
    with pytest.raises(ConfigurationError, match="13 tokens is longer than MistralForCausalLM's sliding_window of 12"):
        shared_prompt_logprobs(model, *rows_of([(4, [5, 9])]))


# --- batches ---------------------------------------------------------------------------------------------------------


def drawn_rows(drawn):
    """Rows of (number of the prompt, tokens of the completion). Prompts have one length; even ones begin alike."""
    made = []
    for number, (prompt, own) in enumerate(drawn):
        begin = [9] * 40 + [prompt] * 10 if prompt % 2 == 0 else [prompt] * (20 + prompt)
        made.append(np.array([*begin, *[100 + number] * own], dtype=np.int32))
    return made, np.array([50 if prompt % 2 == 0 else 20 + prompt for prompt, _ in drawn], dtype=np.int64)


@settings(deadline=None)
@example([], [(0, 12, 0)] + [(0, 60, 10)] * 8, 80, False)
@example([], [(0, 12, 4), (0, 12, 4), (0, 60, 4)], 72, False)  # alone, they part at the ends of their prompts
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=40),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([12, 40, 60]), st.sampled_from([0, 4, 10])), max_size=20),
    st.one_of(st.integers(71, 90), st.integers(71, 300)),
    st.booleans(),
)
def test_batches_keep_their_limits(drawn, parts, budget, in_units):
    drawn = [(0, 20), *drawn] if parts else drawn
    rows, starts = drawn_rows(drawn)
    for other, kept, own in parts:  # begins as another row, which contains it if it has no own tokens
        tokens = [*rows[other % len(rows)][:kept], *[1000 + len(rows)] * own][:70]
        rows.append(np.array(tokens, dtype=np.int32))
        starts = np.append(starts, min(10, len(tokens)))
        drawn = [*drawn, (own % 7, own)]
    units_N = np.array([prompt // 2 for prompt, _ in drawn], dtype=np.int64) if in_units else None
    batches = row_batches(rows, starts, budget, units_N=units_N)
    flat = np.concatenate(batches).tolist() if batches else []
    assert sorted(flat) == list(range(len(drawn)))
    for batch in batches:
        assert Trie.of([rows[row] for row in batch], starts[batch]).lengths_S.sum() <= budget
    if units_N is not None:
        totals = [sum(len(row) for row, unit in zip(rows, units_N, strict=True) if unit == u) for u in range(4)]
        owners = {(int(unit), number) for number, batch in enumerate(batches) for unit in units_N[batch]}
        assert all(
            len([1 for unit, _ in owners if unit == u]) <= 1 for u, total in enumerate(totals) if total <= budget
        )


def test_a_dialogue_with_many_forks_takes_no_more_memory_than_a_group():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_key_value_heads": 4}
    model, generator = build(**sizes, max_position_embeddings=1024), np.random.default_rng(0)
    weights, budget = {weight.data_ptr() for weight in model.parameters()}, 1024

    def draw(count):
        return generator.integers(1, VOCABULARY, count).astype(np.int32)

    def saved(rows, starts):
        """The most bytes that autograd keeps for a batch."""
        sizes = []
        for batch in row_batches(rows, starts, budget):
            kept = {}
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, kept=kept: kept.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
            ):
                shared_prompt_logprobs(model, [rows[row] for row in batch], starts[batch])
            sizes.append(sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights))
        return max(sizes)

    prompt, history = draw(48), draw(32)
    group = [np.append(prompt, draw(60)) for _ in range(16)]
    dialogue, starts = [], []
    for _ in range(32):  # later turns do not see what a turn thought
        starts.append(len(history))
        answer = draw(16)
        dialogue.append(np.concatenate([history, draw(16), answer]))
        history = np.append(history, answer)
    assert saved(dialogue, np.array(starts)) <= 1.6 * saved(group, np.full(16, 48))
    short = [np.append(history, draw(4)) for _ in range(64)]  # only a prompt in common: as many as the tokens allow
    assert len(row_batches(short, np.full(64, len(history)), budget)) == 1


def filling(groups, count, shape, generator):
    """Rows with log-normal lengths, as those of solutions: a mean of 400 tokens, after prompts of 50 to 250."""
    own = np.clip(generator.lognormal(5.67, 0.8, (groups, count)), 10, 4096).astype(np.int64)
    rows, starts, system = [], [], np.full(200 if shape == "system" else 0, 1)
    for group in range(groups):
        row = np.append(system, np.full(generator.integers(50, 250), 2 + group))
        for turn in range(count):
            starts.append(len(row))
            rows.append(np.append(row, np.full(own[group, turn], 1000 + len(rows))).astype(np.int32))
            row = np.append(rows[-1], [2, 3, 4]) if shape == "turns" else row
    return rows, np.array(starts)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["prompts", "units", "system", "turns"])
@pytest.mark.parametrize(("groups", "rows"), [(64, 8), (256, 2)])
def test_batches_are_nearly_full_and_balanced(groups, rows, shape):
    fills, balance, budget = [], [], 16_384
    for seed in range(5):
        given_rows, starts = filling(groups, rows, shape, np.random.default_rng(seed))
        units_N = np.repeat(np.arange(groups), rows) if shape == "units" else None
        batches = row_batches(given_rows, starts, budget, units_N=units_N)
        loads = [int(Trie.of([given_rows[row] for row in batch], starts[batch]).lengths_S.sum()) for batch in batches]
        fills.append(Trie.of(given_rows, starts).lengths_S.sum() / (len(batches) * budget))
        balance.append(min(loads) / max(loads))
    print(f"\n{shape}, {groups} groups of {rows} rows: {np.mean(fills):.3f} of the micro-batches' tokens are filled")
    assert np.mean(fills) >= 0.9
    assert np.mean(balance) >= 0.8
