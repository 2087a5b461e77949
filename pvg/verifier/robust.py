"""Verifier losses that ask to be as good in every environment: V-REx, IRMv1, group DRO, and balanced environments.

A pair's environment is its source: who wrote its two solutions, the base prover or the prover of an earlier round.
With R_e the mean loss over the batch's pairs of environment e, and E the environments that are there:

    balanced     mean_e R_e
    vrex         mean_e R_e + s Var_e(R_e)                               arXiv 2003.00688
    irm          mean_e R_e + s mean_e g_e^2  (g_e: pvg/verifier/penalties.py)            arXiv 1907.02893
    group_dro    sum_e q_e R_e,  q_e <- q_e exp(s R_e) / sum             arXiv 1911.08731, algorithm 1

s is `verifier.robust_strength`; the penalties of vrex and irm grow to it over the first `verifier.robust_warmup` steps,
for a verifier that knows nothing yet is equally bad everywhere. V-REx weighs an environment (1 + 2 s (R_e - mean)) / E,
which is negative where its risk lies far below the mean: it would then learn to be worse there. Such weights are
clamped at 0, unless `verifier.robust_clamp` is false.

Each of these has the gradient of a sum over pairs, with weights that depend on the whole batch: on how many pairs an
environment has, on its losses, for irm on its slopes. `survey` finds them in a pass without gradient, so that the
micro-batches' gradients add up to those of the unsplit batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pvg import sections
from pvg.records import Float32
from pvg.telemetry.metrics import Metrics
from pvg.verifier.batch import VerifierBatch
from pvg.verifier.losses import PairObjective
from pvg.verifier.penalties import environment_means, irm_v1, irm_weights, slopes_of, vrex, vrex_weights


class RobustObjective(PairObjective):
    """PairObjective under another mean. Metrics besides its own, of the whole batch: environments, environment_worst
    (the highest R_e), environment_spread (their standard deviation), environment_penalty (irm: mean g^2; else Var)."""

    def __init__(self, section: sections.Verifier, pad_id: int, *, environments: int) -> None:
        super().__init__(section, pad_id)
        self._section = section
        self._slope = slopes_of(section.loss, self._loss)
        self._environments = environments
        self._log_q_E = torch.zeros(environments)  # group DRO's weights, up to a constant

    def state(self) -> dict[str, Any]:
        """What the next step needs besides the batch, as JSON data."""
        return {"log_q": self._log_q_E.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._log_q_E = torch.tensor(state["log_q"], dtype=torch.float32)

    @torch.no_grad()
    def survey(self, module: nn.Module, micro_batches: list[VerifierBatch]) -> tuple[list[VerifierBatch], Metrics]:
        """The micro-batches with the weights that their pairs have in the loss of the whole batch."""
        if not micro_batches:
            return micro_batches, Metrics()
        losses, slopes = zip(*(self._forward(module, micro_batch) for micro_batch in micro_batches), strict=True)
        environments_M = torch.from_numpy(np.concatenate([part.sources_M for part in micro_batches]).astype(np.int64))
        weights_M = torch.from_numpy(np.concatenate([part.pair_weights_M for part in micro_batches]))
        counted = (environments_M, self._environments, weights_M)
        losses_M, slopes_M = torch.cat(losses), torch.cat(slopes)
        risks_E, totals_E = environment_means(losses_M, *counted)
        there_E = totals_E > 0
        penalty = irm_v1(slopes_M, *counted) if self._section.robust == "irm" else vrex(losses_M, *counted)
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
        """By environment: what multiplies w_m l_m, and what multiplies w_m times the pair's slope."""
        there_E = totals_E > 0
        equal_E = torch.where(
            there_E, 1.0 / (totals_E.clamp_min(torch.finfo(totals_E.dtype).tiny) * there_E.sum()), 0.0
        )
        match self._section.robust:
            case "vrex":
                factors_E = equal_E + strength * vrex_weights(risks_E, totals_E)
                return factors_E.clamp_min(0.0) if self._section.robust_clamp else factors_E, None
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
        section = self._section
        if section.robust == "group_dro" or not section.robust_warmup:
            return section.robust_strength
        return section.robust_strength * min(1.0, batch.step / section.robust_warmup)

    def _forward(self, module: nn.Module, micro_batch: VerifierBatch) -> tuple[Tensor, Tensor]:
        """Each pair's loss and slope, float32 [M], on the CPU."""
        correct_M, incorrect_M, _ = self.pair_scores(module, micro_batch)
        return self._loss(correct_M, incorrect_M).float().cpu(), self._slope(correct_M, incorrect_M).float().cpu()

    def _pair_loss(self, micro_batch: VerifierBatch, correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
        loss = _dot(_known(micro_batch.loss_weights_M), self._loss(correct_M, incorrect_M))
        if micro_batch.slope_weights_M is not None:
            loss = loss + _dot(micro_batch.slope_weights_M, self._slope(correct_M, incorrect_M))
        return loss


def objective_for(section: sections.Verifier, pad_id: int, *, environments: int) -> PairObjective:
    """The verifier's objective by its section; `environments` is how many sources its pairs may have."""
    if section.robust == "none":
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
        raise ValueError("the batch has no weights: call prepare, then survey")
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
