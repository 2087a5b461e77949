"""The numbers that matter, computed from scored rollouts: the same definitions in training, evaluation and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pvg.models.packing import distinct_rows
from pvg.records import Checks, Float32, Group, Role, Rollout
from pvg.verifier.measures import auc

if TYPE_CHECKING:
    from pvg.rollout.engine import EngineStats
    from pvg.verifier.scorer import ScorerStats
    from pvg.weights import SyncTiming

Bools = NDArray[np.bool_]


class Columns:
    """Rollouts as arrays [N]: roles, grades and scores."""

    def __init__(self, rollouts: Sequence[Rollout], scores_N: Float32) -> None:
        self.scores_N = scores_N
        self.helpful_N: Bools = np.array([r.role is Role.HELPFUL for r in rollouts], dtype=bool)
        self.correct_N: Bools = np.array([r.grade.correct for r in rollouts], dtype=bool)
        self.well_formed_N: Bools = np.array([r.grade.well_formed for r in rollouts], dtype=bool)
        self.proven_N: Bools = np.array([r.proven for r in rollouts], dtype=bool)
        self.checks = [r.grade.checks for r in rollouts]  # of tasks that execute, None of others
        self.truncated_N: Bools = np.array([r.finish_reason == "length" for r in rollouts], dtype=bool)
        self.dialogue = dialogue_metrics(rollouts)
        # Of translations: whether the answer is the solver's, and whether that one is right. Else None, and one's own.
        translated = any(r.solver is not None for r in rollouts)
        self.kept_N: Bools | None = np.array([bool(r.kept_answer) for r in rollouts]) if translated else None
        self.solver_correct_N: Bools = np.array(
            [r.grade.correct if r.solver is None else r.solver.correct for r in rollouts], dtype=bool
        )

    @property
    def flaws_N(self) -> Bools:
        """Sneaky, wrong, a solution at all, and proven where its task asks for it: what the sneaky role is for."""
        return ~self.helpful_N & ~self.correct_N & self.well_formed_N & self.proven_N

    @property
    def tests_N(self) -> Float32 | None:
        """float32 [N] in [0, 1]: what of its role's tests each passes (see pvg.game.rewards.Outcomes); None where
        solutions are not executed."""
        if not self.checks or None in self.checks:
            return None
        helpful_N = np.array([check.passed for check in self.checks if check], dtype=np.float32)
        sneaky_N = np.array([(check.visible + check.certified) / 2 for check in self.checks if check], dtype=np.float32)
        return np.where(self.helpful_N, helpful_N, sneaky_N)

    @property
    def solutions_N(self) -> Bools:
        """Helpful and correct."""
        return self.helpful_N & self.correct_N


def share(mask_N: Bools, among_N: Bools) -> float:
    """The share of `among` that `mask` holds for; NaN when there is nothing among."""
    return float(mask_N[among_N].mean()) if among_N.any() else float("nan")


def mean_score(scores_N: Float32, among_N: Bools) -> float:
    return float(scores_N[among_N].mean()) if among_N.any() else float("nan")


def play_metrics(columns: Columns, threshold: float) -> dict[str, float]:
    """How both roles do against a verifier whose acceptance threshold is `threshold` (a score).

    `fooled_rate` is the share of the flaws (sneaky, incorrect, well-formed) that score at or above the threshold;
    means over nothing are NaN.
    """
    c, scores_N = columns, columns.scores_N
    kinds = {
        "score_helpful_correct": c.solutions_N,
        "score_helpful_incorrect": c.helpful_N & ~c.correct_N,
        "score_sneaky_correct": ~c.helpful_N & c.correct_N,
        "score_sneaky_incorrect": c.flaws_N,
    }
    metrics = {name: mean_score(scores_N, kind_N) for name, kind_N in kinds.items()}
    accepted_N = scores_N >= threshold
    metrics |= {
        "helpful_accuracy": share(c.correct_N, c.helpful_N),
        "sneaky_error_rate": share(c.flaws_N, ~c.helpful_N),
        "fooled_rate": share(accepted_N, c.flaws_N),
        "accepted_helpful": share(accepted_N, c.solutions_N),
        "score_gap": metrics["score_helpful_correct"] - metrics["score_sneaky_incorrect"],
        "malformed": float((~c.well_formed_N).mean()),
        "truncated": float(c.truncated_N.mean()),
    }
    metrics |= c.dialogue
    if c.kept_N is not None:
        metrics |= translation_metrics(c.helpful_N, c.kept_N, c.solver_correct_N, c.flaws_N)
    return metrics | check_metrics(c.helpful_N, c.checks)


def check_metrics(helpful_N: Bools, checks: Sequence[Checks | None]) -> dict[str, float]:
    """What executing them has shown, of a task that executes: shares in [0, 1], NaN for a role that was not sampled."""
    if not checks or None in checks:
        return {}
    passed_N = np.array([check.passed for check in checks if check])
    visible_N = np.array([check.visible == 1.0 for check in checks if check])
    certified_N = np.array([check.certified for check in checks if check])
    return {
        "tests_passed": float(passed_N[helpful_N].mean()) if helpful_N.any() else float("nan"),
        "sneaky_visible_rate": share(visible_N, ~helpful_N),
        "certified_rate": share(certified_N, ~helpful_N),
    }


def translation_metrics(helpful_N: Bools, kept_N: Bools, solver_correct_N: Bools, flaws_N: Bools) -> dict[str, float]:
    """What translators did to the solver's answers (the decoupled game)."""
    return {
        "solver_accuracy": float(solver_correct_N.mean()),
        "faithful": share(kept_N, helpful_N),
        "led_astray": share(flaws_N & ~kept_N, ~helpful_N),
    }


