"""The planned time of `pvg evaluate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pvg.config.load import load_experiment
from pvg.planning.evaluation import evaluation_s
from pvg.planning.plan import plan_here

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "modchain.toml"


def test_attacks_take_their_steps_and_their_samples() -> None:
    settings = (
        "evaluate.problems=10",
        "evaluate.samples=3",
        "evaluate.attack_steps=50",
        "evaluate.attack_groups=16",
        'evaluate.attacks=["src","cgc"]',
        "training.groups=32",
    )
    experiment = load_experiment(EXPERIMENT, list(settings))
    plan = plan_here(experiment, lambda _: None)
    sample_s = plan.bounds.sampling_s / plan.work.rollouts
    # Both roles of the base prover and of rounds 0 to 2; then of each attacker, and once more of each of two rounds.
    detection = evaluation_s(experiment, ("detection",), [0, 2], plan)
    assert detection == pytest.approx(2 * 30 * 4 * sample_s)
    found = evaluation_s(experiment, ("detection", "exploit"), [0, 2], plan)
    assert found - detection == pytest.approx(4 * 50 * plan.step_s / 2 + 30 * (4 + 2) * sample_s)
