"""One forward pass over rows that begin alike: what they have in common is computed once, without padding.

All parts of a transformer except attention work on single tokens, so packing does not affect them. In attention, each
segment of the rows' trie (pvg.models.packing.Trie) attends to those before it and itself, with gradients.

Invariant: the hidden states equal those of the same rows in a padded batch. A model for which they differ (tokens that
interact outside of attention, a custom attention) is refused, never computed wrongly."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from pvg.errors import ConfigurationError
from pvg.models.adapters import Adapted, adapted, silu_gradients
from pvg.models.compute import explained, product, product_dtype, product_tolerance, projected
from pvg.models.packing import PackedRows, pack_rows, packed_attention, pad_right
from pvg.records import Int32

# The layers of Llama-like decoders on packed rows: norms, rotary embedding, gates and adapters in few operators.


# Exactly these types: a subclass may compute something else.
DECODERS = (LlamaModel, Qwen2Model, Qwen3Model)
Attend = Callable[[Tensor, Tensor, Tensor, int, float | None], Tensor]


def knows(decoder: nn.Module) -> bool:
    """Whether `fused_hidden` supports this decoder."""
    return type(decoder) in DECODERS


def fused_hidden(decoder: nn.Module, packed: PackedRows, *, last: bool = False) -> Tensor:
    """The last hidden states [T, D] of one of DECODERS. `last`: [E, D], of the rows' last tokens alone (`ends_E`): the
    last layer needs only keys and values of the others. Differentiable. Respects
    pvg.training.trainer.checkpoint_layers."""
    model = cast(Any, decoder)
    hidden_TD = model.embed_tokens(packed.ids_1T)[0]
    cos_1TE, sin_1TE = model.rotary_emb(hidden_TD, packed.positions_1T)
    how: dict[str, Any] = {"cos_TE": cos_1TE[0], "sin_TE": sin_1TE[0]}
    for layer in model.layers:
        only = last and layer is model.layers[-1]
        attend = partial(packed_attention, packed=packed, last=only)
        compute = partial(_layer, attend=attend, wanted_E=packed.ends_E if only else None)
        if layer.training and layer.gradient_checkpointing and torch.is_grad_enabled():
            hidden_TD = checkpoint(compute, layer, hidden_TD, use_reentrant=False, **how)
        else:
            hidden_TD = compute(layer, hidden_TD, **how)
    return _norm(model.norm, hidden_TD)


def _layer(
    layer: Any, hidden_TD: Tensor, *, cos_TE: Tensor, sin_TE: Tensor, attend: Attend, wanted_E: Tensor | None
) -> Tensor:
    """One layer: [T, D] -> [T, D]. `attend` maps queries, keys and values [T, E], the number of heads and the scaling
    to [T, E]. With `wanted_E`, only these tokens are computed: [E, D]. `attend` then returns [E, E]."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )
    low_rank = adapted(groups, product_dtype(hidden_TD))
    ways: list[Callable[..., tuple[Tensor, ...]]] = [partial(_plain, group) for group in groups]
    if low_rank is not None:
        ways = [partial(_adapted, group) for group in low_rank]
    project, project_back, widen, narrow = ways
    query_TE, key_TE, value_TE = project(hidden_TD, norm=layer.input_layernorm)
    if hasattr(attention, "q_norm"):  # Qwen3: of each head
        norms = (attention.q_norm, query_TE), (attention.k_norm, key_TE)
        query_TE, key_TE = (_norm(norm, x_TE.view(-1, attention.head_dim)).view_as(x_TE) for norm, x_TE in norms)
    query_TE, key_TE = (
        cast(Tensor, _Rotate.apply(each_TE, cos_TE, sin_TE))  # type: ignore[no-untyped-call]
        for each_TE in (query_TE, key_TE)
    )
    mixed_TE = attend(query_TE, key_TE, value_TE, query_TE.shape[1] // attention.head_dim, attention.scaling)
    if wanted_E is not None:
        hidden_TD = hidden_TD.index_select(0, wanted_E)
    hidden_TD = hidden_TD + project_back(mixed_TE)[0]
    gate_TI, up_TI = widen(hidden_TD, norm=layer.post_attention_layernorm)
    is_silu = isinstance(mlp.act_fn, SiLUActivation | nn.SiLU)
    return hidden_TD + (narrow(gate_TI, up_TI) if is_silu else narrow(mlp.act_fn(gate_TI) * up_TI))[0]


def _adapted(group: Adapted, x_TI: Tensor, up_TI: Tensor | None = None, norm: Any = None) -> tuple[Tensor, ...]:
    return group(x_TI if norm is None else _norm(norm, x_TI), up_TI)


def _norm(norm: Any, x_TI: Tensor) -> Tensor:
    how, weight = (x_TI.dtype, norm.variance_epsilon), norm.weight
    return cast(Tensor, _Linear.apply(how, x_TI.to(weight.dtype), None, weight)[0])  # type: ignore[no-untyped-call]


def _plain(
    layers: Sequence[nn.Module], x_TI: Tensor, up_TI: Tensor | None = None, norm: Any = None
) -> tuple[Tensor, ...]:
    """As pvg.models.adapters.Adapted, for layers without adapters. With `norm`, the input is its output instead."""
    if any(type(layer) is not nn.Linear for layer in layers):
        x_TI = x_TI if norm is None else norm(x_TI)
        return tuple(layer(x_TI if up_TI is None else silu(x_TI) * up_TI) for layer in layers)
    how = (product_dtype(x_TI), 0.0 if norm is None else norm.variance_epsilon)
    weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
    found = _Linear.apply(how, x_TI, up_TI, norm and norm.weight, *weights)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, ...]", found)


