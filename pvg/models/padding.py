"""Rows of different length as rectangles: padding to the right, and batches that keep within a token budget."""

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
    """start, start + 1, ... of each length, one behind the other."""
    ends_S = np.cumsum(lengths_S)
    return np.arange(int(lengths_S.sum())) + np.repeat(starts_S - ends_S + lengths_S, lengths_S)


def pad_right(rows: Sequence[Int32], pad_id: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """B rows of token ids -> (ids_BL int64, lengths_B int64) on `device`; L is the longest row, the rest is `pad_id`.

    Raises ValueError when there are no rows.
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

    The longest rows come first (so that a batch that does not fit in memory fails at once), rows of equal length in
    their own order: the result depends on the lengths alone. Each row is in exactly one batch.

    `by_length=False` is what bucketing is measured against: rows keep their order, and each batch takes as many as
    would fit if all of them were as long as the longest row of all.

    Raises ConfigurationError when a single row is over the budget.
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
    """The longest of the rows' lengths. Raises ConfigurationError when it is over the budget."""
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
    """R rows of T tokens that lie one behind the other, and how they stand in a rectangle of W, the longest row.

    `slots_T` is where in the rectangle [R * W] each token stands, `tokens_S` which token stands in each slot (in the
    padding any); both are None where all rows are of length W: then the two are the same memory.
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
        """[T, E] -> [R, W, E]. The padding holds some token's values, and gives no gradient back."""
        if self.slots_T is not None:
            flat_TE = cast(Tensor, _Spread.apply(flat_TE, self.slots_T, self.tokens_S))  # type: ignore[no-untyped-call]
        return flat_TE.reshape(-1, self.width, flat_TE.shape[1])

    def gather(self, spread_RWE: Tensor) -> Tensor:
        """[R, W, E] -> [T, E]: the inverse, without the padding."""
        if self.slots_T is None:
            return spread_RWE.flatten(0, 1)
        return spread_RWE.flatten(0, 1).index_select(0, self.slots_T)


class _Spread(torch.autograd.Function):
    """index_select, whose gradient would add up what the padding repeats; ours reads the tokens' own slots alone."""

    @staticmethod
    def forward(ctx: Any, flat_TE: Tensor, slots_T: Tensor, tokens_S: Tensor) -> Tensor:
        ctx.save_for_backward(slots_T)
        return flat_TE.index_select(0, tokens_S)

    @staticmethod
    def backward(ctx: Any, grad_SE: Tensor) -> tuple[Tensor, None, None]:
        (slots_T,) = ctx.saved_tensors
        return grad_SE.index_select(0, slots_T), None, None


# Forward passes in which a row's result is the same bits whatever it is batched with.
#
# A matrix product takes another path through its kernels when its number of rows is odd, and rounds differently. So
# rows are padded to widths and batches to heights at which the paths agree: 0 of 900 scores changed with their batch
# mates on the CPU, against 1 in 5 without (worst by 2e-5).
#
# A resumed run needs this: its cache is empty, so its batches are not those of the uninterrupted run, but its scores,
# and in the end its weights, have to be.

WIDTH = 16
HEIGHT = 8


class PaddedBatch(NamedTuple):
    """What a VerifierModel takes. Rows beyond the given ones repeat the first: drop their results."""

    ids_BL: Tensor
    lengths_B: Tensor
    prompt_lengths_B: Tensor


def padded_width(length: int, max_length: int) -> int:
    """The width at which a row of `length` tokens is computed: a multiple of WIDTH, or the longest there is."""
    return min(-(-length // WIDTH) * WIDTH, max_length)


def batches(lengths: Sequence[int], token_budget: int, max_length: int) -> list[NDArray[np.int64]]:
    """Row numbers in batches whose rectangles keep within the budget. Raises ConfigurationError like
    `token_budget_batches`, which makes them."""
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
    """The rows of one of `batches`, padded in width, and in height as far as the budget allows."""
    width = padded_width(max(map(len, rows)), max_length)
    height = max(len(rows), min(-(-len(rows) // HEIGHT) * HEIGHT, token_budget // width))
    missing = height - len(rows)
    ids_BL, lengths_B = pad_right([*rows, *[rows[0]] * missing], pad_id, device)
    starts = [*prompt_lengths, *[prompt_lengths[0]] * missing]
    wide_BL = pad(ids_BL, (0, width - ids_BL.shape[1]), value=pad_id)
    return PaddedBatch(wide_BL, lengths_B, torch.tensor(starts, dtype=torch.int64, device=device))
