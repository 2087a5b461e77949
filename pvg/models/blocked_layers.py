"""Layers of Llama-like decoders on a CPU in float32, in blocks of tokens, with oneDNN where its products are faster.

Each layer is two functions around attention:

    project   norm, queries, keys and values in one matrix product, rotary embedding
    finish    output projection, norm, gate and up in one matrix product, SwiGLU, down projection, both residual sums

On small models a step over all tokens at once is bound by memory: each elementwise pass writes more than a core's cache
holds, and the next pass reads it back. The intermediates of a block of tokens stay in the cache, and only what the
backward pass needs is kept. The backward pass is written out: per block it recomputes cheap parts (norms, silu) and
accumulates the weights' gradients inside the matrix product.

    normal = x r, r = (mean x^2 + epsilon)^(-1/2);  a linear layer W after a norm of weight w is (W w) normal
    dx = r (dn - normal mean(dn normal)),  dW = d(Ww) w,  dw = sum over W's rows of d(Ww) W

The rotary embedding rotates a head's dimensions s and s + S/2 as a complex number. To make these adjacent, the rows of
the query and key matrices are sorted by pairs, which changes no product of a query and a key.

`why_not` gives the limits: plain float32 linear layers on the CPU up to a width of 256. pvg.models.fused_layers
computes other models.

Matrix products: torch uses MKL, which is slower on AMD processors with AVX-512. On such an EPYC, oneDNN computes a
linear layer forward and backward 1.5 to 1.9 times as fast in one thread and 0.9 to 1.7 times in two, with the smallest
gain for the smallest sizes (`python benchmarks/products.py`, docs/products-avx512-threads-*.json). On an EPYC that has
AVX2 alone, it is 0.7 to 0.8 times as fast as MKL in one thread and 0.6 to 0.8 times in two
(docs/products-avx2-threads-*.json). There, and on Intel processors, MKL is used. `BY_ONEDNN` depends only on the
processor, so runs repeat bit by bit. The `trainer` benchmark profile measures blocks and oneDNN together: on the EPYC
with AVX-512, whole steps gain 1.05x (0.98 to 1.13), which is not significant.

oneDNN compiles a kernel for each shape and keeps some megabytes for it. So it only gets blocks of exactly ROWS rows,
and MKL gets the rest. A model then has a dozen shapes, not one for every number of tokens. The oneDNN operator is the
one that torch.compile uses for a linear layer. It has no gradient and no output buffer, so only autograd functions with
their own backward pass can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from pvg.telemetry.processor import vendor

ROWS = 512  # small enough for a cache, large enough that the cost of a call is small


def _is_wider() -> bool:
    """Whether oneDNN is available and the processor is one on which MKL is slower."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return built and wide and hasattr(torch.ops.mkldnn, "_linear_pointwise") and vendor() == "AuthenticAMD"


BY_ONEDNN = _is_wider()


def in_blocks(wanted: bool | None) -> bool:
    """Whether to compute layers in blocks: the setting `training.blocked_layers`; None: where oneDNN
    is used."""
    return BY_ONEDNN if wanted is None else wanted


def product(x_BD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, out_BF: Tensor) -> Tensor:
    """Compute x W' + b into `out_BF`."""
    if _is_block(x_BD):
        return out_BF.copy_(_onednn(x_BD, weight_FD, bias_F))
    if bias_F is None:
        return torch.mm(x_BD, weight_FD.t(), out=out_BF)
    return torch.addmm(bias_F, x_BD, weight_FD.t(), out=out_BF)


def added_product(added_BF: Tensor, x_BD: Tensor, weight_FD: Tensor, out_BF: Tensor) -> Tensor:
    """Compute `added_BF` + x W' into `out_BF`."""
    if _is_block(x_BD):
        return torch.add(added_BF, _onednn(x_BD, weight_FD), out=out_BF)
    return torch.addmm(added_BF, x_BD, weight_FD.t(), out=out_BF)


