"""What a user sees when something is wrong: one line, a remedy, an exit code, and with --json one document."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from calling import ENTRY, Called, pvg
from hypothesis import given, settings
from hypothesis import strategies as st

import pvg_cli.doctor
from pvg.config.experiment import Experiment
from pvg.errors import LONGEST_LINE, LONGEST_WORD, MissingRequirementError, one_line, visible
from pvg.store import FileStateStore, RunDirectory
from pvg_cli.doctor import CheckResult


def assert_told(called: Called, code: int, *parts: str) -> None:
    assert called.code == code
    assert called.out == ""
    assert called.err.startswith("error: ")
    assert "Traceback" not in called.err
    for part in parts:
        assert part in called.err


def mistake_name(value: object) -> str:
    return "-".join(value) if isinstance(value, tuple) else ""


def ascii_start(text: str) -> str:
    return ascii(text[:10])


@pytest.mark.parametrize("words", [("init",), ("train",), ("doctor",), ("task", "check")])
def test_a_deleted_current_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert_told(pvg(*words), 2, "The current folder no longer exists.")


MISTAKES = [
    (("train", "modchian"), "Did you mean 'modchain'?"),
    (("train", "nowhere.toml"), "nowhere.toml"),
    (("train", "-s", "training.step=3"), "The nearest valid key is 'training.steps'"),
    (("train", "-s", "training.steps"), "key=value"),
    (("train", "-s", "training.steps=many"), "training.steps: "),
    (("train", "--dry-run", "-s", "rollout.group_size=1"), "rollout.group_size = 1"),
    (("train", "--dry-run", "-s", "training.minibatches=0"), "training.minibatches"),
    (("train", "--dry-run", "-s", "training.micro_batch_rollouts=9999"), "larger than its batch"),
    (("train", "--dry-run", "-s", "training.micro_batch_tokens=5"), "is too small"),
    (("train", "--name", "../away"), "cannot be the name of a run"),
    (("train", "--name", ""), "cannot be the name of a run"),
    (("train", "--name", "a", "--resume", "b"), "cannot be used together"),
    (("train", "--resume"), "no unfinished run of 'modchain'"),
    (("train", "--resume", "gone"), "no run 'gone'"),
    (("train", "negotiation", "-s", "game.start=base"), "Leave out game.start."),
    (("config", "validate", "negotiation", "-s", 'game={start="base"}'), "each round of self-play goes on from"),
    (("rollout", "modchian"), "Did you mean 'modchain'?"),
    (("report", "gone"), "no run 'gone'"),
    (("config", "show", "modchian"), "Did you mean 'modchain'?"),
    (("config", "validate", "-s", "seed=x"), "seed: "),
    (("config", "schema", "modchian"), "Did you mean 'modchain'?"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=mistake_name)
def test_a_mistake_is_one_line_with_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    assert_told(pvg(*arguments), 2, says)
    assert not Path("runs").exists()


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=mistake_name)
def test_with_json_it_is_one_document_too(arguments: tuple[str, ...], says: str) -> None:
    called = pvg(*arguments, "--json")
    assert called.code == 2
    error = called.document["error"]
    assert says in error["message"] + error["remedy"]
    assert error["exit_code"] == 2
    assert called.err.startswith("error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--resume", "drawn"),
        ("evaluate", "drawn"),
        ("score", "drawn", "rows.jsonl"),
        ("export", "drawn", "--player", "prover", "--out", "x"),
        ("serve", "drawn", "--player", "verifier"),
    ],
)
def test_every_command_says_the_same_of_samples_without_a_game(arguments: tuple[str, ...]) -> None:
    run = RunDirectory.create(Path("runs"), "drawn", Experiment())
    FileStateStore(run.state).save({"phase": "init", "rounds": [], "shards": [{}]})
    said = "error: The run 'drawn' contains samples of `pvg rollout`, not a game.\nStart a game: pvg train\n"
    assert (pvg(*arguments).code, pvg(*arguments).err) == (2, said)


@pytest.mark.parametrize(
    "arguments", [("train", "--bogus"), ("rollout", "--role", "king"), ("report",), ("bogus",), ("config", "bogus")]
)
def test_wrong_usage_is_exit_code_2_and_a_document_with_json(arguments: tuple[str, ...]) -> None:
    plain = pvg(*arguments)
    assert (plain.code, plain.out) == (2, "")
    called = pvg(*arguments, "--json")
    assert called.code == 2
    assert called.document["error"]["type"] == "UsageError"


def test_debug_shows_the_traceback_of_a_mistake() -> None:
    called = pvg("train", "modchian", "--debug")
    assert called.code == 2
    assert "Traceback" in called.err
    assert "error: There is no experiment" in called.err


def test_what_the_environment_lacks_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise MissingRequirementError("There is no moon.", "pip install moon")

    monkeypatch.setattr("pvg_cli.runs.resolve", lacking)
    called = pvg("config", "show")
    assert_told(called, 3, "There is no moon.", "pip install moon")


def test_a_defect_shows_its_traceback_and_how_to_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("pvg_cli.runs.resolve", broken)
    called = pvg("config", "show", "--json")
    assert called.code == 70
    assert "Traceback" in called.err
    assert "Please report it" in called.err
    assert called.document["error"] == {
        "type": "RuntimeError",
        "message": "a bug of ours",
        "remedy": "This is a bug in pvg. Please report it.",
        "exit_code": 70,
    }


def test_ctrl_c_before_anything_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pvg_cli.runs.resolve", interrupted)
    called = pvg("config", "show", "--json")
    assert called.code == 130
    assert called.document["error"]["exit_code"] == 130


def test_a_runs_folder_that_cannot_be_made_is_not_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("pvg.store.run_directory.make_directory", read_only)
    assert_told(pvg("train"), 3, "pvg cannot create the run folder", "store.root")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("train",), "--set store.root=FOLDER"),
        (("train", "--dry-run", "--name", "mine"), "--set store.root=FOLDER"),
        (("train", "--resume"), "--set store.root=FOLDER"),
        (("report", "first"), "--runs FOLDER"),
        (("runs", "show", "first"), "--runs FOLDER"),
        (("study", "quick", "--dry-run"), "--runs FOLDER"),
    ],
)
def test_a_file_in_place_of_the_folder_of_runs_is_named(arguments: tuple[str, ...], option: str) -> None:
    Path("runs").touch()
    message = f"error: runs is not a folder, so it cannot contain runs.\nMove it away, or choose a folder: {option}"
    assert_told(pvg(*arguments), 2, message)


def test_a_file_in_place_of_the_folder_of_runs_is_named_where_the_run_is_missing() -> None:
    Path("runs").touch()
    called = pvg("report", "--json")
    assert called.code == 2
    assert "runs is not a folder, so it cannot contain runs." in called.document["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "n" * 300),
        ("diagnose", "n" * 300),
        ("compare", "n" * 300, "b.json"),
        ("bench", "--profile", "n" * 300),
        ("bench", "--profile", "rollout", "--out", "n" * 300),
        ("profile", "n" * 300),
        ("train", "n" * 300),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_name_that_no_file_can_have_is_a_mistake(arguments: tuple[str, ...]) -> None:
    assert_told(pvg(*arguments), 2, "File name too long", "shorter")


def failing(number: int, path: str | None = "runs/secret") -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), path)

    return fail


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, 3), (errno.EPERM, 3), (errno.ENOTDIR, 2), (errno.ELOOP, 2)]
)
def test_an_error_of_a_path_that_the_user_named_is_no_defect(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_file", failing(number))  # as in looking for the experiment
    assert_told(pvg("config", "show"), code, f"runs/secret: {os.strerror(number)}.")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_missing_permission_is_no_defect_whatever_the_path(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example the weights of a run of another user."""
    monkeypatch.setattr("pvg_cli.runs.check_references", failing(number))
    assert_told(pvg("config", "show"), 3, f"runs/secret: {os.strerror(number)}.", "Get the permission")


