"""Policy losses: a per-token objective, importance weights, and an aggregation expressed as row weights.

    loss = sum over rows n of  w_n  sum over completion tokens t of  (-rho_nt objective_nt + beta kl_nt)

Invariant: the row weights depend on the whole batch. `PolicyObjective.prepare` fixes them before the batch is split, so
losses and gradients of any micro-batches add up to those of the unsplit batch.

Formulas: the table of docs/learning.md. r_t = pi / pi_sampled of token t, A is the row's advantage, clips are to
[1 - low, 1 + high].

*Decoupled clipping* (arXiv 2110.00641, AReaL 2505.24298) clips rows around the policy at batch start: r_t = pi /
pi_start, and each token's objective is multiplied by the detached weight rho_t. This applies to stale rows
(training.importance = "decoupled") or to all rows ("truncated", "masked").

*Importance weights* correct for pi_start / pi_sampled, which is not 1 if a rollout is stale, or if the sampler's
arithmetic differs from the trainer's (servers, passes in bfloat16). The ratio is per token, or the geometric mean
over the tokens for losses of whole sequences (gspo). Its variance is unbounded, so rho is bounded: `truncated` is
min(ratio, high); `masked` is the ratio if low <= ratio <= high, else 0 (IcePop, arXiv 2510.18855). Row weights use
lengths before masking."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.errors import ConfigurationError, TrainingDivergedError
from pvg.extensions import is_reference, resolve
from pvg.records import Float32
from pvg.telemetry.metrics import Metrics
from pvg.training.batch import PolicyBatch
from pvg.training.credit import Credit, normalised
from pvg.training.forward import ForwardSettings, batch_logprobs, forward_batches, recompute_logprobs

# The KL penalty against a reference policy, and its adaptive coefficient.


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2, elementwise, in nats."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) + d - 1, elementwise, in nats; never negative."""
    difference = logprobs - reference
    return torch.expm1(-difference) + difference


