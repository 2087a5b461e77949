"""A run that is played tells where all of its time went, and nothing that the catalogue does not know."""

from __future__ import annotations

import asyncio
import gc
import html
import json
import re
import shlex
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kill_drill import read_manifests, small_experiment
from small_games import completed, played, prover_steps, rows, state_of

from pvg.config.load import build_experiment
from pvg.game import session
from pvg.game.ledger import Ledger
from pvg.game.run import play
from pvg.game.states import Phase
from pvg.reporting.diagnosis import diagnose
from pvg.reporting.formats import byte_size
from pvg.reporting.run_page import collect, run_page
from pvg.reporting.run_summary import read_run
from pvg.reporting.terminal import machine_facts
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards
from pvg.store.state import JsonLinesReader
from pvg.telemetry import alerts, device
from pvg.telemetry.alerts import EMA_DECAY
from pvg.telemetry.catalogue import metric as catalogued
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver
from pvg.telemetry.monitoring import Monitoring
from pvg.telemetry.prometheus import MetricsEndpoint
from pvg.telemetry.sinks import ExamplesPoint
from pvg.telemetry.waits import runner
from pvg.verifier.scorer import VerifierScorer
from pvg.workers import pool

pytestmark = pytest.mark.slow

SLOW_S = 0.05
UNACCOUNTED_AT_MOST = 0.1  # of a game of steps as small as these; the embedded game's share is in docs/benchmarks.md


