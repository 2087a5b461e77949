"""Benchmarks on servers: what is measured, on which servers, and what is refused. The servers are the tests' own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import load_profile

SERVING = Path(__file__).parent.parent / "servers"
sys.path.insert(0, str(SERVING))

import fake_vllm  # noqa: E402
from fake_vllm import FakeOptions, FakeVllm  # noqa: E402

from pvg.bench import planning  # noqa: E402
from pvg.bench.planning import BenchPlan, plan_bench  # noqa: E402
from pvg.bench.runner import run_plan  # noqa: E402
from pvg.bench.workloads import WORKLOADS  # noqa: E402
from pvg.config.experiment import Experiment  # noqa: E402
from pvg.errors import ConfigurationError, PvgError, ServerUnavailableError, UsageError  # noqa: E402
from pvg.servers.command import Interpreter, ServerSpec  # noqa: E402
from pvg.servers.control import KEY_VARIABLE  # noqa: E402

pytestmark = pytest.mark.slow

KEY = "the-key-of-the-benchmarks"
URL = "http://127.0.0.1:9"
TINY = ("task.problems=64", "task.test_problems=8", "rollout.max_tokens=8")
SYNC = (*TINY, "warmup=0", "workload.streams=6", "workload.updates=3", "training.groups=2")
ROLLOUT = (*TINY, "workload.rollouts=16", "rollout.concurrency=16", "workload.prompt_tokens=40")


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def on_server(
    profile: str,
    root: Path,
    overrides: tuple[str, ...],
    look: Callable[[Any, list[dict[str, float]], FakeVllm], Any],
    samples: int = 1,
) -> Any:
    """Open the workload over one server, take samples, and what `look` finds."""

    async def run() -> Any:
        async with FakeVllm(FakeOptions(root=root, key=KEY)) as server:
            given = [*overrides, f"serving.servers={server.url}", f"weights.root={root}"]
            settings = load_profile(f"profiles/{profile}.toml", given)
            workload = WORKLOADS[settings.profile.profile](settings)
            await workload.open()
            try:
                measured = [dict(await workload.sample(index)) for index in range(samples)]
                for values in measured:
                    assert values.keys() == workload.measures.keys()
                return look(workload, measured, server)
            finally:
                await workload.close()

    return asyncio.run(run())


# --- updates among streams -------------------------------------------------------------------------------------------


def test_updates_meet_all_streams_in_flight_and_their_tokens_come_one_by_one(tmp_path: Path) -> None:
    def look(workload: Any, measured: list[dict[str, float]], server: FakeVllm) -> None:
        derived = workload.derived()
        assert derived["updates"] == 3
        assert derived["in_flight_min"] == 6
        assert derived["versions_served"] > 0.5
        for name in ("wall", "rpc", "queue", "arrival", "pause", "load", "resume", "stage"):
            p50, p95, p99 = (derived[f"{name}_p{percentile}_ms"] for percentile in (50, 95, 99))
            assert 0 <= p50 <= p95 <= p99
        assert derived["queue_p99_ms"] >= derived["arrival_p50_ms"]
        work = workload.work()
        assert work["updates"] == {"idle": 3, "loaded": 3}
        assert (work["streams"], work["completion_tokens"], work["streamed"]) == (6, 8, True)
        assert server.received["bench/00000/00000"] > 2  # before, among and after the updates
        assert server.aborted.total() == 0
        assert server.label.endswith("/12")  # each of six updates in two samples
        workload.loaded[0].updates[0].timing.parts.pop("load_ms")  # as if the reply was lost: what it took is unknown
        with pytest.raises(ServerUnavailableError, match="was lost"):
            workload.derived()

    on_server("sync-vllm", tmp_path, (*SYNC, "warmup=1"), look, samples=2)


# --- rollouts --------------------------------------------------------------------------------------------------------


def test_prompts_are_shared_within_a_sample_and_never_between_two(tmp_path: Path) -> None:
    def look(workload: Any, measured: list[dict[str, float]], server: FakeVllm) -> dict[str, Any]:
        assert [values["prefix_share"] for values in measured] == [measured[0]["prefix_share"]] * 2
        derived = workload.derived()
        assert derived["completion_tokens"] == 16 * 8
        assert derived["truncated"] == 1.0  # fixed lengths: nothing stops
        assert measured[0]["engine_batch"] == pytest.approx(1.0, rel=0.05)
        work: dict[str, Any] = workload.work()
        assert work["prompt_tokens"] == 16 * 40
        assert work["fixed_length"] is True
        return {"share": measured[0]["prefix_share"], "work": work}

    given = (*ROLLOUT, "rollout.concurrency=1")  # the tests' server knows a prompt from its first token on
    shared = on_server("rollout-vllm", tmp_path, given, look, samples=2)
    # Of 40 prompt tokens two blocks of 16 can be shared, by seven of a group of eight.
    assert shared["share"] == pytest.approx(32 / 40 * 7 / 8)


# --- what is planned -------------------------------------------------------------------------------------------------


def planned(profile: str, *overrides: str, **how: Any) -> BenchPlan:
    return plan_bench(profile, overrides, **{"server_urls": [URL], **how})


def test_on_servers_another_profile_takes_its_place() -> None:
    plan = planned("sync")
    assert plan.base.profile.name == "sync-vllm"
    assert plan.base.experiment.rollout.engine.kind == "vllm"
    assert plan.base.experiment.serving.servers == (URL,)
    assert plan_bench("sync").base.profile.name == "sync"


@pytest.mark.parametrize(
    ("profile", "overrides", "how", "words"),
    [
        ("rollout", ("serving.max_num_seqs=64",), {}, "fixed when a server starts.*Drop --set"),
        ("rollout", (), {"sweep": "serving.max_num_seqs=16,64"}, "fixed when a server starts.*--serve"),
        ("rollout", (), {"serve": True}, "--server and --serve cannot be used together"),
        ("rollout", ("rollout.engine=torch",), {}, r"--server already sets rollout\.engine.*Drop --set"),
        ("rollout", (), {"sweep": "rollout.concurrency=8,16", "interleave": True}, "cannot be interleaved"),
        ("trainer", (), {}, "'trainer' does not use servers"),
    ],
)
def test_what_cannot_be_measured_on_servers_is_refused_in_one_line(
    profile: str, overrides: tuple[str, ...], how: dict[str, Any], words: str
) -> None:
    with pytest.raises((UsageError, ConfigurationError), match=words) as caught:
        planned(profile, *overrides, **how)
    assert "\n" not in str(caught.value)


def test_what_is_fixed_at_the_start_can_be_swept_where_servers_are_started() -> None:
    plan = planned("rollout", sweep="serving.max_num_seqs=16,64", server_urls=[], serve=True)
    assert plan.serve
    assert len({planning.start_settings(choice.settings.experiment) for choice in plan.choices}) == 2
    same = planned("rollout", sweep="rollout.concurrency=8,256", server_urls=[], serve=True)
    assert len({planning.start_settings(choice.settings.experiment) for choice in same.choices}) == 1


# --- servers that run ------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """The tests' own server as a process: `run_plan` starts a new event loop."""

    url: str
    root: Path


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    root = tmp_path / "weights"
    root.mkdir()
    command = [sys.executable, fake_vllm.__file__, "--port", "0", "--root", str(root), "--max-num-seqs", "32"]
    running = subprocess.Popen(
        command, env={**os.environ, KEY_VARIABLE: KEY}, stdout=subprocess.PIPE, text=True, cwd=SERVING
    )
    assert running.stdout is not None
    try:
        port = running.stdout.readline().split()[1]
        yield Process(f"http://127.0.0.1:{port}", root)
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


