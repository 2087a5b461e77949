"""Importance weights: rollouts were sampled by mu, and are trained on as if by pi_start, the policy at batch start.

mu is not pi_start where the rollout is stale, and never quite where a server's arithmetic is not the trainer's. The
weight rho = pi_start / mu of a token corrects for it. Its variance has no bound, so it is

- `truncated`: min(rho, high) (truncated importance sampling; Ionides 2008; for samplers apart from the trainer Yao et
  al. 2025, and AReaL, arXiv 2505.24298, for stale rollouts), or
- `masked`: rho where low <= rho <= high, else 0 (IcePop, Ring-1T, arXiv 2510.18855).

Levels: rho is of a token, or of the whole sequence and the same on all of its tokens: the product of its tokens' rho,
without bias and of a variance that grows with length, or the geometric mean of them, which does not grow.

Invariants: weights are detached. A token that is masked out stays in every denominator: row weights are made of
lengths before, so that masking takes gradient away and never makes the rest count for more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pvg.config import sections
from pvg.errors import ConfigurationError, TrainingDivergedError
from pvg.extensions import is_reference, resolve
from pvg.models.logprobs import CompletionOutputs
from pvg.records import Float32
from pvg.telemetry.metrics import Metrics
from pvg.training.batch import PolicyBatch
from pvg.training.credit import Credit, normalised
from pvg.training.forward import ForwardSettings, batch_outputs, batch_positions, forward_batches, recompute_logprobs
from pvg.training.memory import MicroBatchMemory, Size
from pvg.training.penalties import Control, k3, kl_penalty

Kind = Literal["none", "truncated", "masked"]
# How each kind of training.importance weights the rows that it weights.
WEIGHTS: dict[str, Kind] = {
    "none": "truncated",
    "decoupled": "truncated",
    "unweighted": "none",
    "truncated": "truncated",
    "masked": "masked",
}
Level = Literal["token", "sequence", "geometric"]
Ratio = Callable[[Tensor, Tensor], Tensor]

LARGEST_LOG = 20.0  # of a sequence's product: e^20 is far over any bound, and a float32 still


def token_ratio(log_ratios_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """pi_start / mu of each token."""
    return log_ratios_BL.exp()


def geometric_ratio(log_ratios_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """exp(mean_t log ratio) on every token: the ratio of losses whose action is the sequence."""
    counts_B1 = mask_BL.sum(dim=1, keepdim=True).clamp(min=1)
    return (log_ratios_BL.sum(dim=1, keepdim=True) / counts_B1).exp().expand_as(log_ratios_BL)


def sequence_ratio(log_ratios_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """exp(sum_t log ratio) on every token, between e^-20 and e^20."""
    sums_B1 = log_ratios_BL.sum(dim=1, keepdim=True)
    return sums_B1.clamp(-LARGEST_LOG, LARGEST_LOG).exp().expand_as(log_ratios_BL)


RATIOS: dict[Level, Ratio] = {"token": token_ratio, "sequence": sequence_ratio, "geometric": geometric_ratio}


def importance_weights(ratios: Tensor, kind: Kind, low: float, high: float) -> Tensor:
    """Elementwise, what the objective is multiplied with, of raw `ratios`. `low` counts for masks alone."""
    if kind == "none":
        return torch.ones_like(ratios)
    if kind == "truncated":
        return ratios.clamp(max=high)
    return torch.where(outside(ratios, kind, low, high), torch.zeros_like(ratios), ratios)


def outside(ratios: Tensor, kind: Kind, low: float, high: float) -> Tensor:
    """Elementwise, whether the weight is not the ratio."""
    if kind == "none":
        return torch.zeros_like(ratios, dtype=torch.bool)
    return ratios > high if kind == "truncated" else (ratios < low) | (ratios > high)


@torch.no_grad()
def importance_metrics(ratios_N: Tensor, kind: Kind, low: float, high: float) -> Metrics:
    """Over completion tokens: start_ratio_mean and start_ratio_max (raw, before any bound; 1 for rows that were not
    asked about), start_outside (share that is truncated or masked)."""
    metrics = Metrics()
    if not ratios_N.numel():
        return metrics
    cut_N = outside(ratios_N, kind, low, high)
    total, most, cut = torch.stack([ratios_N.sum(), ratios_N.max(), cut_N.sum()]).double().tolist()
    metrics.add_mean("start_ratio_mean", total, ratios_N.numel())
    metrics.add_max("start_ratio_max", most)
    metrics.add_mean("start_outside", cut, ratios_N.numel())
    return metrics


# Policy losses: a per-token objective, and an aggregation written as row weights.
#
#     loss = sum over rows n of  w_n  sum over completion tokens t of  (-rho_nt objective_nt + beta kl_nt - c entropy_nt
#
# Invariant: the row weights depend on the whole batch and are fixed by `PolicyObjective.prepare` before it is split,
# so the losses and gradients of any set of micro-batches add up to those of the unsplit batch.
#
# Formulas: the table of docs/learning.md; r_t = pi / pi_sampled of token t, A the row's advantage. Clips are to [1 -
# low, 1 + high].
#
# Rows may be clipped around the policy at batch start instead (decoupled PPO: Hilton et al., arXiv 2110.00641; AReaL,
# arXiv 2505.24298): r_t = pi / pi_start, and the objective of each token is weighted with rho_t, what
# pvg.training.losses makes of pi_start / pi_sampled, detached. Where pi_start is pi_sampled, that is the plain
# loss. It is so of the stale rows alone (training.importance = "decoupled"), or of all of them ("truncated", "masked").
#
# beta and c, the coefficients of the KL and of the entropy, may follow what the steps measure (pvg.training.penalties).

BYTES_PER_MB = 1_000_000

# --- per-token objectives ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """What an objective sees of B rows; everything is 0 outside the completion (`mask_BL`).

    `log_ratios_BL` = log pi less that of the policy that is clipped around, in nats; `low` and `high` are the clip's.
    """

    logprobs_BL: Tensor
    log_ratios_BL: Tensor
    mask_BL: Tensor
    advantages_B1: Tensor
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Terms:
    """The objective (to be maximised) of each token, and whether the clip took its gradient away."""

    objective_BL: Tensor
    clipped_BL: Tensor


def clipped_ratio(tokens: Tokens) -> Terms:
    """min(r A, clip(r) A), r the token's ratio (PPO)."""
    return _clipped(tokens.log_ratios_BL.exp(), tokens)


