"""Rows whose prompts are computed once, against the same rows in a padded batch."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.errors import ConfigurationError
from pvg.models.logprobs import completion_logprobs, shared_prompt_outputs
from pvg.models.packing import distinct_prompts, pack_rows, packed_batches, pad_right
from pvg.models.shared_prompts import check_packing

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
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
        "granite": (transformers.GraniteForCausalLM, transformers.GraniteConfig),
    }
    model_class, config_class = kinds[family]
    return model_class(config_class(**(SIZES | others))).eval()


def shared_prompt_logprobs(*given, **how):
    return shared_prompt_outputs(*given, **how).logprobs_BL


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
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


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
    longer = np.append(rows[0][:4], rows[0][4:])  # the same tokens, of which five are the prompt
    firsts_U, prompt_of_N = distinct_prompts([*rows, longer], np.append(prompt_lengths, 5))
    assert (firsts_U.tolist(), prompt_of_N.tolist()) == ([0, 3], [0, 0, 0, 1])
    packed = pack_rows(rows, prompt_lengths, "cpu")
    assert packed.ids_1T.shape == (1, 4 + 1 + 2 + 1)
    assert packed.positions_1T[0].tolist() == [0, 1, 2, 3, 4, 5, 4, 4], "similar lengths are next to each other"
    assert_same(build(), rows, prompt_lengths)


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


def test_a_defect_in_the_layers_of_pvg_is_not_the_models(monkeypatch):
    def broken(*_, **__):
        raise IndexError("a defect")

    monkeypatch.setattr("pvg.models.shared_prompts.packed_attention", broken)
    with pytest.raises(IndexError):
        check_packing(build())
    with pytest.raises(ConfigurationError, match="a defect"):
        check_packing(build("qwen3"))


def test_rows_longer_than_a_sliding_window_are_refused():
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=12)
    model = transformers.MistralForCausalLM(config).eval()
    assert_same(model, *rows_of([(4, [5, 8])]))
    with pytest.raises(ConfigurationError, match="13 tokens is longer than MistralForCausalLM's sliding_window of 12"):
        shared_prompt_logprobs(model, *rows_of([(4, [5, 9])]))


# --- batches ---------------------------------------------------------------------------------------------------------

DRAWN = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(0, 20)), max_size=40)


@settings(deadline=None)
@given(DRAWN, st.integers(29, 120), st.booleans())
def test_batches_keep_their_limits(drawn, budget, in_units):
    sizes = {prompt: length for prompt, length, _ in drawn}  # a prompt has one length
    numbers = {prompt: number for number, prompt in enumerate(sizes)}
    prompt_of_N = np.array([numbers[prompt] for prompt, _, _ in drawn], dtype=np.int64)
    starts = np.array([sizes[prompt] for prompt, _, _ in drawn], dtype=np.int64)
    lengths = starts + np.array([completion for *_, completion in drawn], dtype=np.int64)
    totals = {p: sizes[q] + int((lengths - starts)[prompt_of_N == p].sum()) for q, p in numbers.items()}
    units_N = prompt_of_N // 2 if in_units else None
    if in_units and any(totals.get(u, 0) + totals.get(u + 1, 0) > budget for u in range(0, 7, 2)):
        return
    batches = packed_batches(prompt_of_N, starts, lengths, budget, units_N)
    flat = np.concatenate(batches).tolist() if batches else []
    assert sorted(flat) == list(range(len(drawn)))
    for rows in batches:
        prompts = dict(zip(prompt_of_N[rows], starts[rows], strict=True))
        assert sum(prompts.values()) + (lengths - starts)[rows].sum() <= budget
    if units_N is not None:
        owners = {(int(unit), number) for number, rows in enumerate(batches) for unit in units_N[rows]}
        assert len(owners) == len({unit for unit, _ in owners})


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("groups", "rows"), [(64, 8), (256, 2)])
def test_batches_are_nearly_full_and_balanced(groups, rows, whole):
    """Log-normal lengths, as those of solutions: a mean of 400 tokens, after prompts of 50 to 250."""
    fills, balance, budget = [], [], 16_384
    for seed in range(20):
        generator = np.random.default_rng(seed)
        prompt_of_N = np.repeat(np.arange(groups), rows)
        starts_N = generator.integers(50, 250, groups)[prompt_of_N]
        own_N = np.clip(generator.lognormal(5.67, 0.8, groups * rows), 10, 4096).astype(np.int64)
        batches = packed_batches(prompt_of_N, starts_N, starts_N + own_N, budget, prompt_of_N if whole else None)
        loads = [own_N[b].sum() + sum({prompt_of_N[row]: starts_N[row] for row in b}.values()) for b in batches]
        fills.append((own_N.sum() + starts_N[::rows].sum()) / (len(batches) * budget))
        balance.append(min(loads) / max(loads))
    assert np.mean(fills) >= 0.9
    assert np.mean(balance) >= 0.8
