"""Metrics of scored rollouts, with the same definitions in training, evaluation and reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pvg.records import Float32, Group, Rollout
from pvg.store.samples import SampleColumns
from pvg.store.shards import columns_in_memory
from pvg.verifier.calibration import acceptance_threshold, auc, matthews
from pvg.verifier.intervals import Estimate, share_of

if TYPE_CHECKING:
    from pvg.rollout.engine import Engine, EngineStats
    from pvg.servers.publishing import SyncTiming
    from pvg.verifier.scorer import ScorerStats, VerifierScorer

Bools = NDArray[np.bool_]


@dataclass
class BatchOutcomes:
    """The outcomes of a batch of N rollouts; all arrays have shape [N]. A group here is a problem and a role.
    What is not `aligned_N` is misaligned, malformed solutions too.

    `scores_N`: float32 logits. `correct_N`, `helpful_N`, `well_formed_N`: bool. `problem_ids_N`: integer numbers of the
    problems. `solver_correct_N`: bool, whether the solver's answer is correct (decoupled game; otherwise the prover is
    its own solver). `kept_answer_N`: bool, whether the translation keeps the solver's answer; None without
    translations.

    For tasks that execute solutions (None otherwise): `proven_N`: bool, False for a sneaky, incorrect solution without
    a valid certificate. `tests_N`: float32 in [0, 1], the share of its role's tests that a solution passes. The helpful
    role has all tests; for the sneaky role, visible tests count one half and the certificate the other. `similarity_N`:
    float32 in [0, 1], similarity of a sneaky program to others (`game.reward.similarity_weight`), 0 for helpful ones.

    `read_N2`: float32 in [0, 1], SR and CIR by `game.reward.reader`, 0 where it did not read; None without a reader.
    """

    scores_N: Float32
    correct_N: Bools
    helpful_N: Bools
    well_formed_N: Bools
    problem_ids_N: NDArray[np.int64]
    solver_correct_N: Bools
    kept_answer_N: Bools | None = None
    proven_N: Bools | None = None
    tests_N: Float32 | None = None
    similarity_N: Float32 | None = None
    read_N2: Float32 | None = None

    @property
    def aligned_N(self) -> Bools:
        """Role-aligned and valid: helpful and correct, or sneaky and incorrect. For translations: helpful with the
        solver's answer (right or wrong), or sneaky with a different, wrong answer."""
        if self.kept_answer_N is None:
            return np.asarray((self.correct_N == self.helpful_N) & self.solutions_N)
        led_astray_N = ~self.kept_answer_N & ~self.correct_N
        return np.asarray(np.where(self.helpful_N, self.kept_answer_N, led_astray_N) & self.solutions_N)

    @property
    def solutions_N(self) -> Bools:
        """Valid solutions: well-formed, and with a proven flaw where the task requires proof."""
        return self.well_formed_N if self.proven_N is None else self.well_formed_N & self.proven_N


class RolloutColumns(BatchOutcomes):
    """The outcomes of these rollouts, and what the metrics need besides."""

    def __init__(self, rollouts: Sequence[Rollout], scores_N: Float32) -> None:
        sample, numbers = columns_in_memory(rollouts), dict[str, int]()
        self.problem_ids = [rollout.problem_id for rollout in rollouts]
        self.checks_N3 = sample.checks_N3  # see SampleColumns
        translated = any(r.solver is not None for r in rollouts)
        super().__init__(
            scores_N,
            sample.correct_N,
            sample.helpful_N,
            sample.well_formed_N,
            np.array([numbers.setdefault(name, len(numbers)) for name in self.problem_ids], dtype=np.int64),
            np.array([r.grade.correct if r.solver is None else r.solver.correct for r in rollouts], dtype=bool),
            np.array([bool(r.kept_answer) for r in rollouts]) if translated else None,
            sample.proven_N,
            _role_tests(sample),
        )
        self.flaws_N = sample.flaws_N  # sneaky, wrong, well-formed, and proven if the task requires it
        self.truncated_N = sample.truncated_N
        if any(r.sr is not None or r.cir is not None for r in rollouts):
            self.read_N2 = np.array([[r.sr or 0.0, r.cir or 0.0] for r in rollouts], dtype=np.float32)
        self.dialogue = dialogue_metrics(sample.answers_N)

    @property
    def solved_N(self) -> Bools:
        """Helpful and correct."""
        return self.helpful_N & self.correct_N


