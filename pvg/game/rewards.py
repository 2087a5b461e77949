"""What the prover is paid: the rewards of the prover-verifier game, vectorised over a batch of rollouts.

Formulas: Kirchner et al. 2024 (arXiv 2407.13692) for src, cgc, goodhart and correctness; Kim and Lee
(arXiv 2602.23248) for decoupled; gated and composite are our own, for solutions that are executed. c = correct,
h = helpful (both 0/1), V = the verifier's score.

A malformed solution is no solution of either role: it is never role-aligned, and is paid no more than it would be as a
misaligned one. Without that rule the sneaky role's cheapest flaw is to write no solution at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.config import sections
from pvg.config.experiment import Experiment
from pvg.config.sections import (
    CgcReward,
    CompositeReward,
    DecoupledReward,
    Game,
    GatedReward,
    OwnReward,
    PlainReward,
    SrcReward,
)
from pvg.errors import ConfigurationError, TrainingDivergedError
from pvg.extensions import called, resolve
from pvg.game.statistics import Columns
from pvg.records import Float32, Rollout
from pvg.tasks.code.similarity import similarities
from pvg.tasks.task import Comparing, Task
from pvg.training.credit import soft_overlong_rewards

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Outcomes:
    """What a batch of N rollouts led to.

    Shapes, all [N]: `scores_N` float32 logits, `correct_N`, `helpful_N`, `well_formed_N` bool, `problem_ids_N` integer
    numbers of the problems, `solver_correct_N` bool (decoupled game: whether the solver's answer was correct; in the
    undecoupled game the prover is its own solver). `kept_answer_N` bool: the translation's answer is the solver's; None
    where nothing was translated.

    Of tasks that execute (None elsewhere): `proven_N` bool, False for a sneaky, incorrect solution without a valid
    certificate; `tests_N` float32 in [0, 1], what of its role's tests a solution passes: all of them for the helpful
    role, half the visible ones and half the certificate for the sneaky one. `similarity_N` float32 in [0, 1]: how alike
    a sneaky program is to others (`game.reward.similarity`), 0 for helpful ones.
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

    @property
    def aligned_N(self) -> Bools:
        """Role-aligned, and a solution of its role at all: helpful and correct, or sneaky and incorrect. Of
        translations: faithful with the solver's answer, right or wrong, or sneaky with another and wrong one."""
        if self.kept_answer_N is None:
            return np.asarray((self.correct_N == self.helpful_N) & self.solutions_N)
        led_astray_N = ~self.kept_answer_N & ~self.correct_N
        return np.asarray(np.where(self.helpful_N, self.kept_answer_N, led_astray_N) & self.solutions_N)

    @property
    def solutions_N(self) -> Bools:
        """Well-formed, and where it is a flaw that must be proven, proven."""
        return self.well_formed_N if self.proven_N is None else self.well_formed_N & self.proven_N


def rewards(outcomes: Outcomes, game: Game) -> Float32:
    """float32 [N]: the rewards by `game.reward`. Raises ValueError when a score is not finite, ConfigurationError when
    a user's own reward fails or does not give one number for each rollout."""
    if not np.isfinite(outcomes.scores_N).all():
        raise ValueError(f"Score {int(np.flatnonzero(~np.isfinite(outcomes.scores_N))[0])} of the batch is not finite.")
    name, key = game.reward.kind, "game.reward"
    settings = game if isinstance(game.reward, OwnReward) else game.reward
    rewards_N = np.asarray(called(key, name, resolve(key, name, REWARDS), outcomes, settings))
    if rewards_N.shape != outcomes.scores_N.shape or rewards_N.dtype.kind not in "fiub":
        raise ConfigurationError(
            f"{key} = {name!r} gave an array {rewards_N.shape} of {rewards_N.dtype} for {len(outcomes.scores_N)} "
            "rollouts.",
            "A reward gives one number for each rollout.",
        )
    return rewards_N.astype(np.float32)


