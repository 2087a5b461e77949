"""What a batch of rollouts is paid: the reward of the game, and what its length costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pvg.config.experiment import Experiment
from pvg.game.rewards import pay
from pvg.records import Grade, Role, Rollout, VersionSpan
from pvg.tasks.modchain import Modchain


def rollout(tokens: int, correct: bool) -> Rollout:
    made = Rollout(
        id="r", problem_id="p", question="q", reference="1", role=Role.HELPFUL, round=0, source="base", step=0, group=0,
        prompt_ids=np.array([1], dtype=np.int32), completion_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, dtype=np.float32), spans=(VersionSpan(0, 0),), finish_reason="stop", text="t",
        grade=Grade(correct=True, well_formed=True),
    )  # fmt: skip
    return replace(made, grade=Grade(correct=correct, well_formed=True))


@pytest.mark.parametrize(("buffer", "costs"), [(0, [0, 0, 0, 0]), (8, [0, 0, 0.5, 1.0])])
def test_a_long_solution_is_paid_less_by_the_overlong_buffer(buffer: int, costs: list[float]) -> None:
    plain = Experiment().plain()
    plain["rollout"] |= {"max_tokens": 20}
    plain["training"] |= {"loss": "dapo", "overlong_buffer": buffer}
    plain["game"] |= {"reward": "correctness", "sneaky_share": 0.0}
    experiment = Experiment.model_validate(plain)
    # A buffer of 8 before the limit of 20: free up to 12 tokens, then an eighth per token.
    rollouts = [rollout(3, True), rollout(12, False), rollout(16, True), rollout(20, False)]
    limits = {"max_tokens": experiment.rollout.max_tokens, "overlong_buffer": experiment.training.overlong_buffer}
    paid = pay(experiment.game, Modchain(experiment.task), rollouts, np.zeros(4, dtype=np.float32), **limits)
    assert paid.rewards_N.tolist() == [right - cost for right, cost in zip([1, 0, 1, 0], costs, strict=True)]
    assert paid.aligned_N.tolist() == [True, False, True, False]