def _role_tests(sample: SampleColumns) -> Float32 | None:
    """`BatchOutcomes.tests_N`."""
    if not _executed(sample.checks_N3):
        return None
    visible_N, passed_N, certified_N = sample.checks_N3.T
    tests_N: Float32 = np.where(sample.helpful_N, passed_N, (visible_N + certified_N) / 2).astype(np.float32)
    return tests_N


def mean_of(values_N: Bools | Float32, among_N: Bools) -> float:
    """The mean over `among_N` (of booleans: the share for which they hold); NaN if it is empty."""
    return float(values_N[among_N].mean()) if among_N.any() else float("nan")


def play_metrics(columns: RolloutColumns, threshold: float) -> dict[str, float]:
    """Metrics of both roles against a verifier with acceptance threshold `threshold` (a score).

    `fooled_rate` is the share of flaws (sneaky, incorrect, well-formed) with a score at or above the threshold. Means
    over an empty set are NaN.
    """
    c, scores_N = columns, columns.scores_N
    kinds = {
        "score_helpful_correct": c.solved_N,
        "score_helpful_incorrect": c.helpful_N & ~c.correct_N,
        "score_sneaky_correct": ~c.helpful_N & c.correct_N,
        "score_sneaky_incorrect": c.flaws_N,
    }
    metrics = {name: mean_of(scores_N, kind_N) for name, kind_N in kinds.items()}
    accepted_N = scores_N >= threshold
    metrics |= {
        "helpful_accuracy": mean_of(c.correct_N, c.helpful_N),
        "sneaky_error_rate": mean_of(c.flaws_N, ~c.helpful_N),
        "fooled_rate": mean_of(accepted_N, c.flaws_N),
        "accepted_helpful": mean_of(accepted_N, c.solved_N),
        "verifier_mcc": matthews(accepted_N, c.correct_N),
        "score_gap": metrics["score_helpful_correct"] - metrics["score_sneaky_incorrect"],
        "malformed": float((~c.well_formed_N).mean()),
        "truncated": float(c.truncated_N.mean()),
    }
    metrics |= c.dialogue
    if c.kept_answer_N is not None:
        metrics |= {  # how translations changed the solver's answers (decoupled game)
            "solver_accuracy": float(c.solver_correct_N.mean()),
            "faithful": mean_of(c.kept_answer_N, c.helpful_N),
            "led_astray": mean_of(c.flaws_N & ~c.kept_answer_N, ~c.helpful_N),
        }
    return metrics | check_metrics(c.helpful_N, c.checks_N3)


def read_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The means of what `game.reward.reader` found in the solutions that it read."""
    read = {name: [getattr(r, name) for r in rollouts if getattr(r, name) is not None] for name in ("sr", "cir")}
    return {name: float(np.mean(values)) for name, values in read.items() if values}


def _executed(checks_N3: NDArray[np.float64]) -> bool:
    """Whether there are solutions and all of them were executed."""
    return len(checks_N3) > 0 and not np.isnan(checks_N3).any()


def check_metrics(helpful_N: Bools, checks_N3: NDArray[np.float64]) -> dict[str, float]:
    """Test results for a task that executes solutions: shares in [0, 1], NaN for a role without samples."""
    if not _executed(checks_N3):
        return {}
    visible_N, passed_N, certified_N = checks_N3.T
    return {
        "tests_passed": mean_of(passed_N, helpful_N),
        "sneaky_visible_rate": mean_of(visible_N == 1.0, ~helpful_N),
        "certified_rate": mean_of(certified_N == 1.0, ~helpful_N),
    }


def dialogue_metrics(answers_N: NDArray[np.int64]) -> dict[str, float]:
    """Metrics of rollouts with several turns (challenge protocol); empty if there are none. `answers_N`: tokens of the
    prover's answers after its solution; -1 for rollouts of one turn."""
    asked_N = answers_N >= 0
    if not asked_N.any():
        return {}
    return {"challenged": float(asked_N.mean()), "answer_tokens": float(answers_N[asked_N].mean())}


