"""Invariant 1: killed at any instant and resumed, a run ends like the uninterrupted one. See kill_drill.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

ROOT = Path(__file__).parents[2]
KILLS = 12


def drilled(*options: str, tool: str = "kill_drill.py") -> dict[str, Any]:
    """The result of a tool of this folder, run in a separate process, which forks before any torch work."""
    command = [sys.executable, str(Path(__file__).with_name(tool)), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    result: dict[str, Any] = orjson.loads(done.stdout)
    return result


@pytest.mark.drill
@pytest.mark.timeout(1800)  # of a busy machine; a quiet one takes a minute
def test_a_run_killed_at_random_moments_ends_like_the_uninterrupted_run():
    result = drilled("--kills", str(KILLS))
    assert result["problems"] == []
    assert sum(result["kills"].values()) == KILLS
    assert all(result["kills"].get(phase, 0) >= 3 for phase in ("mint", "train_verifier", "train_prover", "checkpoint"))


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_killed_self_play_ends_like_the_uninterrupted_run():
    result = drilled("--kills", "4", "--game", "play")
    assert result["problems"] == []
    assert result["kills"] == {"train_prover": 2, "checkpoint": 2}


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_run_killed_in_its_warm_start_and_after_it_ends_like_the_uninterrupted_run():
    result = drilled("--kills", "4", "--game", "warm")
    assert result["problems"] == []
    assert result["kills"] == {"warmup": 2, "train_prover": 2}


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_killed_game_with_a_protocol_of_ones_own_ends_like_the_uninterrupted_run():
    result = drilled("--kills", "6", "--game", "own")
    assert result["problems"] == []
    assert result["kills"] == {"mint": 2, "train_prover": 2, "checkpoint": 2}


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_killed_game_whose_reward_a_model_reads_ends_like_the_uninterrupted_run():
    assert drilled("--kills", "4", "--game", "read")["problems"] == []


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_killed_and_hanging_workers_and_drivers_leave_the_bits_of_an_undisturbed_run():
    result = drilled("--kills", "20", tool="soak.py")
    assert result["problems"] == []
    assert (result["rollouts_lost"], result["rollouts_twice"]) == (0, 0)
    assert result["kills"]["worker"] >= 3
    assert result["kills"]["driver"] >= 2
    assert result["recovery_s"]["worker"]["measured"] >= 3
