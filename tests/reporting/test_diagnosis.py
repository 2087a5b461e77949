"""The diagnosis: every signature in a log that has it, none in a log that does not; pairing, clocks, load, memory."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest
from event_logs import Log, steps

from pvg.config.load import valid_keys
from pvg.errors import UsageError
from pvg.reporting.diagnosis import SIGNATURES, Diagnosis, diagnose
from pvg.reporting.diagnosis.advice import ADVICE
from pvg.reporting.diagnosis.log_events import DONE_TRACES, OPEN_TRACES, parse_line
from pvg.reporting.diagnosis.tally import NAMES, LogTally
from pvg.telemetry.waits import LagLimits, LagWindow


def seen(found: Diagnosis) -> list[str]:
    return [finding.signature for finding in found.findings]


def of(log: Log, folder: Path) -> Diagnosis:
    return diagnose([log.write(folder / "events.log")])


def test_nothing_stands_out_in_a_healthy_run(tmp_path: Path) -> None:
    found = of(steps(), tmp_path)
    assert found.findings == ()
    assert found.not_seen == {}
    assert found.notes == ()
    assert found.plain()["nothing_stands_out"] is True


def test_a_front_end_queue_is_told_by_its_growth_with_the_load(tmp_path: Path) -> None:
    found = of(steps(queue_ms=lambda load: 20.0 * load), tmp_path)
    assert seen(found) == ["front-end-queue"]
    (finding,) = found.findings
    assert "grows with the load" in finding.says
    assert "Loading does not" in finding.says
    # 14 x 4, 13 x 90 and 13 x 180 requests at 20 ms each, over the same and 40 x 1.52 s
    queued = 20.0 * (14 * 4 + 13 * 90 + 13 * 180) / 1e3
    assert finding.cost_s == pytest.approx(queued)
    assert finding.share == pytest.approx(queued / (queued + 40 * 1.52), rel=1e-3)
    assert finding.measured == pytest.approx(queued / (queued + 0.8), rel=1e-3)
    assert finding.settings == ("weights.client", "rollout.concurrency")
    assert finding.evidence[0].where == "events.log:29"  # the third step: 11 lines each
    assert found.load["queue_ms"].correlation == pytest.approx(1.0)
    assert found.load["rpc_ms"].correlation == pytest.approx(0.0)


def test_a_queue_that_does_not_grow_with_the_load_points_elsewhere(tmp_path: Path) -> None:
    (finding,) = of(steps(queue_ms=lambda load: 900.0), tmp_path).findings
    assert finding.signature == "front-end-queue"
    assert "does not grow with the load" in finding.says


def test_a_slow_engine_reload(tmp_path: Path) -> None:
    found = of(steps(rpc_ms=lambda load: 800.0), tmp_path)
    assert seen(found) == ["engine-reload"]
    assert found.findings[0].cost_s == pytest.approx(32.0)


def test_updates_of_other_runs_in_the_servers_log_are_not_part_of_this_runs_wall_time(tmp_path: Path) -> None:
    client, server = Log(), Log(now=1.0)
    for number in range(200):  # earlier runs used the same server
        server.update(f"old-{number}", 0.0, 10.0, client=False)
    server.now = client.now
    for number in range(20):
        client.update(f"own-{number}", 90.0, 10.0, server=server)
    found = diagnose([client.write(tmp_path / "events.log"), server.write(tmp_path / "server.log")])
    assert "engine-reload" not in seen(found)
    (queue,) = (finding for finding in found.findings if finding.signature == "front-end-queue")
    assert queue.measured == pytest.approx(0.9)
    assert queue.cost_s == pytest.approx(1.8)


def test_slow_checkpoints_by_their_writes_where_no_step_waits(tmp_path: Path) -> None:
    log = steps(write_ms=400.0)
    assert seen(of(log, tmp_path)) == ["checkpoint"]
    log.add("ckpt", event="wait.start")
    log.add("ckpt", event="wait.done", wait_ms=3.0)  # so writing is in the background, and waits are the cost
    assert seen(of(log, tmp_path)) == []


def test_steps_that_wait_for_checkpoints(tmp_path: Path) -> None:
    log = steps(write_ms=400.0)
    for _ in range(10):
        log.add("ckpt", event="wait.done", wait_ms=900.0)
        log.wait(900.0)
    (finding,) = of(log, tmp_path).findings
    assert finding.signature == "checkpoint"
    assert "wait_ms=900" in finding.evidence[0].text


def test_a_starved_trainer(tmp_path: Path) -> None:
    found = of(steps(idle_ms=3000.0), tmp_path)
    assert seen(found) == ["starved-trainer"]
    assert found.findings[0].measured == pytest.approx(0.75)
    assert "train_prover" in found.findings[0].says


def test_stragglers_of_groups(tmp_path: Path) -> None:
    found = of(steps(group_max_ms=450.0), tmp_path)
    assert seen(found) == ["stragglers"]
    assert found.findings[0].cost_s == pytest.approx(40 * 0.35)


def test_stragglers_of_an_engine_that_tells_no_groups(tmp_path: Path) -> None:
    log = Log()
    for batch in range(100):
        longest_ms = 9000.0 if batch % 20 == 0 else 1000.0
        log.wait(longest_ms)
        log.add("gen", event="batch.done", batch=batch, completions=8, dur_ms=longest_ms, longest_ms=longest_ms)
    found = of(log, tmp_path)
    assert seen(found) == ["stragglers"]
    assert found.findings[0].cost_s == pytest.approx(5 * 8.0)


def test_loop_lag_above_a_warning_level_of_the_run(tmp_path: Path) -> None:
    path = steps(lag_ms=60.0).write(tmp_path / "events.log")
    assert seen(diagnose([path])) == []
    found = diagnose([path], LagLimits(p99_s=0.05))
    assert seen(found) == ["loop-lag"]
    assert found.findings[0].measured == pytest.approx(1.2)


def test_a_shared_machine_is_named_and_the_loop_is_not_blamed(tmp_path: Path) -> None:
    found = of(steps(waited_ms=1000.0, lag_ms=600.0), tmp_path)
    assert seen(found) == ["shared-machine", "loop-lag"]
    shared, lag = found.findings
    assert shared.measured == pytest.approx(0.4)  # 1000 of 2500 ms in each window
    assert shared.cost_s == pytest.approx(40.0)
    assert "Added up over its threads, pvg ran for 1 min 00 s and waited 40 s for a core" in shared.says
    assert "waited_ms is such a sum, and longest_wait_ms is the wait of one thread." in shared.says
    assert "waited_ms=1000" in shared.evidence[0].text
    for finding in found.findings:
        assert finding.settings == ("models.threads",)
        assert "Stop other programs" in finding.remedy
    assert "computes on it" not in lag.says
    assert "24 s of it while pvg's threads waited for cores" in lag.says


def test_a_log_of_another_system_than_linux_says_nothing_of_cores(tmp_path: Path) -> None:
    log = steps(lag_ms=600.0)
    log.lines = [line.split(" ran_ms=")[0] for line in log.lines]
    found = of(log, tmp_path)
    assert seen(found) == ["loop-lag"]
    assert "Something computes on it" in found.findings[0].says
    assert set(found.not_seen) == {"shared-machine"}


@pytest.mark.parametrize(
    ("busy", "own", "cores", "usable", "shared"),
    [
        (1.95, 0.4, 2, 2, True),
        (1.95, 1.7, 2, 2, False),  # the others use an eighth of what is busy
        (1.2, 0.4, 2, 2, False),  # a core is free
        (15.8, 1.9, 16, 2, False),  # pvg may use two cores only, and nobody knows what runs on them
    ],
)
def test_another_system_shows_a_shared_machine_by_the_cores_in_use(
    busy: float, own: float, cores: int, usable: int, shared: bool, tmp_path: Path
) -> None:
    log = steps()
    log.lines = [line.split(" ran_ms=")[0].replace("cores=2", f"cores={usable}") for line in log.lines]
    for _ in range(10):
        log.add("machine", event="sample", cores=cores, busy_cores=busy, own_cores=own)
    found = of(log, tmp_path)
    assert seen(found) == (["shared-machine"] if shared else [])
    if shared:
        (finding,) = found.findings
        assert finding.measured == pytest.approx(1.55 / 1.95)
        assert "1.9 of 2 cores were busy, and pvg used 0.4 of them" in finding.says
        assert "Stop other programs" in finding.remedy


def with_workers(busy: float, most: float) -> Log:
    log = steps()
    for _ in range(20):
        log.add("workers", event="sample", up=2, restarts=0, busy=busy, busy_most=most, busy_least=0.0, core_wait=0.1)
    return log


def test_workers_that_wait_for_the_driver_or_for_one_another(tmp_path: Path) -> None:
    assert seen(of(with_workers(0.8, 0.9), tmp_path)) == []
    (idle,) = of(with_workers(0.3, 0.4), tmp_path).findings
    assert idle.signature == "idle-workers"
    assert idle.measured == pytest.approx(0.7)
    (unbalanced,) = of(with_workers(0.6, 0.9), tmp_path).findings
    assert unbalanced.signature == "unbalanced-workers"
    assert unbalanced.measured == pytest.approx(0.3)
    assert "busy_most=0.9" in unbalanced.evidence[0].text


def test_workers_that_wait_for_cores_count_as_the_threads_of_the_driver_do(tmp_path: Path) -> None:
    """The driver's own threads hardly wait: 1.2 of 61.2 s. The workers wait for 80 of their 160 s."""
    log = with_workers(0.8, 0.9)
    assert seen(of(log, tmp_path)) == []
    for _ in range(20):
        cores = {"ran_ms": 4000.0, "waited_ms": 4000.0, "longest_wait_ms": 2500.0}
        log.add("workers", event="sample", up=2, restarts=0, busy=0.8, busy_most=0.9, busy_least=0.7, **cores)
    (finding,) = of(log, tmp_path).findings
    assert finding.signature == "shared-machine"
    assert finding.measured == pytest.approx(81.2 / 221.2)
    assert finding.cost_s == pytest.approx(20 * 2.5)
    assert "Added up over the threads of all its processes, pvg ran for 2 min 20 s and waited 1 min" in finding.says
    assert "longest_wait_ms=2500" in finding.evidence[0].text
    assert finding.settings == ("models.threads",)  # two workers on two cores are not too many


