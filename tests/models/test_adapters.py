import copy
from pathlib import Path

import orjson
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import tiny_llama
from torch import nn

from pvg.config.experiment import Experiment
from pvg.config.training import ModelSection
from pvg.errors import ConfigurationError
from pvg.models import open_model
from pvg.models.adapters import AdaptedModel, attach_adapters
from pvg.models.compute import LiveBytes
from pvg.models.language_model import LanguageModel
from pvg.rollout.lean import LeanDecoder
from pvg.servers.transports.files import write_tensors
from pvg.training.trainer import checkpoint_layers

pytestmark = pytest.mark.slow

RANK, ALPHA = 4, 6.0


def small_model(tied: bool = True, bias: bool = False) -> LanguageModel:
    return tiny_llama(name="small", tied=tied, attention_bias=bias)


def logits(module: torch.nn.Module) -> torch.Tensor:
    return module(torch.arange(2, 19)[None]).logits


def learnt(model: LanguageModel, seed: int = 0) -> AdaptedModel:
    """Adapters as after some training: B is no longer zero."""
    adapted = attach_adapters(model, RANK, ALPHA, seed)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in adapted.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return adapted


@pytest.fixture(params=[(True, False), (False, True)], ids=["tied", "untied with biases"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return small_model(*request.param)


def test_fresh_adapters_change_nothing(model: LanguageModel) -> None:
    before = model.fingerprint()
    adapted = attach_adapters(model, RANK, ALPHA, 0)
    assert adapted.fingerprint() == before
    assert list(adapted.weights()) == list(model.weights())
    assert torch.equal(logits(adapted.module), logits(model.module))
    assert model.fingerprint() == before


def test_merged_weights_are_what_the_forward_pass_computes(model: LanguageModel) -> None:
    adapted = learnt(model)
    plain = model.copy()
    plain.load_weights(adapted.weights())
    with torch.no_grad():
        changed, merged, unchanged = logits(adapted.module), logits(plain.module), logits(model.module)
    assert (changed - unchanged).abs().max() > 0.1
    assert torch.allclose(changed, merged, atol=1e-5)


def test_peft_reads_the_adapter_and_merges_it_alike(model: LanguageModel, tmp_path: Path) -> None:
    adapted = learnt(model)
    adapter = adapted.adapter()
    (tmp_path / "adapter_config.json").write_bytes(orjson.dumps(adapter.config))

    save_file(dict(adapter.tensors), tmp_path / "adapter_model.safetensors")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(model.module), str(tmp_path))
    names = {name.replace(".default.", "."): tensor for name, tensor in theirs.state_dict().items() if ".lora_" in name}
    assert names.keys() == adapter.tensors.keys()
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in adapted.weights().items():
        assert torch.allclose(tensor, merged[name], atol=1e-6), name


@pytest.mark.parametrize("checkpointed", [False, True])
def test_only_the_adapters_learn(checkpointed: bool) -> None:
    adapted = learnt(small_model())
    adapted.require_gradients()
    if checkpointed:
        checkpoint_layers(adapted.module)
    frozen = {name: p.clone() for name, p in adapted.module.named_parameters() if not p.requires_grad}
    trained = [p for p in adapted.module.parameters() if p.requires_grad]
    assert len(trained) == len(adapted.adapter().tensors)
    before = adapted.adapter()
    logits(adapted.module).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in trained)
    torch.optim.SGD(trained, lr=0.1).step()
    for name, parameter in adapted.module.named_parameters():
        if name in frozen:
            assert parameter.grad is None
            assert torch.equal(parameter, frozen[name])
    after = adapted.adapter()
    assert not any(torch.equal(before.tensors[name], tensor) for name, tensor in after.tensors.items())


def test_adapters_beside_bfloat16_layers_are_float32() -> None:
    model = small_model().copy(torch.bfloat16)
    adapted = learnt(model)
    assert {tensor.dtype for tensor in adapted.adapter().tensors.values()} == {torch.float32}
    assert {tensor.dtype for tensor in adapted.weights().values()} == {torch.bfloat16}
    plain = adapted.copy()
    with torch.no_grad():
        assert torch.allclose(logits(adapted.module).float(), logits(plain.module).float(), atol=0.1)


def test_what_samples_has_the_first_updates_of_adapters() -> None:
    """One step of 2e-5 changes a weight by less than half a unit in the last place of bfloat16."""
    model = small_model()
    adapted = attach_adapters(model, RANK, ALPHA, 0)
    with torch.no_grad():
        for name, parameter in adapted.module.named_parameters():
            if "lora_B" in name:
                parameter.add_(2e-5)
    merged = Experiment(models={"precision": "bfloat16"}, training={"adapters": {"rank": RANK}})
    served = {"rollout": {"engine": "vllm"}, "weights": {"transport": "lora"}, "serving": {"servers": ["http://a:1"]}}
    assert Experiment(**merged.plain() | served).sampling_dtype == "bfloat16"  # there they stay apart
    before, wanted = model.weights(), adapted.weights()
    with model.copy(getattr(torch, merged.sampling_dtype)) as sampler:
        sampler.load_weights(wanted)
        for name, weight in sampler.weights().items():
            torch.testing.assert_close(weight.float() - before[name], wanted[name] - before[name], rtol=1e-2, atol=1e-9)