@pytest.mark.parametrize("number", [errno.EISDIR, errno.ENOTDIR, errno.EEXIST])
def test_the_same_error_of_any_other_path_is_a_defect(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg_cli.runs.check_references", failing(number))
    called = pvg("config", "show")
    assert called.code == 70
    assert "Traceback" in called.err
    assert "This is a bug in pvg" in called.err


def test_an_error_without_a_path_is_a_defect_of_pvg_wherever_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", failing(errno.EPERM, None))
    assert pvg("config", "show").code == 70


def test_a_damaged_disk_is_no_defect_whatever_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg_cli.runs.check_references", failing(errno.EIO))
    assert_told(pvg("config", "show"), 3, f"runs/secret: {os.strerror(errno.EIO)}.", "Check the disk")


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("bench",), 3, "pvg cannot write its output: No space left"),
        (("bench", "--json"), 3, "pvg cannot write its output: No space left"),
        (("config", "show"), 3, "pvg cannot write its output: No space left"),
        (("bench", "--profile", "gone", "--json"), 2, "no profile 'gone'"),
    ],
    ids=mistake_name,
)
def test_output_that_does_not_fit_is_no_defect(arguments: tuple[str, ...], code: int, says: str) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([*ENTRY, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@settings(deadline=None)
@given(st.text(max_size=400) | st.text(alphabet="ab \n\x1b\u202e\udc80", min_size=2000, max_size=5000))
def test_one_line_is_one_printable_line_of_bounded_length(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= LONGEST_LINE
    assert all(len(word) <= 10 * LONGEST_WORD for word in line.split())  # ten characters for one that is escaped
    assert one_line(line.strip()) == line.strip() or len(line) > LONGEST_WORD
    assert visible(text).replace("\n", "").isprintable()


@pytest.mark.parametrize("text", ["plain", "with blanks", "é, 中文, 😀", "/a/path" * 40])
def test_what_is_printable_and_short_stays_as_it_is(text: str) -> None:
    assert one_line(text) == text


HOSTILE = [
    "k" * 100_000,
    "a." * 50_000,
    "\x1b[31mred\x07",
    "two\nlines\r\x0bthree",
    "\u202egnp",
    "\udc80",
    " k" * 50_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii_start)
@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "show", "-s", "{}=1"),
        ("config", "show", "-s", "seed={}"),
        ("config", "show", "{}"),
        ("train", "--name", "{}"),
        ("report", "{}"),
        ("train", "--{}"),
        ("{}",),
    ],
    ids=lambda arguments: "-".join(arguments).strip("-"),
)
def test_what_a_user_typed_is_quoted_in_one_printable_line(arguments: tuple[str, ...], text: str) -> None:
    typed = [word.replace("{}", text) for word in arguments]
    called = pvg(*typed, "--json")
    assert called.code in (2, 3)
    assert called.document["error"]["message"].isprintable()
    assert len(called.document["error"]["message"]) <= LONGEST_LINE
    lines = called.err.splitlines()
    assert all(line.isprintable() for line in lines)
    assert len(called.err) < 4 * LONGEST_LINE
    assert len(lines) <= 2 or not lines[0].startswith("error: ")  # typer draws a box around its own


