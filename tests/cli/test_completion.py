"""The tab key, through the variables that the shells set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from calling import ENTRY


def offered(line: str, shell: str = "zsh", folder: Path | None = None) -> list[str]:
    """What the shell is offered for the last word of `line`. Bash takes an equals sign for a word."""
    words = line.replace("=", " = ").split(" ") if shell == "bash" else line.split(" ")
    words = [word for place, word in enumerate(words) if word or place == len(words) - 1]
    if shell == "bash" and line.endswith("="):
        words.pop()
    variables = {
        "_PVG_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        ENTRY, env={**os.environ, **variables}, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    if shell == "zsh":
        return [piece.split('"')[0] for piece in done.stdout.split('"')[1::2]]
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pvg trai", ["train"]),
        ("pvg train modc", ["modchain"]),
        ("pvg config show diplomacy-m", ["diplomacy-mini"]),
        ("pvg serve qwen", ["qwen-gsm8k-lora"]),
        ("pvg bench --profile sy", ["sync", "sync-vllm"]),
        ("pvg study pub", ["published-shape"]),
        ("pvg train -s game.ro", ["game.rounds="]),
        ("pvg train --set task.ki", []),
        ("pvg config explain game.t", ["game.test", "game.test.problems", "game.test.samples"]),
    ],
)
def test_bash_is_offered_names(line: str, expected: list[str]) -> None:
    assert offered(line, "bash") == expected


def test_runs_and_experiments_of_the_folder_are_offered(tmp_path: Path) -> None:
    for name in ("mine", "mine-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "experiment.toml").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.toml").touch()
    for command in ("report", "evaluate", "watch", "diagnose", "train --resume"):
        assert offered(f"pvg {command} mi", "bash", tmp_path) == ["mine", "mine-2"]
    assert offered("pvg train mi", "bash", tmp_path) == ["mine"]
    (tmp_path / "elsewhere" / "other").mkdir(parents=True)
    (tmp_path / "elsewhere" / "other" / "experiment.toml").touch()
    assert offered("pvg report --runs elsewhere o", "bash", tmp_path) == ["other"]


def test_completion_loads_no_torch() -> None:
    program = (
        "import sys\nfrom pvg_cli import completion\n"
        "assert completion.settings('gam') and completion.experiments('')\n"
        "print([name for name in ('torch', 'transformers', 'ray', 'pyarrow', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
