"""`pvg init`: the files pass their own test, play, and replace nothing."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from calling import SMALL, pvg

from pvg.config.load import load_experiment

pytestmark = pytest.mark.slow

FILES = ["data.jsonl", "experiment.toml", "task.py", "test_task.py"]


def test_the_scaffold_is_written_and_its_next_steps_are_told(tmp_path: Path) -> None:
    called = pvg("init", "my game!")
    assert called.code == 0
    assert sorted(path.name for path in (tmp_path / "my game!").iterdir()) == FILES
    assert "cd 'my game!'" in called.out
    assert "pvg train experiment.toml" in called.out
    python = next(line.split(" -m pytest")[0].strip() for line in called.out.splitlines() if " -m pytest" in line)
    subprocess.run([*shlex.split(python), "-c", "import pvg"], cwd=tmp_path / "my game!", check=True)
    assert load_experiment(tmp_path / "my game!" / "experiment.toml").name == "my-game"


def test_nothing_is_replaced_or_half_written(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("mine")
    called = pvg("init", "--json")
    assert called.code == 2
    assert called.document["error"]["message"] == "This folder already has task.py, and pvg init replaces no file."
    assert [path.name for path in tmp_path.iterdir()] == ["task.py"]
    assert (tmp_path / "task.py").read_text() == "mine"


def test_the_same_command_finishes_what_a_killed_one_has_begun(tmp_path: Path) -> None:
    written = [Path(path) for path in pvg("init", "new", "--json").document["files"]]
    texts = {path: path.read_bytes() for path in written}
    assert pvg("init", "new").code == 2
    written[1].unlink()
    assert pvg("init", "new").code == 0
    assert {path: path.read_bytes() for path in written} == texts


def test_the_scaffold_passes_its_own_test_and_its_check_and_plays() -> None:
    pvg("init")
    with Path("data.jsonl").open("a") as file:  # U+2028 separates lines for Python's splitlines, not in JSON
        file.write('{"question": "9+9+9?\u2028", "answer": "7"}\n')
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(pytest_, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    called = pvg("check", "experiment.toml")
    assert called.code == 0, called.out
    assert "modulo 10" not in called.out  # its embedded model reads tags
    called = pvg("check", "task.py:MyTask", "-s", "task.settings.path=data.jsonl")
    assert called.code == 0, called.out
    assert "modulo 10" in called.out
    played = pvg("train", "experiment.toml", *SMALL, "-s", "cluster=none", "--json")
    assert played.code == 0, played.err
    assert played.document["status"] == "complete"


# --- pvg init --protocol ----------------------------------------------------------------------------------------------


def test_the_scaffold_of_a_protocol_is_short_passes_its_own_test_and_its_check_and_plays(tmp_path: Path) -> None:
    called = pvg("init", "--protocol", "two_questions")
    assert called.code == 0
    assert "train two_questions.toml" in called.out
    names = ["test_two_questions.py", "two_questions.py", "two_questions.toml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(len(Path(name).read_text().splitlines()) <= 60 for name in names)
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(pytest_, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    checked = pvg("check", "two_questions.toml", "--json")
    assert checked.code == 0, checked.err
    turns = checked.document["preview"]["episode"]
    assert [turn["by"] for turn in turns] == [["prover"], ["examiner"], ["prover"], ["examiner"], ["prover"]]
    assert {turn["seat"] for turn in turns} == {"prover"}
    played = pvg("train", "two_questions.toml", *SMALL, "-s", "cluster=none", "--json")
    assert played.code == 0, played.err
    assert played.document["status"] == "complete"


def test_a_protocol_replaces_no_file_and_joins_the_folder_of_a_task(tmp_path: Path) -> None:
    assert pvg("init").code == 0
    assert pvg("init", "--protocol", "mine").code == 0
    texts = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert texts.keys() == {*FILES, "mine.py", "mine.toml", "test_mine.py"}
    called = pvg("init", "--protocol", "mine", "--json")
    assert called.code == 2
    assert called.document["error"]["message"].startswith("This folder already has mine.py, mine.toml, test_mine.py")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == texts


@pytest.mark.parametrize("name", ["", "My", "a-b", "../a", "class", "json", "numpy", "pvg"])
def test_a_protocol_has_a_name_that_python_can_import_and_does_not_know_yet(name: str, tmp_path: Path) -> None:
    called = pvg("init", "--protocol", name)
    assert called.code == 2
    assert "Choose another name" in called.err or "Use small letters" in called.err
    assert list(tmp_path.iterdir()) == []