def kl_penalty(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The penalty, elementwise, in nats, with k3's value and k2's gradient; differentiable in `logprobs`."""
    gradient = k2(logprobs, reference)
    return gradient + (k3(logprobs, reference) - gradient).detach()


# --- adaptive coefficients --------------------------------------------------------------------------------------------

MOST_ERROR = 0.2  # relative error of the KL; Ziegler et al.'s value
KL_HORIZON = 10.0  # steps in which an error of a fifth or more moves the coefficient by a fifth: Ziegler's
KL_RANGE = 1000.0  # maximal factor above or below training.kl.coefficient, so that a long drift can be reversed


def adapted_kl(coefficient: float, kl: float, target: float, horizon: float) -> float:
    """beta (1 + e / horizon) with e = clip(kl / target - 1, -0.2, 0.2): the proportional controller in log space of
    Ziegler et al. (arXiv 1909.08593, section 2.2; their K_beta = 0.1 is a horizon of 10 steps). `kl` and `target` are
    in nats, in the same measure."""
    error = min(max(kl / target - 1.0, -MOST_ERROR), MOST_ERROR)
    return coefficient * (1.0 + error / horizon)


Kind = Literal["none", "truncated", "masked"]
# How each kind of training.importance weights the rows that it weights.
WEIGHTS: dict[str, Kind] = {
    "none": "none",
    "decoupled": "truncated",
    "unweighted": "none",
    "truncated": "truncated",
    "masked": "masked",
}
Ratio = Callable[[Tensor, Tensor], Tensor]

# The lowest and the highest importance weight (IcePop's; 5 is far above the ratios of healthy rollouts).
WEIGHT_BOUNDS = (0.5, 5.0)


def token_ratio(log_ratios_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """pi_start / pi_sampled of each token."""
    return log_ratios_BL.exp()


def geometric_ratio(log_ratios_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """exp(mean_t log ratio) for every token: the ratio of losses whose action is the whole sequence."""
    counts_B1 = mask_BL.sum(dim=1, keepdim=True).clamp(min=1)
    return (log_ratios_BL.sum(dim=1, keepdim=True) / counts_B1).exp().expand_as(log_ratios_BL)


def importance_weights(ratios: Tensor, kind: Kind, low: float, high: float) -> Tensor:
    """Elementwise: the weight rho for raw `ratios`. Only masking uses `low`."""
    if kind == "none":
        return torch.ones_like(ratios)
    if kind == "truncated":
        return ratios.clamp(max=high)
    return torch.where(outside(ratios, kind, low, high), torch.zeros_like(ratios), ratios)


def outside(ratios: Tensor, kind: Kind, low: float, high: float) -> Tensor:
    """Elementwise: whether the weight differs from the ratio."""
    if kind == "none":
        return torch.zeros_like(ratios, dtype=torch.bool)
    return ratios > high if kind == "truncated" else (ratios < low) | (ratios > high)


@torch.no_grad()
def importance_metrics(ratios_BL: Tensor, mask_BL: Tensor, tokens: int, kind: Kind, low: float, high: float) -> Metrics:
    """Metrics over the `tokens` of the mask: start_ratio_mean and start_ratio_max (before bounds; 1 for rows without
    weights), start_outside (share of truncated or masked tokens)."""
    totals = {
        "mean start_ratio_mean": _total(ratios_BL, mask_BL),
        "mean start_outside": _total(outside(ratios_BL, kind, low, high), mask_BL),
        "max start_ratio_max": _largest(ratios_BL, mask_BL),
    }
    return _gathered(totals, tokens) if tokens else Metrics()


def _total(values_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Sum over the mask's tokens. Indexing by the mask would wait for the device to count them."""
    return torch.where(mask_BL, values_BL, 0).sum()


def _largest(values_BL: Tensor, mask_BL: Tensor) -> Tensor:
    return torch.where(mask_BL, values_BL, -torch.inf).max()


def _gathered(totals: Mapping[str, Tensor], tokens: int) -> Metrics:
    """Metrics of scalars by kind and name, which stay on their device. Means are per token."""
    metrics = Metrics()
    totals_M = torch.stack([total.double() for total in totals.values()])
    metrics.add_later(list(totals), torch.stack([totals_M, torch.full_like(totals_M, tokens)], dim=1))
    return metrics


# --- per-token objectives ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The input of an objective for B rows; everything is 0 outside the completion (`mask_BL`).

    `log_ratios_BL`: log pi minus that of the policy to clip around, in nats. `low` and `high`: the clip's bounds.
    """

    logprobs_BL: Tensor
    log_ratios_BL: Tensor
    mask_BL: Tensor
    advantages_B1: Tensor
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ObjectiveTerms:
    """The objective of each token (to maximise), and whether the clip removed its gradient."""

    objective_BL: Tensor
    clipped_BL: Tensor


def clipped_ratio(tokens: TokenBatch) -> ObjectiveTerms:
    """min(r A, clip(r) A) with the token's ratio r (PPO)."""
    return _clipped(tokens.log_ratios_BL.exp(), tokens)


def clipped_sequence_ratio(tokens: TokenBatch) -> ObjectiveTerms:
    """min(s A, clip(s) A) for every token, with the sequence's ratio s = exp(mean_t log r_t) (GSPO)."""
    return _clipped(geometric_ratio(tokens.log_ratios_BL, tokens.mask_BL), tokens)


def capped_weight(tokens: TokenBatch) -> ObjectiveTerms:
    """stopgrad(min(r, 1 + high)) A log pi (CISPO): caps the gradient but never removes it; ignores `low`."""
    ratios_BL = tokens.log_ratios_BL.detach().exp()
    weights_BL = ratios_BL.clamp(max=1.0 + tokens.high)
    return ObjectiveTerms(weights_BL * tokens.advantages_B1 * tokens.logprobs_BL, ratios_BL > 1.0 + tokens.high)


def reinforce(tokens: TokenBatch) -> ObjectiveTerms:
    """A log pi: without ratio and clip, for on-policy batches."""
    return ObjectiveTerms(tokens.advantages_B1 * tokens.logprobs_BL, torch.zeros_like(tokens.mask_BL))


def _clipped(ratios_BL: Tensor, tokens: TokenBatch) -> ObjectiveTerms:
    advantages_B1 = tokens.advantages_B1
    free_BL = ratios_BL * advantages_B1
    held_BL = ratios_BL.clamp(1.0 - tokens.low, 1.0 + tokens.high) * advantages_B1
    return ObjectiveTerms(torch.minimum(free_BL, held_BL), held_BL < free_BL)


# --- aggregation: completion lengths and the length limit -> row weights --------------------------------------------

Float64 = NDArray[np.float64]


def mean_of_sequence_means(lengths_N: Float64, max_tokens: int) -> Float64:
    """1 / (N C_n): each sequence counts the same."""
    return 1.0 / (len(lengths_N) * np.maximum(lengths_N, 1.0))


def mean_of_sequence_sums(lengths_N: Float64, max_tokens: int) -> Float64:
    """1 / N: the whole sequence is the action; its log-prob is the sum over tokens (RLOO)."""
    return np.full(len(lengths_N), 1.0 / max(1, len(lengths_N)))


def sum_over_limit(lengths_N: Float64, max_tokens: int) -> Float64:
    """1 / (N x max_tokens): a constant, so length has no effect on weights (Dr. GRPO; rae, whose policy gradient sums
    over tokens)."""
    return np.full(len(lengths_N), 1.0 / (max(1, len(lengths_N)) * max_tokens))


def mean_of_tokens(lengths_N: Float64, max_tokens: int) -> Float64:
    """1 / (sum of C): every token of the batch counts the same."""
    return np.full(len(lengths_N), 1.0 / max(1.0, lengths_N.sum()))


# --- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A row of the table in docs/learning.md.

    - `clip_low`, `clip_high`: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    - `penalised`: has a KL term. `drops_silent`: leaves groups without signal out of the batch and its denominators.
    - `ratio`: for importance weights.
    - `credit`: rewards to advantages; None: pvg.training.credit's function for the loss's name.
    """

    objective: Callable[[TokenBatch], ObjectiveTerms]
    aggregation: Callable[[Float64, int], Float64]
    clip_low: float = 0.2
    clip_high: float = 0.2
    penalised: bool = True
    drops_silent: bool = False
    ratio: Ratio = token_ratio
    credit: Credit | None = None


LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(clipped_ratio, mean_of_sequence_means),
    "dr_grpo": PolicyLoss(clipped_ratio, sum_over_limit),
    "dapo": PolicyLoss(clipped_ratio, mean_of_tokens, clip_high=0.28, penalised=False, drops_silent=True),
    "gspo": PolicyLoss(
        clipped_sequence_ratio, mean_of_sequence_means, clip_low=3e-4, clip_high=4e-4, ratio=geometric_ratio
    ),
    # The cap is 1 + clip_high = 5, far above the ratios of a healthy step, so it bounds outliers only.
    "cispo": PolicyLoss(capped_weight, mean_of_tokens, clip_high=4.0),
    "rloo": PolicyLoss(reinforce, mean_of_sequence_sums),
    "reinforce_pp": PolicyLoss(clipped_ratio, mean_of_tokens),
    "spo": PolicyLoss(clipped_ratio, mean_of_tokens),
    "rae": PolicyLoss(clipped_ratio, sum_over_limit),
}


def policy_loss(name: str) -> PolicyLoss:
    """The loss `name`: of the table, or a `PolicyLoss` in a user's file (default credit: GRPO's).

    Raises ConfigurationError for an unknown name.
    """
    if not is_reference(name) and name not in LOSSES:
        raise ConfigurationError(f"There is no loss {name!r}.", f"Known: {', '.join(LOSSES)}.")
    loss = resolve("training.loss", name, LOSSES, PolicyLoss)
    return replace(loss, credit=loss.credit or normalised) if is_reference(name) else loss


class PolicyObjective:
    """The loss `section.loss` as the trainer's objective: prepares a batch, splits it, computes a micro-batch's loss.

    Log-probs are at the sampling temperature, because the temperature is part of the trained policy.
    """

    def __init__(
        self,
        section: Training,
        rollout: Rollouts,
        pad_id: int,
        precision: str = "float32",
        *,
        fused_layers: bool = True,
    ) -> None:
        """`precision`: of log-probs that are computed again. `fused_layers`: whether layers of
        Llama, Qwen2 and Qwen3 use pvg's own code."""
        loss, limits = policy_loss(section.loss.kind), section.loss
        self._loss = replace(
            loss,
            clip_low=loss.clip_low if limits.clip_low is None else limits.clip_low,
            clip_high=loss.clip_high if limits.clip_high is None else limits.clip_high,
        )
        if section.kl.target is not None and not self._loss.penalised:
            raise ConfigurationError(
                f"training.kl.target has no effect: training.loss = {section.loss.kind!r} has no KL term.",
                "Leave it out.",
            )
        self.kl = section.kl.coefficient  # of the next step
        auto = section.importance == "auto"
        self._rows = rollout.default_importance(precision) if auto else section.importance
        self._importance: Kind = WEIGHTS[self._rows]
        self.weight_bounds = WEIGHT_BOUNDS
        self._section = section
        self._max_tokens = rollout.max_tokens
        self._forward = ForwardSettings.of(section, rollout.temperature, pad_id, precision, fused_layers=fused_layers)

    @property
    def credit(self) -> Credit | None:
        """See PolicyLoss."""
        return self._loss.credit

    @property
    def needs_reference(self) -> bool:
        """Whether batches need reference log-probs: the loss has a KL term with a coefficient above 0."""
        return self._loss.penalised and self._section.kl.coefficient > 0

    @property
    def decoupled(self) -> bool:
        """Whether only stale rows are weighted and clipped around the policy at batch start."""
        return self._rows in ("decoupled", "unweighted")

    @property
    def weighs_all(self) -> bool:
        """Whether all rows are weighted and clipped around the policy at batch start."""
        return self._rows in ("truncated", "masked")

    @property
    def needs_start(self) -> bool:
        """Whether batches need all rows' log-probs under the policy at batch start. Not in batches with one step, where
        this policy is the trained one and the step computes them anyway."""
        return self.weighs_all and not self.one_step

    @property
    def one_step(self) -> bool:
        """Whether a batch has one step, so that its forward pass gives the log-probs at batch start."""
        return self._section.minibatches == 1

    # --- the adaptive coefficient; it depends on metrics of whole steps, so micro-batches do not change it ------------

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Call after a step: returns its KL coefficient as a metric if it adapts, then sets that of the next step."""
        penalty, used, kl = self._section.kl, self.kl, metrics.get("kl")
        if penalty.target is None:
            return {}
        if kl is not None and math.isfinite(kl):
            adapted = adapted_kl(used, kl, penalty.target, KL_HORIZON)
            self.kl = min(max(adapted, penalty.coefficient / KL_RANGE), penalty.coefficient * KL_RANGE)
        return {"kl_coefficient": used}

    def state(self) -> dict[str, Any]:
        """JSON data that restores the coefficient bit by bit; {} if it does not adapt."""
        return {} if self._section.kl.target is None else {"kl": self.kl}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl = state.get("kl", self.kl)

    # --- a batch ------------------------------------------------------------------------------------------------------

    def recompute(self, module: nn.Module, batch: PolicyBatch) -> list[Float32]:
        """Log-probs of the batch's completions under `module`, computed in the same way as for the loss."""
        return recompute_logprobs(module, batch, self._forward)

    def prepare(self, batch: PolicyBatch) -> PolicyBatch:
        """Set the row weights from the whole batch, unless it has some.

        Raises TrainingDivergedError, naming the row, for an advantage or log-prob that is NaN or infinite.
        """
        _check_finite(batch)
        if self.needs_reference and batch.reference_logprobs is None:
            raise ValueError("the KL term requires reference_logprobs")
        if self.needs_start and batch.proximal_logprobs is None:
            raise ValueError("importance weights over several steps require proximal_logprobs")
        if batch.row_weights_N is not None:
            return batch
        kept_N = _rows_of_signal(batch) if self._loss.drops_silent else np.ones(len(batch), dtype=np.bool_)
        weights_N = np.zeros(len(batch), dtype=np.float64)
        kept_lengths = batch.completion_lengths_N[kept_N].astype(np.float64)
        weights_N[kept_N] = self._loss.aggregation(kept_lengths, self._max_tokens)
        return batch.with_weights(weights_N.astype(np.float32))

    def split(self, batch: PolicyBatch) -> list[PolicyBatch]:
        """Micro-batches of a prepared batch, within the token budget. Leaves out rows of weight 0.

        Raises ConfigurationError if a single row exceeds the token budget.
        """
        assert batch.row_weights_N is not None, "prepare the batch before splitting it"
        rows = np.flatnonzero(batch.row_weights_N != 0.0)
        return [batch.select(part) for part in forward_batches(batch, rows, self._forward)]

    def __call__(self, module: nn.Module, micro_batch: PolicyBatch) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the loss, and its metrics (see `_metrics`)."""
        batch = micro_batch
        assert batch.row_weights_N is not None, "prepare the batch before computing its loss"
        device = next(module.parameters()).device
        logprobs_BL = batch_logprobs(module, batch, self._forward)
        mask_BL = _tensor(batch.completion_mask(), device)
        if batch.sampled_masks is not None:  # ignore the log-probs of tokens that an environment wrote
            logprobs_BL = logprobs_BL.masked_fill(~mask_BL, 0.0)
        sampled_BL = _tensor(batch.on_positions(batch.sampled_logprobs), device)
        proximal_BL, moved_BL = self._start(batch, logprobs_BL.detach(), sampled_BL, mask_BL)
        log_ratios_BL = logprobs_BL - proximal_BL
        advantages_B1 = _tensor(batch.advantages_N, device)[:, None]
        terms = self._loss.objective(
            TokenBatch(logprobs_BL, log_ratios_BL, mask_BL, advantages_B1, self._loss.clip_low, self._loss.clip_high)
        )
        cost_BL = -terms.objective_BL
        bounds = (self._importance, *self.weight_bounds)
        if moved_BL is not None:
            cost_BL = cost_BL * importance_weights(moved_BL, *bounds)
        reference_BL = None
        if batch.reference_logprobs is not None:
            reference_BL = _tensor(batch.on_positions(batch.reference_logprobs), device)
        if self.needs_reference:
            assert reference_BL is not None
            cost_BL = cost_BL + self.kl * kl_penalty(logprobs_BL, reference_BL)
        weights_B1 = _tensor(batch.row_weights_N, device)[:, None]
        loss = (weights_B1 * cost_BL * mask_BL).sum()
        trained = int(batch.completion_lengths_N.sum())
        metrics = _metrics(loss, logprobs_BL, logprobs_BL - sampled_BL, reference_BL, mask_BL, trained, terms)
        if moved_BL is not None:
            metrics.merge(importance_metrics(moved_BL, mask_BL, trained, *bounds))
        tokens = int(batch.lengths_N.sum())
        positions = tokens if self._forward.shared_prompts else mask_BL.numel()  # shared: prompts once, no padding
        metrics.add_mean("padding", positions - tokens, positions)
        return loss, metrics

    def _start(
        self, batch: PolicyBatch, now_BL: Tensor, sampled_BL: Tensor, mask_BL: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probs to clip around, and the log-ratio of the policy at batch start to the sampler if weights need
        it. `now_BL`: under the current policy, which in a batch's only step is the policy at batch start."""
        if batch.proximal_logprobs is not None:
            start_BL = _tensor(batch.on_positions(batch.proximal_logprobs), now_BL.device)
        elif self.weighs_all:
            start_BL = now_BL
        elif batch.stale_N is not None:
            start_BL = torch.where(_tensor(batch.stale_N, now_BL.device)[:, None], now_BL, sampled_BL)
        else:
            return sampled_BL, None
        return start_BL, self._loss.ratio(start_BL - sampled_BL, mask_BL)