def test_a_report_says_what_the_servers_were(process: Process) -> None:
    own = [given for given in ROLLOUT if "concurrency" not in given]
    given = (*own, f"weights.root={process.root}", "repeats=2", "warmup=0")
    plan = plan_bench("rollout", given, server_urls=[process.url], sweep="rollout.concurrency=4,16")
    result = run_plan(plan, command="test")
    assert (result.exit_code, result.report.status) == (0, "ok")
    assert result.report.environment.vllm == "0.32.0"
    assert result.report.config["servers"]["count"] == 1
    assert result.report.config["servers"]["max_num_seqs"] == 32
    few, many = result.report.variants
    assert max(few.samples["engine_batch"].values) <= 4
    assert max(many.samples["engine_batch"].values) > 4
    assert sorted(path.name for path in process.root.glob("bench*/*")) == []  # no version is left behind


def raised(url: str, *overrides: str) -> PvgError:
    plan = plan_bench("rollout", (*ROLLOUT, *overrides), server_urls=[url])
    with pytest.raises(PvgError) as caught:
        run_plan(plan, command="test")
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_server_that_is_not_there_is_known_before_anything_runs() -> None:
    error = raised(URL)
    assert isinstance(error, ServerUnavailableError)
    assert error.exit_code == 3
    assert URL in error.message