class _Linear(torch.autograd.Function):
    """y = h W^T + b of linear layers with one input h: silu(x) up, or the norm w n of x with n = x r and
    r = (mean x^2 + epsilon)^(-1/2), for which dx = r (w dh - n mean(w dh n)) and dw = sum of dh n, or x itself. Without
    layers, h.

    Neither h nor cast weights are kept, because the backward pass computes them again in little time, and n only in the
    precision of the products, as what enters them. It adds up what h gets from several layers as autograd does, to the
    same bits."""

    @staticmethod
    def forward(
        ctx: Any, how: Any, x_TI: Tensor, up_TI: Tensor | None, norm_I: Tensor | None, *weights: Any
    ) -> tuple[Tensor, ...]:
        (ctx.dtype, epsilon), ctx.wide, rate_T1 = how, x_TI.dtype, None
        if norm_I is not None:
            wide = x_TI.dtype if x_TI.dtype.itemsize > 2 else torch.float32
            length_T1 = torch.linalg.vector_norm(x_TI, dim=1, keepdim=True, dtype=wide)
            rate_T1 = length_T1.square_().div_(x_TI.shape[1]).add_(epsilon).rsqrt_()
            x_TI = (x_TI * rate_T1).to(x_TI.dtype)
            input_TI = (x_TI * norm_I).to(ctx.dtype)
        else:
            input_TI = (x_TI if up_TI is None else silu(x_TI) * up_TI).to(ctx.dtype)
        ctx.save_for_backward(x_TI if norm_I is None else x_TI.to(ctx.dtype), up_TI, norm_I, rate_T1, *weights)
        pairs = zip(weights[::2], weights[1::2], strict=True)
        found = [projected(input_TI, W.to(ctx.dtype), b if b is None else b.to(ctx.dtype)) for W, b in pairs]
        return tuple(found) if weights else (input_TI,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, up_TI, norm_I, rate_T1, *weights = ctx.saved_tensors
        x_TI, (_, wants_x, wants_up, wants_norm, *wanted) = x_TI.to(ctx.wide), ctx.needs_input_grad
        active_TI = None if up_TI is None else silu(x_TI)
        of_weights: list[Tensor | None] = [None] * len(weights)
        if any(wanted):
            input_TI = x_TI if norm_I is None else x_TI * norm_I
            input_TI = (input_TI if active_TI is None else active_TI * up_TI).to(ctx.dtype)
            for place in filter(wanted.__getitem__, range(len(weights))):
                grad = grads[place // 2]
                of_weights[place] = (grad.sum(0) if place % 2 else product(grad.t(), input_TI)).to(weights[place].dtype)
            del input_TI  # as wide as the layer: at the peak of memory each of them counts
        if not (wants_x or wants_up or wants_norm):
            return None, None, None, None, *of_weights
        grad_TI = grads[0]
        for place in reversed(range(len(weights) // 2)):
            part = product(grads[place], weights[2 * place].to(ctx.dtype)).to(x_TI.dtype)
            grad_TI = part if 2 * place + 2 == len(weights) else grad_TI.add_(part)
        if active_TI is not None:
            return None, *silu_gradients(grad_TI, x_TI, up_TI, active_TI), None, *of_weights
        if norm_I is None:
            return None, grad_TI, None, None, *of_weights
        product_TI = grad_TI * x_TI
        if wants_x:
            means_T1 = (product_TI @ norm_I)[:, None] / x_TI.shape[1]
            grad_TI = (grad_TI * norm_I).addcmul_(x_TI, means_T1, value=-1.0).mul_(rate_T1)
        return None, grad_TI if wants_x else None, None, product_TI.sum(0) if wants_norm else None, *of_weights


class _Rotate(torch.autograd.Function):
    """The rotary embedding of each head of [T, E]. Dimension s of a head's first half and dimension s of its second
    half are rotated as a plane. The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, cos_TS: Tensor, sin_TS: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TS, sin_TS)
        ctx.dtype = x_TE.dtype
        return _rotated(x_TE, cos_TS, sin_TS, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None, None]:
        cos_TS, sin_TS = ctx.saved_tensors
        return _rotated(grad_TE, cos_TS, sin_TS, -1.0).to(ctx.dtype), None, None


def _rotated(x_TE: Tensor, cos_TS: Tensor, sin_TS: Tensor, sign: float) -> Tensor:
    size = cos_TS.shape[1]
    half = size // 2
    x_THS = x_TE.reshape(len(x_TE), -1, size)
    cos_T1S, sin_T1S = cos_TS[:, None], sin_TS[:, None]
    turned_THS = x_THS * cos_T1S
    turned_THS[..., :half].addcmul_(x_THS[..., half:], sin_T1S[..., :half], value=-sign)
    turned_THS[..., half:].addcmul_(x_THS[..., :half], sin_T1S[..., half:], value=sign)
    return turned_THS.flatten(1)


# The name under which transformers finds the attention of packed rows.
ATTENTION = "pvg_shared_prompts"
REMEDY = "Set training.shared_prompts = false."
# Largest difference between a packed row and the same row alone, relative to the largest hidden state. In 16 bits, of
# a shallow model (pvg.models.compute.product_tolerance).
_TOLERANCE_FLOAT32 = 1e-4
_TOLERANCE_BFLOAT16 = 5e-2
TURNS_ALIKE = 1e-2  # difference of cosines and sines; products of TF32 round them
# The check takes tokens from all over the vocabulary (the stride is prime). A vocabulary often begins with special
# tokens that are hardly trained; after them, rounding to bfloat16 alone moved SmolLM2's hidden states by a fifth.
PLACES_APART = 7919
# Set on a module after the check, with the ways (fused or not) that passed. So each is checked only once.
_CHECKED = "_pvg_shared_prompts_checked"


def trust_packing(module: nn.Module) -> None:
    """Let `check_packing` pass without a look."""
    module.__dict__[_CHECKED] = {False, True}


def packed_hidden(module: nn.Module, packed: PackedRows, fused_layers: bool) -> Tensor:
    """The decoder's last hidden states [T, D], one per token of `packed`. Differentiable.

    `fused_layers`: use the fused layers above if they fit the model. Raises ConfigurationError for a model that cannot
    compute packed rows.
    """
    check_packing(module, fused_layers)
    check_window(module, packed.longest)
    return _hidden(module, packed, fused_layers)


def last_hidden(module: nn.Module, ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor:
    """The decoder's last hidden state of each row's last token, [B, D]. Rows are padded on the right, and on the CPU;
    what they have in common is computed once. Differentiable. No row is longer than `longest_packed`."""
    # Packed rows lack their last token, so each gets one more. The last token that counts belongs to the completion.
    rows = [np.append(row, np.int32(0)) for row in rows_of(ids_BL, lengths_B)]
    device = next(module.parameters()).device
    packed = pack_rows(rows, torch.minimum(prompt_lengths_B, lengths_B - 1).numpy(), device)
    return hidden_of_ends(module, packed, shorter=device.type == "cpu")


def hidden_of_ends(module: nn.Module, packed: PackedRows, *, shorter: bool) -> Tensor:
    """`last_hidden` of packed rows. `shorter`: the last layer computes the last tokens alone, if it is known. On a GPU,
    that was not measured."""
    decoder = cast(Any, module).get_decoder()
    if shorter and knows(decoder):
        hidden_ED = fused_hidden(decoder, packed, last=True)
    else:
        hidden_ED = _hidden(module, packed, fused_layers=True).index_select(0, packed.ends_E)
    return hidden_ED.index_select(0, packed.places_N)


def rows_of(ids_BL: Tensor, lengths_B: Tensor) -> list[Int32]:
    """The rows that `pad_right` has padded, on the CPU."""
    ids = ids_BL.numpy().astype(np.int32)
    return [row[:length] for row, length in zip(ids, lengths_B.tolist(), strict=True)]


def _hidden(module: nn.Module, packed: PackedRows, fused_layers: bool) -> Tensor:
    model = cast(Any, module)
    if fused_layers and knows(model.get_decoder()):
        return fused_hidden(model.get_decoder(), packed)
    with _attention(model.config.get_text_config(), ATTENTION):
        output = model.get_decoder()(
            input_ids=packed.ids_1T, position_ids=packed.positions_1T, use_cache=False, packed_rows=packed
        )
    return cast(Tensor, output.last_hidden_state[0])


def same_attention(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for the two forward passes of a checkpointed layer of `module`. The second runs in the backward pass,
    when the model's attention is no longer that of packed rows."""
    model = cast(Any, module if hasattr(module, "config") else module.backbone)  # a verifier has one
    config = model.config.get_text_config()
    return nullcontext(), _attention(config, config._attn_implementation)


@contextmanager
def _attention(config: Any, name: str) -> Iterator[None]:
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention_of_packed(
    module: nn.Module,
    query_1HTE: Tensor,
    key_1KTE: Tensor,
    value_1KTE: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in each layer: [1, heads, T, head size] in, [1, T, heads, head size] out. Some models do
    not hand `packed_rows` on to their layers. A mask here is the layer's own, perhaps with weights that are still 0."""
    if packed_rows is None or attention_mask is not None:
        raise ConfigurationError(f"{type(module).__name__} cannot compute rows that share a prompt.", REMEDY)
    heads, tokens, size = query_1HTE.shape[1:]
    query_TE, key_TE, value_TE = (tensor[0].transpose(0, 1).flatten(1) for tensor in (query_1HTE, key_1KTE, value_1KTE))
    mixed_TE = packed_attention(query_TE, key_TE, value_TE, heads, scaling, packed_rows)
    return mixed_TE.view(1, tokens, heads, size), None


AttentionInterface.register(ATTENTION, _attention_of_packed)


def check_packing(module: nn.Module, fused_layers: bool = True) -> None:
    """Check once per `module` and way whether packed rows get the hidden states that they have alone. Raises
    ConfigurationError if not."""
    if fused_layers in module.__dict__.get(_CHECKED, ()):
        return
    model = cast(Any, module)
    name = type(module).__name__
    if getattr(model.config.get_text_config(), "_attn_implementation", None) != "sdpa":
        raise ConfigurationError(f"{name} has a custom attention, which cannot share prompts.", REMEDY)
    weight = model.get_input_embeddings().weight
    ids = _tokens(module, 11)
    rows = [ids[:8], np.concatenate([ids[:3], ids[7:]]), ids[2:6]]  # two rows share a prompt of three tokens
    modes = [(part, part.training) for part in module.modules()]
    module.eval()  # with dropout the two forward passes would differ
    packed = pack_rows(rows, np.array([3, 3, 2]), weight.device)
    # An error in pvg's own layers is a defect of pvg, and no reason to train without them.
    own = fused_layers and knows(model.get_decoder())
    try:
        with (
            torch.no_grad(),
            nullcontext() if own else explained(f"{name} cannot compute rows that share a prompt", REMEDY),
        ):
            found_TD = _hidden(module, packed, fused_layers)
            hidden = [_hidden_of(module, [row]) for row in rows]
    finally:
        for part, training in modes:
            part.training = training
    expected_TD = torch.cat([hidden[0][:3], hidden[2][:2], hidden[0][3:-1], hidden[1][3:-1], hidden[2][2:-1]])
    if not _alike(module, found_TD.float(), expected_TD):
        raise ConfigurationError(f"{name} cannot compute rows that share a prompt.", REMEDY)
    module.__dict__.setdefault(_CHECKED, set()).add(fused_layers)


def check_window(module: nn.Module, longest: int) -> None:
    """Raises ConfigurationError for rows that are longer than a layer's window: packed attention sees whole rows."""
    for name, window in _numbers(module, WINDOW):
        if longest > window:
            raise ConfigurationError(
                f"A row of {longest} tokens is longer than {type(module).__name__}'s {name} of {window}, which shared "
                "prompts do not support.",
                REMEDY,
            )


def longest_packed(module: nn.Module) -> int:
    """The most tokens of a packed row that `module` computes as alone; 0 if it cannot compute packed rows."""
    try:
        check_packing(module)
    except ConfigurationError:
        return 0
    return longest_by_structure(module)


def longest_by_structure(module: nn.Module) -> int:
    """As `longest_packed`, but without a look at numbers: for models without weights too."""
    model = cast(Any, module)
    config = model.config.get_text_config()
    mixes = "linear_attention" in (getattr(config, "layer_types", None) or ())
    if mixes or config._attn_implementation != "sdpa" or any(isinstance(part, nn.Conv1d) for part in module.modules()):
        return 0
    return min((window for _, window in _numbers(module, WINDOW)), default=sys.maxsize)


# Names of settings with a number of tokens after which a layer computes something else.
WINDOW = re.compile("(window|window_size|chunk_size|local_attention)$")
CHANGES = re.compile(f"{WINDOW.pattern}|original_max_position")
SHORT, ROW = 2, 4  # tokens of the rows that are always tried


def longest_tried(module: nn.Module, longest: int) -> int:
    """The tokens of a long row that shows whether others depend on it. `longest` if the model's configuration has a
    smaller number of tokens at which something changes, otherwise a few."""
    return longest if any(number < longest for _, number in _numbers(module, CHANGES)) else ROW


def check_rows(module: nn.Module, longest: int, max_tokens: int, key: str) -> None:
    """Raises ConfigurationError unless a row has the same hidden states with eager attention, and beside a row of
    `longest` tokens. With some rotary embeddings, all positions of a batch depend on its
    longest row. Long rows are computed only for a model whose configuration has a smaller number for such a change.

    `longest`: the most tokens of prompt and completion of the model `key`, of which `max_tokens` are
    rollout.max_tokens."""
    model, name = cast(Any, module), type(module).__name__
    config = model.config.get_text_config()
    with torch.no_grad(), explained(f"{name} gives pvg no hidden states", "Choose another model."):
        short, long = (_tokens(module, count) for count in (SHORT, ROW))
        with _attention(config, "eager"):
            eager = _hidden_of(module, [long])
        if not _alike(module, eager, _hidden_of(module, [long])):
            raise ConfigurationError(
                f"{name} computes other numbers with the attention 'sdpa', which pvg uses, than with 'eager'.",
                "Choose another model.",
            )
        limits = [number for _, number in _numbers(module, CHANGES) if number < longest]
        if _is_alone(module, short, _tokens(module, longest_tried(module, longest))):
            return
        safe = max((n for n in [ROW, *limits] if _is_alone(module, short, _tokens(module, n))), default=0)
    fits, beside = max_tokens - longest + safe, f"a row of more than {safe} tokens" if safe else "a longer row"
    raise ConfigurationError(
        f"{key}: {name} computes other numbers for a row when {beside} is in the same batch, "
        f"and a row may have {longest} tokens.",
        f"Set rollout.max_tokens to at most {fits}, or choose another model." if fits > 0 else "Choose another model.",
    )


def _is_alone(module: nn.Module, short: Int32, long: Int32) -> bool:
    """Whether the short row has the same hidden states and rotations alone and beside the long one."""
    turns: list[list[Tensor]] = []

    def look(part: nn.Module, _inputs: Any, output: Any) -> None:
        if any("inv_freq" in name for name, _ in part.named_buffers(recurse=False)):
            turns[-1].extend(
                each[:1, :SHORT].float() for each in output if isinstance(each, Tensor) and each.dim() == 3
            )

    found = []
    with register_module_forward_hook(look):
        for rows in ([short], [short, long]):
            turns.append([])
            found.append(_hidden_of(module, rows))
    same = all(torch.allclose(one, other, atol=TURNS_ALIKE) for one, other in zip(*turns, strict=True))
    return same and _alike(module, *found)


def _hidden_of(module: nn.Module, rows: Sequence[Int32]) -> Tensor:
    """The last hidden states [T, D] of the first of the rows, which are padded."""
    ids_BL, _ = pad_right(rows, 0, cast(Any, module).get_input_embeddings().weight.device)
    output = cast(Any, module).get_decoder()(input_ids=ids_BL, use_cache=False)
    return cast(Tensor, output.last_hidden_state[0, : len(rows[0])]).float()


def _tokens(module: nn.Module, count: int) -> Int32:
    places = np.arange(1, count + 1) * PLACES_APART
    ids: Int32 = (places % cast(Any, module).get_input_embeddings().weight.shape[0]).astype(np.int32)
    return ids


def _alike(module: nn.Module, found_TD: Tensor, expected_TD: Tensor) -> bool:
    model = cast(Any, module)
    layers = model.config.get_text_config().num_hidden_layers
    weight = model.get_input_embeddings().weight
    tolerance = product_tolerance(weight, _TOLERANCE_FLOAT32, _TOLERANCE_BFLOAT16, layers)
    return bool((found_TD - expected_TD).abs().max() <= tolerance * expected_TD.abs().max())


def _numbers(module: nn.Module, names: re.Pattern[str]) -> list[tuple[str, int]]:
    """The settings of the model's configuration with such names and a number of tokens; 0 and None are no number."""
    config = vars(cast(Any, module).config.get_text_config())
    if set(config.get("layer_types") or ()) == {"full_attention"}:
        config = {key: value for key, value in config.items() if not WINDOW.search(key)}
    found, places = [], [config]
    while places:
        place = places.pop()
        places += [value for value in place.values() if isinstance(value, dict)]
        found += [
            (key, value) for key, value in place.items() if names.search(str(key)) and type(value) is int and value
        ]
    return sorted(found)