def clipped_sequence_ratio(tokens: Tokens) -> Terms:
    """min(s A, clip(s) A) on every token, s = exp(mean_t log r_t) the sequence's ratio (GSPO)."""
    return _clipped(geometric_ratio(tokens.log_ratios_BL, tokens.mask_BL), tokens)


def capped_weight(tokens: Tokens) -> Terms:
    """stopgrad(min(r, 1 + high)) A log pi (CISPO): the gradient is capped, never cut off; `low` is not used."""
    ratios_BL = tokens.log_ratios_BL.detach().exp()
    weights_BL = ratios_BL.clamp(max=1.0 + tokens.high)
    return Terms(weights_BL * tokens.advantages_B1 * tokens.logprobs_BL, ratios_BL > 1.0 + tokens.high)


def reinforce(tokens: Tokens) -> Terms:
    """A log pi: no ratio, no clip, for on-policy batches."""
    return Terms(tokens.advantages_B1 * tokens.logprobs_BL, torch.zeros_like(tokens.mask_BL))


def _clipped(ratios_BL: Tensor, tokens: Tokens) -> Terms:
    advantages_B1 = tokens.advantages_B1
    free_BL = ratios_BL * advantages_B1
    held_BL = ratios_BL.clamp(1.0 - tokens.low, 1.0 + tokens.high) * advantages_B1
    return Terms(torch.minimum(free_BL, held_BL), held_BL < free_BL)


# --- aggregation: lengths of completions, the length limit -> row weights -------------------------------------------

Float64 = NDArray[np.float64]


def mean_of_sequence_means(lengths_N: Float64, max_tokens: int) -> Float64:
    """1 / (N C_n): each sequence counts the same, whatever its length."""
    return 1.0 / (len(lengths_N) * np.maximum(lengths_N, 1.0))


def mean_of_sequence_sums(lengths_N: Float64, max_tokens: int) -> Float64:
    """1 / N: the sequence is the action, its log-prob the sum over its tokens (RLOO)."""
    return np.full(len(lengths_N), 1.0 / max(1, len(lengths_N)))


