"""Chunked completion log-probs against a plain log-softmax of the full logits."""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pvg.errors import ConfigurationError
from pvg.models.logprobs import check_logits, completion_logprobs

VOCABULARY = 37
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**settings):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | settings))).eval()


def build(family):
    torch.manual_seed(0)
    if family == "llama":
        model = llama(tie_word_embeddings=False)
    elif family == "llama-tied":
        model = llama(tie_word_embeddings=True)
    elif family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        model = transformers.GPT2LMHeadModel(config).eval()
    elif family == "gemma2":  # soft-capped logits
        config = transformers.Gemma2Config(**SIZES, final_logit_softcapping=0.7)
        model = transformers.Gemma2ForCausalLM(config).eval()
    elif family == "cohere":  # scaled logits
        model = transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=0.3)).eval()
    elif family == "hyperclovax":
        model = transformers.HyperCLOVAXForCausalLM(transformers.HyperCLOVAXConfig(**SIZES, logits_scaling=0.2)).eval()
    else:  # divided logits
        model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=5.0)).eval()
    with torch.no_grad():  # logits large enough for a cap or a scale to matter
        model.get_output_embeddings().weight.mul_(20)
    return model


FAMILIES = ("llama", "llama-tied", "gpt2", "gemma2", "cohere", "granite", "hyperclovax")


def rows():
    torch.manual_seed(1)
    ids_BL = torch.randint(1, VOCABULARY, (4, 12))
    return ids_BL, torch.tensor([12, 7, 9, 2]), torch.tensor([3, 1, 9, 1])


def plain_logprobs(model, ids_BL, lengths_B, prompt_lengths_B, temperature):
    """The full [B, L, V] matrix, and a loop over tokens."""
    logprobs_BLV = torch.log_softmax(model(input_ids=ids_BL).logits.float() / temperature, dim=-1)
    values = torch.zeros(ids_BL.shape)
    for row in range(len(ids_BL)):
        for t in range(int(prompt_lengths_B[row]), int(lengths_B[row])):
            values[row, t] = logprobs_BLV[row, t - 1, ids_BL[row, t]]
    return values


def gradients(model, logprobs_BL):
    model.zero_grad()
    weights_BL = torch.linspace(-1.0, 2.0, logprobs_BL.numel()).reshape(logprobs_BL.shape)
    (weights_BL * logprobs_BL).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("tokens_per_chunk", [1, 5, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_full_matrix(family, tokens_per_chunk):
    model = build(family)
    expected = plain_logprobs(model, *rows(), 0.7)
    found = completion_logprobs(model, *rows(), temperature=0.7, logits_chunk=tokens_per_chunk * VOCABULARY)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected_gradients = gradients(model, expected)
    found_gradients = gradients(model, found)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=2e-6 * max(1.0, scale))


class Largest(TorchDispatchMode):
    """Remembers the most elements any operation's result had."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def largest_tensor(logits_chunk):
    """Of a forward and a backward over 8 x 28 completion tokens of a vocabulary of 2000: 448,000 logits in all."""
    model = llama(vocab_size=2000, hidden_size=8, intermediate_size=8, head_dim=4, tie_word_embeddings=True)
    ids_BL = torch.randint(1, 2000, (8, 32))
    lengths_B, prompt_lengths_B = torch.full((8,), 32), torch.full((8,), 4)
    with Largest() as largest:
        completion_logprobs(model, ids_BL, lengths_B, prompt_lengths_B, logits_chunk=logits_chunk).sum().backward()
    return largest.numel


def test_no_tensor_is_larger_than_the_chunk():
    assert largest_tensor(20_000) <= 20_000  # ten tokens at a time; the embedding itself has 16,000 elements
    assert largest_tensor(1_000_000) == 8 * 28 * 2000  # and the measurement sees a matrix that is not chunked


def test_no_logits_wait_for_the_backward_pass():
    """They are made again there: what autograd keeps has no vocabulary dimension, however many chunks there are."""
    model, kept = llama(vocab_size=41), []

    def keep(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        completion_logprobs(model, *rows(), logits_chunk=2 * 41)
    assert kept
    assert not [shape for shape in kept if len(shape) and shape[-1] == 41]


def test_a_model_without_a_decoder_of_its_own_is_refused():
    class Whole(transformers.LlamaForCausalLM):
        def get_decoder(self):  # as transformers' Llama4ForCausalLM, whose decoder is the model with its output head
            return self

    model = Whole(transformers.LlamaConfig(**SIZES)).eval()
    with pytest.raises(ConfigurationError, match="Whole changes its logits"):
        check_logits(model)


def test_bfloat16_models_give_float32_logprobs():
    model = build("llama").to(torch.bfloat16)
    found = completion_logprobs(model, *rows())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain_logprobs(model, *rows(), 1.0), rtol=0.02, atol=0.02)