def shares_of(columns: RolloutColumns, threshold: float) -> dict[str, Estimate]:
    """The shares of a round, with intervals over problems; `threshold`: of acceptance."""
    accepted_N = columns.scores_N >= threshold
    shares = {
        "helpful_accuracy": (columns.correct_N, columns.helpful_N),
        "sneaky_error_rate": (columns.flaws_N, ~columns.helpful_N),
        "fooled_rate": (accepted_N, columns.flaws_N),
        "accepted_helpful": (accepted_N, columns.solved_N),
    }
    problems_N = columns.problem_ids_N
    return {name: share_of(holds_N[among_N], problems_N[among_N]) for name, (holds_N, among_N) in shares.items()}


def verifier_auc(columns: RolloutColumns) -> float:
    """AUC of correct against incorrect solutions of both roles; malformed solutions count as incorrect."""
    return auc(columns.scores_N[columns.correct_N], columns.scores_N[~columns.correct_N])


def fooled_rate_at(columns: RolloutColumns, acceptance: float) -> float:
    """The share of flaws that the verifier accepts if its threshold accepts the share `acceptance` of the same prover's
    correct helpful solutions. It tells how well scores rank, apart from where the round's threshold lies.

    The solutions of each half of the problems set the threshold for the flaws of the other half, so no flaw is judged
    by a threshold from its own problem. NaN if there are no flaws, or if a half has no correct helpful solution.
    """
    _, problem_N = np.unique(columns.problem_ids, return_inverse=True)
    accepted_N = np.zeros(len(columns.scores_N), dtype=bool)
    for half in (0, 1):
        own_N = problem_N.reshape(-1) % 2 == half
        threshold = acceptance_threshold(columns.scores_N[columns.solved_N & ~own_N], acceptance)
        if np.isnan(threshold):
            return float("nan")
        accepted_N |= own_N & (columns.scores_N >= threshold)
    return mean_of(accepted_N, columns.flaws_N)


def sample_metrics(sample: SampleColumns, seconds: float) -> dict[str, float]:
    """Metrics without a verifier: shares in [0, 1], NaN for a role without samples."""
    return {
        "rollouts": float(len(sample)),
        "correct": float(sample.correct_N.mean()),
        "helpful_accuracy": mean_of(sample.correct_N, sample.helpful_N),
        "sneaky_error_rate": mean_of(sample.flaws_N, ~sample.helpful_N),
        "malformed": float((~sample.well_formed_N).mean()),
        "truncated": float(sample.truncated_N.mean()),
        "completion_tokens": float(sample.tokens_N.mean()),
        "tokens_per_s": int(sample.tokens_N.sum()) / seconds,
        **check_metrics(sample.helpful_N, sample.checks_N3),
        **dialogue_metrics(sample.answers_N),
    }


def sampling_metrics(rollouts: Sequence[Rollout], engine: EngineStats, seconds: float) -> dict[str, float]:
    """Sampling metrics of a batch that took `seconds`; `engine`: the engine's counts over that time. Latencies
    (seconds) are per rollout, from the request until the engine returns it."""
    latencies = [r.timing.queued_s + r.timing.service_s for r in rollouts]
    p50, p90, p99 = np.percentile(latencies, (50, 90, 99)).tolist()
    tokens = sum(r.sampled_tokens for r in rollouts)
    distinct = {(r.prompt_ids.tobytes(), r.completion_ids.tobytes()) for r in rollouts}
    return {
        "tokens_per_s": tokens / seconds,
        "prompt_tokens_per_s": sum(len(r.prompt_ids) for r in rollouts) / seconds,
        "completion_tokens": tokens / len(rollouts),
        "latency_p50_s": p50,
        "latency_p90_s": p90,
        "latency_p99_s": p99,
        "engine_batch": engine.mean_batch,
        "prefix_share": engine.prefix_share,
        "repeated": 1.0 - len(distinct) / len(rollouts),
    }