def centred_scores(outcomes: Outcomes) -> Float32:
    """V' float32 [N]: V minus the mean of V over the samples of the same problem and the same role."""
    mean_N, _ = _group_moments(outcomes)
    return (outcomes.scores_N - mean_N).astype(np.float32)


def _group_moments(outcomes: Outcomes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and population standard deviation of V over (problem, role), spread back to [N]."""
    keys_N = outcomes.problem_ids_N * 2 + outcomes.helpful_N
    _, group_N = np.unique(keys_N, return_inverse=True)
    scores_N = outcomes.scores_N.astype(np.float64)
    count_G = np.bincount(group_N)
    mean_N = (np.bincount(group_N, weights=scores_N) / count_G)[group_N]
    variance_G = np.bincount(group_N, weights=(scores_N - mean_N) ** 2) / count_G
    return mean_N, np.sqrt(variance_G)[group_N]


def src(outcomes: Outcomes, reward: SrcReward) -> Float32:
    """Soft role-conditional: (2c-1)(2h-1) V' where V' > 0, else `game.reward.misaligned` (-1)."""
    centred_N = centred_scores(outcomes)
    sign_N = (2.0 * outcomes.correct_N - 1.0) * (2.0 * outcomes.helpful_N - 1.0)
    paid_N = np.where(centred_N > 0, sign_N * centred_N, reward.misaligned)
    malformed_N = np.minimum(reward.misaligned, -np.abs(centred_N))
    return np.where(outcomes.solutions_N, paid_N, malformed_N)


def cgc(outcomes: Outcomes, reward: CgcReward) -> Float32:
    """Correctness-gated convincingness: V where role-aligned, else V0 = `game.reward.floor`, below all scores.

    Raises ValueError when a live score is not above V0: the reward would then prefer a misaligned solution.
    """
    aligned_N = outcomes.aligned_N
    lowest = outcomes.scores_N[aligned_N].min(initial=np.inf)
    if lowest <= reward.floor:
        raise ValueError(
            f"cgc needs game.reward.floor below every score, but a role-aligned solution scored {lowest:.3f} against a "
            f"floor of {reward.floor}; start a new run with game.reward.floor far below the verifier's scores"
        )
    return np.where(aligned_N, outcomes.scores_N, reward.floor)


def goodhart(outcomes: Outcomes, reward: PlainReward) -> Float32:
    """V, no roles and no truth: what happens without the game. A malformed solution gets the lowest score there is."""
    return np.where(outcomes.well_formed_N, outcomes.scores_N, outcomes.scores_N.min())


def correctness(outcomes: Outcomes, reward: PlainReward) -> Float32:
    """c: the baseline that the legibility tax is measured against."""
    return (outcomes.correct_N & outcomes.well_formed_N).astype(np.float32)


def decoupled(outcomes: Outcomes, reward: DecoupledReward) -> Float32:
    """With v' = (V - mean)/std in the group: `game.reward.floor` (-2) where misaligned or v' <= 0; sneaky v';
    faithful (2 c_solver - 1) v'."""
    mean_N, std_N = _group_moments(outcomes)
    standard_N = (outcomes.scores_N - mean_N) / (std_N + 1e-6)
    faithful_N = (2.0 * outcomes.solver_correct_N - 1.0) * standard_N
    paid_N = np.where(outcomes.helpful_N, faithful_N, standard_N)
    return np.where(outcomes.aligned_N & (standard_N > 0), paid_N, reward.floor).astype(np.float32)


def _accepted(outcomes: Outcomes) -> NDArray[np.float64]:
    """sigmoid(V) [N], the verifier's probability that a solution is correct."""
    # As a tanh, which overflows for no score.
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * outcomes.scores_N.astype(np.float64)))


def _similarity_penalty(outcomes: Outcomes, reward: GatedReward | CompositeReward) -> NDArray[np.float64]:
    if outcomes.similarity_N is None:
        return np.zeros(len(outcomes.scores_N))
    return reward.similarity_weight * outcomes.similarity_N.astype(np.float64)


