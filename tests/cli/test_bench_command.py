"""`pvg bench` as a user types it: files, tables, JSON, mistakes, Ctrl-C. It measures tests/bench's tiny workload."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson
import psutil
import pytest
from calling import pvg
from tiny_workload import TinyWorkload, write_profile

from pvg.bench.report import read_report
from pvg.bench.workloads import WORKLOADS

pytestmark = pytest.mark.slow

BENCH_TESTS = Path(__file__).parent.parent / "bench"


@pytest.fixture(autouse=True)
def tiny(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(WORKLOADS, "tiny", TinyWorkload)
    write_profile(empty_folder)
    return empty_folder


def reports() -> list[Path]:
    return sorted(Path("bench").glob("*")) if Path("bench").exists() else []


def test_without_a_profile_it_lists_them_with_what_they_prove() -> None:
    called = pvg("bench")
    assert called.code == 0
    line = next(line for line in called.out.splitlines() if line.startswith("tiny"))
    assert "sorts numbers" in line
    assert "rollout" in called.out
    listed = {"name": "tiny", "workload": "tiny", "about": "sorts numbers", "path": "profiles/tiny.toml"}
    assert listed in pvg("bench", "--json").document["profiles"]


def test_what_a_profile_says_about_itself_is_no_markup() -> None:
    tiny = Path("profiles", "tiny.toml")
    tiny.write_text(tiny.read_text().replace("sorts numbers", "[/x] :smile: \\u001b[31m"))
    called = pvg("bench")
    assert called.code == 0, called.err
    assert "[/x] :smile: \\x1b[31m" in called.out


def test_a_profile_writes_its_report_and_says_where_and_what_next() -> None:
    called = pvg("bench", "--profile", "tiny")
    assert called.code == 0, called.err
    (path,) = reports()
    assert path.name.startswith("tiny-")
    report = read_report(path)
    assert (report.status, report.kind, report.repeats, report.warmup) == ("ok", "bench", 3, 1)
    assert report.command == "pvg bench --profile tiny"
    assert str(path) in called.out
    assert f"pvg compare OTHER {path}" in called.out
    for words in ("numbers_per_s", "sort_s", "wall_s", "Time budget", "unaccounted", "share", "0.5"):
        assert words in called.out
    assert "sample 1 of 4 (warm-up)" in called.err
    assert "sample 4 of 4," in called.err
    assert "\x1b" not in called.out + called.err
    called = pvg("bench", "-p", "tiny", "--json", "-s", "repeats=2", "-s", "warmup=0", "--out", "mine.json")
    assert called.document == orjson.loads(Path("mine.json").read_bytes())
    assert (called.document["repeats"], called.document["warmup"]) == (2, 0)
    assert called.document["command"].startswith("pvg bench -p tiny --json -s repeats=2")


def test_an_ablation_says_what_each_switch_bought_beside_busy_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def busy() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if any("computing" in word for word in child.cmdline())]

    class Counting(TinyWorkload):
        async def sample(self, index: int) -> Mapping[str, float]:
            found.append(len(busy()))
            return await super().sample(index)

    monkeypatch.setitem(WORKLOADS, "tiny", Counting)
    called = pvg("bench", "-p", "tiny", "--ablate", "--beside", "2")
    assert called.code == 0, called.err
    assert found == [2] * 12  # three variants, four samples each
    assert "beside 2 busy processes" in called.out
    for words in ("all slow", "workload.kind=quicksort", "the faster algorithm", "rollout.engine.max_rows=128", "gain"):
        assert words in called.out
    assert called.out.count("x  ") >= 2
    assert not busy()
    (path,) = reports()
    assert read_report(path).config["profile"]["beside"] == 2
    assert read_report(path).command == "pvg bench -p tiny --ablate --beside 2"


def test_a_sweep_prints_a_line_for_each_value() -> None:
    called = pvg("bench", "-p", "tiny", "--sweep", "workload.kind=stable,quicksort", "--interleave")
    assert called.code == 0, called.err
    table = called.out[called.out.index("Values") :]
    assert "workload.kind" in table.splitlines()[1] + table.splitlines()[2]
    for value in ("stable", "quicksort"):
        assert any(line.strip().startswith(value) for line in table.splitlines())
    assert "samples taken in turn" in called.out


def test_a_failed_variant_is_said_written_and_exits_with_its_code() -> None:
    called = pvg("bench", "-p", "tiny", "--sweep", "workload.fault=sample,''")
    assert called.code == 3
    assert "There is nothing to sample. Bring it." in called.out
    (path,) = reports()
    assert read_report(path).status == "failed"
    assert "pvg compare" not in called.out
    called = pvg("bench", "-p", "tiny", "-s", "workload.fault=not_finite", "--json")
    assert called.code == 1
    assert called.document["reason"] == "Measured a value that is not finite: numbers_per_s = nan."


def test_a_defect_is_no_failed_variant_and_writes_nothing() -> None:
    called = pvg("bench", "-p", "tiny", "-s", "workload.fault=defect", "--json")
    assert called.code == 70
    assert called.document["error"]["type"] == "KeyError"
    assert reports() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "tinny"], "Did you mean 'tiny'"),
        (["-p", "tiny", "-s", "rollout.engine.maxrows=1"], "'rollout.engine.max_rows'"),
        (["-p", "tiny", "--ablate", "--sweep", "rollout.engine.max_rows=1,2"], "cannot be used together"),
        (["-p", "tiny", "--out", "no/where/r.json"], "mkdir -p no/where"),
        (["--sweep", "rollout.engine.max_rows=1,2"], "--profile is missing"),
        (["-p", "tiny", "--server", "http://127.0.0.1:9"], "does not use servers"),
        (["-p", "rollout", "--server", "http://127.0.0.1:9", "--serve"], "cannot be used together"),
        (["-p", "rollout", "--server", "http://127.0.0.1:9", "--sweep", "serving.max_num_seqs=1,2"], "--serve"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2_before_anything_runs(arguments: list[str], words: str) -> None:
    called = pvg("bench", *arguments)
    assert called.code == 2
    assert words in " ".join(called.err.split())
    assert "sample 1" not in called.err
    assert "Traceback" not in called.err
    assert reports() == []


PROGRAM = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from tiny_workload import TinyWorkload
from pvg.bench.workloads import WORKLOADS
from pvg_cli.main import app
WORKLOADS["tiny"] = TinyWorkload
{before}
sys.exit(app(["bench", "-p", "tiny", *sys.argv[1:]], prog_name="pvg"))
"""


def process(*arguments: str, before: str = "") -> subprocess.Popen[str]:
    program = PROGRAM.format(tests=str(BENCH_TESTS), before=before)
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_is_known_before_the_work() -> None:
    before = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    running = process("--json", before=before)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 3
    assert "No report can be written" in orjson.loads(out)["error"]["message"]
    assert "sample 1" not in err
    assert reports() == []


def test_ctrl_c_stops_at_once_and_leaves_no_half_report() -> None:
    running = process("-s", "workload.fault=wait")
    assert running.stdout is not None
    assert running.stdout.readline() == "waiting\n"
    running.send_signal(signal.SIGTERM)  # handled as Ctrl-C
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert (out, err.splitlines()[-1]) == ("", "Stopped. No report was written.")
    assert reports() == []