class Scraping(SilentObserver):
    """Reads the metrics endpoint at every step, as Prometheus would. `page` is the first with a step of the prover,
    `served` are the names of all."""

    def __init__(self, port: int) -> None:
        self.port, self.page, self.steps = port, "", 0
        self.served: set[str] = set()
        self.alerts: list[tuple[str, str]] = []
        self.cached_in: set[str] = set()  # threads that put the score cache into a commit
        self.tables: list[ExamplesPoint] = []  # what a sink got

    def alerted(self, name: str, message: str) -> None:
        self.alerts.append((name, message))

    def progressed(self, progress: Progress) -> None:
        self.steps += 1
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as response:
            page = response.read().decode()
        self.served |= set(re.findall(r"^(pvg_\w+)[{ ]", page, re.MULTILINE))
        if not self.page and "reward_mean" in progress.metrics:
            self.page = page


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, Scraping]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    plain = small_experiment().plain()
    plain["rollout"]["max_tokens"] = 14  # some solutions are truncated, and some are not
    plain["telemetry"] |= {"metrics_port": port}
    experiment = build_experiment(plain)
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "measured", experiment)
    observer = Scraping(port)
    device._WORKER_PEAKS.clear()  # an earlier test of this process may have played with workers
    # Otherwise the collections at the ends of phases, whose time is not accounted for, look at what earlier tests left.
    gc.collect()
    gc.freeze()

    async def main() -> None:
        await play(experiment, run, observer=observer, stop=asyncio.Event(), resume=False)

    cache_state = VerifierScorer.cache_state

    def noted(scorer: VerifierScorer) -> Any:
        observer.cached_in.add(threading.current_thread().name)
        return cache_state(scorer)

    loop, notice = runner()
    assert notice is None
    with loop, run.lock(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(VerifierScorer, "cache_state", noted)
        patched.setattr(MetricsEndpoint, "examples", lambda sink, point: observer.tables.append(point))
        patched.setattr(Monitoring, "device_every_s", 0.2)
        patched.setattr(session, "SHORTEST_SPAN_S", 0.0)
        patched.setattr(alerts, "CHANCE_AUC", 1.0)  # so that both are alerted of
        patched.setattr(alerts, "WEIGHTS_QUEUE_MS", 1e-6)
        loop.run(main())
    return run, observer


class Watching(SilentObserver):
    """Keeps what each prover step tells; after some of them it reads the metrics endpoint and asks to stop."""

    def __init__(self, stop: asyncio.Event, port: int, steps: int) -> None:
        self._stop, self._port, self._most = stop, port, steps
        self._phase = ""
        self.steps: list[dict[str, float]] = []
        self.told = 0
        self.page = ""

    def phase_started(self, info: PhaseInfo) -> None:
        self._phase = info.phase

    def progressed(self, progress: Progress) -> None:
        self.told += 1
        if self._phase != "train_prover":
            return
        self.steps.append(dict(progress.metrics))
        if len(self.steps) < self._most:
            return
        self._stop.set()
        while f"\npvg_step {self.told}.0\n" not in self.page:  # a thread writes it; or the test's time runs out
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as response:
                self.page = response.read().decode()


BATCHES, MINIBATCHES = 4, 4


def test_a_batch_counts_once_however_many_steps_learn_from_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    plain = small_experiment().plain()
    plain["training"] |= {"minibatches": MINIBATCHES, "steps": 20 * MINIBATCHES}
    plain["telemetry"]["metrics_port"] = port
    plain["store"]["commit_every"] = 100  # so that the only commit is the one of the stop
    experiment = build_experiment(plain)
    run = RunDirectory.create(tmp_path, "minibatches", experiment)
    with run.lock():
        stop = asyncio.Event()
        observer = Watching(stop, port, BATCHES * MINIBATCHES)
        asyncio.run(play(experiment, run, observer=observer, stop=stop, resume=False))
    steps = prover_steps(run)
    assert len(steps) == BATCHES * MINIBATCHES
    firsts, others = steps[::MINIBATCHES], [step for n, step in enumerate(steps) if n % MINIBATCHES]
    of_batch = {"rollouts", "tokens_per_s", "zero_signal", "fooled_rate", "reward_mean", "staleness", "cache_misses"}
    assert all(step.keys() >= of_batch | {"loss", "grad_norm", "trainer_idle"} for step in firsts)
    assert all(step.keys() >= {"loss", "grad_norm", "trainer_idle"} for step in others)
    assert not any(step.keys() & of_batch for step in others)
    assert [step.keys() for step in observer.steps] == [step.keys() for step in steps]
    committed = state_of(run)
    sampled = [shard["rows"] for shard in committed["shards"] if "train_prover" in shard["path"]]
    assert sum(step["rollouts"] for step in firsts) == sum(sampled) == 16 * BATCHES
    # The alerts have taken in each batch once.
    for name in ("helpful_accuracy", "zero_signal"):
        average = firsts[0][name]
        for step in firsts[1:]:
            average = EMA_DECAY * average + (1 - EMA_DECAY) * step[name]
        assert committed["progress"]["alerts"]["averages"][name] == pytest.approx(average)
    # Within a batch the endpoint goes on to show the figures of the batch.
    assert 'pvg_rollouts{phase="train_prover"} 16.0' in observer.page
    assert 'pvg_budget_seconds{part="forward_backward",phase="train_prover"}' in observer.page
    assert 'pvg_budget_seconds{part="decode",phase="train_prover"}' not in observer.page


def test_the_score_cache_is_copied_for_a_commit_beside_the_loop(measured: tuple[RunDirectory, Scraping]) -> None:
    """100,000 scores take 50 ms."""
    assert measured[1].cached_in == {"pvg-batch_0"}


def test_the_parts_of_all_steps_and_phases_are_the_time_of_the_run(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    (whole,) = rows(run, "run")
    assert whole["status"] == "complete"
    told = Counter[str]()
    for record in [*rows(run, "step"), *rows(run, "phase")]:
        told.update(record["budget"])
    assert whole["seconds"] == pytest.approx(sum(whole["budget"].values()))
    last_commit = whole["seconds"] - sum(told.values())  # what came after the last phase was told
    assert 0 <= last_commit < 0.2 * whole["seconds"]
    assert whole["budget"]["unaccounted"] < UNACCOUNTED_AT_MOST * whole["seconds"]
    for part, seconds in told.items():
        assert seconds <= whole["budget"][part] + 1e-6, part


def test_the_time_of_a_step_has_the_parts_of_its_phase(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    by_phase = {record["phase"]: record["budget"].keys() for record in rows(run, "step")}
    assert by_phase["mint"] >= {"rollout", "prefill", "decode", "grade", "unaccounted"}
    assert by_phase["train_verifier"] >= {"draw_pairs", "pack", "forward_backward", "optimizer", "record"}
    assert by_phase["train_prover"] >= {"decode", "grade", "score_service", "credit", "forward_backward", "sync"}
    assert by_phase["checkpoint"] >= {"sync", "decode", "score_service"}
    for record in rows(run, "step"):
        assert all(record["busy"][part] >= seconds - 1e-9 for part, seconds in record["budget"].items())
        assert all(seconds >= -1e-9 for seconds in record["budget"].values())


def test_every_span_lies_in_the_run_and_nests(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    spans = list(JsonLinesReader(run.spans))
    (whole,) = rows(run, "run")
    end = whole["time"]
    # Grades get a separate track only while decoding occupies the track of the driver, for a few moments.
    assert "driver" in {span["track"] for span in spans}
    assert all(end - whole["seconds"] - 1 <= span["start_s"] <= span["end_s"] <= end + 1 for span in spans)
    driver = sorted((s for s in spans if s["track"] == "driver"), key=lambda s: (s["start_s"], -s["end_s"]))
    around: list[dict[str, Any]] = []
    for span in driver:
        del around[span["depth"] :]
        assert len(around) == span["depth"]
        assert all(outer["end_s"] >= span["end_s"] - 1e-6 for outer in around)
        around.append(span)


def test_nothing_is_told_that_the_catalogue_does_not_know(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    names: set[str] = set()
    for record in [*rows(run, "step"), *rows(run, "phase")]:
        names |= {f"{record['phase']}/{name}" for name in record["metrics"]}
        names |= {f"budget/{part}" for part in record["budget"]} | {f"busy/{part}" for part in record.get("busy", ())}
    for kind, prefix in (("round", "round"), ("device", "device"), ("loop", "loop")):
        found = rows(run, kind)
        assert found, kind
        names |= {f"{prefix}/{name}" for record in found for name in record["metrics"]}
    assert [name for name in names if not catalogued(name)] == []


def test_the_event_log_pairs(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    lines = run.events.read_text().splitlines()
    events = Counter(
        (line.split()[0].strip("[]"), field.removeprefix("event="))
        for line in lines
        for field in line.split()
        if field.startswith("event=")
    )
    updates = events["weights", "client.send"]
    assert updates > 0
    assert {events["weights", name] for name in ("server.recv", "rpc.start", "rpc.done", "client.done")} == {updates}
    steps = [r for r in rows(run, "step") if r["phase"].startswith("train_")]
    assert events["step", "done"] == len(steps)
    assert events["run", "start"] == events["run", "stop"] == 1


def logged(run: RunDirectory, tag: str, event: str) -> list[dict[str, str]]:
    """The fields of one kind of line of the event log, in order."""
    own = [line for line in run.events.read_text().splitlines() if line.startswith(f"[{tag}] ")]
    found = [dict(part.split("=", 1) for part in shlex.split(line)[1:]) for line in own]
    return [fields for fields in found if fields["event"] == event]


def test_the_diagnosis_of_a_real_run_can_tell(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    found = diagnose(run)
    assert found.not_seen == {}
    waits = [r["metrics"]["weights_queue_s"] for r in rows(run, "step") if "weights_queue_s" in r["metrics"]]
    assert found.timings_s["weights_queue_s"].total == pytest.approx(sum(waits))
    assert found.timings_s["group_wait_max_s"].max > 0
    (started,) = rows(run, "start")
    assert started["cores"].keys() == {"threads", "usable", "machine"}


def test_a_commit_is_logged_with_the_time_that_it_took(tmp_path: Path) -> None:
    """The disk takes at least SLOW_S, so the line says so."""

    class SlowDisk(ThreadPoolExecutor):
        def submit(self, call: Any, /, *args: Any, **more: Any) -> Any:
            return super().submit(lambda: (time.sleep(SLOW_S), call(*args, **more))[1])

    experiment = small_experiment()
    run = RunDirectory.create(tmp_path, "slow", experiment)
    ledger = Ledger(run, experiment, "test", SlowDisk(1))
    asyncio.run(ledger.commit(ledger.state.enter(Phase.MINT), ({}, {})))
    ledger.close()
    (line,) = logged(run, "ckpt", "write.done")
    assert float(line["write_ms"]) >= 1e3 * SLOW_S


def test_every_process_of_a_run_leaves_its_last_word_and_the_largest_peak_of_memory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_experiment().plain()
    plain["game"]["rounds"] = 1
    experiment = build_experiment(plain)
    peaks: list[Mapping[str, float]] = []
    for resume in (False, True):
        _, run = played(experiment, tmp_path, stop_at=("", 0) if resume else ("mint", 2), resume=resume)
        peaks.append(read_manifests(run)[-1].peak_memory if resume else read_run(run).peak_memory)
        # The resumed process holds less: the run's peak stays that of the first.
        monkeypatch.setattr("pvg.game.ledger.peak_memory", lambda: {"rss_bytes": 1.0})
    assert peaks[0]["rss_bytes"] > 1e8
    assert peaks[1] == read_run(run).peak_memory == peaks[0]
    assert [record["status"] for record in rows(run, "run")] == ["interrupted", "complete"]
    told = [(r["round"], r["phase"], r["step"]) for r in rows(run, "step")]
    assert len(told) == len(set(told))


def test_the_report_shows_the_peak_memory_that_the_run_wrote(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    assert_peaks_are_shown(run, {"rss_bytes": "peak resident memory of the main process"})


@pytest.mark.drill
def test_a_run_with_workers_counts_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PROBE_S", 0.1)
    monkeypatch.setattr(device, "_WORKER_PEAKS", {})
    plain = small_experiment().plain()
    plain["cluster"] = {"kind": "local", "workers": 2}
    plain["verifier"]["steps"] = plain["training"]["steps"] = 2
    plain["game"] |= {"rounds": 1, "mint_problems": 12}
    experiment = build_experiment(plain)
    run = completed(experiment, tmp_path)
    shown = assert_peaks_are_shown(
        run,
        {
            "rss_bytes": "peak resident memory of the main process",
            "worker_rss_bytes": "peak resident memory of the largest worker",
            "workers_rss_bytes": "sum of the workers' peaks (an upper bound)",
        },
    )
    assert shown["worker_rss_bytes"] > 5e7
    assert shown["worker_rss_bytes"] < shown["workers_rss_bytes"] <= 2 * shown["worker_rss_bytes"]


def assert_peaks_are_shown(run: RunDirectory, labels: Mapping[str, str]) -> Mapping[str, float]:
    """The peaks of the last manifest, after a look at the report's page and at what the terminal shows."""
    peaks = read_manifests(run)[-1].peak_memory
    assert peaks.keys() == labels.keys()
    page = html.unescape(run_page(collect(run, read_run(run), 0)))
    facts = machine_facts(read_run(run))
    for name, label in labels.items():
        size = byte_size(peaks[name])
        assert re.search(rf"{re.escape(label)}\W*<[^>]*>(<[^>]*>|\s)*{re.escape(size)}", page)
        assert (label, size) in facts
    return peaks


def test_every_metric_that_the_grafana_dashboard_names_is_served(measured: tuple[RunDirectory, Scraping]) -> None:
    _, observer = measured
    dashboard = json.loads((Path(__file__).parent.parent.parent / "docs" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    named = set(re.findall(r"\bpvg_\w+", " ".join(queries)))
    assert len(named) > 30
    here = {name for name in named if not name.startswith("pvg_device_gpu_")}  # those: test_prometheus.py
    assert sorted(here - observer.served) == []


def test_alerts_are_recorded_logged_and_counted(measured: tuple[RunDirectory, Scraping]) -> None:
    run, observer = measured
    recorded = Counter(record["name"] for record in rows(run, "alert"))
    assert recorded["verifier_at_chance"] == 2  # at the end of each round's verifier phase
    assert recorded["weights_queue"] == 2  # as it begins to hold in each prover phase
    assert Counter(fields["name"] for fields in alert_lines(run)) == recorded
    assert 'pvg_alerts_total{kind="verifier_at_chance"} 1.0' in observer.page
    assert Counter(name for name, _ in observer.alerts) == recorded


def test_each_round_sends_a_table_of_its_solutions_to_the_sinks(measured: tuple[RunDirectory, Scraping]) -> None:
    run, observer = measured
    assert [table.round for table in observer.tables] == [0, 1]
    shards = RolloutShards(run.rollouts)
    rollouts = [rollout for path in run.rollouts.rglob("*.arrow") for rollout in shards.read(path)]
    for table in observer.tables:
        prefix = f"{table.round:03d}/evaluation/round-{table.round:03d}"  # of the round's own prover
        written = {(r.role.value, r.text, r.score) for r in rollouts if r.id.startswith(prefix)}
        told = {(row["role"], row["solution"], row["score"]) for row in table.rows}
        assert told
        assert told <= written


def alert_lines(run: RunDirectory) -> list[dict[str, str]]:
    own = [line for line in run.events.read_text().splitlines() if line.startswith("[alert] ")]
    return [dict(part.split("=", 1) for part in shlex.split(line)[1:] if "=" in part) for line in own]


def test_the_endpoint_served_the_metrics_while_the_run_was_played(measured: tuple[RunDirectory, Scraping]) -> None:
    run, observer = measured
    assert observer.steps == len(rows(run, "step"))
    assert "helpful_accuracy" in observer.page
    assert "budget" in observer.page
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{observer.port}/metrics", timeout=2)