def test_a_traceback_is_printable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of \x1b[31m ours")

    monkeypatch.setattr("pvg_cli.runs.resolve", broken)
    called = pvg("config", "show")
    assert called.code == 70
    assert r"RuntimeError: a bug of \x1b[31m ours" in called.err
    assert called.err.replace("\n", "").isprintable()


def test_doctor_fails_when_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Path) -> list[CheckResult]:
        return [CheckResult("moon", "missing", "not there", "pip install moon"), CheckResult("sun", "notice", "dim")]

    monkeypatch.setattr(pvg_cli.doctor, "CHECKS", (missing,))
    called = pvg("doctor")
    assert called.code == 1
    assert "pip install moon" in called.out
    document = pvg("doctor", "--json").document
    assert document["healthy"] is False
    assert [check["name"] for check in document["checks"]] == ["moon", "sun"]


def test_a_termination_ends_a_command_that_a_script_started_in_the_background(tmp_path: Path) -> None:
    """There SIGINT is ignored, so SIGTERM must not be turned into one."""
    command = [sys.executable, "-c", "import signal, sys, time\n" + BACKGROUND]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 130


BACKGROUND = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
import typer
from pvg_cli.boundary import guarded

@guarded
def command(as_json: bool = False, debug: bool = False) -> None:
    print("ready", flush=True)
    time.sleep(300)

try:
    command(as_json=False, debug=False)
except typer.Exit as done:
    sys.exit(done.exit_code)
"""
