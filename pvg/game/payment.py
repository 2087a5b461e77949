"""What a batch is paid: from rollouts and their scores to rewards, by the experiment's game."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pvg import sections
from pvg.errors import TrainingDivergedError
from pvg.experiment import Experiment
from pvg.game.rewards import COMPARING_REWARDS, Outcomes, rewards
from pvg.game.statistics import Columns
from pvg.records import Float32, Rollout
from pvg.tasks.code.similarity import similarities
from pvg.tasks.task import Comparing, Task
from pvg.training.credit import soft_overlong_rewards


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
    """float32 [N], of sneaky programs, where `game.similarity_weight` asks for them."""
    if not game.similarity_weight or game.reward not in COMPARING_REWARDS or not isinstance(task, Comparing):
        return None
    rows: list[int] = np.flatnonzero(~helpful_N).tolist()
    found_N = np.zeros(len(rollouts), dtype=np.float32)
    found_N[rows] = similarities(
        [task.solution(rollouts[row].text) for row in rows],
        [rollouts[row].reference for row in rows],
        np.array([rollouts[row].group for row in rows], dtype=np.int32),
        reference=game.similarity in ("reference", "both"),
        group=game.similarity in ("group", "both"),
    )
    return found_N