@torch.no_grad()
def _metrics(
    loss: Tensor,
    logprobs_BL: Tensor,
    log_ratios_BL: Tensor,
    reference_BL: Tensor | None,
    mask_BL: Tensor,
    tokens: int,
    terms: ObjectiveTerms,
) -> Metrics:
    """loss (sum), and over the `tokens` of the mask: entropy (the estimate -mean log pi), ratio_mean and ratio_max
    (before the clip), clipped (share whose gradient the clip changed), kl (mean of k3; with a reference). The
    caller adds padding, the share of positions without a token."""
    ratios_BL = log_ratios_BL.exp()
    values = {
        "sum loss": loss,
        "mean entropy": -_total(logprobs_BL, mask_BL),
        "mean ratio_mean": _total(ratios_BL, mask_BL),
        "mean clipped": _total(terms.clipped_BL, mask_BL),
        "max ratio_max": _largest(ratios_BL, mask_BL) if tokens else torch.ones_like(loss),
    }
    if reference_BL is not None:
        values["mean kl"] = _total(k3(logprobs_BL, reference_BL), mask_BL)
    return _gathered(values, tokens)


def _rows_of_signal(batch: PolicyBatch) -> NDArray[np.bool_]:
    """Rows whose group has a nonzero advantage; credit gives exactly 0 to groups of equal rewards."""
    keys_N2 = np.stack([batch.role_ids_N.astype(np.int64), batch.group_ids_N.astype(np.int64)], axis=1)
    groups, group_N = np.unique(keys_N2, axis=0, return_inverse=True)
    group_N = group_N.reshape(-1)
    largest_G = np.bincount(group_N, weights=np.abs(batch.advantages_N), minlength=len(groups))
    kept_N: NDArray[np.bool_] = largest_G[group_N] > 0.0
    return kept_N


def _check_finite(batch: PolicyBatch) -> None:
    logprobs = {
        "a sampled log-prob": batch.sampled_logprobs,
        "a reference log-prob": batch.reference_logprobs,
        "a log-prob at batch start": batch.proximal_logprobs,
    }
    columns: dict[str, Any] = {"an advantage": batch.advantages_N[:, None]} if len(batch) else {}
    columns |= {name: values for name, values in logprobs.items() if values is not None}
    for name, rows in columns.items():
        for row, values in enumerate(rows):
            if not np.isfinite(values).all():
                raise TrainingDivergedError(
                    f"Row {row} of the batch (group {batch.group_ids_N[row]}) has {name} that is not finite.",
                    "The trainer did not use this batch; the last commit is intact.",
                )


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