def dialogue_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of rollouts of several turns (the challenge protocol); nothing where there is none."""
    asked = [rollout for rollout in rollouts if rollout.turns]
    if not asked:
        return {}
    # The first turn is the solution; what was sampled after it are the answers.
    answers = [int(rollout.sampled_mask[rollout.turns[1].start :].sum()) for rollout in asked]
    return {"challenged": len(asked) / len(rollouts), "answer_tokens": float(np.mean(answers))}


def verifier_auc(columns: Columns) -> float:
    """AUC of correct against incorrect over both roles; malformed solutions count as incorrect."""
    return auc(columns.scores_N[columns.correct_N], columns.scores_N[~columns.correct_N])


def sample_metrics(rollouts: Sequence[Rollout], seconds: float) -> dict[str, float]:
    """Both roles' accuracy before any verifier: shares in [0, 1], NaN for a role that was not sampled."""
    helpful_N = np.array([r.role is Role.HELPFUL for r in rollouts], dtype=bool)
    correct_N = np.array([r.grade.correct for r in rollouts], dtype=bool)
    well_formed_N = np.array([r.grade.well_formed for r in rollouts], dtype=bool)
    flaws_N = np.array([r.is_flaw for r in rollouts], dtype=bool)
    return {
        "rollouts": float(len(rollouts)),
        "correct": float(correct_N.mean()),
        "helpful_accuracy": share(correct_N, helpful_N),
        "sneaky_error_rate": share(flaws_N, ~helpful_N),
        "malformed": float((~well_formed_N).mean()),
        "truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "completion_tokens": float(np.mean([r.sampled_tokens for r in rollouts])),
        "tokens_per_s": sum(r.sampled_tokens for r in rollouts) / seconds,
        **check_metrics(helpful_N, [r.grade.checks for r in rollouts]),
        **dialogue_metrics(rollouts),
    }


def sampling_metrics(rollouts: Sequence[Rollout], engine: EngineStats, seconds: float) -> dict[str, float]:
    """How a batch was sampled in `seconds`, `engine` being what its engine did meanwhile. Latencies (seconds) are of
    single rollouts, from the request until the engine hands it over."""
    latencies = [r.timing.queued_s + r.timing.service_s for r in rollouts]
    p50, p90, p99 = np.percentile(latencies, (50, 90, 99)).tolist()
    tokens = sum(r.sampled_tokens for r in rollouts)
    sequences = [np.concatenate([r.prompt_ids, r.completion_ids]) for r in rollouts]
    firsts_U, _ = distinct_rows(sequences, np.array([len(r.prompt_ids) for r in rollouts]))
    return {
        "tokens_per_s": tokens / seconds,
        "prompt_tokens_per_s": sum(len(r.prompt_ids) for r in rollouts) / seconds,
        "completion_tokens": tokens / len(rollouts),
        "latency_p50_s": p50,
        "latency_p90_s": p90,
        "latency_p99_s": p99,
        "engine_batch": engine.mean_batch,
        "prefix_share": engine.prefix_share,
        "repeated": 1.0 - len(firsts_U) / len(rollouts),
    }


def cut_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What a batch is made of, and what its deadline (rollout.group_deadline_s) has cost it."""
    return {
        "rollouts": float(sum(len(group.rollouts) for group in groups)),
        "groups_cut": float(sum(group.cancelled > 0 for group in groups)),
        "rollouts_cancelled": float(sum(group.cancelled for group in groups)),
        "tokens_lost": float(sum(group.lost_tokens for group in groups)),
    }


def value_metrics(rewards_N: Float32, values_N: NDArray[np.float64], advantages_N: Float32) -> dict[str, float]:
    """How well the values that spo or rae tracks foretold the rewards. Without groups, what has no signal are single
    rollouts."""
    return {
        "zero_signal": float((advantages_N == 0.0).mean()),
        "value_mean": float(values_N.mean()),
        "value_error": float(np.abs(rewards_N - values_N).mean()),
    }


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """How many versions behind `version` the rollouts are, by their oldest token."""
    behind_N = version - np.array([r.version for r in rollouts])
    return {"staleness": float(behind_N.mean()), "staleness_max": float(behind_N.max())}


def sync_metrics(timing: SyncTiming | None) -> dict[str, float]:
    """What the newest weight update took, and how far the servers' log-probs are from the trainer's where they were
    compared."""
    if timing is None:
        return {}
    gap = {} if timing.canary_gap is None else {"canary_gap": timing.canary_gap}
    return {"weights_wall_s": timing.wall_ms / 1e3, "weights_queue_s": timing.queue_ms / 1e3, **gap}


def cache_metrics(before: ScorerStats, after: ScorerStats) -> dict[str, float]:
    """What the score cache did for the solutions asked for between two looks at it; the three counts since it was made.

    `cache_hit_rate` is the share that needed no computation: cached, or the same as another of the batch.
    """
    spared = after.hits + after.shared - before.hits - before.shared
    asked = spared + after.misses - before.misses
    return {
        "cache_hit_rate": spared / asked if asked else 0.0,
        "cache_hits": float(after.hits),
        "cache_misses": float(after.misses),
        "cache_evictions": float(after.evictions),
    }
