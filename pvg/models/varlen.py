"""Attention of packed rows on a GPU, by torch's flash attention for sequences of different lengths.

The other way (pvg.models.packing.packed_attention) pads completions to a rectangle and needs a mask of completion
tokens x (prompt + completion) tokens per row. A mask rules out flash attention, and for 64 rows of 1,024 tokens it
takes 100 MB. Here each prompt is a sequence of queries and keys, and each completion is a sequence whose keys are those
of its prompt and its own. Causal attention counts from the end of both, so no mask is needed. One kernel computes all
of them.

It needs a GPU of compute capability 8.0 or newer, a dtype of 16 bits (the weights', or that of autocast) and a torch
whose `varlen_attn` knows `window_size`, such as 2.11. `why_not_varlen` says what is missing; then the other way
computes. pvg.models.shared_prompts compares the result with the model's own attention before the first use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
LEAST_CAPABILITY = (8, 0)
Kernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """S sequences of queries and keys. The queries of a sequence follow those of the one before; `queries_S1` and
    `keys_S1` int32 [S + 1] are the starts. `tokens_K`: the token among the T of the packed rows of each of the K keys.
    """

    queries_S1: Tensor
    keys_S1: Tensor
    tokens_K: Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(
        cls,
        prompts_U: NDArray[np.int64],
        completions_N: NDArray[np.int64],
        prompt_of_N: NDArray[np.int64],
        device: torch.device | str,
    ) -> SequenceLayout:
        """Of U prompts and N completions with these lengths; a completion follows prompt `prompt_of_N`."""
        begins_U, prompt_tokens = np.cumsum(prompts_U) - prompts_U, int(prompts_U.sum())
        begins_N = prompt_tokens + np.cumsum(completions_N) - completions_N
        rows = [row for row in range(len(completions_N)) if completions_N[row]]  # a sequence has at least one token
        keys = [np.arange(prompt_tokens)]
        for row in rows:
            prompt = prompt_of_N[row]
            keys.append(np.arange(begins_U[prompt], begins_U[prompt] + prompts_U[prompt]))
            keys.append(np.arange(begins_N[row], begins_N[row] + completions_N[row]))
        queries_S = np.concatenate([prompts_U, completions_N[rows]])
        keys_S = np.concatenate([prompts_U, (prompts_U[prompt_of_N] + completions_N)[rows]])

        def starts(lengths_S: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.append(0, np.cumsum(lengths_S)).astype(np.int32)).to(device)

        tokens_K = torch.from_numpy(np.concatenate(keys)).to(device)
        return cls(starts(queries_S), starts(keys_S), tokens_K, int(queries_S.max()), int(keys_S.max()))


def varlen_attention(
    query_TE: Tensor,
    key_TE: Tensor,
    value_TE: Tensor,
    heads: int,
    scaling: float | None,
    layout: SequenceLayout,
    kernel: Kernel | None = None,
) -> Tensor:
    """[T, E] for all query heads; keys and values may have fewer heads. Call it only if `why_not_varlen` is None, or
    with a `kernel` that computes elsewhere."""
    kernel = kernel or _kernel()
    dtype, size = product_dtype(query_TE), query_TE.shape[1] // heads
    query_THD, key_THD, value_THD = (
        flat_TE.to(dtype).view(len(flat_TE), -1, size) for flat_TE in (query_TE, key_TE, value_TE)
    )
    # torch 2.13 asks for this argument. 2.11 does not know it, and takes grouped queries without it.
    grouped = {"enable_gqa": key_THD.shape[1] != heads} if "enable_gqa" in _arguments(kernel) else {}
    mixed_THD = kernel(
        query_THD,
        key_THD.index_select(0, layout.tokens_K),
        value_THD.index_select(0, layout.tokens_K),
        layout.queries_S1,
        layout.keys_S1,
        layout.longest_query,
        layout.longest_key,
        scale=scaling,
        window_size=(-1, 0),  # causal, from the end of queries and keys
        **grouped,
    )
    return mixed_THD.flatten(1)


def why_not_varlen(query_TE: Tensor, heads: int) -> str | None:
    """Why `varlen_attention` cannot compute these queries; None if it can."""
    if query_TE.device.type != "cuda":
        return f"they are on {query_TE.device.type}"
    size = query_TE.shape[1] // heads
    if (dtype := product_dtype(query_TE)) not in HALVES:
        return f"products are computed in {dtype}"
    if size > LARGEST_HEAD or size % HEAD_MULTIPLE:
        return f"a head has {size} dimensions"
    return _missing(query_TE.device)


def product_dtype(query_TE: Tensor) -> torch.dtype:
    """The dtype of matrix products with this tensor: that of autocast, or its own."""
    kind = query_TE.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query_TE.dtype


@cache
def _missing(device: torch.device) -> str | None:
    if not _is_known():
        return f"torch {torch.__version__} has no variable-length attention"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "the GPU is older than Ampere"
    return None


@cache
def _is_known() -> bool:
    """Whether this torch has the kernel with the arguments that are used here."""
    try:
        kernel = _kernel()
    except ImportError:
        return False
    return {"scale", "window_size"} <= _arguments(kernel)


@cache
def _arguments(kernel: Kernel) -> frozenset[str]:
    """The names of its arguments."""
    return frozenset(inspect.signature(kernel).parameters)


def _kernel() -> Kernel:
    from torch.nn.attention import varlen

    return cast(Kernel, cast(Any, varlen).varlen_attn)
