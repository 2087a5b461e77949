"""A real SIGKILL at random moments of writing: the last commit is readable, and so is everything it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pvg.config.experiment import Experiment
from pvg.store.run_directory import RunDirectory

WRITER = Path(__file__).with_name("committing_writer.py")
KILLS = 16


@pytest.mark.drill
def test_a_killed_writer_loses_no_commit_and_repeats_none(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "killed", Experiment())
    done = subprocess.run(
        [sys.executable, str(WRITER), str(run.path), str(KILLS), "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"commits=(\d+) late=(\d+)\n", done.stdout)
    assert found, done.stdout
    commits, late = map(int, found.groups())
    assert commits >= KILLS
    assert late >= 3  # some kills hit in the middle of a commit, else this has tested nothing
    assert not [path for path in run.path.rglob(".tmp-*") if path.parent != run.path]