@pytest.mark.parametrize("lean", [True, False])
def test_samples_of_16_bits_move_as_the_trainers_policy_does(lean: bool) -> None:
    """After one small step of the adapters, which weights in 16 bits do not show. The decoder has begun before."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "initializer_range": 1 / 16}
    base = tiny_llama(layers=4, attention_bias=True, **sizes).copy(torch.bfloat16)
    adapted, ids_RT = attach_adapters(base, RANK, ALPHA, 0), torch.randint(19, (24, 24))

    def taken(logits_RTV: torch.Tensor) -> torch.Tensor:
        return logits_RTV.float().log_softmax(-1)[:, :-1].gather(-1, ids_RT[:, 1:, None]).flatten()

    def exact() -> torch.Tensor:
        trained = attach_adapters(base.copy(torch.float32), RANK, ALPHA, 0)
        trained.load_adapter(adapted.adapter())
        return taken(trained.module(ids_RT).logits)

    sampler, position_R = adapted.sampler(), torch.zeros(24, dtype=torch.int64)
    decoder = LeanDecoder.over(sampler.module) if lean else None

    def sampled() -> torch.Tensor:
        sampler.load_policy(*adapted.policy())
        if decoder is None:
            return taken(sampler.module(ids_RT).logits)
        cache = decoder.new_cache(24, 24)
        steps = [decoder.step(ids_RT[:, t], position_R + t, cache, t + 1) for t in range(24)]
        return taken(torch.stack(steps, 1))

    with torch.no_grad():
        before = exact(), sampled()
    (taken(adapted.module(ids_RT).logits) * torch.randn(24, 1).expand(-1, 23).flatten()).mean().backward()
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, adapted.module.parameters()):
            assert parameter.grad is not None
            parameter.add_(parameter.grad.sign(), alpha=2e-4)
        wanted, found = (after - first for after, first in zip((exact(), sampled()), before, strict=True))
        merged = base.copy()
        rounded = -taken(merged.module(ids_RT).logits)
        merged.load_policy(*adapted.policy())
        rounded += taken(merged.module(ids_RT).logits)
    shares = [float(moved @ wanted / (wanted @ wanted)) for moved in (found, rounded)]
    assert 0.7 < shares[0] < 1.3
    assert abs(shares[1]) < 0.5
    weights = [model.module.model.layers[1].mlp.up_proj.weight for model in (base, sampler)]
    assert weights[0].data_ptr() == weights[1].data_ptr()


def test_merged_layers_are_in_memory_one_at_a_time() -> None:
    """While a sampler copies them, with the values that they had when the weights were taken."""
    model = tiny_llama(layers=24)
    adapted, sampler, expected = learnt(model), model.copy(), learnt(model).copy()
    with LiveBytes(nn.ModuleList([adapted.module, sampler.module])) as live:
        weights = adapted.weights()
        adapted.load_weights(model.weights())  # it starts over
        sampler.load_weights(weights)
    assert live.peak < sum(weight.nbytes for weight in model.weights().values()) / 2
    assert sampler.fingerprint() == expected.fingerprint() != model.fingerprint()


def test_a_file_has_all_merged_layers(tmp_path: Path) -> None:
    """Also if they have had the same memory, one after the other."""
    model = tiny_llama(layers=24)
    adapted = learnt(model)
    write_tensors(tmp_path / "f", adapted.weights(), torch.bfloat16)
    written = load_file(tmp_path / "f")
    assert written.keys() == model.weights().keys()
    for name, weight in adapted.copy(torch.bfloat16).weights().items():
        assert torch.equal(weight, written[name])


def test_copy_and_save_give_the_merged_model(model: LanguageModel, tmp_path: Path) -> None:
    adapted = learnt(model)
    plain = adapted.copy()
    assert type(plain) is LanguageModel
    assert plain.fingerprint() == adapted.fingerprint()
    assert list(plain.weights()) == list(model.weights())
    assert all(parameter.requires_grad for parameter in plain.module.parameters())
    adapted.save(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    with open_model(ModelSection(source=str(tmp_path)), torch.device("cpu")) as opened:
        assert opened.fingerprint() == adapted.fingerprint()
    plain.close()
    adapted.adapter()  # what was copied is not what it was copied from


def test_a_layer_that_is_tied_to_another_is_refused() -> None:
    model = small_model()
    layers = model.module.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(ConfigurationError, match="would change only one of them"):
        attach_adapters(model, RANK, ALPHA, 0)
