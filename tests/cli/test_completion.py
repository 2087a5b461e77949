"""The tab key, through the variables that the shells set."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from calling import ENTRY

from pvg_cli import completion

pytestmark = pytest.mark.slow


def offered(line: str, folder: Path | None = None) -> list[str]:
    """What bash is offered for the last word of `line`."""
    words = [word for place, word in enumerate(line.split(" ")) if word or place == len(line.split(" ")) - 1]
    variables = {
        "_PVG_COMPLETE": "complete_bash",
        "_TYPER_COMPLETE_ARGS": line,
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        ENTRY, env={**os.environ, **variables}, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pvg trai", ["train"]),
        ("pvg bench --profile sy", ["sync", "sync-vllm"]),
        ("pvg train -s game.ro", ["game.rounds="]),
        ("pvg config explain game.t", ["game.test", "game.test.problems", "game.test.samples"]),
    ],
)
def test_bash_is_offered_names(line: str, expected: list[str]) -> None:
    assert offered(line) == expected


def test_runs_and_experiments_of_the_folder_are_offered(tmp_path: Path) -> None:
    for name in ("runs/mine", "runs/mine-2", "elsewhere/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "experiment.toml").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.toml").touch()
    assert offered("pvg train --resume mi", tmp_path) == ["mine", "mine-2"]
    assert offered("pvg report --runs elsewhere o", tmp_path) == ["other"]
    assert completion.experiments("mi") == ["mine"]
    assert completion.settings("task.ki") == []
    assert completion.studies("pub") == ["published-shape"]
