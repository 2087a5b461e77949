"""Profiling a stage with the real profilers: what is in the folder, what is missing and why, and who waits."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from profiled_work import ProfiledWork, spin_here

from pvg.bench import profiling
from pvg.bench.profiling import ProfileResult, profile_stage, stage_of, stage_settings
from pvg.bench.py_spy import (
    CostlyFrame,
    PySpyError,
    explained,
    find_py_spy,
    read_speedscope,
    sampling,
    shortened,
)
from pvg.errors import EXIT_ENVIRONMENT, ConfigurationError, UsageError
from pvg.installation import install_extra

HERE = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
needs_py_spy = pytest.mark.skipif(HERE is None, reason="py-spy is not installed")


@pytest.fixture(autouse=True)
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "LEAST_SAMPLED_S", 0.5)


@pytest.fixture
def without_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))


def profiled(folder: Path, **options: Any) -> tuple[ProfileResult, ProfiledWork]:
    work = ProfiledWork()
    settings = stage_settings("rollout", "modchain", [])
    return profile_stage(settings, "rollout", folder, steps=2, workloads={"rollout": lambda _: work}, **options), work


# --- the whole -------------------------------------------------------------------------------------------------------


@needs_py_spy
def test_a_folder_with_everything_in_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    made, work = profiled(tmp_path / "out", on_pass=told.append, py_spy=True)
    assert work.closed
    assert made.missing == {}
    assert [each.name for each in made.passes] == [
        "spans",
        "torch profiler",
        "py-spy, speedscope",
        "py-spy, flamegraph",
    ]
    assert len(told) == 5
    folder = made.folder
    assert {file.name for file in made.files} | {"README.txt"} == {path.name for path in folder.iterdir()}
    # the costliest function, in this file's neighbour, with its line
    assert (made.frames_from, made.frames[0].function) == ("py-spy", "spin_here")
    assert made.frames[0].place.startswith("tests/bench/profiled_work.py:") or "profiled_work.py" in made.frames[0].file
    assert made.frames[0].share > 0.5
    assert made.samples > 20
    # spans: both parts, the second's work in its thread
    trace = json.loads(gzip.decompress((folder / "timeline.json.gz").read_bytes()))["traceEvents"]
    assert [event["name"] for event in trace].count("multiply") == 2
    assert any(event["name"] == "step 2" for event in trace)
    assert any(event["ph"] == "C" for event in trace)
    # torch: operators of the executor's thread
    operators = json.loads(gzip.decompress((folder / "torch.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in operators) == 6
    assert "aten::mm" in (folder / "torch-operators.txt").read_text()
    assert "spin_here" in (folder / "py-spy.svg").read_text()
    readme = (folder / "README.txt").read_text()
    assert all(file.name in readme for file in made.files)
    assert json.loads((folder / "profile.json").read_bytes())["frames"][0]["function"] == "spin_here"
    assert made.budget is not None
    assert sum(made.budget.exposed.values()) == pytest.approx(made.budget.wall_s)
    assert made.budget.exposed["spin"] >= 0.2
    assert "USDT" not in capfd.readouterr().err


def test_without_py_spy_the_rest_is_made_and_what_is_missing_is_said(tmp_path: Path, without_py_spy: None) -> None:
    made, _ = profiled(tmp_path / "out")
    assert made.missing == {"py-spy": f"py-spy is not installed. {install_extra('profile')}"}
    assert made.frames_from == "torch"
    assert "aten::mm" in [frame.function for frame in made.frames]
    assert sum(frame.share for frame in made.frames) <= 1.0 + 1e-9
    assert "Missing: py-spy" in (made.folder / "README.txt").read_text()
    assert not (made.folder / "py-spy.svg").exists()


def test_demanded_and_missing_is_an_error_before_anything_runs(tmp_path: Path, without_py_spy: None) -> None:
    with pytest.raises(PySpyError) as caught:
        profiled(tmp_path / "out", py_spy=True)
    assert caught.value.exit_code == EXIT_ENVIRONMENT
    assert not (tmp_path / "out").exists()


def test_it_can_be_left_out(tmp_path: Path) -> None:
    made, _ = profiled(tmp_path / "out", py_spy=False)
    assert made.missing == {"py-spy": "Left out because of --no-py-spy."}


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(UsageError, match="not an empty folder"):
            profiled(target, py_spy=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"


# --- py-spy ----------------------------------------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_py_spy
def test_threads_are_sampled_and_waiting_ones_are_not_counted(tmp_path: Path) -> None:
    output = tmp_path / "stacks.json"
    with sampling(find_py_spy(), output, "speedscope"):
        working = threading.Thread(target=spin_here, args=(0.6,))
        working.start()
        working.join()
    # Of tests that run side by side, each process has a thread that reads from the others.
    frames = [frame for frame in read_speedscope(output).frames if frame.function != "Popen2IO.read"]
    assert frames[0].function == "spin_here"
    # With the main thread's waiting it would be half at most. How many samples of that there are is up to the kernel:
    # where it tells py-spy that a thread sleeps, py-spy takes none.
    assert frames[0].share / sum(frame.share for frame in frames) > 0.6


@needs_py_spy
@pytest.mark.skipif(shutil.which("setpriv") is None or os.getuid() != 0, reason="needs root and setpriv")
def test_a_process_that_may_not_be_looked_into(tmp_path: Path) -> None:
    """Without the capability, and marked as not to be traced: what a hardened container does to a user."""
    program = (
        "import ctypes, sys; from pathlib import Path\n"
        "from pvg.bench.py_spy import *\n"
        "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"  # PR_SET_DUMPABLE
        "try:\n"
        f"    with sampling(find_py_spy(), Path({str(tmp_path / 'x')!r}), 'flamegraph'): print('sampled')\n"
        "except PySpyError as error: print(error)\n"
    )
    command = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.startswith("py-spy may not inspect this process. Allow it: sudo sysctl"), done.stderr


def test_a_py_spy_that_fails_says_why(tmp_path: Path) -> None:
    broken = script(tmp_path / "py-spy", "echo 'Error: No such file or directory (os error 2)'; exit 1")
    ran = False
    with pytest.raises(PySpyError, match="py-spy failed: No such file"), sampling(broken, tmp_path / "x", "flamegraph"):
        ran = True
    assert not ran


def test_a_py_spy_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    empty = script(
        tmp_path / "py-spy", "trap 'exit 0' INT; echo 'py-spy> Sampling process'; while :; do sleep 0.05; done"
    )
    with pytest.raises(PySpyError), sampling(empty, tmp_path / "x", "flamegraph"):
        pass


def test_no_child_is_left_when_the_work_fails(tmp_path: Path) -> None:
    number = tmp_path / "pid"
    stubborn = script(
        tmp_path / "py-spy", f"echo $$ > {number}; trap '' INT; echo 'Sampling process'; while :; do sleep 0.05; done"
    )
    with pytest.raises(ZeroDivisionError), sampling(stubborn, tmp_path / "x", "flamegraph"):
        raise ZeroDivisionError
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


@pytest.mark.parametrize("text", ["Error: Permission denied (os error 13)", "Operation not permitted"])
def test_what_is_forbidden_has_a_remedy(text: str) -> None:
    assert "SYS_PTRACE" in explained(text).remedy


# --- frames ----------------------------------------------------------------------------------------------------------


def test_costliest_frames_by_hand(tmp_path: Path) -> None:
    frames = [
        {"name": "main", "file": "/x/main.py", "line": 1},
        {"name": "hot", "file": "/x/hot.py", "line": 7},
        {"name": "hot", "file": "/x/hot.py", "line": 9},
        {"name": "Runner.run", "file": "/usr/lib/python3/asyncio/runners.py", "line": 118},
        {"name": "run", "file": "/x/runners.py", "line": 3},
    ]
    threads = [
        {"samples": [[0, 1], [0, 1], [0, 2], [0]], "weights": [1.0, 1.0, 3.0, 2.0]},
        {"samples": [[3], [0, 4], [], [3]], "weights": [1.0, 1.0, 1.0, 1.0]},
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"shared": {"frames": frames}, "profiles": threads}))
    sampled = read_speedscope(path, 2)
    assert sampled.frames == (
        CostlyFrame("hot", "/x/hot.py", 9, 5.0, 0.625),
        CostlyFrame("main", "/x/main.py", 1, 2.0, 0.25),
    )
    assert (sampled.samples, sampled.waiting, sampled.seconds) == (5, 2, 8.0)


def test_files_are_shown_as_one_knows_them() -> None:
    assert shortened(time.__name__) == "time"
    assert shortened(json.__file__) == "json/__init__.py"
    assert shortened(str(Path(profiling.__file__))) == "pvg/bench/profiling.py"
    assert shortened("/elsewhere/x.py") == "/elsewhere/x.py"
    deep = CostlyFrame("f", "transformers/models/llama/modeling_llama.py", 64, 1.0, 1.0)
    assert deep.place == "transformers/…/modeling_llama.py:64"
    assert CostlyFrame("aten::mm", "", 0, 1.0, 1.0).place == ""


# --- stages ----------------------------------------------------------------------------------------------------------


def test_a_stage_works_on_the_experiments_own_batch() -> None:
    settings = stage_settings("rollout", "modchain", ["training.groups=4"])
    assert settings.workload["rollouts"] == 32
    assert stage_settings("trainer", "modchain", ["workload.rollouts=16"]).workload["rollouts"] == 16
    assert settings.experiment.training.groups == 4
    assert stage_settings("e2e", "modchain", []).profile.profile == "e2e"


def test_mistakes_in_a_stage_or_a_setting() -> None:
    with pytest.raises(UsageError, match="Did you mean 'trainer'"):
        stage_of("trainr")
    with pytest.raises(ConfigurationError, match="training"):
        stage_settings("rollout", "modchain", ["training.gruops=4"])
    with pytest.raises(UsageError, match="modchian"):
        stage_settings("rollout", "modchian", [])
