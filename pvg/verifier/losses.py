"""Verifier losses for equal quality in every environment: V-REx, IRMv1, group DRO, and balanced environments.

A pair's environment is its source: the base prover or the prover of an earlier round. R_e is the mean loss over the
pairs of environment e, weighted by w; E environments have pairs in the batch. W_e is the sum of w over the pairs of e.

    R_e = sum of w_m l_m / W_e  over the pairs m of environment e        (w: a batch's pair weights, or 1)

    balanced     mean_e R_e
    vrex         mean_e R_e + s Var_e(R_e), Var with divisor E                 arXiv 2003.00688
    irm          mean_e R_e + s mean_e g_e^2,  g_e = d R_e(a V) / d a at a = 1 arXiv 1907.02893 (IRMv1)
    group_dro    sum_e q_e R_e,  q_e <- q_e exp(s R_e) / sum                   arXiv 1911.08731, algorithm 1

s is `verifier.robust.strength`; the penalties grow to it over the first `verifier.robust.warmup` steps. V-REx gives an
environment the weight (1 + 2 s (R_e - mean)) / E; negative weights become 0. IRMv1's multiplier a scales the *scores*.

Neither penalty is a sum over pairs, but its gradient is that of a weighted sum whose weights are constants of the whole
batch. So two passes are exact for any micro-batches: `measure` and `weigh` compute R_e or g_e of the whole batch
without gradient, then training uses sum_m weight_m value_m:

    d Var_e(R_e)   = sum_m  w_m / W_e  2 (R_e - mean_e R_e) / E   d l_m                     (`vrex_weights`)
    d mean_e g_e^2 = sum_m  w_m / W_e  2 g_e / E                  d (d l_m(aV)/da)          (`irm_weights`)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import softplus

from pvg.config.training import PenalisedRisk, Verifier
from pvg.errors import ConfigurationError
from pvg.extensions import called, is_reference, resolve
from pvg.models.packing import pad_right
from pvg.records import Float32, Int32
from pvg.telemetry.metrics import Metrics
from pvg.verifier.data import VerifierBatch

# Verifier losses over pairs of one correct and one incorrect solution, with a penalty on the size of scores.


def bradley_terry(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """-log sigmoid(V_c - V_i) for each pair."""
    return softplus(incorrect_M - correct_M)


def cross_entropy(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """The mean binary cross-entropy of each pair's two solutions, in nats."""
    return 0.5 * (softplus(-correct_M) + softplus(incorrect_M))


PairLoss = Callable[[Tensor, Tensor], Tensor]
KEY = "verifier.loss"

