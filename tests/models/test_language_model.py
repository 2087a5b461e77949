import gc
import weakref

import pytest
import torch
from tiny_llama import tiny_llama

from pvg.errors import ConfigurationError
from pvg.models.language_model import LanguageModel, ModelClosedError


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.module(torch.arange(2, 19)[None]).logits


@pytest.mark.slow
def test_close_frees_the_weights_and_every_use_afterwards_raises():
    gc.collect()
    gc.disable()  # reference counting alone must free it: a cycle would keep gigabytes until some later collection
    try:
        model = tiny_llama()
        module, weight = weakref.ref(model.module), weakref.ref(model.module.model.embed_tokens.weight)
        logits(model)
        model.close()
        assert module() is None
        assert weight() is None
    finally:
        gc.enable()
    model.close()
    assert model.closed
    uses = ("module", "device", "dtype", "max_length", "num_parameters", "weights", "fingerprint", "copy")
    for use in uses:
        with pytest.raises(ModelClosedError, match="tiny"):
            getattr(model, use)()
    with pytest.raises(ModelClosedError):
        model.load_weights({})


def test_a_copy_in_16_bits_keeps_the_frequencies_of_positions():
    with tiny_llama() as model, model.copy(torch.bfloat16) as rounded:
        assert rounded.dtype == torch.bfloat16
        for (name, kept), (_, found) in zip(model.module.named_buffers(), rounded.module.named_buffers(), strict=True):
            assert torch.equal(kept, found), name


def test_a_copy_has_weights_of_its_own_and_outlives_the_original():
    model = tiny_llama()
    twin = model.copy()
    assert twin.fingerprint() == model.fingerprint()
    before = logits(twin)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
    assert twin.fingerprint() != model.fingerprint()
    model.close()
    assert torch.equal(logits(twin), before)
    assert twin.module.lm_head.weight is twin.module.model.embed_tokens.weight


def test_weights_name_a_tied_weight_once_and_follow_training():
    model = tiny_llama()
    weights = model.weights()
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
    assert sum(weight.numel() for weight in weights.values()) == model.num_parameters
    with torch.no_grad():
        model.module.model.norm.weight.fill_(3.0)
    assert bool((weights["model.norm.weight"] == 3.0).all())


@pytest.mark.parametrize("tied", [True, False])
def test_load_weights_makes_the_models_equal_and_keeps_ties(tied):
    source, target = tiny_llama(1, tied=tied), tiny_llama(2, tied=tied)
    target.load_weights(source.weights())
    assert target.fingerprint() == source.fingerprint()
    assert torch.equal(logits(target), logits(source))
    target.load_weights(source.module.state_dict())  # both names of the tied weight
    assert (target.module.lm_head.weight is target.module.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "model.norm.weight"),
        (lambda weights: weights.update({"model.extra": torch.zeros(1)}), "model.extra"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(33)}), r"\(32,\), not \(33,\)"),
        (lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] + 1}), "two different"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_loaded(spoil, named):
    target, weights = tiny_llama(2), tiny_llama(1).weights()
    before = target.fingerprint()
    spoil(weights)
    with pytest.raises(ConfigurationError, match=named):
        target.load_weights(weights)
    assert target.fingerprint() == before


def test_the_fingerprint_sees_every_bit_and_the_dtype():
    model = tiny_llama()
    before = model.fingerprint()
    assert tiny_llama().fingerprint() == before
    with torch.no_grad():
        model.module.model.norm.weight[0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert model.fingerprint() != before
    assert LanguageModel(tiny_llama().module.bfloat16(), model.tokenizer, "tiny").fingerprint() != before
