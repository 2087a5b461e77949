"""A run that is played tells where all of its time went, and nothing that the catalogue does not know."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kill_drill import small_experiment

from pvg.experiment import build_experiment
from pvg.game.run import play
from pvg.store.journal import read_json_lines
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.catalogue import unknown_metrics
from pvg.telemetry.event_loop import runner
from pvg.telemetry.observer import Progress, SilentObserver
from pvg.verifier.scorer import VerifierScorer

UNACCOUNTED_AT_MOST = 0.1  # of a game of steps as small as these; the embedded game's share is in docs/benchmarks.md


class Scraping(SilentObserver):
    """Reads the metrics endpoint once, in the middle of the run, as Prometheus would."""

    def __init__(self, port: int) -> None:
        self.port, self.page, self.steps = port, "", 0
        self.cached_in: set[str] = set()  # threads that put the score cache into a commit

    def progressed(self, progress: Progress) -> None:
        self.steps += 1
        if not self.page and "reward_mean" in progress.metrics:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as response:
                self.page = response.read().decode()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, Scraping]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    plain = small_experiment().plain()
    plain["telemetry"] |= {"device_every_s": 0.2, "metrics_port": port, "shortest_span_ms": 0.0}
    experiment = build_experiment(plain)
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "measured", experiment)
    observer = Scraping(port)

    async def main() -> None:
        await play(experiment, run, observer=observer, stop=asyncio.Event(), resume=False)

    cache_state = VerifierScorer.cache_state

    def noted(scorer: VerifierScorer) -> Any:
        observer.cached_in.add(threading.current_thread().name)
        return cache_state(scorer)

    loop, notice = runner(experiment.telemetry.event_loop)
    assert notice is None
    with loop, run.lock(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(VerifierScorer, "cache_state", noted)
        loop.run(main())
    return run, observer


def test_the_score_cache_is_copied_for_a_commit_beside_the_loop(measured: tuple[RunDirectory, Scraping]) -> None:
    """100,000 scores take 50 ms."""
    assert measured[1].cached_in == {"pvg-batch_0"}


class StopSoon(SilentObserver):
    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    def progressed(self, progress: Progress) -> None:
        self._stop.set()


def records(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_json_lines(run.metrics) if record["kind"] == kind]


def test_the_parts_of_all_steps_and_phases_are_the_time_of_the_run(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    (whole,) = records(run, "run")
    assert whole["status"] == "complete"
    told = Counter[str]()
    for record in [*records(run, "step"), *records(run, "phase")]:
        told.update(record["budget"])
    assert whole["seconds"] == pytest.approx(sum(whole["budget"].values()))
    last_commit = whole["seconds"] - sum(told.values())  # what came after the last phase was told
    assert 0 <= last_commit < 0.2 * whole["seconds"]
    assert whole["budget"]["unaccounted"] < UNACCOUNTED_AT_MOST * whole["seconds"]
    for part, seconds in told.items():
        assert seconds <= whole["budget"][part] + 1e-6, part


def test_the_time_of_a_step_has_the_parts_of_its_phase(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    by_phase = {record["phase"]: record["budget"].keys() for record in records(run, "step")}
    assert by_phase["mint"] >= {"rollout", "prefill", "decode", "grade", "unaccounted"}
    assert by_phase["train_verifier"] >= {"draw_pairs", "pack", "forward_backward", "optimizer", "record"}
    assert by_phase["train_prover"] >= {"decode", "grade", "score_service", "credit", "forward_backward", "sync"}
    assert by_phase["checkpoint"] >= {"sync", "decode", "score_service"}
    for record in records(run, "step"):
        assert all(record["busy"][part] >= seconds - 1e-9 for part, seconds in record["budget"].items())
        assert all(seconds >= -1e-9 for seconds in record["budget"].values())


def test_every_span_lies_in_the_run_and_nests(measured: tuple[RunDirectory, Scraping]) -> None:
    run, _ = measured
    spans = list(read_json_lines(run.spans))
    (whole,) = records(run, "run")
    end = whole["time"]
    # Grades have a track of their own only while the driver's is taken by decoding, which is a matter of moments.
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
    for record in [*records(run, "step"), *records(run, "phase")]:
        names |= {f"{record['phase']}/{name}" for name in record["metrics"]}
        names |= {f"budget/{part}" for part in record["budget"]} | {f"busy/{part}" for part in record.get("busy", ())}
    for kind, prefix in (("round", "round"), ("device", "device"), ("loop", "loop")):
        found = records(run, kind)
        assert found, kind
        names |= {f"{prefix}/{name}" for record in found for name in record["metrics"]}
    assert unknown_metrics(names) == []


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
    assert events["gen", "batch.start"] == events["gen", "batch.done"] > 0
    steps = [r for r in records(run, "step") if r["phase"].startswith("train_")]
    assert events["step", "done"] == len(steps)
    assert events["rollout", "batch"] > 0
    assert events["loop", "lag"] == len(records(run, "loop"))
    assert events["run", "start"] == events["run", "stop"] == 1


def test_every_process_of_a_run_leaves_its_last_word(tmp_path: Path) -> None:
    experiment = small_experiment()
    run = RunDirectory.create(tmp_path, "stopped", experiment)
    for resume in (False, True):
        stop = asyncio.Event()
        observer = SilentObserver() if resume else StopSoon(stop)
        with run.lock():
            asyncio.run(play(experiment, run, observer=observer, stop=stop, resume=resume))
    assert [record["status"] for record in records(run, "run")] == ["interrupted", "complete"]
    told = [(r["round"], r["phase"], r["step"]) for r in records(run, "step")]
    assert len(told) == len(set(told))


def test_the_endpoint_served_the_metrics_while_the_run_was_played(measured: tuple[RunDirectory, Scraping]) -> None:
    run, observer = measured
    assert observer.steps == len(records(run, "step"))
    assert "helpful_accuracy" in observer.page
    assert "budget" in observer.page
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{observer.port}/metrics", timeout=2)
