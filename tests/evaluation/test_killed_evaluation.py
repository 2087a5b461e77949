"""`pvg evaluate` killed at any instant ends like the uninterrupted one. See evaluation_drill.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest


@pytest.mark.drill
@pytest.mark.timeout(900)  # of a busy machine; a quiet one takes 25 s
def test_an_evaluation_killed_at_random_moments_ends_like_the_uninterrupted_one():
    drill = Path(__file__).with_name("evaluation_drill.py")
    done = subprocess.run([sys.executable, str(drill), "--kills", "7"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    result = orjson.loads(done.stdout)
    assert result["problems"] == []
    assert result["policies"] == 4  # two attackers, and two probes of the baseline
    assert sum(result["kills"].values()) >= 4
    assert any(phase.startswith("attack") for phase in result["kills"])
