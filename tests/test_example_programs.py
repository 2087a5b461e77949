"""The programs of examples/ run, with tiny settings."""

from __future__ import annotations

import ast
import csv
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
GAME = EXAMPLES / "game_in_one_file.py"
TINY = {"task.problems": 256, "task.test_problems": 32, "game.mint_problems": 24}
TINY |= {"verifier.steps": 3, "training.steps": 2, "training.groups": 4}
ATTACK = {"evaluate.attack_steps": 2, "evaluate.attack_window": 1, "evaluate.problems": 8}


def test_the_game_in_one_file_is_played(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"rounds": 2, "minted": 24, "verifier-steps": 3, "pairs": 4, "prover-steps": 2, "groups": 4, "tested": 8}
    given = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    monkeypatch.setattr(sys, "argv", [str(GAME), *given])
    runpy.run_path(str(GAME), run_name="__main__")
    head, *rows = capsys.readouterr().out.splitlines()
    titles = ["helpful accuracy", "sneaky error rate", "fooled rate", "AUC"]
    assert [head[i : i + 18].strip() for i in range(5, 77, 18)] == titles
    assert [row.split()[0] for row in rows] == ["base", "0", "1"]
    shares = [row[at : at + 18].removesuffix(" %") for row in rows for at in (5, 23)]
    assert all(0.0 <= float(share) <= 100.0 for share in shares)


def test_the_game_in_one_file_can_be_read_in_one_sitting() -> None:
    assert len(GAME.read_text().splitlines()) <= 300


def test_the_notebook_runs_and_shows_runs_and_solutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "pvg_in_a_notebook.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "cell", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None
            names |= {"SMALL": {**names["SMALL"], **TINY}, "ATTACK": ATTACK}
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else "")
    _, first, _, example, evaluated, *_ = shown
    assert "helpful accuracy" in first
    assert all('class="solution ' in html and "A" in html for html in (first, example))
    assert ["<details>" in html for html in (first, evaluated)] == [False, True]
    out = capsys.readouterr().out
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
