"""Verifier losses over pairs of one correct and one incorrect solution, with a penalty on the size of scores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import softplus

from pvg.config.training import Verifier
from pvg.errors import ConfigurationError
from pvg.extensions import called, is_reference, resolve
from pvg.models.packing import distinct_rows, pad_right, row_batches, token_budget_batches
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
    score_gap (mean of V_c - V_i), pairs, padding (share of positions without a token).

    A pair's loss needs two scores, but the activations of one solution at a time. So a pair's solutions may be in two
    micro-batches: `survey` computes their scores without a gradient, and each micro-batch computes its own scores
    again, with a gradient, beside the known ones of the others.
    """

    def __init__(self, section: Verifier, pad_id: int, *, longest_packed: int = sys.maxsize) -> None:
        """`longest_packed`: that of the verifier; 0 without training.shared_prompts."""
        self._loss = pair_loss(section.loss)
        self._score_penalty = section.score_penalty
        self._token_budget = section.micro_batch_tokens
        self._pad_id = pad_id
        self._longest_packed = longest_packed

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
        """Micro-batches within the token budget. Each solution is computed in one, with all pairs that it is in.
        Solutions that pairs connect are in one micro-batch if they fit; else it has the others beside its own
        (`own_N`).

        Raises ConfigurationError if a single solution exceeds the budget.
        """
        batch = batch.select(np.arange(len(batch)))  # without rows that are in no pair
        budget = self._token_budget
        if (longest := int(batch.lengths_N.max())) > budget:
            raise ConfigurationError(
                f"verifier.micro_batch_tokens = {budget} is too small for one solution of {longest} tokens.",
                f"Set it to {longest} or more, or shorten the completions (rollout.max_tokens).",
            )
        firsts_U, number_of_N = distinct_rows(batch.sequences, batch.prompt_lengths_N)
        equal_N2 = np.stack([np.arange(len(number_of_N)), firsts_U[number_of_N]], axis=1)
        units_N = clusters(np.concatenate([batch.pairs_M2, equal_N2]), len(number_of_N))
        micro_batches = []
        if longest <= self._longest_packed:
            parts = row_batches(batch.sequences, batch.prompt_lengths_N, budget, units_N=units_N)
        else:
            parts = token_budget_batches(batch.lengths_N, budget)
        for rows in parts:
            own_N = np.zeros(len(number_of_N), dtype=np.bool_)
            own_N[rows] = True
            part = replace(batch, own_N=own_N).select(np.flatnonzero(own_N[batch.pairs_M2].any(axis=1)))
            micro_batches.append(replace(part, own_N=None) if np.all(part.own_N) else part)
        return micro_batches

    def survey(self, module: nn.Module, micro_batches: Sequence[VerifierBatch]) -> list[VerifierBatch]:
        """The micro-batches of `split`, with the scores of solutions that others of them compute."""
        cut = [(part, part.own_N, _keys(part)) for part in micro_batches if part.own_N is not None]
        wanted = {key for _, own_N, keys in cut for key in compress(keys, ~own_N)}
        found, scored = list[Tensor](), list[tuple[int, bytes]]()
        for part, own_N, keys in cut:
            rows = [row for row in np.flatnonzero(own_N).tolist() if keys[row] in wanted]
            if rows:
                found.append(self._scores(module, part, rows))
                scored += [keys[row] for row in rows]
        scores = dict(zip(scored, torch.cat(found).tolist() if found else [], strict=True))  # one transfer
        known = (np.array([scores.get(key, 0.0) for key in keys]) for *_, keys in cut)
        return [part if part.own_N is None else replace(part, scores_N=next(known)) for part in micro_batches]

    def __call__(self, module: nn.Module, micro_batch: VerifierBatch) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the loss, and its metrics. A pair counts where its correct solution is computed;
        the gradient of a solution is that of all its pairs."""
        pair_weights, row_weights = _weights(micro_batch)
        own = np.ones(len(micro_batch.sequences), np.bool_) if micro_batch.own_N is None else micro_batch.own_N
        rows = np.flatnonzero(own)
        scores_N = self._scores(module, micro_batch, rows.tolist())
        device = scores_N.device
        if micro_batch.own_N is not None:
            assert micro_batch.scores_N is not None, "survey the micro-batches first"
            known_N = torch.from_numpy(micro_batch.scores_N).to(scores_N)
            scores_N = known_N.index_put((torch.from_numpy(rows).to(device),), scores_N)
        pairs_M2 = torch.from_numpy(micro_batch.pairs_M2).to(device, torch.int64)
        correct_M, incorrect_M = scores_N[pairs_M2[:, 0]], scores_N[pairs_M2[:, 1]]
        counted = own[micro_batch.pairs_M2[:, 0]]
        pair_weights_M, counted_M = (torch.from_numpy(w).to(device) for w in (pair_weights, pair_weights * counted))
        row_weights_N = torch.from_numpy(row_weights * own).to(device)

        losses_M = self._loss(correct_M, incorrect_M)
        loss = (pair_weights_M * losses_M).sum()
        if not counted.all():
            loss = loss + ((counted_M - pair_weights_M) * losses_M.detach()).sum()
        if self._score_penalty:
            loss = loss + self._score_penalty * (row_weights_N * scores_N.square()).sum()
        metrics = _metrics(loss, scores_N, correct_M - incorrect_M, counted_M, row_weights_N)
        tokens, longest = int(micro_batch.lengths_N[own].sum()), int(micro_batch.lengths_N[own].max())
        positions = tokens if longest <= self._longest_packed else len(rows) * longest  # packed rows have no padding
        metrics.add_sum("pairs", int(counted.sum()))
        metrics.add_mean("padding", positions - tokens, positions)
        return loss, metrics

    def _scores(self, module: nn.Module, batch: VerifierBatch, rows: list[int]) -> Tensor:
        """The scores of these rows, [rows]; if they are packed, what they have in common is computed once."""
        device, packed = next(module.parameters()).device, int(batch.lengths_N[rows].max()) <= self._longest_packed
        where = "cpu" if packed else device  # rows are packed on the CPU
        ids_RL, lengths_R = pad_right([batch.sequences[row] for row in rows], self._pad_id, where)
        starts_R = torch.from_numpy(batch.prompt_lengths_N[rows]).to(where, torch.int64)
        references_R = None if batch.references_N is None else torch.from_numpy(batch.references_N[rows]).to(device)
        scores_R: Tensor = module(ids_RL, lengths_R, starts_R, references_R, packed=packed)
        return scores_R


def _keys(batch: VerifierBatch) -> list[tuple[int, bytes]]:
    """What tells solutions apart."""
    return [(int(start), ids.tobytes()) for ids, start in zip(batch.sequences, batch.prompt_lengths_N, strict=True)]


def _weights(batch: VerifierBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    assert batch.pair_weights_M is not None, "prepare the batch first"
    assert batch.row_weights_N is not None
    return batch.pair_weights_M, batch.row_weights_N


@torch.no_grad()
def _metrics(loss: Tensor, scores_N: Tensor, gaps_M: Tensor, pair_weights_M: Tensor, row_weights_N: Tensor) -> Metrics:
    wins_M = (gaps_M > 0).float() + 0.5 * (gaps_M == 0).float()
    pairs, rows = pair_weights_M.sum(), row_weights_N.sum()
    means = {
        "mean loss": (loss, pairs),
        "mean pair_accuracy": ((pair_weights_M * wins_M).sum(), pairs),
        "mean score_mean": ((row_weights_N * scores_N).sum(), rows),
        "mean score_gap": ((pair_weights_M * gaps_M).sum(), pairs),
    }
    metrics = Metrics()
    metrics.add_later(list(means), torch.stack([torch.stack(pair) for pair in means.values()]).double())
    return metrics


def clusters(links_L2: NDArray[np.integer], rows: int) -> NDArray[np.int64]:
    """Cluster numbers [N]: equal for rows that a chain of links connects."""
    label_N = np.arange(rows)
    while True:
        found_N = label_N.copy()
        np.minimum.at(found_N, links_L2, label_N[links_L2].min(axis=1, keepdims=True))
        found_N = found_N[found_N]  # one step along the chain
        if np.array_equal(found_N, label_N):
            return label_N
        label_N = found_N
