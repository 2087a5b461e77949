"""The report: what it refuses, the shipped schema, reading back, and disks that are full."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import orjson
import pytest
from tiny_workload import TinyWorkload, write_profile

import pvg
from pvg.bench.planning import plan_bench
from pvg.bench.report import BenchReport, git_state, read_report, write_report
from pvg.bench.runner import run_plan
from pvg.bench.workloads import WORKLOADS
from pvg.bench.workloads import trainer as machine
from pvg.errors import UsageError
from pvg.installation import version_of
from pvg.version import code_version


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(WORKLOADS, "tiny", TinyWorkload)
    write_profile(tmp_path)
    return tmp_path


def report(*overrides: str, **options: Any) -> BenchReport:
    return run_plan(plan_bench("tiny", overrides, **options), command="pvg bench").report


def schema() -> Any:
    return BenchReport.model_json_schema(mode="serialization")


@pytest.mark.parametrize("options", [{}, {"ablate": True}, {"sweep": "workload.fault=sample,close,''"}])
def test_real_reports_are_valid_and_come_back_as_they_were(folder: Path, options: dict[str, Any]) -> None:
    written = report(**options)
    write_report(folder / "r.json", written)
    jsonschema.validate(orjson.loads((folder / "r.json").read_bytes()), schema())
    assert read_report(folder / "r.json") == written


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "Cannot read the report"),
        (b"{", "is not JSON"),
        (b"[1]", "not a benchmark report"),
        (b'{"schema_version": 7}', "schema version 7"),
        (b'{"schema_version": 1}', "not a valid benchmark report: kind"),
    ],
)
def test_what_is_no_report_is_named(folder: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (folder / "r.json").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_report(folder / "r.json")


# --- the environment and the machine ---------------------------------------------------------------------------------


def test_the_environment_is_this_process_and_loads_no_torch() -> None:
    program = (
        "import sys; from pvg.bench.report import read_environment as r; e = r();"
        "print(e.model_dump_json()); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = orjson.loads(done.stdout)
    assert found["torch"] == version_of("torch")
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["threads"] is None
    assert found["event_loop"] == "uvloop"
    assert found["memory_gb"] > 0.1


def test_a_checkout_is_dirty_when_its_code_is_and_not_for_a_new_report(folder: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    assert git_state(folder) == (None, None)
    git("init", "-q")
    (folder / "pvg").mkdir()
    (folder / "pvg" / "code.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    commit, dirty = git_state(folder)
    assert (len(commit or ""), dirty) == (40, False)
    (folder / "bench").mkdir()
    (folder / "bench" / "r.json").write_text("{}")
    assert git_state(folder) == (commit, False)
    (folder / "pvg" / "code.py").write_text("x = 2\n")
    assert git_state(folder) == (commit, True)


def test_a_git_that_hangs_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk of the network that does not answer. Its own child keeps its output open."""
    fake = folder / "git"
    fake.write_text("#!/bin/sh\nsleep 600 &\ntouch $!.sleeps\nexec sleep 600\n")
    fake.chmod(0o700)
    (folder / ".git").mkdir()
    (folder / "pvg").mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr("pvg.version.GIT_S", 0.5)
    monkeypatch.setattr("pvg.__file__", str(folder / "pvg" / "__init__.py"))
    try:
        assert code_version() == f"{pvg.__version__}+unknown"
        assert git_state(folder) == (None, None)
    finally:
        for sleeping in folder.glob("*.sleeps"):
            os.kill(int(sleeping.stem), signal.SIGKILL)


def test_the_matmul_rate_counts_two_operations_for_each_product_and_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: 0.5 * next(ticks)))
    assert machine.matmul_gflops("float32") == 4.294967296  # 2 * 1024^3 / 0.5 / 1e9
    assert machine.matmul_gflops("bfloat16") == 4.294967296