def sum_over_limit(lengths_N: Float64, max_tokens: int) -> Float64:
    """1 / (N x max_tokens): a constant, so that length buys nothing (Dr. GRPO; rae, whose policy gradient sums over a
    solution's tokens)."""
    return np.full(len(lengths_N), 1.0 / (max(1, len(lengths_N)) * max_tokens))


def mean_of_tokens(lengths_N: Float64, max_tokens: int) -> Float64:
    """1 / (sum of C): every token of the batch counts the same."""
    return np.full(len(lengths_N), 1.0 / max(1.0, lengths_N.sum()))


# --- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A row of docs/learning.md. `clip_low` and `clip_high` are the defaults of training.loss.clip_low and clip_high;
    `penalised`: has a KL term; `drops_silent`: groups without a signal leave the batch, and its denominators;
    `ratio`: what importance weights are made of, where training.importance.level says nothing else; `credit`: how
    rewards become advantages, None: as pvg.training.credit has it under the loss's name."""

    objective: Callable[[Tokens], Terms]
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
    # The cap is 1 + clip_high = 5: far above any ratio of a healthy step, so that it only bounds outliers.
    "cispo": PolicyLoss(capped_weight, mean_of_tokens, clip_high=4.0),
    "rloo": PolicyLoss(reinforce, mean_of_sequence_sums),
    "reinforce_pp": PolicyLoss(clipped_ratio, mean_of_tokens),
    "spo": PolicyLoss(clipped_ratio, mean_of_tokens),
    "rae": PolicyLoss(clipped_ratio, sum_over_limit),
}


def policy_loss(name: str) -> PolicyLoss:
    """The loss of that name, of the table or a `PolicyLoss` of a user's file, which is GRPO's in what it leaves open.

    Raises ConfigurationError for a name that is neither.
    """
    if not is_reference(name) and name not in LOSSES:
        raise ConfigurationError(f"There is no loss {name!r}.", f"Known: {', '.join(LOSSES)}.")
    loss = resolve("training.loss", name, LOSSES, PolicyLoss)
    return replace(loss, credit=loss.credit or normalised) if is_reference(name) else loss


