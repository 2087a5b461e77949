"""The layers of Llama-like decoders on packed rows, against transformers' own on padded ones."""

import numpy as np
import pytest
import torch
import transformers

from pvg.models import shared_prompts
from pvg.models.adapters import attach_adapters
from pvg.models.heads import ScalarHead
from pvg.models.language_model import LanguageModel
from pvg.models.logprobs import completion_logprobs, shared_prompt_logprobs
from pvg.models.packing import pack_rows, packed_attention, pad_right
from pvg.models.shared_prompts import fused_hidden, knows, packed_hidden
from pvg.planning.memory import GROUP, ModelShape, Pass, activations_of
from pvg.training.trainer import checkpoint_layers

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 16}


def build(kind="llama"):
    torch.manual_seed(0)
    model: torch.nn.Module
    if kind == "qwen2":  # biases before the rotation
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, num_key_value_heads=2))
    elif kind == "qwen3":  # norms of queries and keys, whose heads are not hidden_size / heads
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))
    elif kind == "scaled":  # a rotary embedding that is no pure rotation
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=YARN))
    elif kind == "biased":
        config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, attention_bias=True, mlp_bias=True)
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms of 1 and biases of 0 would hide a mistake
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def rows():
    generator = np.random.default_rng(0)
    prompts = [generator.integers(1, 37, length) for length in (4, 6)]
    picks = [(0, 5), (0, 2), (1, 7), (0, 9), (1, 1)]
    made = [np.concatenate([prompts[p], generator.integers(1, 37, c)]).astype(np.int32) for p, c in picks]
    return made, np.array([len(prompts[p]) for p, _ in picks], dtype=np.int32)


def gradients(model, logprobs_BL):
    model.zero_grad()
    weights_BL = torch.linspace(-1.0, 2.0, logprobs_BL.numel()).reshape(logprobs_BL.shape)
    (weights_BL * logprobs_BL).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def padded(model):
    sequences, prompt_lengths = rows()
    ids_BL, lengths_B = pad_right(sequences, 0)
    return completion_logprobs(model, ids_BL, lengths_B, torch.from_numpy(prompt_lengths.astype(np.int64)))


def assert_same(model):
    found, expected = shared_prompt_logprobs(model, *rows()), padded(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-6)
    found_gradients, expected_gradients = gradients(model, found), gradients(model, expected)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "scaled", "biased"])
def test_values_and_all_gradients_are_transformers_own(kind):
    model = build(kind)
    assert knows(model.model)
    assert_same(model)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_adapters_are_trained_alone_and_alike(kind):
    pytest.importorskip("peft", reason="`make install`")
    with LanguageModel(build(kind), None, "tiny") as base, attach_adapters(base, 2, 4.0, seed=0) as learner:
        with torch.no_grad():
            for name, weight in learner.module.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.1)
        assert_same(learner.module)
        logprobs_BL = shared_prompt_logprobs(learner.module, *rows())
        assert all("lora" in n for n in gradients(learner.module, logprobs_BL))


def test_checkpointed_layers_are_computed_twice_to_the_same_bits(monkeypatch):
    expected = gradients(plain := build(), shared_prompt_logprobs(plain, *rows()))
    model, calls = build(), []
    checkpoint_layers(model)

    def counted(*arguments, **others):
        calls.append(1)
        return packed_attention(*arguments, **others)

    monkeypatch.setattr(shared_prompts, "packed_attention", counted)
    logprobs_BL = shared_prompt_logprobs(model, *rows())
    before = len(calls)
    found = gradients(model, logprobs_BL)
    assert len(calls) == before + len(model.model.layers)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_bfloat16_the_norms_are_computed_in_float32(kind):
    model = build(kind).to(torch.bfloat16)
    packed = pack_rows(*rows(), "cpu")
    with torch.no_grad():
        fused_TD = fused_hidden(model.model, packed)
        plain_TD = packed_hidden(model, packed, fused_layers=False)
    assert fused_TD.dtype == torch.bfloat16
    torch.testing.assert_close(fused_TD, plain_TD, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_under_autocast_gradients_err_no_more_than_those_of_transformers(kind):
    exact = gradients(model := build(kind), padded(model))

    def error(logprobs_BL):
        found = gradients(model, logprobs_BL)
        return sum(float((found[name] - gradient).square().sum()) for name, gradient in exact.items()) ** 0.5

    with torch.autocast("cpu", torch.bfloat16):
        both = shared_prompt_logprobs(model, *rows()), padded(model)
    fused, plain = map(error, both)
    assert 0 < fused < 1.2 * plain


@pytest.mark.parametrize(("precision", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_layer_keeps_its_states_in_the_precision_of_passes(precision, size):
    width, inner, heads, keys = 192, 512, 3, 64
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads, vocab_size=64,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    found = Pass("float32", precision, prompt=40, completion=31)
    # Two norms, queries, and the result of attention as gathered; keys and values, each row with its own of the prompt;
    # gates. In float32, the rate of each norm. Of torch's kernel also the result as computed, and each head's sum.
    of_keys = (40 + GROUP * (40 + 30)) / found.positions
    expected = size * (4 * width + 2 * keys * of_keys + 2 * inner) + 4 * 2
    if precision == "float32":
        expected += size * width + 4 * heads
    layer = activations_of(ModelShape("small", 2, width, keys, 64, 0, 0, config), found).layer
    assert layer == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("whole", [False, True])  # the prompts of rows(), or the whole row
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "scaled", "biased"])
def test_a_score_of_the_last_token_has_the_gradients_of_all_layers_on_all_tokens(kind, whole):
    ids_BL, lengths_B = pad_right(rows()[0], 0)
    starts_B = lengths_B if whole else torch.from_numpy(rows()[1]).long()

    def scored(packed, checkpointed=False):
        with LanguageModel(build(kind), None, "tiny") as language_model:
            torch.manual_seed(3)
            verifier = ScalarHead(language_model)
            with torch.no_grad():
                for weight in verifier.parameters():
                    weight.add_(0.1 * torch.randn(weight.shape))
            if checkpointed:
                checkpoint_layers(verifier.eval())
            scores_B = verifier(ids_BL, lengths_B, starts_B, packed=packed)
            return scores_B.detach(), gradients(verifier, scores_B)

    (found_B, found), (expected_B, expected) = scored(True), scored(False)
    torch.testing.assert_close(found_B, expected_B, rtol=1e-4, atol=2e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-5, msg=name)
    again_B, again = scored(True, checkpointed=True)
    assert torch.equal(again_B, found_B)
    assert all(torch.equal(again[name], gradient) for name, gradient in found.items())