def test_what_the_program_itself_does_to_the_loop_is_not_blamed_on_the_machine(tmp_path: Path) -> None:
    (finding,) = of(steps(waited_ms=100.0, lag_ms=600.0), tmp_path).findings
    assert finding.signature == "loop-lag"
    assert "Something computes on it" in finding.says
    assert "pvg profile EXPERIMENT --stage e2e" in finding.remedy


def test_other_programs_are_blamed_only_if_some_run(tmp_path: Path) -> None:
    """A machine that pvg alone uses: its threads wait for cores, because it has more threads than cores."""
    log = steps(waited_ms=1000.0, threads=8)
    for _ in range(10):
        log.add("machine", event="sample", cores=2, busy_cores=1.9, own_cores=1.85)
    (finding,) = of(log, tmp_path).findings
    assert finding.signature == "shared-machine"
    assert "Stop other programs" not in finding.remedy
    assert finding.settings == ("models.threads",)


@pytest.mark.parametrize(
    ("threads", "settings", "advice"),
    [(1, (), "reserve cores"), (2, ("models.threads",), "With one thread"), (8, ("models.threads",), "lower the")],
)
def test_fewer_threads_are_advised_where_there_are_several(
    threads: int, settings: tuple[str, ...], advice: str, tmp_path: Path
) -> None:
    (finding,) = of(steps(waited_ms=1000.0, threads=threads), tmp_path).findings
    assert finding.settings == settings
    assert advice in finding.remedy


