"""Products of adapted layers against peft's, and what a layer costs: operators, and bytes saved per token."""

import itertools

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from pvg.models import packing
from pvg.models.adapters import adapted, attach_adapters
from pvg.models.language_model import LanguageModel
from pvg.models.packing import pack_rows
from pvg.models.shared_prompts import packed_hidden, trust_packing
from pvg.planning.memory import ModelShape, Pass, activations_of

pytestmark = pytest.mark.slow


def config(scale: int, layers: int) -> Qwen2Config:
    """The shape of Qwen2.5-1.5B, divided by `scale`."""
    sizes = {"hidden_size": 1536 // scale, "intermediate_size": 8960 // scale, "num_hidden_layers": layers}
    return Qwen2Config(**sizes, vocab_size=64, num_attention_heads=12, num_key_value_heads=2)


def decoder(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config(16, layers)).bfloat16()
    module = attach_adapters(LanguageModel(model, None, "tiny"), 16, 32.0, 0).module
    for name, weight in module.named_parameters():
        if "lora_B" in name or "bias" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return module.model.train()


def results(dtype: torch.dtype, own: bool) -> list[torch.Tensor]:
    """Results and all gradients of q, k, v with one input and of down with a gated one."""
    layer = decoder(1).to(dtype if dtype != torch.bfloat16 else None).layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    groups = ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.down_proj,))
    x, gate, up = inputs = [torch.randn(33, size).to(dtype).requires_grad_() for size in (96, 560, 560)]
    if own:
        project, narrow = adapted(groups, dtype)
        found = [*project(x), *narrow(gate, up)]
    else:
        found = [*(linear(x) for linear in groups[0]), mlp.down_proj(mlp.act_fn(gate) * up)]
    sum((each * torch.randn(each.shape).to(dtype)).sum() for each in found).backward()
    leaves = [*inputs, *(weight for weight in layer.parameters() if weight.grad is not None)]
    return [each.detach().double() for each in (*found, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_pefts_up_to_rounding(dtype: torch.dtype) -> None:
    exact = results(torch.float64, own=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):  # peft needs it for its matrices
        both = [results(dtype, own) for own in (True, False)]
    own, pefts = (
        np.array([float((each - want).norm() / want.norm()) for each, want in zip(found, exact, strict=True)])
        for found in both
    )
    assert len(own) == 4 + 3 + 2 * 4  # results, inputs, A and B
    assert (own < (1e-6 if dtype == torch.float32 else 1.05 * pefts)).all()


class Operators(TorchDispatchMode):
    """Counts those that compute: no views."""

    count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.count += not (operator.is_view or operator is torch.ops.aten.detach.default)
        return operator(*arguments, **(named or {}))


@pytest.mark.parametrize(("dtype", "before"), [("bfloat16", 106_024), ("float32", 112_168)])
def test_a_layer_saves_a_third_less(dtype: str, before: int) -> None:
    """`before`: with peft's own layers, which also saved copies of frozen float32 weights, 95 MB."""
    found = activations_of(ModelShape("1.5B", 28, 1536, 256, 64, 0, 0, config(1, 28)), Pass(dtype, "bfloat16", 16))
    print(f"\nweights in {dtype}: {found.layer:,.0f} bytes of a layer per token, {before:,} with peft's layers")
    assert found.layer <= 2 / 3 * before
    assert found.copies < 2e6


class AnyAttention(torch.autograd.Function):
    """Stands in for torch's kernel, with as many operators: one, and one for its gradients."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.shapes = [each.shape for each in inputs]
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        sizes = [shape.numel() for shape in ctx.shapes]
        parts = grad.new_zeros(sum(sizes)).split(sizes)
        return tuple(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_with_the_attention_of_a_gpu_a_layer_takes_at_most_half_of_the_operators_of_peft(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a group of eight rows with one prompt, in bfloat16."""

    def kernel(query, key, value, *starts, scale=None, window_size=None, enable_gqa=False):
        return AnyAttention.apply(query, key, value)

    monkeypatch.setattr(packing, "_kernel", lambda: kernel)
    rows = [np.append(np.arange(12), np.arange(row, row + 12)).astype(np.int32) for row in range(8)]
    packed = pack_rows(rows, np.full(8, 12), "cpu")
    counts: dict[bool, list[int]] = {True: [], False: []}
    for own, layers in itertools.product((True, False), (2, 3)):
        sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": layers}
        settings = getattr(transformers, f"{family}Config")(
            **sizes, hidden_size=96, intermediate_size=64, vocab_size=64
        )
        model = getattr(transformers, f"{family}ForCausalLM")(settings).bfloat16()
        module = attach_adapters(LanguageModel(model, None, "tiny"), 16, 32.0, 0).module.train()
        trust_packing(module)
        with Operators() as operators:
            with packing.attention_as_on_a_gpu(), torch.autocast("cpu", torch.bfloat16):
                hidden = packed_hidden(module, packed, fused_layers=own)
            hidden.sum().backward()
        counts[own].append(operators.count)
    fused, plain = (two[1] - two[0] for two in (counts[True], counts[False]))
    print(f"\n{family}: {fused} operators of a layer, {plain} with peft's layers")
    assert 0 < fused <= plain / 2
