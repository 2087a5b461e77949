"""Verifier losses for equal quality in every environment: V-REx, IRMv1, group DRO, and balanced environments.

A pair's environment is its source: the base prover or the prover of an earlier round that wrote its solutions. R_e is
the mean loss over the pairs of environment e, weighted by w. E environments have pairs in the batch; others are left
out. W_e is the sum of w over the pairs of e.

    R_e = sum of w_m l_m / W_e over the pairs m of environment e         (w: a batch's pair weights, or 1)

    balanced     mean_e R_e
    vrex         mean_e R_e + s Var_e(R_e), Var with divisor E                 arXiv 2003.00688
    irm          mean_e R_e + s mean_e g_e^2,  g_e = d R_e(a V) / d a at a = 1 arXiv 1907.02893 (IRMv1)
    group_dro    sum_e q_e R_e,  q_e <- q_e exp(s R_e) / sum                   arXiv 1911.08731, algorithm 1

s is `verifier.robust.strength`. The penalties of vrex and irm grow to it over the first `verifier.robust.warmup` steps,
because an untrained verifier is equally bad everywhere. V-REx gives an environment the weight (1 + 2 s (R_e - mean)) /
E. It is negative if R_e is far below the mean, which would train the verifier to be worse there. Such weights become 0.

IRMv1's multiplier a scales the *scores*. With the derivatives worked out, g_e is a mean over pairs like R_e, of

    bradley_terry    d l(aV)/da = -sigmoid(-d) d,  d = V_c - V_i
    cross_entropy    d l(aV)/da = (-sigmoid(-V_c) V_c + sigmoid(V_i) V_i) / 2

Neither penalty is a sum over pairs, but its gradient is that of a weighted sum whose weights are constants of the whole
batch. So two passes are exact for any micro-batches: `measure` and `weigh` compute R_e or g_e of the whole batch
without gradient, then training uses sum_m weight_m value_m:

    d Var_e(R_e)   = sum_m  w_m / W_e  2 (R_e - mean_e R_e) / E   d l_m                     (`vrex_weights`)
    d mean_e g_e^2 = sum_m  w_m / W_e  2 g_e / E                  d (d l_m(aV)/da)          (`irm_weights`)

Only first derivatives: V-REx treats the mean as a constant, whose gradient cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pvg.config.training import PenalisedRisk, Verifier
from pvg.records import Float32
from pvg.telemetry.metrics import Metrics
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import PairObjective

PairLoss = Callable[[Tensor, Tensor], Tensor]


def bradley_terry_slopes(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """d l(a V_c, a V_i) / d a at a = 1 of each pair's Bradley-Terry loss: float32 [M], differentiable."""
    gaps_M = correct_M - incorrect_M
    return -torch.sigmoid(-gaps_M) * gaps_M


def cross_entropy_slopes(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """As `bradley_terry_slopes`, for each pair's mean binary cross-entropy."""
    return 0.5 * (torch.sigmoid(incorrect_M) * incorrect_M - torch.sigmoid(-correct_M) * correct_M)


# Keys as in pvg.verifier.losses.LOSSES.
SLOPES: dict[str, PairLoss] = {
    "bradley_terry": bradley_terry_slopes,
    "cross_entropy": cross_entropy_slopes,
}


def slopes_of(name: str, loss: PairLoss) -> PairLoss:
    """d l(a V_c, a V_i) / d a at a = 1: from the table for pvg's losses, else (dl/dV_c) V_c + (dl/dV_i) V_i by
    autograd."""
    if name in SLOPES:
        return SLOPES[name]

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
    """IRMv1's mean_e g_e^2: a scalar, differentiable in the slopes (see SLOPES) and through them in the scores."""
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
        self._slope = slopes_of(section.loss, self._loss)
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
        return found, _metrics(risks_E[there_E], float(penalty))

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


def _metrics(risks: Tensor, penalty: float) -> Metrics:
    metrics = Metrics()
    metrics.add_sum("environments", len(risks))
    metrics.add_mean("environment_worst", float(risks.max()), 1)
    metrics.add_mean("environment_spread", float(risks.std(correction=0)), 1)
    metrics.add_mean("environment_penalty", penalty, 1)
    return metrics