@pytest.mark.parametrize(("trunc_pct", "advised"), [(0.0, False), (3.0, True)])
def test_shorter_completions_are_advised_where_some_are_cut(trunc_pct: float, advised: bool, tmp_path: Path) -> None:
    found = of(steps(idle_ms=3000.0, group_max_ms=2000.0, trunc_pct=trunc_pct), tmp_path)
    assert set(seen(found)) == {"starved-trainer", "stragglers"}
    for finding in found.findings:
        assert ("rollout.max_tokens" in finding.settings) is advised
        assert ("completions" in finding.remedy) is advised


@pytest.mark.parametrize(("phase", "sampling"), [("train_prover", True), ("train_verifier", False), ("warmup", False)])
def test_sampling_is_blamed_only_for_the_steps_that_wait_for_rollouts(
    phase: str, sampling: bool, tmp_path: Path
) -> None:
    log = steps(idle_ms=3000.0, trunc_pct=0.0)
    log.lines = [line.replace("phase=train_prover", f"phase={phase}") for line in log.lines]
    (finding,) = of(log, tmp_path).findings
    assert finding.signature == "starved-trainer"
    assert ("rollout.prefetch.kind" in finding.settings) is sampling


def test_a_loop_that_stands_still_without_crossing_a_level(tmp_path: Path) -> None:
    (finding,) = of(steps(lag_ms=600.0), tmp_path).findings
    assert finding.signature == "loop-lag"
    assert finding.cost_s == pytest.approx(40 * 0.6)


