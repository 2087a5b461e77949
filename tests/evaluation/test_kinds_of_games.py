"""`evaluate` on games whose players are not the ordinary ones: adapters of one base, an ensemble, players that learn at
the same time, groups of one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_drill import evaluated_experiment
from test_runner import changed, evaluated, played

from pvg.config.experiment import Experiment
from pvg.evaluation.opened_run import OpenedRun, open_frozen_verifier
from pvg.evaluation.report import PARTS
from pvg.evaluation.runner import open_evaluation
from pvg.game.states import Phase
from pvg.records import Rollout
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.events import SilentObserver

BASE = {"source": "embedded:modchain-prover"}
SMALL = {
    "problems": 4,
    "samples": 2,
    "attacks": ["cgc"],
    "attack_steps": 2,
    "attack_window": 1,
    "baseline_probes": 1,
}
GAMES: dict[str, dict[str, Any]] = {
    "adapters of one base": {
        "training": {"adapters": {"rank": 16}, "steps": 2},
        "verifier": {"adapters": {"rank": 16}, "steps": 2},
        "models": {"verifier": BASE},
    },
    "an ensemble": {
        "verifier": {"ensemble": "median", "steps": 2, "held_out": 0.3},
        "training": {"steps": 2},
    },
}


def game(name: str) -> Experiment:
    settings = {"evaluate": SMALL, **GAMES[name]}
    settings["game"] = {"reward": {"kind": "cgc", "floor": -90.0}, **settings.get("game", {})}
    return changed(evaluated_experiment(), **settings)


async def scores_of(run: RunDirectory, experiment: Experiment, rollouts: list[Rollout]) -> np.ndarray:
    """By the verifier of round 0, as an evaluation opens it."""
    async with AsyncExitStack() as stack:
        reading = OpenedRun.open(run)
        context = await open_evaluation(experiment, reading, SilentObserver(), asyncio.Event(), stack)
        with open_frozen_verifier(context, 0) as frozen:
            return await frozen.scores("again", rollouts, "these")


@pytest.mark.drill
@pytest.mark.parametrize("name", GAMES)
def test_every_part_is_measured_by_the_verifier_that_the_game_had(name: str, tmp_path: Path) -> None:
    experiment = game(name)
    run = played(tmp_path, "tiny", experiment)
    outcome, _ = evaluated(run, experiment)
    assert (outcome.status, outcome.report.status) == ("complete", "complete")
    (row,) = outcome.report.rounds
    plain = row.model_dump(mode="json")
    assert [part for part in PARTS if plain[part.replace("-", "_")] is None] == []
    assert [(attack["kind"], attack["limit"]) for attack in plain["exploit"]] == [("cgc", 2)]

    reading = OpenedRun.open(run)
    scored = [r for r in reading.read_rollouts(0, Phase.CHECKPOINT.value) if r.score is not None]
    told = np.array([r.score for r in scored])
    assert len(told) > 8
    assert np.ptp(told) > 1e-4
    found = asyncio.run(scores_of(run, experiment, scored))
    np.testing.assert_allclose(found, told, atol=1e-5, rtol=1e-5)