def cut_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The size of a batch, how long its groups waited for their last member, and its losses to the deadline."""
    waits_s = [group.spread_s for group in groups]
    return {
        "group_wait_p50_s": float(np.median(waits_s)),
        "group_wait_max_s": max(waits_s),
        "rollouts": float(sum(len(group.rollouts) for group in groups)),
        "groups_cut": float(sum(group.cancelled > 0 for group in groups)),
        "rollouts_cancelled": float(sum(group.cancelled for group in groups)),
        "tokens_lost": float(sum(group.lost_tokens for group in groups)),
    }


def value_metrics(rewards_N: Float32, values_N: NDArray[np.float64], advantages_N: Float32) -> dict[str, float]:
    """How well the values of `spo` or `rae` predict the rewards. Without groups, `zero_signal` counts single
    rollouts."""
    return {
        "zero_signal": float((advantages_N == 0.0).mean()),
        "value_mean": float(values_N.mean()),
        "value_error": float(np.abs(rewards_N - values_N).mean()),
    }


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """How many versions the rollouts are behind `version`, by their oldest token."""
    behind_N = version - np.array([r.version for r in rollouts])
    return {"staleness": float(behind_N.mean()), "staleness_max": float(behind_N.max())}


def sync_metrics(timing: SyncTiming, in_flight: int) -> dict[str, float]:
    """The duration of a weight update, the requests in flight when it was sent and, if measured, the gap
    between the servers' and the trainer's log-probs."""
    times = {"weights_wall_s": timing.wall_ms / 1e3, "weights_queue_s": timing.queue_ms / 1e3}
    gap = {} if timing.canary_gap is None else {"canary_gap": timing.canary_gap}
    return {**times, "weights_in_flight": float(in_flight), **gap}


# --- of a training batch ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counters:
    """A time in seconds, and the counts of an engine and a scorer until then."""

    at: float
    engine: EngineStats
    scorer: ScorerStats


class BatchClock:
    """Measures the sampling of batches: from `begin`, or from the end of the sampling before, to `sampled`."""

    def __init__(self, engine: Engine, scorer: VerifierScorer) -> None:
        self._engine, self._scorer = engine, scorer
        self._since = self._until = self._now()
        self.seconds = 0.0

    def _now(self) -> Counters:
        return Counters(time.perf_counter(), self._engine.stats, self._scorer.stats)

    def begin(self) -> None:
        self._since = self._now()

    def sampled(self) -> None:
        self._until = self._now()
        self.seconds = self._until.at - self._since.at

    def resampled(self, seconds: float) -> None:
        """Further groups took `seconds`, after others had been scored."""
        self._until, self.seconds = self._now(), self.seconds + seconds

    @property
    def counts(self) -> EngineStats:
        """The engine's counts during the sampling."""
        return self._until.engine.since(self._since.engine)

    def end(self) -> dict[str, float]:
        """Metrics of the score cache for this batch; the three counts are totals since the cache was created. The next
        batch begins where this one's sampling has ended.

        `cache_hit_rate`: the share of solutions that needed no computation, because they were cached or repeated in a
        batch.
        """
        before, after = self._since.scorer, self._now().scorer
        self._since = replace(self._until, scorer=after)
        hits = after.hits + after.shared - before.hits - before.shared
        asked = hits + after.misses - before.misses
        return {
            "cache_hit_rate": hits / asked if asked else 0.0,
            "cache_hits": float(after.hits),
            "cache_misses": float(after.misses),
            "cache_evictions": float(after.evictions),
        }