class PolicyObjective:
    """The loss of `section.loss` as an objective for the trainer: prepare a batch, split it, weigh a micro-batch.

    Log-probs are those of the sampling temperature, for the temperature belongs to the policy that is trained.
    """

    def __init__(self, section: sections.Training, rollout: sections.Rollouts, pad_id: int) -> None:
        self._loss = policy_loss(section.loss.kind)
        if section.kl.kind == "adaptive" and not self._loss.penalised:
            raise ConfigurationError(
                f"training.kl = 'adaptive' has nothing to adapt: training.loss = {section.loss.kind!r} has no KL term.",
                "Set training.kl to 'none'.",
            )
        clip_low, clip_high = section.loss.clip_low, section.loss.clip_high
        self._low = self._loss.clip_low if clip_low is None else clip_low
        self._high = self._loss.clip_high if clip_high is None else clip_high
        self._control = Control(section)
        level = section.importance.level
        self._ratio = self._loss.ratio if level is None else RATIOS[level]
        self._importance: Kind = WEIGHTS[section.importance.kind]
        self._exact_entropy = section.exact_entropy
        self._section = section
        self._max_tokens = rollout.max_tokens
        self._forward = ForwardSettings.of(section, rollout.temperature, pad_id)
        # For the trainer, which measures. None: every step has the token budget of the section.
        self.memory: MicroBatchMemory[PolicyBatch] | None = None
        if section.micro_batch_memory_mb:
            limit = section.micro_batch_memory_mb * BYTES_PER_MB
            self.memory = MicroBatchMemory(limit, section.micro_batch_tokens, section.logits_chunk, self._size)

    @property
    def credit(self) -> Credit | None:
        """See PolicyLoss."""
        return self._loss.credit

    @property
    def needs_reference(self) -> bool:
        """Whether batches must carry reference log-probs: the loss has a KL term and its coefficient is not 0."""
        return self._loss.penalised and self._section.kl.kind != "none"

    @property
    def decoupled(self) -> bool:
        """Whether only stale rows are weighted and clipped around the policy at batch start."""
        return self._section.importance.kind in ("decoupled", "unweighted")

    @property
    def weighs_all(self) -> bool:
        """Whether all rows are weighted and clipped around the policy at batch start, stale or not."""
        return self._section.importance.kind in ("truncated", "masked")

    @property
    def needs_start(self) -> bool:
        """Whether batches must carry, for all rows, the log-probs of the policy at batch start. In the one step of a
        batch that policy is the one that is trained, and its log-probs are computed anyway."""
        return self.weighs_all and not self.one_step

    @property
    def one_step(self) -> bool:
        """Whether a batch has one step, so that the step's forward pass computes the log-probs at batch start."""
        return self._section.minibatches == 1

    # --- what is adapted from step to step ----------------------------------------------------------------------------

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """After a step: the coefficients that it had, as metrics, where they are adapted; then the next one's."""
        found: dict[str, float] = {}
        if self._section.kl.kind == "adaptive":
            found["kl_coefficient"] = self._control.kl
        if self._section.entropy.kind == "adaptive":
            found["entropy_coefficient"] = self._control.bonus
        self._control.observe(metrics)
        return found

    def state(self) -> dict[str, Any]:
        return self._control.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._control.load_state(state)

    # --- a batch ------------------------------------------------------------------------------------------------------

    def recompute(self, module: nn.Module, batch: PolicyBatch) -> list[Float32]:
        """Log-probs of the batch's completions under `module`, computed as this objective computes its own."""
        return recompute_logprobs(module, batch, self._forward)

    def prepare(self, batch: PolicyBatch) -> PolicyBatch:
        """Fill the row weights from the whole batch (a batch that has them keeps them).

        Raises TrainingDivergedError naming the row of a NaN or infinite advantage or log-prob.
        """
        _check_finite(batch)
        if self.needs_reference and batch.reference_logprobs is None:
            raise ValueError("the KL term needs reference_logprobs")
        if self.needs_start and batch.proximal_logprobs is None:
            raise ValueError("importance weights over several steps need proximal_logprobs")
        if batch.row_weights_N is not None:
            return batch
        kept_N = _rows_of_signal(batch) if self._loss.drops_silent else np.ones(len(batch), dtype=np.bool_)
        weights_N = np.zeros(len(batch), dtype=np.float64)
        kept_lengths = batch.completion_lengths_N[kept_N].astype(np.float64)
        weights_N[kept_N] = self._loss.aggregation(kept_lengths, self._max_tokens)
        return batch.with_weights(weights_N.astype(np.float32))

    def split(self, batch: PolicyBatch) -> list[PolicyBatch]:
        """Micro-batches of a prepared batch: within the token budget, at most micro_batch_rollouts rows each, and at
        least accumulation_steps of them where that is set and there are rows enough. Rows of weight 0 are left out.
        With micro_batch_memory_mb the budget is the learned one, and the micro-batches are of like size.

        Raises ConfigurationError when a single row is over the token budget.
        """
        assert batch.row_weights_N is not None, "prepare the batch before splitting it"
        section = self._section
        rows = np.flatnonzero(batch.row_weights_N != 0.0)
        most = section.micro_batch_rollouts
        if section.accumulation_steps is not None and rows.size:
            share = max(1, len(rows) // section.accumulation_steps)
            most = share if most is None else min(most, share)
        forward = self._forward
        if self.memory is not None and rows.size:
            forward = replace(forward, token_budget=self.memory.budget(int(batch.lengths_N[rows].max())))
        parts = forward_batches(batch, rows, forward, most, balanced=self.memory is not None)
        return [batch.select(part) for part in parts]

    def _size(self, micro_batch: PolicyBatch) -> Size:
        return Size(int(micro_batch.lengths_N.max()), batch_positions(micro_batch, self._forward))

    def __call__(self, module: nn.Module, micro_batch: PolicyBatch) -> tuple[Tensor, Metrics]:
        """The micro-batch's share of the loss, and its metrics (see `_metrics`)."""
        batch = micro_batch
        assert batch.row_weights_N is not None, "prepare the batch before computing its loss"
        device = next(module.parameters()).device
        outputs = batch_outputs(module, batch, self._forward, entropies=self._exact_entropy)
        logprobs_BL = outputs.logprobs_BL
        mask_BL = _tensor(batch.completion_mask(), device)
        if batch.sampled_masks is not None:  # what an environment wrote has a log-prob too, which is nobody's
            logprobs_BL = logprobs_BL.masked_fill(~mask_BL, 0.0)
        sampled_BL = _tensor(batch.on_positions(batch.sampled_logprobs), device)
        proximal_BL, moved_BL = self._start(batch, logprobs_BL.detach(), sampled_BL, mask_BL)
        log_ratios_BL = logprobs_BL - proximal_BL
        advantages_B1 = _tensor(batch.advantages_N, device)[:, None]
        terms = self._loss.objective(Tokens(logprobs_BL, log_ratios_BL, mask_BL, advantages_B1, self._low, self._high))
        cost_BL = -terms.objective_BL
        bounds = (self._importance, self._section.importance.low, self._section.importance.high)
        if moved_BL is not None:
            cost_BL = cost_BL * importance_weights(moved_BL, *bounds)
        reference_BL = None
        if batch.reference_logprobs is not None:
            reference_BL = _tensor(batch.on_positions(batch.reference_logprobs), device)
        if self.needs_reference:
            assert reference_BL is not None
            cost_BL = cost_BL + self._control.kl * kl_penalty(logprobs_BL, reference_BL, self._section.kl.estimator)
        if (bonus := self._control.bonus) > 0.0:
            assert outputs.entropies_BL is not None
            cost_BL = cost_BL - bonus * outputs.entropies_BL
        weights_B1 = _tensor(batch.row_weights_N, device)[:, None]
        loss = (weights_B1 * cost_BL * mask_BL).sum()
        metrics = _metrics(loss, outputs, logprobs_BL - sampled_BL, reference_BL, mask_BL, terms)
        if moved_BL is not None:
            metrics.merge(importance_metrics(moved_BL[mask_BL], *bounds))
        tokens = int(batch.lengths_N.sum())
        positions = tokens if self._forward.shared_prompts else mask_BL.numel()  # prompts once, and no padding
        metrics.add_mean("padding", positions - tokens, positions)
        return loss, metrics

    def _start(
        self, batch: PolicyBatch, now_BL: Tensor, sampled_BL: Tensor, mask_BL: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probs that are clipped around, and how far the policy at batch start is from the sampler, where that
        is asked. `now_BL` are those of the policy as it is: of the only step of a batch, that at its start."""
        if batch.proximal_logprobs is not None:
            start_BL = _tensor(batch.on_positions(batch.proximal_logprobs), now_BL.device)
        elif self.weighs_all:
            start_BL = now_BL
        elif batch.stale_N is not None:
            start_BL = torch.where(_tensor(batch.stale_N, now_BL.device)[:, None], now_BL, sampled_BL)
        else:
            return sampled_BL, None
        return start_BL, self._ratio(start_BL - sampled_BL, mask_BL)


@torch.no_grad()
def _metrics(
    loss: Tensor,
    outputs: CompletionOutputs,
    log_ratios_BL: Tensor,
    reference_BL: Tensor | None,
    mask_BL: Tensor,
    terms: Terms,
) -> Metrics:
    """loss (sum), and over the completion tokens: entropy (the estimate -mean log pi), ratio_mean and ratio_max (raw,
    before any clip), clipped (share whose gradient the clip changed), kl (mean of k3; only with a reference),
    entropy_exact (only where it is asked for). Beside them stands padding, the share of the micro-batches' positions
    that hold no token."""
    logprobs_BL = outputs.logprobs_BL
    ratios_N = log_ratios_BL[mask_BL].exp()
    values = {
        "entropy": -logprobs_BL[mask_BL].sum(),
        "ratio_mean": ratios_N.sum(),
        "clipped": terms.clipped_BL[mask_BL].sum(),
    }
    if reference_BL is not None:
        values["kl"] = k3(logprobs_BL, reference_BL)[mask_BL].sum()
    if outputs.entropies_BL is not None:
        values["entropy_exact"] = outputs.entropies_BL[mask_BL].sum()
    most = ratios_N.max() if ratios_N.numel() else torch.ones((), device=ratios_N.device)
    # One transfer from the device for all of them.
    loss_value, highest, *totals = torch.stack([loss, most, *values.values()]).double().tolist()
    metrics = Metrics()
    metrics.add_sum("loss", loss_value)
    metrics.add_max("ratio_max", highest)
    for name, total in zip(values, totals, strict=True):
        metrics.add_mean(name, total, ratios_N.numel())
    return metrics


def _rows_of_signal(batch: PolicyBatch) -> NDArray[np.bool_]:
    """Rows whose group has an advantage other than 0: credit gives exactly 0 to groups of one reward value."""
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
                    "Nothing was trained on this batch; the last commit is intact.",
                )


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