LOSSES: dict[str, PairLoss] = {
    "bradley_terry": bradley_terry,
    "cross_entropy": cross_entropy,
}


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
        correct_M, incorrect_M, scores_N = self.pair_scores(module, micro_batch)
        pair_weights_M = torch.from_numpy(pair_weights).to(scores_N.device)
        row_weights_N = torch.from_numpy(row_weights).to(scores_N.device)

        loss = self._pair_loss(micro_batch, correct_M, incorrect_M)
        penalty = self._score_penalty * (row_weights_N * scores_N.square()).sum() if self._score_penalty else None
        with torch.no_grad():  # metrics use the plain mean over pairs, independent of the training weights
            plain_loss = (pair_weights_M * self._loss(correct_M, incorrect_M)).sum() + (
                0.0 if penalty is None else penalty
            )
        metrics = _metrics(plain_loss, scores_N, correct_M - incorrect_M, pair_weights_M, row_weights_N)
        positions = len(micro_batch.sequences) * int(micro_batch.lengths_N.max())
        metrics.add_sum("pairs", len(micro_batch))
        metrics.add_mean("padding", positions - int(micro_batch.lengths_N.sum()), positions)
        return loss if penalty is None else loss + penalty, metrics

    def pair_scores(self, module: nn.Module, micro_batch: VerifierBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of the pairs' correct solutions [M], of the incorrect ones [M], and of the distinct solutions [N]."""
        scores_N = _scores(module, micro_batch, self._pad_id)
        pairs_M2 = torch.from_numpy(micro_batch.pairs_M2).to(scores_N.device, torch.int64)
        return scores_N[pairs_M2[:, 0]], scores_N[pairs_M2[:, 1]], scores_N

    def _pair_loss(self, micro_batch: VerifierBatch, correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
        pair_weights_M = torch.from_numpy(_weights(micro_batch)[0]).to(correct_M.device)
        return (pair_weights_M * self._loss(correct_M, incorrect_M)).sum()


def _scores(module: nn.Module, batch: VerifierBatch, pad_id: int) -> Tensor:
    device = next(module.parameters()).device
    input_ids_NL, lengths_N = pad_right(batch.sequences, pad_id, device)
    prompt_lengths_N = torch.from_numpy(batch.prompt_lengths_N).to(device, torch.int64)
    references_N = None if batch.references_N is None else torch.from_numpy(batch.references_N).to(device)
    scores_N: Tensor = module(input_ids_NL, lengths_N, prompt_lengths_N, references_N)
    return scores_N


def _weights(batch: VerifierBatch) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if batch.pair_weights_M is None or batch.row_weights_N is None:
        raise ValueError("the batch has no weights: call prepare first")
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


def slopes_of(loss: PairLoss) -> PairLoss:
    """d l(a V_c, a V_i) / d a at a = 1 of each pair, float32 [M]: (dl/dV_c) V_c + (dl/dV_i) V_i. Differentiable."""

    def slopes(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
        with torch.enable_grad():  # the survey disables gradients
            scores = [s if s.requires_grad else s.detach().requires_grad_() for s in (correct_M, incorrect_M)]
            # A pair's loss depends only on its own two scores, so the gradient of the sum gives each pair's gradient.
            gradients = torch.autograd.grad(loss(*scores).sum(), scores, create_graph=True)
            slopes_M = gradients[0] * scores[0] + gradients[1] * scores[1]
        return slopes_M if torch.is_grad_enabled() else slopes_M.detach()

    return slopes


def environment_means(
    values_M: Tensor, environments_M: Tensor, environments: int, weights_M: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(means_E, totals_E): each environment's weighted mean of `values_M` (0 without pairs) and its sum of weights.
    `environments_M`: int64 in 0..environments-1. `weights_M`: not negative; None: all 1. Differentiable in the
    values."""
    if weights_M is None:
        totals_E = torch.bincount(environments_M, minlength=environments).to(values_M.dtype)
    else:
        totals_E = values_M.new_zeros(environments).index_add(0, environments_M, weights_M)
        values_M = values_M * weights_M
    sums_E = values_M.new_zeros(environments).index_add(0, environments_M, values_M)
    return sums_E / totals_E.clamp_min(torch.finfo(totals_E.dtype).tiny), totals_E


def vrex(losses_M: Tensor, environments_M: Tensor, environments: int, weights_M: Tensor | None = None) -> Tensor:
    """V-REx's Var_e(R_e): a scalar, differentiable in the losses; 0 with fewer than two environments."""
    means_E, totals_E = environment_means(losses_M, environments_M, environments, weights_M)
    there_E = _there(totals_E)
    mean = torch.dot(there_E, means_E.detach())  # its gradient cancels: the deviations from it sum to 0
    return torch.dot(there_E, (means_E - mean).square())


def irm_v1(slopes_M: Tensor, environments_M: Tensor, environments: int, weights_M: Tensor | None = None) -> Tensor:
    """IRMv1's mean_e g_e^2: a scalar, differentiable in the slopes (`slopes_of`) and through them in the scores."""
    means_E, totals_E = environment_means(slopes_M, environments_M, environments, weights_M)
    return torch.dot(_there(totals_E), means_E.square())


def vrex_weights(means_E: Tensor, totals_E: Tensor) -> Tensor:
    """float32 [E]: the factor of w_m l_m in the second pass (see the module docstring), without gradient.

    `means_E` and `totals_E`: `environment_means` of the whole batch's losses.
    """
    return 2.0 * _per_weight(means_E - torch.dot(_there(totals_E), means_E), totals_E)


def irm_weights(means_E: Tensor, totals_E: Tensor) -> Tensor:
    """As `vrex_weights`, for IRMv1 and the whole batch's slopes."""
    return 2.0 * _per_weight(means_E, totals_E)


def _there(totals_E: Tensor) -> Tensor:
    """[E]: 1 / (number of environments with pairs) for these environments, 0 for the others."""
    there_E = totals_E.sign()
    return there_E / there_E.sum().clamp_min(1.0)


def _per_weight(values_E: Tensor, totals_E: Tensor) -> Tensor:
    """values / (E W_e); 0 for environments without pairs."""
    tiny = torch.finfo(totals_E.dtype).tiny
    return (_there(totals_E) * values_E / totals_E.clamp_min(tiny)).detach()


class RobustObjective(PairObjective):
    """PairObjective with a robust mean. Additional metrics of the whole batch: environments, environment_worst (highest
    R_e), environment_spread (standard deviation of R_e), environment_penalty (irm: mean g^2; otherwise Var)."""

    def __init__(self, section: Verifier, pad_id: int, *, environments: int) -> None:
        super().__init__(section, pad_id)
        self._robust = section.robust
        self._slope = slopes_of(self._loss)
        self._environments = environments
        self._log_q_E = torch.zeros(environments)  # group DRO's log weights, up to a constant

    def state(self) -> dict[str, Any]:
        """What the next step needs in addition to the batch, as JSON data."""
        return {"log_q": self._log_q_E.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._log_q_E = torch.tensor(state["log_q"], dtype=torch.float32)

    @torch.no_grad()
    def weigh(
        self, micro_batches: list[VerifierBatch], measured: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[list[VerifierBatch], Metrics]:
        """The micro-batches with their pairs' weights in the loss of the whole batch, and metrics. `measured`: the
        results of `measure`."""
        if not micro_batches:
            return micro_batches, Metrics()
        losses, slopes = zip(*measured, strict=True)
        environments_M = torch.from_numpy(np.concatenate([part.sources_M for part in micro_batches]).astype(np.int64))
        weights_M = torch.from_numpy(np.concatenate([part.pair_weights_M for part in micro_batches]))
        counted = (environments_M, self._environments, weights_M)
        losses_M, slopes_M = torch.cat(losses), torch.cat(slopes)
        risks_E, totals_E = environment_means(losses_M, *counted)
        there_E = totals_E > 0
        penalty = irm_v1(slopes_M, *counted) if self._robust.kind == "irm" else vrex(losses_M, *counted)
        factors_E, slope_factors_E = self._factors(
            risks_E, totals_E, slopes_M, counted, self._strength(micro_batches[0])
        )

        found = [
            _weighted(part, environments_M[first:end], factors_E, slope_factors_E)
            for part, first, end in _spans(micro_batches)
        ]
        return found, _risk_metrics(risks_E[there_E], float(penalty))

    def _factors(
        self,
        risks_E: Tensor,
        totals_E: Tensor,
        slopes_M: Tensor,
        counted: tuple[Tensor, int, Tensor],
        strength: float,
    ) -> tuple[Tensor, Tensor | None]:
        """By environment: the factor of w_m l_m, and the factor of w_m times the pair's slope."""
        there_E = totals_E > 0
        equal_E = torch.where(
            there_E, 1.0 / (totals_E.clamp_min(torch.finfo(totals_E.dtype).tiny) * there_E.sum()), 0.0
        )
        match self._robust.kind:
            case "vrex":
                return (equal_E + strength * vrex_weights(risks_E, totals_E)).clamp_min(0.0), None
            case "irm":
                slopes_E, _ = environment_means(slopes_M, *counted)
                return equal_E, strength * irm_weights(slopes_E, totals_E)
            case "group_dro":
                self._log_q_E = torch.log_softmax(self._log_q_E + strength * torch.where(there_E, risks_E, 0.0), 0)
                q_E = torch.where(there_E, self._log_q_E.exp(), 0.0)
                return equal_E * there_E.sum() * q_E / q_E.sum(), None
            case _:
                return equal_E, None

    def _strength(self, batch: VerifierBatch) -> float:
        robust = self._robust
        if isinstance(robust, PenalisedRisk) and robust.warmup:
            return robust.strength * min(1.0, batch.step / robust.warmup)
        return robust.strength

    @torch.no_grad()
    def measure(self, module: nn.Module, micro_batch: VerifierBatch) -> tuple[Tensor, Tensor]:
        """Each pair's loss and slope, float32 [M], on the CPU."""
        correct_M, incorrect_M, _ = self.pair_scores(module, micro_batch)
        return self._loss(correct_M, incorrect_M).float().cpu(), self._slope(correct_M, incorrect_M).float().cpu()

    def _pair_loss(self, micro_batch: VerifierBatch, correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
        loss = _dot(_known(micro_batch.loss_weights_M), self._loss(correct_M, incorrect_M))
        if micro_batch.slope_weights_M is not None:
            loss = loss + _dot(micro_batch.slope_weights_M, self._slope(correct_M, incorrect_M))
        return loss


def objective_for(section: Verifier, pad_id: int, *, environments: int) -> PairObjective:
    """The objective for the verifier's section; `environments`: the number of possible sources of pairs."""
    if section.robust.kind == "none":
        return PairObjective(section, pad_id)
    return RobustObjective(section, pad_id, environments=environments)


def _weighted(
    part: VerifierBatch, environments_M: Tensor, factors_E: Tensor, slope_factors_E: Tensor | None
) -> VerifierBatch:
    weights_M = torch.from_numpy(_known(part.pair_weights_M))
    slopes = None if slope_factors_E is None else (weights_M * slope_factors_E[environments_M]).numpy()
    return replace(part, loss_weights_M=(weights_M * factors_E[environments_M]).numpy(), slope_weights_M=slopes)


def _spans(parts: list[VerifierBatch]) -> list[tuple[VerifierBatch, int, int]]:
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return [(part, end - len(part), end) for part, end in zip(parts, ends, strict=True)]


def _known(weights_M: Float32 | None) -> Float32:
    if weights_M is None:
        raise ValueError("the batch has no weights: call prepare, then weigh")
    return weights_M


def _dot(weights_M: Float32, values_M: Tensor) -> Tensor:
    return (torch.from_numpy(weights_M).to(values_M.device) * values_M).sum()


def _risk_metrics(risks: Tensor, penalty: float) -> Metrics:
    metrics = Metrics()
    metrics.add_sum("environments", len(risks))
    metrics.add_mean("environment_worst", float(risks.max()), 1)
    metrics.add_mean("environment_spread", float(risks.std(correction=0)), 1)
    metrics.add_mean("environment_penalty", penalty, 1)
    return metrics
