"""Rows of different length as rectangles: padding on the right, batches within a token budget, reproducible shapes.

The result of a row must not depend on its batch. A matrix product with an odd number of rows takes another path through
its kernels and rounds differently. So rows are padded to widths and batches to heights whose paths agree (`rectangle`):
0 of 900 scores on the CPU changed with the batch, against 1 in 5 without padding (by up to 2e-5). A resumed run needs
this: its cache is empty, so its batches differ from those of the uninterrupted run, but scores and weights must be
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import pad

from pvg.errors import ConfigurationError
from pvg.records import Float32, Int32


def lengths_of(rows: Sequence[Int32] | Sequence[Float32]) -> NDArray[np.int64]:
    return np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))


def counted(lengths_S: NDArray[np.int64], starts_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ... for each length, concatenated."""
    ends_S = np.cumsum(lengths_S)
    return np.arange(int(lengths_S.sum())) + np.repeat(starts_S - ends_S + lengths_S, lengths_S)


def pad_right(rows: Sequence[Int32], pad_id: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """B rows of token ids -> (ids_BL int64, lengths_B int64) on `device`. L is the longest row, the rest is `pad_id`.

    Raises ValueError if there are no rows.
    """
    if not rows:
        raise ValueError("pad_right needs at least one row")
    lengths_B = lengths_of(rows)
    ids_BL = np.full((len(rows), int(lengths_B.max())), pad_id, dtype=np.int64)
    ids_BL[np.arange(ids_BL.shape[1]) < lengths_B[:, None]] = np.concatenate(rows)
    return torch.from_numpy(ids_BL).to(device), torch.from_numpy(lengths_B).to(device)


def token_budget_batches(
    lengths: ArrayLike, budget: int, max_rows: int | None = None, *, by_length: bool = True
) -> list[NDArray[np.int64]]:
    """Row numbers in batches with rows x longest <= `budget` and at most `max_rows` rows each.

    The longest rows come first, so a batch that does not fit in memory fails at once. Rows of equal length keep
    their order, so the result depends only on the lengths. Each row is in exactly one batch.

    `by_length=False` is the baseline for measuring this bucketing: rows keep their order, and each batch has the number
    of rows that would fit if all were as long as the longest.

    Raises ConfigurationError if a single row is over the budget.
    """
    lengths_N = np.asarray(lengths, dtype=np.int64)
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, not {max_rows}")
    if not lengths_N.size:
        return []
    order_N = np.argsort(-lengths_N, kind="stable") if by_length else np.arange(len(lengths_N))
    longest = check_budget(lengths_N, budget)
    batches = []
    start = 0
    while start < len(order_N):
        width = int(lengths_N[order_N[start]]) if by_length else longest
        rows = budget // max(1, width)
        if max_rows is not None:
            rows = min(rows, max_rows)
        batches.append(order_N[start : start + rows])
        start += rows
    return batches


def check_budget(lengths_N: NDArray[np.int64], budget: int) -> int:
    """The largest of the lengths. Raises ConfigurationError if it is over the budget."""
    longest = int(lengths_N.max(initial=0))
    if longest > budget:
        row = int(lengths_N.argmax())
        raise ConfigurationError(
            f"A sequence of {longest} tokens (row {row}) is over the token budget of {budget} per batch.",
            "Raise the budget (micro_batch_tokens, score_tokens) or shorten the completions (rollout.max_tokens).",
        )
    return longest


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """R rows with T tokens in total, stored consecutively, and their layout as a rectangle of width W, the longest row.

    `slots_T` is the position of each token in the rectangle [R * W]. `tokens_S` is the token at each position (any
    token in the padding). Both are None if all rows have length W: then both layouts are the same memory.
    """

    width: int
    ends_R: Tensor
    slots_T: Tensor | None
    tokens_S: Tensor | None

    @classmethod
    def of(cls, lengths: ArrayLike, device: torch.device | str = "cpu") -> JoinedRows:
        lengths_R = np.asarray(lengths, dtype=np.int64)
        width = int(lengths_R.max(initial=0))
        ends_R = np.cumsum(lengths_R)
        ends = torch.from_numpy(ends_R).to(device)
        if (lengths_R == width).all():
            return cls(width, ends, None, None)
        real_RW = np.arange(width) < lengths_R[:, None]
        slots_T = np.flatnonzero(real_RW)
        tokens_S = np.where(real_RW, np.arange(width) + (ends_R - lengths_R)[:, None], 0).reshape(-1)
        return cls(width, ends, torch.from_numpy(slots_T).to(device), torch.from_numpy(tokens_S).to(device))

    def spread(self, flat_TE: Tensor) -> Tensor:
        """[T, E] -> [R, W, E]. The padding holds the values of some token and gets no gradient."""
        if self.slots_T is not None:
            flat_TE = cast(Tensor, _Spread.apply(flat_TE, self.slots_T, self.tokens_S))  # type: ignore[no-untyped-call]
        return flat_TE.reshape(-1, self.width, flat_TE.shape[1])

    def gather(self, spread_RWE: Tensor) -> Tensor:
        """[R, W, E] -> [T, E]: the inverse, without the padding."""
        if self.slots_T is None:
            return spread_RWE.flatten(0, 1)
        return spread_RWE.flatten(0, 1).index_select(0, self.slots_T)


class _Spread(torch.autograd.Function):
    """index_select whose gradient ignores the padding; torch's would add it up."""

    @staticmethod
    def forward(ctx: Any, flat_TE: Tensor, slots_T: Tensor, tokens_S: Tensor) -> Tensor:
        ctx.save_for_backward(slots_T)
        return flat_TE.index_select(0, tokens_S)

    @staticmethod
    def backward(ctx: Any, grad_SE: Tensor) -> tuple[Tensor, None, None]:
        (slots_T,) = ctx.saved_tensors
        return grad_SE.index_select(0, slots_T), None, None


# --- batches in which a row's result does not depend on the others ---------------------------------------------------

WIDTH = 16
HEIGHT = 8


class PaddedBatch(NamedTuple):
    """The input of a VerifierModel. Rows beyond the given ones repeat the first; discard their results."""

    ids_BL: Tensor
    lengths_B: Tensor
    prompt_lengths_B: Tensor


def padded_width(length: int, max_length: int) -> int:
    """The width for a row of `length` tokens: a multiple of WIDTH, at most `max_length`."""
    return min(-(-length // WIDTH) * WIDTH, max_length)


def batches(lengths: Sequence[int], token_budget: int, max_length: int) -> list[NDArray[np.int64]]:
    """Row numbers in batches whose rectangles are within the budget. Raises ConfigurationError like
    `token_budget_batches`."""
    return token_budget_batches([padded_width(length, max_length) for length in lengths], token_budget)


def rectangle(
    rows: Sequence[Int32],
    prompt_lengths: Sequence[int],
    pad_id: int,
    device: torch.device,
    *,
    token_budget: int,
    max_length: int,
) -> PaddedBatch:
    """The rows of one of `batches`, padded to the right width, and in height as far as the budget allows."""
    width = padded_width(max(map(len, rows)), max_length)
    height = max(len(rows), min(-(-len(rows) // HEIGHT) * HEIGHT, token_budget // width))
    missing = height - len(rows)
    ids_BL, lengths_B = pad_right([*rows, *[rows[0]] * missing], pad_id, device)
    starts = [*prompt_lengths, *[prompt_lengths[0]] * missing]
    wide_BL = pad(ids_BL, (0, width - ids_BL.shape[1]), value=pad_id)
    return PaddedBatch(wide_BL, lengths_B, torch.tensor(starts, dtype=torch.int64, device=device))
