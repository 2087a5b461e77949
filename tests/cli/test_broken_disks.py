"""Disks that are full or read-only, folders that move away, and files that are not what they should be: one clear
line and exit code 2 or 3, and nothing lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calling import Called, pvg
from run_samples import begin, commit, played, state

from pvg.config.experiment import Experiment
from pvg.game.ledger import Ledger
from pvg.game.run import GameOutcome
from pvg.game.states import Phase
from pvg.store import lease
from pvg.store.run_directory import RunDirectory


def assert_refused(called: Called, code: int, *parts: str) -> None:
    assert "Traceback" not in called.err
    assert called.code == code, called.err
    error = next(line for line in called.err.splitlines() if line.startswith("error: "))
    for part in parts:
        assert part in error


def play_with(monkeypatch: pytest.MonkeyPatch, between: Callable[[], None] = lambda: None) -> None:
    """Replace the game by two of its commits, without its models."""

    async def play(experiment: Experiment, run: RunDirectory, **_: Any) -> GameOutcome:
        ledger = Ledger(run, experiment, "test")
        try:
            ledger.record("step", number=0)
            state = ledger.state if ledger.state.phase is Phase.MINT else ledger.state.enter(Phase.MINT)
            await ledger.commit(state)
            between()
            await ledger.commit(replace(state, step=1))
        finally:
            ledger.close()
        return GameOutcome("interrupted", run.path, [], 1.0)

    monkeypatch.setattr("pvg.game.run.play", play)


def mount(*arguments: str, at: Path) -> None:
    at.mkdir(exist_ok=True)
    if subprocess.run(["mount", *arguments, str(at)], capture_output=True, check=False).returncode:
        pytest.skip("needs root, who may mount: `sudo make test`")


@pytest.fixture
def mounted() -> Iterator[list[Path]]:
    """Mount points to be unmounted at the end."""
    points: list[Path] = []
    yield points
    for point in points:
        subprocess.run(["umount", str(point)], check=True)


# --- read-only file systems --------------------------------------------------------------------------------------


@pytest.fixture
def read_only(mounted: list[Path]) -> Path:
    """A folder with a complete run `first` and an unfinished one `second`, which is read-only."""
    played(Path("runs"), "first")
    second = begin(Path("runs"), "second")
    commit(second, state("train_prover", rounds=[{"helpful_accuracy": 0.5}]))
    folder = Path("read-only")
    mount("--bind", "runs", at=folder)
    mounted.append(folder)
    if subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("needs root, who may mount: `sudo make test`")
    return folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "--resume", "read-only/second"), "lock: Read-only file system"),
        (("report", "read-only/first"), "page read-only/first/report.html cannot be written: Read-only file system"),
        (("train", "-s", "store.root=read-only"), "run folder read-only/modchain: Read-only file system"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_read_only_file_system_is_no_defect(read_only: Path, arguments: tuple[str, ...], says: str) -> None:
    assert_refused(pvg(*arguments), 3, says)


# --- full disks --------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_and_an_uncommitted_run_leaves_nothing(
    mounted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path("runs")
    mount("-t", "tmpfs", "-o", "size=8k", "tmpfs", at=root)
    mounted.append(root)
    play_with(monkeypatch)
    called = pvg("train", "--json")
    assert_refused(called, 3, "runs/modchain", "No space left on device")
    assert called.document["error"]["exit_code"] == 3
    assert list(root.iterdir()) == []


# --- folders that move away --------------------------------------------------------------------------------------


def test_a_folder_that_goes_away_while_it_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    play_with(monkeypatch, lambda: shutil.rmtree("runs/modchain"))
    assert_refused(pvg("train"), 2, "runs/modchain", "moved, deleted or replaced")
    assert not Path("runs/modchain").exists()


# --- files that are not what they should be ----------------------------------------------------------------------


def unfinished(monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    play_with(monkeypatch)
    assert pvg("train").code == 130
    return RunDirectory(Path("runs/modchain"))


@pytest.mark.parametrize("name", ["lock", "state.json", "experiment.toml"])
def test_a_folder_in_the_place_of_a_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run = unfinished(monkeypatch)
    (run.path / name).unlink()
    (run.path / name / "inner").mkdir(parents=True)
    assert_refused(pvg("train", "--resume", "modchain"), 2, "modchain")
    assert pvg("report", "modchain", "--no-html").code in (0, 2)
    (run.path / name / "inner").rmdir()
    assert_refused(pvg("train", "--resume", "modchain"), 2, "modchain")


def with_a_fifo_for(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)  # to open it for reading waits for a writer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state.json", "metrics.jsonl", "lease-000001.json"])
def test_no_command_waits_for_the_writer_of_a_fifo_in_a_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run = unfinished(monkeypatch)
    monkeypatch.setattr(lease, "WATCH_S", 0.1)  # a lease that cannot be read may be that of another host
    with_a_fifo_for(run.path / name)
    listed, report = pvg("runs"), pvg("report", "modchain", "--no-html")
    assert (listed.code, report.code) == (0, 0)
    assert "modchain" in listed.out
    says = f"runs/modchain/{name} is not a regular file."
    assert (says in listed.err) is (name == "state.json")  # the list shows no content of the others
    assert (says in " ".join(report.out.split())) is (name != "lease-000001.json")
    resumed = pvg("train", "--resume", "modchain")
    if name == "metrics.jsonl":
        assert_refused(resumed, 2, says)
    else:
        assert resumed.code == 130
    with_a_fifo_for(run.path / "state.json")
    with_a_fifo_for(run.path / "state.previous.json")
    assert_refused(pvg("train", "--resume", "modchain"), 2, "state.json is not a regular file", "state.previous.json")


def with_a_device_for(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")  # to read it to its end fills the memory


@pytest.mark.parametrize("put", [with_a_fifo_for, with_a_device_for])
def test_a_report_names_a_shard_that_is_no_file_and_shows_the_rest(put: Callable[[Path], None]) -> None:
    run = played(Path("runs"))
    shards = sorted(run.rollouts.rglob("*.arrow"))
    for shard in shards:
        put(shard)
    called = pvg("report", "first")
    assert called.code == 0, called.err
    assert "warning: " in called.err
    assert any(str(shard) in called.err for shard in shards)
    assert "87.5 %" in called.out
    assert "rollouts.html" not in called.out
    assert pvg("runs").code == 0


def test_a_run_that_lost_its_state_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    played(Path("runs"))
    run = unfinished(monkeypatch)
    for lost in (RunDirectory(Path("runs/first")), run):
        for path in lost.path.glob("state*.json"):
            path.unlink()
        before = {path: path.read_bytes() for path in lost.path.rglob("*") if path.is_file()}
        for more in ((), ("--dry-run",)):
            assert_refused(pvg("train", "--resume", lost.name, *more), 2, "no state.json", "metrics.jsonl")
        assert {path: path.read_bytes() for path in lost.path.rglob("*") if path.is_file()} == before
        called = pvg("report", lost.name, "--no-html")
        assert called.code == 0
        assert "no state.json" in called.out
    assert_refused(pvg("train", "--resume"), 2, "no unfinished run")