# --- servers that pvg starts ------------------------------------------------------------------------------------------


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Servers that are started are the tests' own; `max_num_seqs` of each. One of 7 does not start."""
    started: list[int] = []

    def spec(experiment: Experiment, *_: Any, log: Path, port: int) -> ServerSpec:
        started.append(experiment.serving.max_num_seqs)
        root = experiment.weights.root.absolute()
        options = ["--port", str(port), "--root", str(root), "--max-num-seqs", str(started[-1])]
        command = ["-c", "import sys; sys.exit('no such thing')"] if started[-1] == 7 else [fake_vllm.__file__]
        return ServerSpec(
            command=(sys.executable, *command, *options),
            environment={**os.environ, KEY_VARIABLE: KEY, "PYTHONPATH": os.pathsep.join([str(SERVING), *sys.path])},
            host="127.0.0.1",
            port=port,
            model="fake",
            runner="generate",
            interpreter=Interpreter(Path(sys.executable), "0.32.0", "cpu", "a test"),
            log=log.absolute(),
            startup_s=60.0,
        )

    monkeypatch.setattr(planning, "server_spec", spec)
    interpreter: Callable[[], Interpreter] = lambda: Interpreter(Path(sys.executable), "0.32.0", "cpu", "")  # noqa: E731
    monkeypatch.setattr(planning, "find_interpreter", interpreter)
    return started


def served(tmp_path: Path, sweep: str, *overrides: str) -> tuple[Any, list[str]]:
    root = tmp_path / "weights"
    root.mkdir()
    given = (*ROLLOUT, f"weights.root={root}", "repeats=1", "warmup=0", *overrides)
    told: list[str] = []
    result = run_plan(plan_bench("rollout", given, serve=True, sweep=sweep), command="test", on_server=told.append)
    return result, told


def test_each_start_up_setting_gets_a_server_and_none_is_left(tmp_path: Path, starts: list[int]) -> None:
    result, told = served(tmp_path, "serving.max_num_seqs=7,32")
    assert starts == [7, 32]
    failed, ok = result.report.variants  # one that does not start fails its variant alone
    assert (result.exit_code, failed.status, ok.status) == (3, "failed", "ok")
    assert "ended before it was ready" in failed.reason
    urls = [line.split()[0] for line in told if "is ready" in line]
    assert len(urls) == 1
    assert result.report.config["servers"]["max_num_seqs"] == 32
    assert result.report.environment.vllm == "0.32.0"
    for url in urls:
        assert asyncio.run(_refuses(url))


async def _refuses(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return True
    writer.close()
    return False
