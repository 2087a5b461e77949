"""A batch of pairs cut into micro-batches that keep within a token budget. numpy only.

Pairs that share solutions stay together, so that each solution is forwarded once: a *cluster* is what pairs connect,
which with all pairs of a problem is the problem. Only a cluster that is over the budget by itself is cut, and then the
solutions on both sides of the cut are forwarded more than once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pvg.errors import ConfigurationError
from pvg.records import Int32

Int64 = NDArray[np.int64]


def pairs_by_budget(pairs_M2: Int32, lengths_N: Int64, token_budget: int) -> list[Int64]:
    """Pair numbers in parts, each pair in one part, with distinct rows x longest of them <= `token_budget`. The longest
    first. Raises ConfigurationError when a single pair is over the budget."""
    clusters_M = clusters(pairs_M2, len(lengths_N))
    order_M = np.argsort(clusters_M, kind="stable")
    sizes_K = np.unique(clusters_M, return_counts=True)[1]
    by_cluster = np.split(order_M, np.cumsum(sizes_K)[:-1])
    rows_of = [np.unique(pairs_M2[pairs]) for pairs in by_cluster]
    widths_K = np.array([lengths_N[rows].max() for rows in rows_of], dtype=np.int64)

    parts: list[list[Int64]] = []
    rows = width = 0  # of the part that is being filled: its width is that of its first cluster, the longest
    for cluster in np.argsort(-widths_K, kind="stable").tolist():
        own_rows, own_width, pairs = len(rows_of[cluster]), int(widths_K[cluster]), by_cluster[cluster]
        if own_rows * own_width > token_budget:
            parts.extend([part] for part in _cut(pairs_M2, pairs, lengths_N, token_budget))
            rows = width = 0
        elif width and (rows + own_rows) * width <= token_budget:
            parts[-1].append(pairs)
            rows += own_rows
        else:
            parts.append([pairs])
            rows, width = own_rows, own_width
    return [np.concatenate(part) for part in parts]


def clusters(pairs_M2: Int32, rows: int) -> Int64:
    """A number for each pair [M], the same where a chain of shared rows leads from one pair to the other."""
    label_N = np.arange(rows)
    while True:
        lowest_M: Int64 = label_N[pairs_M2].min(axis=1)
        found_N = label_N.copy()
        np.minimum.at(found_N, pairs_M2[:, 0], lowest_M)
        np.minimum.at(found_N, pairs_M2[:, 1], lowest_M)
        found_N = found_N[found_N]  # a step further along the chain
        if np.array_equal(found_N, label_N):
            return lowest_M
        label_N = found_N


def _cut(pairs_M2: Int32, pairs: Int64, lengths_N: Int64, token_budget: int) -> Iterator[Int64]:
    """The pairs of one cluster in parts within the budget."""
    longest_M = lengths_N[pairs_M2[pairs]].max(axis=1)
    # The longest first, so that the first pair of a part sets its width; pairs that share rows beside each other.
    order_M = np.lexsort((pairs_M2[pairs, 1], pairs_M2[pairs, 0], -longest_M))
    part: list[int] = []
    rows: set[int] = set()
    width = 0
    for place in order_M.tolist():
        pair = int(pairs[place])
        wanted = set(pairs_M2[pair].tolist())
        if not part or len(rows | wanted) * width > token_budget:
            width = int(longest_M[place])
            if len(wanted) * width > token_budget:
                raise ConfigurationError(
                    f"verifier.micro_batch_tokens = {token_budget} is below a pair of {width} tokens each.",
                    f"Set it to {2 * width} or more, or shorten the completions (rollout.max_tokens).",
                )
            if part:
                yield np.asarray(part, dtype=np.int64)
            part, rows = [], set()
        part.append(pair)
        rows |= wanted
    yield np.asarray(part, dtype=np.int64)
