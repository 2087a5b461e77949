"""One forward pass over rows that share prompts: each distinct prompt is computed once, without padding.

The tokens of a batch form one long row: the distinct prompts, then the completions. All parts of a transformer except
attention work on single tokens, so packing does not affect them. In attention, prompts attend to themselves, and each
completion attends to its prompt and itself, with gradients.

    packed = pack_rows(sequences, prompt_lengths, device)
    hidden_TD = packed_hidden(module, packed, fused_layers)

Invariant: the hidden states equal those of the same rows in a padded batch. A model for which they differ (tokens that
interact outside of attention, a custom attention) is refused, never computed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pvg.errors import ConfigurationError
from pvg.models.compute import product_tolerance
from pvg.models.fused_layers import fused_hidden, knows
from pvg.models.packing import PackedRows, pack_rows, packed_attention

# The name under which transformers finds the attention of packed rows.
ATTENTION = "pvg_shared_prompts"
REMEDY = "Set training.shared_prompts = false."
# Largest difference between a packed row and the same row alone, relative to the largest hidden state. In 16 bits, of
# a shallow model (pvg.models.compute.product_tolerance).
_TOLERANCE_FLOAT32 = 1e-4
_TOLERANCE_BFLOAT16 = 5e-2
# The check takes tokens from all over the vocabulary (the stride is prime). A vocabulary often begins with special
# tokens that are hardly trained; after them, rounding to bfloat16 alone moved SmolLM2's hidden states by a fifth.
PLACES_APART = 7919
# Set on a module after the check, with the ways (fused or not) that passed. So each is checked only once.
_CHECKED = "_pvg_shared_prompts_checked"


def packed_hidden(module: nn.Module, packed: PackedRows, fused_layers: bool) -> Tensor:
    """The decoder's last hidden states [T, D], one per token of `packed`. Differentiable.

    `fused_layers`: use pvg.models.fused_layers if it knows the model. Raises ConfigurationError for a model that cannot
    compute packed rows.
    """
    check_packing(module, fused_layers)
    _check_window(module, int(packed.lengths_N.max()))
    return _hidden(module, packed, fused_layers)


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
    if not hasattr(module, "config"):  # a verifier, whose rows are never packed
        return nullcontext(), nullcontext()
    config = cast(Any, module).config.get_text_config()
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
    not hand `packed_rows` on to their layers."""
    if packed_rows is None:
        raise ConfigurationError(f"{type(module).__name__} cannot compute rows that share a prompt.", REMEDY)
    heads, tokens, size = query_1HTE.shape[1:]
    query_TE, key_TE, value_TE = (tensor[0].transpose(0, 1).flatten(1) for tensor in (query_1HTE, key_1KTE, value_1KTE))
    mixed_TE = packed_attention(query_TE, key_TE, value_TE, heads, scaling, packed_rows)
    return mixed_TE.view(1, tokens, heads, size), None


AttentionInterface.register(ATTENTION, _attention_of_packed)


def check_packing(module: nn.Module, fused_layers: bool) -> None:
    """Check once per `module` and way whether packed rows get the hidden states that they have alone. Raises
    ConfigurationError if not."""
    if fused_layers in module.__dict__.get(_CHECKED, ()):
        return
    model = cast(Any, module)
    name = type(module).__name__
    if getattr(model.config.get_text_config(), "_attn_implementation", None) != "sdpa":
        raise ConfigurationError(f"{name} has a custom attention, which cannot share prompts.", REMEDY)
    weight = model.get_input_embeddings().weight
    ids = (np.arange(1, 12) * PLACES_APART % weight.shape[0]).astype(np.int32)
    rows = [ids[:8], np.concatenate([ids[:3], ids[7:]]), ids[2:6]]  # two rows share a prompt of three tokens
    modes = [(part, part.training) for part in module.modules()]
    module.eval()  # with dropout the two forward passes would differ
    with torch.no_grad():
        packed = pack_rows(rows, np.array([3, 3, 2]), weight.device)
        found_TD = _hidden(module, packed, fused_layers)
        alone = [
            model.get_decoder()(input_ids=torch.from_numpy(row[None]).long().to(weight.device), use_cache=False)
            for row in rows
        ]
    for part, training in modes:
        part.training = training
    hidden = [output.last_hidden_state[0] for output in alone]
    expected_TD = torch.cat([hidden[0][:3], hidden[2][:2], hidden[0][3:-1], hidden[1][3:-1], hidden[2][2:-1]]).float()
    layers = model.config.get_text_config().num_hidden_layers
    tolerance = product_tolerance(weight, _TOLERANCE_FLOAT32, _TOLERANCE_BFLOAT16, layers)
    if not bool((found_TD.float() - expected_TD).abs().max() <= tolerance * expected_TD.abs().max()):
        raise ConfigurationError(f"{name} cannot compute rows that share a prompt.", REMEDY)
    module.__dict__.setdefault(_CHECKED, set()).add(fused_layers)


def _check_window(module: nn.Module, longest: int) -> None:
    """Refuse rows that are longer than a layer's window, because packed attention sees whole rows."""
    config = cast(Any, module).config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window and longest > window:  # Qwen2-MoE uses 0 for no window
            raise ConfigurationError(
                f"A row of {longest} tokens is longer than {type(module).__name__}'s {name} of {window}, which shared "
                "prompts do not support.",
                REMEDY,
            )
