import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.errors import ConfigurationError
from pvg.models.characters import modchain_tokenizer
from pvg.models.language_model import LanguageModel, ModelClosedError
from pvg.models.tokenizer import Tokenizer


def tiny(seed: int = 0, tied: bool = True) -> LanguageModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=19,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LanguageModel(LlamaForCausalLM(config), Tokenizer(modchain_tokenizer()), "tiny")


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.module(torch.arange(2, 19)[None]).logits


def test_properties_describe_the_module():
    with tiny() as model:
        assert (model.device, model.dtype, model.max_length) == (torch.device("cpu"), torch.float32, 64)
        assert not model.module.training
        # 19x32 tied embeddings; per layer 4x32x32 attention, 3x32x48 mlp, 2x32 norms; one last norm.
        assert model.num_parameters == 19 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32


def test_close_frees_the_weights_and_every_use_afterwards_raises():
    gc.collect()
    gc.disable()  # reference counting alone must free it: a cycle would keep gigabytes until some later collection
    try:
        model = tiny()
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


def test_leaving_the_context_closes_even_when_the_body_raises():
    model = tiny()
    with pytest.raises(ZeroDivisionError), model:
        _ = 1 / 0
    assert model.closed


def test_a_copy_has_weights_of_its_own_and_outlives_the_original():
    model = tiny()
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
    model = tiny()
    weights = model.weights()
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
    assert sum(weight.numel() for weight in weights.values()) == model.num_parameters
    with torch.no_grad():
        model.module.model.norm.weight.fill_(3.0)
    assert bool((weights["model.norm.weight"] == 3.0).all())


@pytest.mark.parametrize("tied", [True, False])
def test_load_weights_makes_the_models_equal_and_keeps_ties(tied):
    source, target = tiny(1, tied), tiny(2, tied)
    target.load_weights(source.weights())
    assert target.fingerprint() == source.fingerprint()
    assert torch.equal(logits(target), logits(source))
    target.load_weights(source.module.state_dict())  # both names of the tied weight
    assert (target.module.lm_head.weight is target.module.model.embed_tokens.weight) == tied


def test_load_weights_casts_to_the_models_dtype():
    source, target = tiny(1), tiny(2)
    target.module.bfloat16()
    target.load_weights(source.weights())
    assert target.dtype == torch.bfloat16
    assert torch.equal(target.module.model.norm.weight, source.module.model.norm.weight.bfloat16())


def test_a_tied_weight_may_come_under_its_second_name():
    source, target = tiny(1), tiny(2)
    weights = source.weights()
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    target.load_weights(weights)
    assert target.fingerprint() == source.fingerprint()


def spoil_missing(weights):
    del weights["model.norm.weight"]
    return "model.norm.weight"


def spoil_unknown(weights):
    weights["model.extra"] = torch.zeros(1)
    return "model.extra"


def spoil_shape(weights):
    weights["model.norm.weight"] = torch.zeros(33)
    return r"\(32,\), not \(33,\)"


def spoil_tie(weights):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    return "two different tensors"


@pytest.mark.parametrize("spoil", [spoil_missing, spoil_unknown, spoil_shape, spoil_tie])
def test_weights_that_do_not_fit_are_refused_and_nothing_is_loaded(spoil):
    target = tiny(2)
    before = target.fingerprint()
    weights = tiny(1).weights()
    named = spoil(weights)
    with pytest.raises(ConfigurationError, match=named):
        target.load_weights(weights)
    assert target.fingerprint() == before


def test_the_fingerprint_sees_every_bit_and_the_dtype():
    model = tiny()
    before = model.fingerprint()
    assert tiny().fingerprint() == before
    with torch.no_grad():
        model.module.model.norm.weight[0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert model.fingerprint() != before
    assert LanguageModel(tiny().module.bfloat16(), model.tokenizer, "tiny").fingerprint() != before


def test_importing_the_package_loads_no_torch():
    code = "import sys, pvg.models; print('torch' in sys.modules or 'transformers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert ran.stdout.strip() == "False"