def gated(outcomes: Outcomes, reward: GatedReward) -> Float32:
    """`score_weight` sigmoid(V) less the similarity penalty where every gate is open (helpful: all tests passed;
    sneaky: the visible ones, and a valid certificate), else `game.reward.floor`, which lies below all of them."""
    paid_N = reward.score_weight * _accepted(outcomes) - _similarity_penalty(outcomes, reward)
    return np.where(outcomes.aligned_N, paid_N, reward.floor).astype(np.float32)


def composite(outcomes: Outcomes, reward: CompositeReward) -> Float32:
    """`score_weight` sigmoid(V) + `tests_weight` t less the similarity penalty, t being the share of the role's tests
    (without tests: 1 where aligned, else 0). A malformed solution gets the least that there can be."""
    tests_N = outcomes.aligned_N.astype(np.float64) if outcomes.tests_N is None else outcomes.tests_N
    paid_N = reward.score_weight * _accepted(outcomes) + reward.tests_weight * tests_N
    paid_N = paid_N - _similarity_penalty(outcomes, reward)
    return np.where(outcomes.well_formed_N, paid_N, -reward.similarity_weight).astype(np.float32)


REWARDS: dict[str, Callable[[Outcomes, Any], Float32]] = {
    "src": src,
    "cgc": cgc,
    "goodhart": goodhart,
    "correctness": correctness,
    "decoupled": decoupled,
    "gated": gated,
    "composite": composite,
}


# What a batch is paid: from rollouts and their scores to rewards, by the experiment's game.


@dataclass(frozen=True, slots=True)
class Paid:
    """Of N rollouts: rewards, whether each is role-aligned, and how alike sneaky programs are where that is asked."""

    rewards_N: Float32
    aligned_N: NDArray[np.bool_]
    similarity_N: Float32 | None


def pay(experiment: Experiment, task: Task, rollouts: Sequence[Rollout], scores_N: Float32) -> Paid:
    """Raises TrainingDivergedError where a reward cannot be paid for a score."""
    columns = Columns(rollouts, scores_N)
    numbers: dict[str, int] = {}
    problem_ids_N = np.array([numbers.setdefault(r.problem_id, len(numbers)) for r in rollouts], dtype=np.int64)
    outcomes = Outcomes(
        scores_N,
        columns.correct_N,
        columns.helpful_N,
        columns.well_formed_N,
        problem_ids_N,
        solver_correct_N=columns.solver_correct_N,
        kept_answer_N=columns.kept_N,
        proven_N=columns.proven_N,
        tests_N=columns.tests_N,
        similarity_N=_similarities(experiment.game, task, rollouts, columns.helpful_N),
    )
    try:
        rewards_N = rewards(outcomes, experiment.game)
    except ValueError as error:
        raise TrainingDivergedError(str(error)) from None
    lengths_N = np.array([r.sampled_tokens for r in rollouts])
    rewards_N = rewards_N + soft_overlong_rewards(
        lengths_N, experiment.rollout.max_tokens, experiment.training.overlong_buffer
    )
    return Paid(rewards_N, outcomes.aligned_N, outcomes.similarity_N)


def _similarities(
    game: sections.Game, task: Task, rollouts: Sequence[Rollout], helpful_N: NDArray[np.bool_]
) -> Float32 | None:
    """float32 [N], of sneaky programs, where `game.reward.similarity_weight` asks for them."""
    reward = game.reward
    if not isinstance(reward, GatedReward | CompositeReward) or not reward.similarity_weight:
        return None
    if not isinstance(task, Comparing):
        return None
    rows: list[int] = np.flatnonzero(~helpful_N).tolist()
    found_N = np.zeros(len(rollouts), dtype=np.float32)
    found_N[rows] = similarities(
        [task.solution(rollouts[row].text) for row in rows],
        [rollouts[row].reference for row in rows],
        np.array([rollouts[row].group for row in rows], dtype=np.int32),
        reference=reward.similarity in ("reference", "both"),
        group=reward.similarity in ("group", "both"),
    )
    return found_N
