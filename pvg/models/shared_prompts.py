"""One forward pass over rows that share prompts: every distinct prompt is computed once, and no padding at all.

The tokens of a batch become one long row: first the distinct prompts, then what follows them in each row. All of a
transformer but its attention works on single tokens, so that it does not notice. Attention is given its rows back: the
prompts see themselves, and each completion sees its own prompt's keys and values and itself, gradients included.

    packed = pack_rows(sequences, prompt_lengths, device)
    hidden_TD = packed_hidden(module, packed)

Invariant: the hidden states are those of the same rows in a padded batch. A model for which they are not (tokens that
meet outside of attention, an attention of its own) is refused, never computed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from pvg.errors import ConfigurationError
from pvg.models.padding import Rows, check_budget, counted, lengths_of
from pvg.records import Int32

# Under this name transformers finds the attention of packed rows.
ATTENTION = "pvg_shared_prompts"
REMEDY = "Set training.shared_prompts = false."
# How far a packed row may be from the same row alone, relative to the largest hidden state, by the kind of rounding.
_TOLERANCE_FLOAT32 = 1e-4
_TOLERANCE_BFLOAT16 = 5e-2
# Set on a module once its packed rows were found to be right, so that it is asked once and not on every call.
_CHECKED = "_pvg_shared_prompts_checked"


@dataclass(frozen=True, slots=True)
class PackedRows:
    """N rows with U distinct prompts as one row of T tokens: the prompts, then each row's completion but for its last
    token, which predicts nothing.

    `prompts` and `completions` say where the rows of either part begin and end; `prompt_of_N` is each row's prompt.
    `mask` is True where a completion token may look: [1 or N, 1, W, P + W], of the padded widths of both parts.

    The M completion tokens, each row's first ones before all others: `rows_M` and `columns_M` are their places in the
    padded rows, `targets_M` their ids. A row's first token is predicted by its prompt's last one, `lasts_R`, the others
    by the T's own completion tokens, in their order.
    """

    ids_1T: Tensor
    positions_1T: Tensor
    prompts: Rows
    completions: Rows
    prompt_of_N: Tensor
    mask: Tensor
    completion_tokens: int
    lengths_N: NDArray[np.int64]
    lasts_R: Tensor
    rows_M: Tensor
    columns_M: Tensor
    targets_M: Tensor


def pack_rows(sequences: Sequence[Int32], prompt_lengths: NDArray[Any], device: torch.device | str) -> PackedRows:
    """Rows of prompt + completion. Prompts are the same when their tokens are, whichever group they belong to."""
    lengths_N, starts_N = lengths_of(sequences), np.asarray(prompt_lengths, dtype=np.int64)
    prompt_of_N, prompts = distinct_prompts(sequences, starts_N)
    completions = [row[start:-1] for row, start in zip(sequences, starts_N, strict=True)]
    prompts_U = lengths_of(prompts)
    inner_N = np.maximum(lengths_N - starts_N - 1, 0)  # completion tokens that predict another one
    begun_R = np.flatnonzero(lengths_N > starts_N)
    rows_M = np.concatenate([begun_R, np.repeat(np.arange(len(sequences)), inner_N)])
    columns_M = np.concatenate([starts_N[begun_R], counted(inner_N, starts_N + 1)])
    before_N = np.cumsum(lengths_N) - lengths_N
    parts = {
        "ids_1T": np.concatenate([*prompts, *completions])[None],
        "positions_1T": counted(np.concatenate([prompts_U, inner_N]), np.append(0 * prompts_U, starts_N))[None],
        "prompt_of_N": prompt_of_N,
        "lasts_R": (np.cumsum(prompts_U) - 1)[prompt_of_N[begun_R]],
        "rows_M": rows_M,
        "columns_M": columns_M,
        "targets_M": np.concatenate(sequences)[before_N[rows_M] + columns_M],
    }
    return PackedRows(
        prompts=Rows.of(prompts_U, device),
        completions=Rows.of(inner_N, device),
        mask=_mask(prompts_U, prompt_of_N, int(inner_N.max())).to(device),
        completion_tokens=int(inner_N.sum()),
        lengths_N=lengths_N,
        **{name: torch.from_numpy(array.astype(np.int64)).to(device) for name, array in parts.items()},
    )


def distinct_prompts(sequences: Sequence[Int32], prompt_lengths: NDArray[Any]) -> tuple[NDArray[np.int64], list[Int32]]:
    """The number of each row's prompt, and the distinct prompts in the order in which they first come."""
    numbers: dict[bytes, int] = {}
    prompts: list[Int32] = []
    prompt_of_N = np.empty(len(sequences), dtype=np.int64)
    for row, (ids, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        key = ids[:length].tobytes()
        number = prompt_of_N[row] = numbers.setdefault(key, len(prompts))
        if number == len(prompts):
            prompts.append(ids[:length])
    return prompt_of_N, prompts


def shared_prompt_batches(
    prompt_of_N: NDArray[np.int64],
    prompt_lengths: NDArray[Any],
    lengths: NDArray[np.int64],
    budget: int,
    max_rows: int | None = None,
    *,
    by_length: bool = True,
) -> list[NDArray[np.int64]]:
    """Row numbers in batches of at most `max_rows` rows, in which distinct prompts x the longest of them + rows x the
    longest completion <= `budget`: what attention works on, padding included.

    Rows that share a prompt stand beside each other, those with the longest row first; with `by_length=False` all keep
    their order. The result depends on the prompts and the lengths alone. Each row is in exactly one batch.

    Raises ConfigurationError when a single row is over the budget.
    """
    check_budget(lengths, budget)
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, not {max_rows}")
    order_N = np.arange(len(lengths))
    if by_length and len(lengths):
        longest_U = np.zeros(int(prompt_of_N.max()) + 1, dtype=np.int64)
        np.maximum.at(longest_U, prompt_of_N, lengths)
        order_N = np.lexsort((-lengths, prompt_of_N, -longest_U[prompt_of_N]))
    batches: list[list[int]] = []
    prompts: set[int] = set()
    widest = longest = 0
    for row in order_N.tolist():
        prompt, start = int(prompt_of_N[row]), int(prompt_lengths[row])
        widest, longest = max(widest, start), max(longest, int(lengths[row]) - start)
        rows = len(batches[-1]) if batches else 0
        positions = (len(prompts) + (prompt not in prompts)) * widest + (rows + 1) * longest
        if not batches or positions > budget or rows == max_rows:
            batches.append([])
            prompts, widest, longest = set(), start, int(lengths[row]) - start
        batches[-1].append(row)
        prompts.add(prompt)
    return [np.asarray(found, dtype=np.int64) for found in batches]


def packed_hidden(module: nn.Module, packed: PackedRows) -> Tensor:
    """The decoder's last hidden states: [T, D], one for each token of `packed`. Differentiable.

    Raises ConfigurationError for a model whose tokens cannot be computed so.
    """
    check_packing(module)
    _check_window(module, int(packed.lengths_N.max()))
    return _hidden(module, packed)


def _hidden(module: nn.Module, packed: PackedRows) -> Tensor:
    model = cast(Any, module)
    with _attention(model.config.get_text_config(), ATTENTION):
        output = model.get_decoder()(
            input_ids=packed.ids_1T, position_ids=packed.positions_1T, use_cache=False, packed_rows=packed
        )
    return cast(Tensor, output.last_hidden_state[0])


def same_attention(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for the two forward passes of a checkpointed layer of `module`: the second, in the backward pass, comes
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


def _packed_attention(
    module: nn.Module,
    query_1HTE: Tensor,
    key_1KTE: Tensor,
    value_1KTE: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: [1, heads, T, head size] in, [1, T, heads, head size] out."""
    prompts, completions = packed_rows.prompts, packed_rows.completions
    heads, tokens, size = query_1HTE.shape[1:]
    split = tokens - packed_rows.completion_tokens
    flat = [tensor[0].transpose(0, 1).flatten(1) for tensor in (query_1HTE, key_1KTE, value_1KTE)]
    of_prompts, of_completions = zip(
        *(torch.split(tensor_TE, [split, tokens - split]) for tensor_TE in flat), strict=True
    )
    query_UPE, key_UPE, value_UPE = map(prompts.spread, of_prompts)
    mixed_UPE = _attend(query_UPE, key_UPE, value_UPE, None, heads, scaling)
    mixed = [prompts.gather(mixed_UPE)]
    if completions.width:
        query_NWE, key_NWE, value_NWE = map(completions.spread, of_completions)
        keys, values = [
            torch.cat([prompts_UPE.index_select(0, packed_rows.prompt_of_N), own_NWE], dim=1)
            for prompts_UPE, own_NWE in ((key_UPE, key_NWE), (value_UPE, value_NWE))
        ]
        mixed_NWE = _attend(query_NWE, keys, values, packed_rows.mask, heads, scaling)
        mixed.append(completions.gather(mixed_NWE))
    return torch.cat(mixed).view(1, tokens, heads, size), None


def _attend(
    query_BQE: Tensor, key_BKE: Tensor, value_BKE: Tensor, mask: Tensor | None, heads: int, scaling: float | None
) -> Tensor:
    """Attention of rectangles, causal where there is no mask: [B, Q, E]."""
    size = query_BQE.shape[2] // heads
    query, key, value = (
        tensor.view(*tensor.shape[:2], -1, size).transpose(1, 2) for tensor in (query_BQE, key_BKE, value_BKE)
    )
    repeats = heads // key.shape[1]
    mixed_BHQE = scaled_dot_product_attention(
        query, repeat_kv(key, repeats), repeat_kv(value, repeats), attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return mixed_BHQE.transpose(1, 2).flatten(2)


AttentionInterface.register(ATTENTION, _packed_attention)


def _mask(prompt_lengths_U: NDArray[np.int64], prompt_of_N: NDArray[np.int64], width: int) -> Tensor:
    """See PackedRows. The completions' padding stands on the right, where nobody looks."""
    longest = int(prompt_lengths_U.max())
    own_WW = np.tri(width, dtype=np.bool_)
    lengths = prompt_lengths_U[prompt_of_N] if (prompt_lengths_U != longest).any() else prompt_lengths_U[:1]
    prompt_BP = np.arange(longest) < lengths[:, None]
    shape = (len(lengths), width)
    mask_BWK = np.concatenate(
        [np.broadcast_to(prompt_BP[:, None], (*shape, longest)), np.broadcast_to(own_WW, (*shape, width))], axis=2
    )
    return torch.from_numpy(mask_BWK[:, None])


def check_packing(module: nn.Module) -> None:
    """Ask `module` once whether packed rows have the hidden states that they have alone. Raises ConfigurationError."""
    if module.__dict__.get(_CHECKED):
        return
    model = cast(Any, module)
    name = type(module).__name__
    if getattr(model.config.get_text_config(), "_attn_implementation", None) != "sdpa":
        raise ConfigurationError(f"{name} has an attention of its own, which cannot share prompts.", REMEDY)
    weight = model.get_input_embeddings().weight
    ids = np.arange(1, 12, dtype=np.int32) % weight.shape[0]
    rows = [ids[:8], np.concatenate([ids[:3], ids[7:]]), ids[2:6]]  # two rows share a prompt of three tokens
    modes = [(part, part.training) for part in module.modules()]
    module.eval()  # dropout would make two forwards differ
    with torch.no_grad():
        packed = pack_rows(rows, np.array([3, 3, 2]), weight.device)
        found_TD = _hidden(module, packed)
        alone = [
            model.get_decoder()(input_ids=torch.from_numpy(row[None]).long().to(weight.device), use_cache=False)
            for row in rows
        ]
    for part, training in modes:
        part.training = training
    hidden = [output.last_hidden_state[0] for output in alone]
    expected_TD = torch.cat([hidden[0][:3], hidden[2][:2], hidden[0][3:-1], hidden[1][3:-1], hidden[2][2:-1]]).float()
    exact = weight.dtype == torch.float32 and not torch.is_autocast_enabled(weight.device.type)
    tolerance = _TOLERANCE_FLOAT32 if exact else _TOLERANCE_BFLOAT16
    if not bool((found_TD.float() - expected_TD).abs().max() <= tolerance * expected_TD.abs().max()):
        raise ConfigurationError(f"{name} cannot compute rows that share a prompt.", REMEDY)
    module.__dict__[_CHECKED] = True


def _check_window(module: nn.Module, longest: int) -> None:
    """Refuse rows that a layer would see only a part of: the packed attention sees all of them."""
    config = cast(Any, module).config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and longest > window:
            raise ConfigurationError(
                f"A row of {longest} tokens is longer than {type(module).__name__}'s {name} of {window}, which prompts "
                "that are computed once do not know.",
                REMEDY,
            )
