"""The programs of examples/ run, with tiny settings."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import pvg

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
GAME = EXAMPLES / "game_in_one_file.py"
TINY = {"task.problems": 256, "task.test_problems": 32, "game.mint_problems": 24}
TINY |= {"verifier.steps": 3, "training.steps": 2, "training.groups": 4}


def test_the_game_in_one_file_is_played(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"rounds": 2, "minted": 24, "verifier-steps": 3, "pairs": 4, "prover-steps": 2, "groups": 4, "tested": 8}
    given = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    monkeypatch.setattr(sys, "argv", [str(GAME), *given])
    runpy.run_path(str(GAME), run_name="__main__")
    head, *rows = capsys.readouterr().out.splitlines()
    titles = ["helpful accuracy", "sneaky error rate", "fooled rate", "AUC"]
    assert [head[i : i + 18].strip() for i in range(5, 77, 18)] == titles
    assert [row.split()[0] for row in rows] == ["base", "0", "1"]
    assert all(0.0 <= float(cell) <= 1.0 for row in rows for cell in row.split()[1:3])


def test_the_game_in_one_file_can_be_read_in_one_sitting() -> None:
    assert len(GAME.read_text().splitlines()) <= 300


def test_pvg_is_used_as_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play = pvg.play

    def play_tiny(name: str, settings: dict[str, Any]) -> pvg.Run:
        return play(name, {**settings, **TINY})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pvg, "play", play_tiny, raising=False)
    runpy.run_path(str(EXAMPLES / "use_as_a_library.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "runs/modchain is complete." in out
    assert len(re.findall(r"^ +-?\d+\.\d\d  (correct|wrong sum|no solution)", out, flags=re.MULTILINE)) == 3


def test_the_hack_alarm_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["hack_alarm.py", *words])
        runpy.run_path(str(EXAMPLES / "hack_alarm.py"), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    small = ["training.steps=2", "game.test.problems=2", "game.mint_problems=4"]
    for _ in range(2):  # the second call finds both games
        run("--seeds", "7:9", "--out", "out.csv", *(word for each in small for word in ("--set", each)))
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(row["seed"], row["steps"], row["alarm"]) for row in rows] == [("7", "2", "0"), ("8", "2", "0")]
    assert all(0.0 <= float(share) <= 1.0 for row in rows for share in row["batches"].split())
    assert "in 200 resamples of 2 games" in run("--resample", "out.csv")
