"""The plan of a tiny embedded game beside what the game measures: rollouts, tokens, and bytes, not time."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "game"))
from kill_drill import small_experiment

from pvg.config.load import build_experiment
from pvg.game.run import play
from pvg.planning.memory import read_shape
from pvg.planning.plan import MACHINES, Inputs, plan_of
from pvg.reporting.run_summary import read_run
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.events import SilentObserver

PROMPT = 11  # tokens


def test_the_plan_of_a_game_and_the_game(tmp_path: Path) -> None:
    plain = small_experiment().plain()
    plain["game"]["rounds"] = 1
    plain["training"]["steps"] = 2
    experiment = build_experiment(plain)
    run = RunDirectory.create(tmp_path, "tiny", experiment)
    with run.lock():
        asyncio.run(play(experiment, run, observer=SilentObserver(), stop=asyncio.Event(), resume=False))
    steps = [step.metrics for step in read_run(run).steps if step.phase == "train_prover"]
    shape = read_shape(experiment.models.prover.source, print)
    inputs = Inputs.assumed(experiment, shape, shape, MACHINES["cpu"])
    inputs.assign([f"prompt_tokens={PROMPT}", f"mean_tokens={steps[0]['completion_tokens']}", "sigma=0"])
    plan = plan_of(experiment, inputs, shape, shape)
    assert {step["rollouts"] for step in steps} == {plan.work.rollouts}
    assert plan.work.mean_length == pytest.approx(steps[0]["completion_tokens"], abs=0.5)
    # Sampling cannot need fewer decoding steps than all rows busy: 16 of the 32 rows have a rollout.
    assert plan.work.rows == plan.work.rollouts >= steps[0]["engine_batch"]
    weights = run.weights / "round-000-prover" / "tensors.safetensors"
    assert plan.memory[0].parts["trained weights"] == pytest.approx(weights.stat().st_size, rel=0.02)
