"""Verifier losses over pairs of one correct and one incorrect solution, with a penalty on the size of scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import softplus

from pvg.config.training import Verifier
from pvg.errors import ConfigurationError
from pvg.extensions import called, is_reference, resolve
from pvg.models.packing import pad_right
from pvg.records import Int32
from pvg.telemetry.metrics import Metrics
from pvg.verifier.data import VerifierBatch


def bradley_terry(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """-log sigmoid(V_c - V_i) for each pair."""
    return softplus(incorrect_M - correct_M)


def cross_entropy(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """The mean binary cross-entropy of each pair's two solutions, in nats."""
    return 0.5 * (softplus(-correct_M) + softplus(incorrect_M))


PairLoss = Callable[[Tensor, Tensor], Tensor]
KEY = "verifier.loss"

LOSSES: dict[str, PairLoss] = {"bradley_terry": bradley_terry, "cross_entropy": cross_entropy}


def pair_loss(name: str) -> PairLoss:
    """The loss `name`, of the table or a user's file: correct scores [M], incorrect scores [M] -> [M].

    Raises ConfigurationError for an unknown name, and for a user's loss that fails or has another shape.
    """
    loss = resolve(KEY, name, LOSSES)

    def checked(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
        losses_M = called(KEY, name, loss, correct_M, incorrect_M)
        if not isinstance(losses_M, Tensor) or losses_M.shape != correct_M.shape:
            raise ConfigurationError(f"{KEY} = {name!r} must return one number per pair, for {len(correct_M)} pairs.")
        return losses_M

    return checked if is_reference(name) else loss


class PairObjective:
    """The verifier's objective. Metrics: loss, pair_accuracy (a tie counts half), score_mean (over distinct solutions),
    score_gap (mean of V_c - V_i), pairs, padding (share of positions without a token)."""

    def __init__(self, section: Verifier, pad_id: int) -> None:
        self._loss = pair_loss(section.loss)
        self._score_penalty = section.score_penalty
        self._token_budget = section.micro_batch_tokens
        self._pad_id = pad_id

    def prepare(self, batch: VerifierBatch) -> VerifierBatch:
        """Set weights: each pair's share (default 1/M), and 1/N for each solution in a pair. Raises ValueError for a
        batch without pairs."""
        if not len(batch):
            raise ValueError("a verifier batch needs at least one pair")
        shares_M = np.ones(len(batch), dtype=np.float32) if batch.shares_M is None else batch.shares_M
        used_N = np.bincount(batch.pairs_M2.reshape(-1), minlength=len(batch.sequences)) > 0
        return batch.with_weights(
            pair_weights_M=(shares_M / shares_M.sum(dtype=np.float64)).astype(np.float32),
            row_weights_N=(used_N / used_N.sum()).astype(np.float32),
        )

    def split(self, batch: VerifierBatch) -> list[VerifierBatch]:
        """Micro-batches of whole pairs. The number of distinct solutions times their longest length is within the token
        budget. Each solution is in one micro-batch, unless the solutions of one problem exceed the budget.

        Raises ConfigurationError if a single pair exceeds the budget.
        """
        _, row_weights_N = _weights(batch)
        unpenalised_N = row_weights_N.copy()
        micro_batches = []
        for pairs in pairs_by_budget(batch.pairs_M2, batch.lengths_N, self._token_budget):
            micro_batches.append(replace(batch, row_weights_N=unpenalised_N).select(pairs))
            unpenalised_N = unpenalised_N.copy()
            unpenalised_N[batch.pairs_M2[pairs].reshape(-1)] = 0.0
        return micro_batches

    def __call__(self, module: nn.Module, micro_batch: VerifierBatch) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the loss, and its metrics. Forwards each distinct solution once."""
        pair_weights, row_weights = _weights(micro_batch)
        scores_N = _scores(module, micro_batch, self._pad_id)
        pairs_M2 = torch.from_numpy(micro_batch.pairs_M2).to(scores_N.device, torch.int64)
        correct_M, incorrect_M = scores_N[pairs_M2[:, 0]], scores_N[pairs_M2[:, 1]]
        pair_weights_M = torch.from_numpy(pair_weights).to(scores_N.device)
        row_weights_N = torch.from_numpy(row_weights).to(scores_N.device)

        loss = (pair_weights_M * self._loss(correct_M, incorrect_M)).sum()
        if self._score_penalty:
            loss = loss + self._score_penalty * (row_weights_N * scores_N.square()).sum()
        metrics = _metrics(loss, scores_N, correct_M - incorrect_M, pair_weights_M, row_weights_N)
        positions = len(micro_batch.sequences) * int(micro_batch.lengths_N.max())
        metrics.add_sum("pairs", len(micro_batch))
        metrics.add_mean("padding", positions - int(micro_batch.lengths_N.sum()), positions)
        return loss, metrics


def _scores(module: nn.Module, batch: VerifierBatch, pad_id: int) -> Tensor:
    device = next(module.parameters()).device
    input_ids_NL, lengths_N = pad_right(batch.sequences, pad_id, device)
    prompt_lengths_N = torch.from_numpy(batch.prompt_lengths_N).to(device, torch.int64)
    references_N = None if batch.references_N is None else torch.from_numpy(batch.references_N).to(device)
    scores_N: Tensor = module(input_ids_NL, lengths_N, prompt_lengths_N, references_N)
    return scores_N


def _weights(batch: VerifierBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    assert batch.pair_weights_M is not None, "prepare the batch first"
    assert batch.row_weights_N is not None
    return batch.pair_weights_M, batch.row_weights_N


@torch.no_grad()
def _metrics(loss: Tensor, scores_N: Tensor, gaps_M: Tensor, pair_weights_M: Tensor, row_weights_N: Tensor) -> Metrics:
    wins_M = (gaps_M > 0).float() + 0.5 * (gaps_M == 0).float()
    totals = [loss, (pair_weights_M * wins_M).sum(), (row_weights_N * scores_N).sum(), (pair_weights_M * gaps_M).sum()]
    weights = [pair_weights_M.sum(), row_weights_N.sum()]
    total_loss, total_wins, total_scores, total_gaps, pairs, rows = torch.stack(totals + weights).tolist()
    metrics = Metrics()
    metrics.add_mean("loss", total_loss, pairs)
    metrics.add_mean("pair_accuracy", total_wins, pairs)
    metrics.add_mean("score_mean", total_scores, rows)
    metrics.add_mean("score_gap", total_gaps, pairs)
    return metrics


# --- micro-batches within a token budget ------------------------------------------------------------------------------
# Pairs that share solutions stay together, so that each solution is forwarded once. A *cluster* is a set of connected
# pairs; with all pairs of a problem it is the problem. Only a cluster that exceeds the budget is cut. Solutions on both
# sides of a cut are forwarded more than once.

Int64 = NDArray[np.int64]


def pairs_by_budget(pairs_M2: Int32, lengths_N: Int64, token_budget: int) -> list[Int64]:
    """Pair numbers in parts, each pair in one part, with distinct rows x longest row <= `token_budget`. Longest part
    first. Raises ConfigurationError if a single pair exceeds the budget."""
    clusters_M = clusters(pairs_M2, len(lengths_N))
    order_M = np.argsort(clusters_M, kind="stable")
    sizes_K = np.unique(clusters_M, return_counts=True)[1]
    by_cluster = np.split(order_M, np.cumsum(sizes_K)[:-1])
    rows_of = [np.unique(pairs_M2[pairs]) for pairs in by_cluster]
    widths_K = np.array([lengths_N[rows].max() for rows in rows_of], dtype=np.int64)

    parts: list[list[Int64]] = []
    rows = width = 0  # of the current part; its width is that of its first cluster, the longest
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
    """Cluster numbers [M]: equal for pairs that a chain of shared rows connects."""
    label_N = np.arange(rows)
    while True:
        lowest_M: Int64 = label_N[pairs_M2].min(axis=1)
        found_N = label_N.copy()
        np.minimum.at(found_N, pairs_M2[:, 0], lowest_M)
        np.minimum.at(found_N, pairs_M2[:, 1], lowest_M)
        found_N = found_N[found_N]  # one step along the chain
        if np.array_equal(found_N, label_N):
            return lowest_M
        label_N = found_N


def _cut(pairs_M2: Int32, pairs: Int64, lengths_N: Int64, token_budget: int) -> Iterator[Int64]:
    """The pairs of one cluster, in parts within the budget."""
    longest_M = lengths_N[pairs_M2[pairs]].max(axis=1)
    # Longest first, so that a part's first pair sets its width; pairs with shared rows next to each other.
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
                    f"verifier.micro_batch_tokens = {token_budget} is too small for a pair of {width} tokens each.",
                    f"Set it to {2 * width} or more, or shorten the completions (rollout.max_tokens).",
                )
            if part:
                yield np.asarray(part, dtype=np.int64)
            part, rows = [], set()
        part.append(pair)
        rows |= wanted
    yield np.asarray(part, dtype=np.int64)