def input_gradient(grad_BF: Tensor, weight_FD: Tensor, out_BD: Tensor) -> Tensor:
    """Compute dx = dy W, for y = x W', into `out_BD`."""
    if _is_block(grad_BF):
        return out_BD.copy_(_onednn(grad_BF, weight_FD.t()))
    return torch.mm(grad_BF, weight_FD, out=out_BD)


def add_weight_gradient(sum_FD: Tensor, grad_BF: Tensor, x_BD: Tensor) -> None:
    """Add dW = dy' x to `sum_FD`."""
    if not _is_block(x_BD):
        sum_FD.addmm_(grad_BF.t(), x_BD)
    elif grad_BF.shape[1] <= x_BD.shape[1]:
        sum_FD.add_(_onednn(grad_BF.t(), x_BD.t()))
    else:  # oneDNN is faster if the first matrix has fewer rows
        sum_FD.add_(_onednn(x_BD.t(), grad_BF.t()).t())


def _is_block(x_BD: Tensor) -> bool:
    return BY_ONEDNN and len(x_BD) == ROWS


def _onednn(x_BD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x_BD, weight_FD, bias_F, "none", [], "")
    return found


# --- layers ----------------------------------------------------------------------------------------------------------

# Memory for a block's widest intermediate: fits in the 2 MB second-level caches of two cores. Larger blocks are a tenth
# slower; smaller ones synchronize the threads more often, and below 200 tokens the matrix products get slower.
BLOCK_BYTES = 3 << 20
LEAST_BLOCK = 256
# In wider models matrix products take nearly all the time, and joining the matrices costs more than blocks save: at a
# width of 576 with 630 tokens, a step took a twelfth longer.
WIDEST = 256

Attend = Callable[[Tensor, Tensor, Tensor, int, float | None], Tensor]


def why_not(decoder: nn.Module) -> str | None:
    """Why blocks cannot compute the layers of this decoder (one of fused_layers.DECODERS); None if they can."""
    return next(_reasons(cast(Any, decoder)), None)


def _reasons(decoder: Any) -> Iterator[str]:
    weight = decoder.embed_tokens.weight
    if weight.device.type != "cpu":
        yield f"its weights are on {weight.device.type}, but blocks are for CPUs"
    if weight.shape[1] > WIDEST:
        yield f"its width of {weight.shape[1]} is above {WIDEST}"
    if torch.is_autocast_enabled("cpu"):
        yield "it computes under autocast"
    for layer in decoder.layers:
        for part in linears_of(layer):
            if type(part) is not nn.Linear:
                yield f"its layers hold a {type(part).__name__} of {type(part).__module__.split('.')[0]}"
            elif part.weight.dtype != torch.float32:
                yield f"it computes in {part.weight.dtype}"
        if layer.mlp.act_fn(torch.ones(1)) != silu(torch.ones(1)):
            yield "its activation is not silu"


def blocked_layer(
    layer: Any, hidden_TD: Tensor, turns_TP: Tensor, attend: Attend, wanted_N: Tensor | None = None
) -> Tensor:
    """One layer: [T, D] -> [T, D]. `turns_TP` complex [T, S/2]: factors of the rotary embedding (`turns_of`). `attend`
    maps queries, keys and values [T, E], the number of heads and the scaling to [T, E].

    With `wanted_N`, only these tokens are computed: [N, D]. `attend` then returns [N, E].
    """
    attention, mlp = layer.self_attn, layer.mlp
    query_TE, key_TE, value_TE = _Project.apply(  # type: ignore[no-untyped-call]
        hidden_TD,
        turns_TP,
        layer.input_layernorm.variance_epsilon,
        layer.input_layernorm.weight,
        *_parameters(attention.q_proj, attention.k_proj, attention.v_proj),
    )
    heads = query_TE.shape[1] // attention.head_dim
    mixed_TE = attend(query_TE, key_TE, value_TE, heads, attention.scaling)
    if wanted_N is not None:
        hidden_TD = hidden_TD.index_select(0, wanted_N)
    found = _Finish.apply(  # type: ignore[no-untyped-call]
        hidden_TD,
        mixed_TE,
        layer.post_attention_layernorm.variance_epsilon,
        layer.post_attention_layernorm.weight,
        *_parameters(mlp.gate_proj, mlp.up_proj, attention.o_proj, mlp.down_proj),
    )
    return cast(Tensor, found)