@pytest.mark.parametrize("stall_s", [0.3, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("hz", [10.0, 50.0])
def test_a_stall_costs_no_more_than_it_lasted(stall_s: float, hz: float, tmp_path: Path) -> None:
    """As the monitor tells it: every tick of the stall with the rest of it."""
    period_s, ticks = 1 / hz, round(5.0 * hz)
    late = [tick * period_s for tick in range(1, round(stall_s * hz) + 1)]
    window = LagWindow.of([*late, *[0.0005] * (ticks - len(late))])
    lags = {f"{name}_ms": getattr(window, f"{name}_s") * 1e3 for name in ("p50", "p90", "p99", "max")}
    log = Log()
    log.add("run", event="start")
    log.wait(5000.0)
    log.add("loop", event="lag", **lags, samples=window.samples, period_ms=1e3 * period_s)
    (finding,) = of(log, tmp_path).findings
    assert 0.5 * stall_s <= finding.cost_s <= stall_s + 0.001
    assert finding.share is not None
    assert finding.share <= 1.0001


def test_several_at_once_stand_in_the_order_of_their_cost(tmp_path: Path) -> None:
    found = of(steps(idle_ms=5000.0, rpc_ms=lambda load: 600.0, write_ms=900.0), tmp_path)
    assert seen(found) == ["starved-trainer", "checkpoint", "engine-reload"]


def test_what_the_log_cannot_tell_is_said(tmp_path: Path) -> None:
    log = Log()
    log.add("weights", event="client.done", trace="a", wall_ms=9.0, rpc_ms=8.0, queue_ms=1.0)
    found = of(log, tmp_path)
    assert set(found.not_seen) == set(SIGNATURES) - {"idle-workers", "unbalanced-workers"}  # not every run has any
    assert found.not_seen["front-end-queue"].startswith("1 weight update")


def test_every_setting_that_is_named_exists(tmp_path: Path) -> None:
    """One log with everything in it, so that every finding is made."""
    log = steps(queue_ms=lambda load: 20.0 * load, write_ms=900.0, idle_ms=5000.0, group_max_ms=5000.0, lag_ms=40_000.0)
    others = [steps(rpc_ms=lambda load: 9000.0), steps(waited_ms=5000.0)]
    others += [with_workers(0.3, 0.4), with_workers(0.6, 0.9)]
    findings = [finding for made in (log, *others) for finding in of(made, tmp_path).findings]
    assert {finding.signature for finding in findings} == set(SIGNATURES)
    assert all(finding.evidence for finding in findings)
    assert {key for advice in ADVICE.values() for key in advice.settings} <= set(valid_keys())


# --- pairing ----------------------------------------------------------------------------------------------------------


def test_halves_in_any_order_and_in_two_logs_give_the_same_updates(tmp_path: Path) -> None:
    together, client, server = Log(), Log(), Log()
    for number in range(30):
        together.update(f"t{number}", 40.0 + number, 10.0)
        client.update(f"t{number}", 40.0 + number, 10.0, server=server)
    shuffled = list(together.lines)
    random.Random(3).shuffle(shuffled)
    (tmp_path / "shuffled.log").write_text("\n".join(shuffled) + "\n")
    paths = (client.write(tmp_path / "client.log"), server.write(tmp_path / "server.log"))
    straight, mixed, apart = of(together, tmp_path), diagnose([tmp_path / "shuffled.log"]), diagnose(paths)
    assert straight.timings["queue_ms"].n == 30
    for other in (mixed, apart, diagnose(paths[::-1])):
        assert other.tally.pairing.halves.paired == 30
        for name in ("wall_ms", "queue_ms", "rpc_ms", "in_server_ms"):
            assert other.timings[name].p50 == pytest.approx(straight.timings[name].p50)


def test_missing_halves_are_counted(tmp_path: Path) -> None:
    log = Log()
    log.update("whole", 5.0, 5.0)
    log.update("server", 5.0, 5.0, client=False)
    log.add("weights", event="client.send", trace="lost", version=3)
    log.add("weights", event="client.done", trace="client", wall_ms=9.0, rpc_ms=8.0, queue_ms=1.0, failed=2)
    log.add("weights", event="client.done", wall_ms=9.0, rpc_ms=8.0, queue_ms=1.0)
    found = of(log, tmp_path)
    halves = found.tally.pairing.halves
    assert (halves.paired, halves.server_only, halves.unfinished, halves.client_only) == (1, 1, 1, 2)
    assert (halves.untraced, halves.failed) == (1, 2)
    assert found.timings["wall_ms"].n == 3
    assert found.timings["rpc_ms"].n == 4
    assert any("never finished" in note for note in found.notes)


def test_times_that_only_follow_from_the_moments(tmp_path: Path) -> None:
    """client.done without figures: wall from send to done, rpc from the server's start to done, queue the rest."""
    log = Log()
    log.add("weights", event="client.send", trace="a")
    log.wait(300.0)
    log.add("weights", event="rpc.start", trace="a")
    log.wait(100.0)
    log.add("weights", event="rpc.done", trace="a")
    log.wait(50.0)
    log.add("weights", event="client.done", trace="a")
    timings = of(log, tmp_path).timings
    assert [round(timings[name].max, 3) for name in ("wall_ms", "rpc_ms", "queue_ms")] == [450.0, 100.0, 350.0]


def test_two_clocks_are_noticed_and_no_difference_is_taken_across_them(tmp_path: Path) -> None:
    client, server = Log(now=100.0), Log(now=987_654.0)
    for number in range(30):
        client.update(f"t{number}", 40.0, 10.0, server=server)
        server.add("gen", event="batch.start", batch=number, inflight=number, target_batch=9)
    paths = (client.write(tmp_path / "client.log"), server.write(tmp_path / "server.log"))
    found = diagnose(paths)
    assert any("different clocks" in note and "+987,554.000 s" in note for note in found.notes)
    assert found.timings["in_server_ms"].max == pytest.approx(40.0, abs=0.01)
    assert found.seconds == pytest.approx(30 * 0.05, abs=0.01)
    assert found.load == {}  # the load at that time is unknown
    assert "do not show how the wait depends" in found.findings[0].says


def test_two_clocks_in_one_log(tmp_path: Path) -> None:
    """The order of the lines tells what the times do not."""
    client, server = Log(now=5.0), Log(now=987_654.0)
    lines: list[str] = []
    for number in range(30):
        server.add("gen", event="batch.start", batch=number, inflight=number, target_batch=9)
        client.update(f"t{number}", 40.0 * number, 10.0, server=server)
        client.wait(1000.0)
        lines += [*server.lines, *client.lines]
        server.lines, client.lines = [], []
    (tmp_path / "both.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path / "both.log"])
    assert found.load["queue_ms"].correlation == pytest.approx(1.0)
    assert found.seconds == pytest.approx(29 * 1.01 + 0.04 * sum(range(30)), rel=0.05)


def test_a_server_log_alone_still_tells_of_slow_loading(tmp_path: Path) -> None:
    log = Log()
    for number in range(10):
        log.update(f"t{number}", 1.0, 900.0, client=False)
    assert seen(of(log, tmp_path)) == ["engine-reload"]


def test_open_traces_are_given_up_oldest_first(tmp_path: Path) -> None:
    log = Log()
    for number in range(OPEN_TRACES + 10):
        log.add("weights", event="client.send", trace=f"t{number}")
    log.add("weights", event="client.done", trace="t9", wall_ms=1.0, rpc_ms=1.0, queue_ms=0.0)  # given up by now
    log.add("weights", event="client.done", trace="t4000", wall_ms=1.0, rpc_ms=1.0, queue_ms=0.0)
    halves = of(log, tmp_path).tally.pairing.halves
    assert halves.evicted == 10
    assert halves.unfinished == OPEN_TRACES + 9
    assert halves.client_only == 2


# --- time -------------------------------------------------------------------------------------------------------------


def test_the_time_between_two_sessions_does_not_count(tmp_path: Path) -> None:
    log = Log(now=50_000.0)
    for start in (50_000.0, 51_000.0, 3.0):  # resumed, and resumed after a restart of the machine
        log.now = start
        log.add("run", event="start")
        log.wait(20_000.0)
        log.add("phase", event="start", phase="mint")
    assert of(log, tmp_path).seconds == pytest.approx(60.0)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_tables_of_updates_events_and_phases_do_not_grow_with_the_log() -> None:
    """200,000 lines, each with a new trace id, event or phase. What the last tenth adds to what is held is traced: it
    replaces entries of full tables. Only the numbers remain, 8 bytes each in arrays that may move as a whole."""
    lines = (
        line
        for number in range(50_000)
        for line in (
            f"[weights] t={number} event=client.send trace=trace-{number}\n",
            f"[weights] t={number} event=server.recv trace=other-{number}\n",
            f"[weights] t={number} event=client.done trace=trace-{number} wall_ms={number} rpc_ms=1\n",
            f"[step] t={number} event=done phase=p{number} wall_ms={number} idle_ms={number % 7}\n",
        )
    )
    tally = LogTally(("x.log",))
    for number, line in enumerate(lines, start=1):
        if number == 180_000:
            tracemalloc.start()
        event = parse_line(line, 0, number)
        assert event is not None
        tally.add(event)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert tally.quantity("wall_ms").n == 50_000 - DONE_TRACES
    assert tally.pairing.halves.evicted >= 50_000 - OPEN_TRACES
    assert len(tally.phases) == NAMES + 1  # and one for the rest
    assert held < 8e6


def test_a_missing_log_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        diagnose([tmp_path / "none.log"])
