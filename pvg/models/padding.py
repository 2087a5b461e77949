"""Rows of different length as rectangles: padding to the right, and batches that keep within a token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pvg.errors import ConfigurationError
from pvg.records import Int32


def pad_right(rows: Sequence[Int32], pad_id: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """B rows of token ids -> (ids_BL int64, lengths_B int64) on `device`; L is the longest row, the rest is `pad_id`.

    Raises ValueError when there are no rows.
    """
    if not rows:
        raise ValueError("pad_right needs at least one row")
    lengths_B = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
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
    longest = int(lengths_N.max())
    if longest > budget:
        row = int(lengths_N.argmax())
        raise ConfigurationError(
            f"A sequence of {longest} tokens (row {row}) is over the token budget of {budget} per batch.",
            "Raise the budget (micro_batch_tokens, score_tokens) or shorten the completions (rollout.max_tokens).",
        )
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
