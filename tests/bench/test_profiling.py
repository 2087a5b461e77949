"""Profiling a stage with the real profilers: what is in the folder, what is missing and why, and who waits."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from profiled_work import ProfiledWork

from pvg.bench import profiling
from pvg.bench.profiling import ProfileResult, PySpyError, profile_stage, py_spy_pass, stage_settings
from pvg.bench.workloads import WORKLOADS
from pvg.errors import ConfigurationError, UsageError

HERE = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
needs_py_spy = pytest.mark.skipif(HERE is None, reason="no py-spy: `make install`")


@pytest.fixture(autouse=True)
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "LEAST_SAMPLED_S", 0.5)


def profiled(folder: Path, **options: Any) -> tuple[ProfileResult, ProfiledWork]:
    work = ProfiledWork()
    settings = stage_settings("rollout", "modchain", [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORKLOADS, "rollout", lambda _: work)
        return profile_stage(settings, "rollout", folder, steps=2, **options), work


# --- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_py_spy
def test_a_folder_with_everything_in_it(tmp_path: Path) -> None:
    told: list[str] = []
    made, work = profiled(tmp_path / "out", on_pass=told.append)
    assert work.closed
    assert made.missing == {}
    assert [each.name for each in made.passes] == ["spans", "torch profiler", "py-spy"]
    assert len(told) == 4
    folder = made.folder
    assert {file.name for file in made.files} == {path.name for path in folder.iterdir()}
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
    operators = json.loads((folder / "profile.json").read_bytes())["operators"]
    assert "aten::mm" in [operator["name"] for operator in operators]
    assert sum(operator["share"] for operator in operators) <= 1.0 + 1e-9
    assert made.budget is not None
    assert sum(made.budget.exposed.values()) == pytest.approx(made.budget.wall_s)
    assert made.budget.exposed["spin"] >= 0.2


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo 'Error: No such file or directory (os error 2)'; exit 1", "py-spy failed: No such file"),
        ("exit 0", "py-spy failed: without a message"),
        ("echo 'Permission denied (os error 13)'; exit 1", "may not inspect this process"),
    ],
)
def test_a_py_spy_that_writes_nothing_says_why(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PySpyError, match=says):
        watched(ProfiledWork(), tmp_path, text)


def test_no_child_is_left_when_the_work_fails(tmp_path: Path) -> None:
    number = tmp_path / "pid"

    class Failing(ProfiledWork):
        async def sample(self, index: int) -> Mapping[str, float]:
            if number.exists() and number.read_text():
                raise ZeroDivisionError
            return await super().sample(index)

    with pytest.raises(ZeroDivisionError):
        watched(Failing(), tmp_path, f"echo $$ > '{number}'; trap '' INT; while :; do sleep 0.05; done")
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


def watched(work: ProfiledWork, folder: Path, text: str) -> None:
    """A pass of the work under a py-spy that is this shell script."""

    async def run() -> None:
        await work.open()
        try:
            await py_spy_pass(work, 0.5, script(folder / "py-spy", text), folder / "x")
        finally:
            await work.close()

    asyncio.run(run())


# --- stages ----------------------------------------------------------------------------------------------------------


def test_a_stage_works_on_the_experiments_own_batch() -> None:
    settings = stage_settings("rollout", "modchain", ["training.groups=4"])
    assert settings.workload["rollouts"] == 32
    assert stage_settings("trainer", "modchain", ["workload.rollouts=16"]).workload["rollouts"] == 16
    assert settings.experiment.training.groups == 4
    assert stage_settings("e2e", "modchain", []).profile.profile == "e2e"


def test_mistakes_in_a_stage_or_a_setting() -> None:
    with pytest.raises(UsageError, match="Did you mean 'trainer'"):
        stage_settings("trainr", "modchain", [])
    with pytest.raises(ConfigurationError, match="training"):
        stage_settings("rollout", "modchain", ["training.gruops=4"])
    with pytest.raises(UsageError, match="modchian"):
        stage_settings("rollout", "modchian", [])