def turns_of(cos_TS: Tensor, sin_TS: Tensor) -> Tensor:
    """transformers' tables, whose halves are equal, as complex factors [T, S/2]."""
    half = cos_TS.shape[1] // 2
    return torch.complex(cos_TS[:, :half].float(), sin_TS[:, :half].float())


class _Project(torch.autograd.Function):
    """x, turns -> rotated queries and keys (each head's dimensions in pairs), values."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, turns_TP: Tensor, epsilon: float, norm_D: Tensor, *linears: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = linears[0::2], linears[1::2]
        pairs = turns_TP.shape[1]
        weight_FD, bias_F = _joined(weights, biases, norm_D, pairs)
        tokens, sizes = len(x_TD), [len(cast(Tensor, weight)) for weight in weights]
        size, turned = block_size(weight_FD), sizes[0] + sizes[1]
        found_TF = x_TD.new_empty(tokens, len(weight_FD))
        rate_T1 = x_TD.new_empty(tokens, 1)
        normal = x_TD.new_empty(min(size, tokens), x_TD.shape[1])
        for x, turns, rate, out in _blocks(size, x_TD, turns_TP, rate_T1, found_TF):
            product(_normal(x, rate, epsilon, normal[: len(x)]), weight_FD, bias_F, out)
            _pairs(out[:, :turned], pairs).mul_(turns[:, None])
        ctx.save_for_backward(x_TD, turns_TP, rate_T1, norm_D, *linears)
        ctx.size = size
        return torch.split(found_TF, sizes, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, turns_TP, rate_T1, norm_D, *linears = ctx.saved_tensors
        weights, biases = linears[0::2], linears[1::2]
        pairs = turns_TP.shape[1]
        weight_FD, bias_F = _joined(weights, biases, norm_D, pairs)
        grad_FD, grad_F = torch.zeros_like(weight_FD), None if bias_F is None else torch.zeros_like(bias_F)
        sizes = [len(weight) for weight in weights]
        most = min(ctx.size, len(x_TD))
        grad_x_TD = torch.empty_like(x_TD)
        normal, grad_n = x_TD.new_empty(2, most, x_TD.shape[1])
        slope = x_TD.new_empty(most, len(weight_FD))
        for x, turns, rate, grad_x, *grads in _blocks(ctx.size, x_TD, turns_TP, rate_T1, grad_x_TD, *grads_TE):
            n, dn, df = normal[: len(x)], grad_n[: len(x)], slope[: len(x)]
            torch.mul(x, rate, out=n)
            back = turns.conj().resolve_conj()[:, None]
            query, key, value = torch.split(df, sizes, dim=1)
            for target, grad in ((query, grads[0]), (key, grads[1])):
                torch.mul(_pairs(grad, pairs), back, out=_pairs(target, pairs))
            value.copy_(grads[2])
            add_weight_gradient(grad_FD, df, n)
            if grad_F is not None:
                grad_F.add_(df.sum(0))
            _norm_backward(input_gradient(df, weight_FD, dn), n, rate, grad_x)
        grad_norm_D, grads_linears = _parted(grad_FD, grad_F, weights, biases, norm_D, pairs)
        return grad_x_TD, None, None, grad_norm_D, *grads_linears


class _Finish(torch.autograd.Function):
    """x and attention's output m -> h = x + O m, then h + D (silu(G n) U n), where n is the norm of h."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, mixed_TE: Tensor, epsilon: float, norm_D: Tensor, *linears: Tensor | None
    ) -> Tensor:
        weights, biases = linears[0::2], linears[1::2]
        weight_FD, bias_F = _joined(weights[:2], biases[:2], norm_D)
        out_DE, down_DI = cast(Sequence[Tensor], weights[2:])
        size, half = block_size(weight_FD), down_DI.shape[1]
        most, keeps = min(size, len(x_TD)), any(ctx.needs_input_grad)
        found_TD, rate_T1 = torch.empty_like(x_TD), x_TD.new_empty(len(x_TD), 1)
        middle_TD = torch.empty_like(x_TD) if keeps else None
        normal, scratch = x_TD.new_empty(most, x_TD.shape[1]), x_TD.new_empty(most, x_TD.shape[1])
        activated = x_TD.new_empty(most, half)
        kept: list[Tensor] = []
        for number, (x, mixed, rate, found) in enumerate(_blocks(size, x_TD, mixed_TE, rate_T1, found_TD)):
            rows = len(x)
            h = scratch[:rows] if middle_TD is None else middle_TD[number * size : number * size + rows]
            added_product(x, mixed, out_DE, h)
            if biases[2] is not None:
                h.add_(biases[2])
            if keeps or not kept or rows != len(kept[-1]):  # without a gradient, all blocks share one buffer
                kept.append(x_TD.new_empty(rows, len(weight_FD)))
            both = product(_normal(h, rate, epsilon, normal[:rows]), weight_FD, bias_F, kept[-1])
            gate, up = torch.split(both, half, dim=1)
            inner = torch.ops.aten.silu.out(gate, out=activated[:rows]).mul_(up)
            added_product(h, inner, down_DI, found)
            if biases[3] is not None:
                found.add_(biases[3])
        if keeps:
            ctx.save_for_backward(mixed_TE, middle_TD, rate_T1, norm_D, *linears, *kept)
            ctx.size = size
        return found_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        mixed_TE, middle_TD, rate_T1, norm_D, *others = ctx.saved_tensors
        linears, kept = others[:8], others[8:]
        weights, biases = linears[0::2], linears[1::2]
        weight_FD, bias_F = _joined(weights[:2], biases[:2], norm_D)
        out_DE, down_DI = weights[2:]
        half, (tokens, width) = down_DI.shape[1], middle_TD.shape
        most = min(ctx.size, tokens)
        grad_FD, grad_out_DE, grad_down_DI = map(torch.zeros_like, (weight_FD, out_DE, down_DI))
        grad_F, grad_out_D, grad_down_D = (
            None if bias is None else torch.zeros_like(bias) for bias in (bias_F, *biases[2:])
        )
        grad_x_TD, grad_mixed_TE = torch.empty_like(middle_TD), torch.empty_like(mixed_TE)
        normal, grad_n = middle_TD.new_empty(2, most, width)
        activated, multiplied, grad_inner = middle_TD.new_empty(3, most, half)
        slope = middle_TD.new_empty(most, 2 * half)
        blocks = _blocks(ctx.size, grad_TD.contiguous(), mixed_TE, middle_TD, rate_T1, grad_x_TD, grad_mixed_TE)
        for (grad, mixed, h, rate, grad_x, grad_mixed), both in zip(blocks, kept, strict=True):
            rows = len(grad)
            n, dn, df, a, p, di = (
                buffer[:rows] for buffer in (normal, grad_n, slope, activated, multiplied, grad_inner)
            )
            gate, up = torch.split(both, half, dim=1)
            grad_gate, grad_up = torch.split(df, half, dim=1)
            torch.ops.aten.silu.out(gate, out=a)
            add_weight_gradient(grad_down_DI, grad, torch.mul(a, up, out=p))
            input_gradient(grad, down_DI, di)
            torch.mul(di, a, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(di.mul_(up), gate, grad_input=grad_gate)
            add_weight_gradient(grad_FD, df, torch.mul(h, rate, out=n))
            _norm_backward(input_gradient(df, weight_FD, dn), n, rate, grad_x).add_(grad)
            add_weight_gradient(grad_out_DE, grad_x, mixed)
            input_gradient(grad_x, out_DE, grad_mixed)
            for target, source in ((grad_F, df), (grad_out_D, grad_x), (grad_down_D, grad)):
                if target is not None:
                    target.add_(source.sum(0))
        grad_norm_D, grads_linears = _parted(grad_FD, grad_F, weights[:2], biases[:2], norm_D)
        grads_linears += [grad_out_DE, grad_out_D, grad_down_DI, grad_down_D]
        return grad_x_TD, grad_mixed_TE, None, grad_norm_D, *grads_linears


# --- shared parts ----------------------------------------------------------------------------------------------------


def linears_of(layer: Any) -> list[nn.Module]:
    """The linear parts of a transformer layer: queries, keys, values, output, gate, up, down."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*parts, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _parameters(*linears: Any) -> list[Tensor | None]:
    return [parameter for linear in linears for parameter in (linear.weight, linear.bias)]


def block_size(weight_FD: Tensor) -> int:
    """Tokens per block for a product with F outputs per token."""
    if BY_ONEDNN:
        return ROWS
    return max(LEAST_BLOCK, BLOCK_BYTES // (len(weight_FD) * weight_FD.element_size()))


def _blocks(size: int, *tensors: Tensor) -> Any:
    """The blocks of several tensors of T tokens, in parallel."""
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def _normal(x_BD: Tensor, rate_B1: Tensor, epsilon: float, out_BD: Tensor) -> Tensor:
    torch.linalg.vector_norm(x_BD, dim=1, keepdim=True, out=rate_B1)
    rate_B1.square_().div_(x_BD.shape[1]).add_(epsilon).rsqrt_()
    return torch.mul(x_BD, rate_B1, out=out_BD)


def _norm_backward(grad_n_BD: Tensor, normal_BD: Tensor, rate_B1: Tensor, out_BD: Tensor) -> Tensor:
    """Compute r (dn - n mean(dn n)) into `out_BD`; changes no other tensor."""
    torch.mul(grad_n_BD, normal_BD, out=out_BD)
    mean_B1 = out_BD.sum(1, keepdim=True).div_(-normal_BD.shape[1])
    return torch.addcmul(grad_n_BD, normal_BD, mean_B1, out=out_BD).mul_(rate_B1)


def _pairs(flat_BE: Tensor, pairs: int) -> Tensor:
    """Heads of `pairs` pairs each, as complex numbers: [B, heads, pairs]."""
    return torch.view_as_complex(torch.unflatten(flat_BE, 1, (-1, pairs, 2)))


def _joined(
    weights: Sequence[Tensor | None], biases: Sequence[Tensor | None], norm_D: Tensor, pairs: int = 0
) -> tuple[Tensor, Tensor | None]:
    """The matrices stacked and multiplied by the norm's weight; with `pairs`, the first two sorted by pairs."""
    rows = [_sorted(cast(Tensor, weight), pairs if place < 2 else 0) for place, weight in enumerate(weights)]
    joined = torch.cat(rows).mul_(norm_D)
    if all(bias is None for bias in biases):
        return joined, None
    values = [
        weight.new_zeros(len(weight)) if bias is None else _sorted(bias, pairs if place < 2 else 0)
        for place, (weight, bias) in enumerate(zip(rows, biases, strict=True))
    ]
    return joined, torch.cat(values)


def _parted(
    grad_FD: Tensor,
    grad_F: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_D: Tensor,
    pairs: int = 0,
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of the norm's weight, and of each matrix and bias that `_joined` stacked."""
    sizes = [len(weight) for weight in weights]
    parts_F = [None] * len(sizes) if grad_F is None else list(torch.split(grad_F, sizes))
    grad_norm_D = torch.zeros_like(norm_D)
    found: list[Tensor | None] = []
    for place, (weight, bias, part, part_F) in enumerate(
        zip(weights, biases, torch.split(grad_FD, sizes), parts_F, strict=True)
    ):
        grad = _unsorted(part, pairs if place < 2 else 0)
        grad_norm_D += (grad * weight).sum(0)
        found.append(grad * norm_D)
        found.append(None if bias is None or part_F is None else _unsorted(part_F, pairs if place < 2 else 0))
    return grad_norm_D, found


def _sorted(rows: Tensor, pairs: int) -> Tensor:
    """Make the rows s and s + pairs of each head adjacent."""
    return rows if not pairs else torch.unflatten(rows, 0, (-1, 2, pairs)).transpose(1, 2).flatten(0, 2)


def _unsorted(rows: Tensor, pairs: int) -> Tensor:
    return rows if not pairs else torch.unflatten(rows, 0, (-1, pairs, 2)).transpose(1, 2).flatten(0, 2)
