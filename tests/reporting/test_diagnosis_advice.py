"""Every piece of advice of `pvg diagnose`: where it applies, where it does not, and that its settings load.

The logs in real_runs/ are those of small games, played with this version on a machine with two cores that other
programs used too. A test may play with other settings than the log's run: rules read both.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from event_logs import steps

from pvg.config.load import find_experiment, load_experiment, shipped_directories, valid_keys
from pvg.reporting.diagnosis import diagnose, signatures
from pvg.reporting.diagnosis.advice import RULES, advised
from pvg.reporting.diagnosis.tally import LogTally, read_logs

REAL = Path(__file__).with_name("real_runs")
VLLM = ("rollout.engine=vllm",)
LORA = ("training.adapters=lora",)
NO_CLUSTER = ("cluster=none",)


def tally_of(run: str, *overrides: str, **facts: Any) -> LogTally:
    """The log of a real run, with its settings or some of them changed. `facts`: what another log would have shown."""
    found = read_logs([REAL / run / "events.log"])
    settings = load_experiment(REAL / run / "experiment.toml", overrides)
    return replace_facts(found, experiment=settings, experiment_file=REAL / run / "experiment.toml", **facts)


def replace_facts(tally: LogTally, **facts: Any) -> LogTally:
    for name, value in facts.items():
        assert hasattr(tally, name)
        setattr(tally, name, value)
    return tally


def overrides_of(tally: LogTally, rule: str) -> tuple[str, ...] | None:
    """What a rule wants to change; None if it says nothing."""
    found = advised(tally, rule)
    return found[0].overrides if found else None


# Rule, run, its changed settings, what the log would show, and the advice.
APPLIES: list[tuple[str, str, tuple[str, ...], dict[str, Any], tuple[str, ...]]] = [
    ("dedicated-updates", "ahead", (*VLLM, "weights.client=shared"), {}, ("weights.client=dedicated",)),
    ("fewer-requests", "ahead", VLLM, {"most_in_flight": 400.0}, ("rollout.concurrency=200",)),
    ("fewer-rows", "ahead", (), {"most_in_flight": 64.0}, ("rollout.engine.max_rows=32",)),
    ("smaller-weights", "ahead", ("models.device=cuda",), {}, ("rollout.dtype=bfloat16",)),
    ("adapters-only", "ahead", (*VLLM, *LORA), {}, ("weights.transport.kind=lora",)),
    ("weights-in-memory", "ahead", VLLM, {}, ("weights.root=/dev/shm/pvg-weights",)),
    ("larger-batches", "ahead", (), {}, ("training.groups=16",)),
    ("more-minibatches", "ahead", (), {}, ("training.minibatches=2",)),
    ("rarer-commits", "ahead", (), {}, ("store.commit_every=2",)),
    (  # 8 verifier steps in round 0, 24 in round 2
        "rarer-commits",
        "ahead",
        ("store.commit_every=12", "game.growing=true", "game.rounds=3"),
        {},
        ("store.commit_every=24",),
    ),
    ("larger-chunks", "rows", (), {}, ("rollout.engine.max_rows=24",)),
    ("faster-disk", "rows", (), {}, ()),
    ("more-requests", "ahead", (*VLLM, "rollout.concurrency=32"), {}, ("rollout.concurrency=64",)),
    ("more-rows", "rows", (), {}, ("rollout.engine.max_rows=24",)),
    ("shorter-solutions", "rows", (), {}, ("rollout.max_tokens=12",)),
    ("discouraged-length", "rows", (), {}, ("training.overlong_buffer=4",)),
    ("whole-groups", "rows", (), {}, ("rollout.engine.max_rows=8",)),
    ("deadline", "rows", (), {}, ("rollout.deadline.kind=cut", "rollout.deadline.seconds=0.3")),
    ("deadline", "rows", ("rollout.deadline=cut",), {}, ("rollout.deadline.seconds=0.3",)),
    ("sample-ahead", "rows", VLLM, {}, ("rollout.prefetch.kind=fresh",)),
    ("uvloop", "ahead", (), {}, ("telemetry.event_loop=uvloop",)),
    ("crowded-loop", "ahead", VLLM, {"most_in_flight": 900.0}, ("rollout.concurrency=450",)),
    ("profile", "ahead", (), {}, ()),
    ("own-cores", "threads", (), {}, ()),
    ("fewer-threads", "threads", (), {}, ("models.threads=2",)),
    ("fewer-processes", "crowd", (), {}, ("cluster.max_workers=2",)),
    ("equal-shares", "crowd", (), {}, ("training.groups=8",)),
    ("slow-machine", "crowd", ("cluster=ray", "cluster.workers=4", "cluster.address=head:6379"), {}, ()),
]
# The same, and why the advice does not apply.
DOES_NOT: list[tuple[str, str, tuple[str, ...], dict[str, Any], str]] = [
    ("dedicated-updates", "ahead", VLLM, {}, "in force: the default"),
    ("dedicated-updates", "ahead", ("weights.client=shared",), {}, "the torch engine has no connections"),
    ("fewer-requests", "ahead", (), {"most_in_flight": 400.0}, "the torch engine samples, and no server"),
    ("fewer-requests", "ahead", VLLM, {"most_in_flight": 1.0}, "one request is the least"),
    ("fewer-rows", "ahead", VLLM, {}, "servers decode"),
    ("fewer-rows", "ahead", ("rollout.engine.max_rows=1",), {}, "one row is the least"),
    ("smaller-weights", "ahead", ("models.device=cuda", "rollout.dtype=bfloat16"), {}, "in force"),
    ("adapters-only", "ahead", (*VLLM, *LORA, "weights.transport=lora"), {}, "in force"),
    ("adapters-only", "ahead", VLLM, {}, "no adapters are trained"),
    ("adapters-only", "ahead", LORA, {}, "the torch engine reads no files"),
    ("weights-in-memory", "ahead", (*VLLM, "weights.root=/dev/shm/mine"), {}, "in force"),
    ("weights-in-memory", "ahead", (*VLLM, "serving.servers=http://gpu1:8000"), {}, "a server on another machine"),
    ("weights-in-memory", "ahead", (), {}, "the torch engine reads no files"),
    ("more-minibatches", "ahead", ("training.minibatches=64",), {}, "a batch of 64 rollouts has no 128 parts"),
    ("rarer-commits", "ahead", ("store.commit_every=12",), {}, "in force: one commit per phase"),
    ("rarer-commits", "rows", (), {}, "the commits are those of chunks, not of steps"),
    ("larger-chunks", "ahead", (), {}, "the commits are those of steps"),
    ("faster-disk", "rows", ("store.root=/dev/shm/runs",), {}, "in force"),
    ("more-requests", "ahead", VLLM, {}, "in force: the limit is above what two batches have"),
    ("more-requests", "ahead", (*VLLM, "rollout.concurrency=96"), {"most_in_flight": 20.0}, "far from the limit"),
    (
        "more-requests",
        "ahead",
        (*VLLM, "rollout.concurrency=16", "serving.max_num_seqs=16"),
        {},
        "the server decodes no more",
    ),
    ("more-requests", "rows", ("rollout.concurrency=16",), {}, "the torch engine has rows"),
    ("more-rows", "rows", ("rollout.engine.max_rows=64",), {}, "in force: the whole batch is decoded together"),
    ("more-rows", "rows", VLLM, {}, "servers decode"),
    ("shorter-solutions", "ahead", (), {"truncated": False}, "no solution was cut"),
    ("discouraged-length", "rows", ("training.overlong_buffer=2",), {}, "in force"),
    ("discouraged-length", "rows", (), {"truncated": False}, "no solution was cut"),
    ("discouraged-length", "rows", ("game.protocol=challenge",), {}, "excluded by the protocol"),
    ("whole-groups", "rows", ("rollout.engine.max_rows=16",), {}, "in force"),
    ("whole-groups", "rows", VLLM, {}, "servers decode"),
    ("deadline", "rows", ("rollout.deadline=cut", "rollout.deadline.seconds=0.2"), {}, "in force: it is early"),
    ("deadline", "rows", ("rollout.deadline=cut", "rollout.deadline.seconds=0.3"), {}, "in force"),
    ("sample-ahead", "ahead", VLLM, {}, "in force"),
    ("sample-ahead", "rows", (), {}, "one process does one thing after the other"),
    ("sample-ahead", "crowd", (), {}, "the cores are busy, so the workers have no time for it"),
    ("sample-ahead", "rows", (*VLLM, "game.schedule=simultaneous"), {}, "excluded by the schedule"),
    ("sample-ahead", "rows", (*VLLM, "training.dynamic_sampling=2"), {}, "excluded by dynamic sampling"),
    ("uvloop", "rows", (), {}, "in force: the default"),
    ("crowded-loop", "ahead", VLLM, {"most_in_flight": 8.0}, "8 requests are no work"),
    ("crowded-loop", "ahead", (), {"most_in_flight": 900.0}, "the torch engine samples, and no server"),
    ("fewer-threads", "rows", (), {}, "in force: one thread"),
    ("fewer-processes", "workers", (), {}, "two workers on two cores"),
    ("fewer-processes", "crowd", ("cluster=ray", "cluster.workers=4"), {}, "the workers are on other machines"),
    ("fewer-processes", "crowd", ("cluster.max_workers=2",), {}, "in force"),
    ("fewer-idle-workers", "rows", (), {}, "there are no workers"),
    ("fewer-idle-workers", "crowd", (), {}, "the workers were busy"),
    ("equal-shares", "workers", (), {}, "in force: 8 groups and 2 workers"),
    ("equal-shares", "rows", (), {}, "there are no workers"),
    ("slow-machine", "crowd", (), {}, "all workers are on one machine"),
]


@pytest.mark.parametrize(("rule", "run", "settings", "facts", "wanted"), APPLIES, ids=lambda value: str(value)[:40])
def test_advice_that_applies(
    rule: str, run: str, settings: tuple[str, ...], facts: dict[str, Any], wanted: tuple[str, ...]
) -> None:
    assert overrides_of(tally_of(run, *settings, **facts), rule) == wanted


@pytest.mark.parametrize(("rule", "run", "settings", "facts", "why"), DOES_NOT, ids=lambda value: str(value)[:40])
def test_advice_that_does_not_apply(
    rule: str, run: str, settings: tuple[str, ...], facts: dict[str, Any], why: str
) -> None:
    assert overrides_of(tally_of(run, *settings, **facts), rule) is None, why


def test_every_rule_is_tested_and_used() -> None:
    assert {row[0] for row in APPLIES} | {"fewer-idle-workers"} == set(RULES)
    assert set(RULES) - {row[0] for row in DOES_NOT} == {"larger-batches", "profile", "own-cores"}
    source = ast.parse(Path(signatures.__file__).read_bytes())
    texts = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert set(RULES) <= texts


def test_other_programs_are_blamed_only_if_some_run(tmp_path: Path) -> None:
    """A machine that pvg alone uses: its threads wait for cores, because it has more threads than cores."""
    log = steps(waited_ms=1000.0, threads=8)
    for _ in range(10):
        log.add("machine", event="sample", cores=2, busy_cores=1.9, own_cores=1.85)
    (finding,) = diagnose([log.write(tmp_path / "events.log")]).findings
    assert finding.signature == "shared-machine"
    assert "Stop other programs" not in finding.remedy
    assert "more threads and processes than cores" in finding.says
    assert finding.settings == ("models.threads",)


@pytest.mark.parametrize(("busy", "wanted"), [(0.3, ("cluster.max_workers=2",)), (0.9, None)])
def test_fewer_workers_are_advised_where_they_are_idle(
    busy: float, wanted: tuple[str, ...] | None, tmp_path: Path
) -> None:
    log = steps()
    for _ in range(10):
        log.add("workers", event="sample", up=4, restarts=0, busy=busy, busy_most=busy, busy_least=busy)
    settings = REAL / "crowd" / "experiment.toml"
    tally = read_logs([log.write(tmp_path / "events.log")], settings)
    assert overrides_of(tally, "fewer-idle-workers") == wanted


def test_a_model_server_on_the_same_machine_is_not_to_be_stopped() -> None:
    (advice,) = advised(tally_of("threads", *VLLM, *NO_CLUSTER), "own-cores")
    assert "Give the model servers other cores" in advice.says


@pytest.mark.parametrize(("native", "wanted"), [(True, ("rollout.dtype=bfloat16",)), (False, None), (None, None)])
def test_bfloat16_is_advised_on_a_cpu_with_instructions_for_it(
    native: bool | None, wanted: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pvg.reporting.diagnosis.advice.native_bfloat16", lambda root: native)
    assert overrides_of(tally_of("ahead", "models.device=cpu"), "smaller-weights") == wanted


# --- the settings exist and load --------------------------------------------------------------------------------------


def experiments() -> Iterator[Path]:
    for folder in shipped_directories():
        yield from sorted(folder.glob("*.toml"))


@pytest.mark.parametrize("path", list(experiments()), ids=lambda path: path.stem)
@pytest.mark.parametrize("run", ["crowd", "rows"])
def test_what_is_advised_for_a_shipped_experiment_loads_and_changes_something(path: Path, run: str) -> None:
    tasks_of_one_engine = load_experiment(path).task.kind == "play"
    for engine in ((),) if tasks_of_one_engine else ((), VLLM):
        changed = load_experiment(path, engine)
        tally = replace_facts(tally_of(run), experiment=changed, most_in_flight=900.0)
        for rule in RULES:
            for advice in advised(tally, rule):
                assert set(advice.settings) <= set(valid_keys())
                assert load_experiment(path, [*engine, *advice.overrides]) != changed or not advice.overrides


def test_every_key_of_a_rule_exists() -> None:
    for rule in RULES.values():
        assert set(rule.settings) <= set(valid_keys())


# --- whole diagnoses --------------------------------------------------------------------------------------------------


def diagnosed(run: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """Signature -> (changes, remedy) of a real run with its settings."""
    found = diagnose([REAL / run / "events.log"], experiment_file=REAL / run / "experiment.toml")
    assert found.plain()["settings_known"] is True
    return {finding.signature: (finding.changes, finding.remedy) for finding in found.findings}


@pytest.mark.parametrize(
    ("run", "changes"),
    [("workers", ()), ("threads", ("models.threads=2",)), ("crowd", ("cluster.max_workers=2",)), ("rows", ())],
)
def test_the_shared_machine_of_a_real_run_gets_fitting_advice(run: str, changes: tuple[str, ...]) -> None:
    found, remedy = diagnosed(run)["shared-machine"]
    assert found == changes
    assert "Stop other programs on this machine" in remedy


def test_without_settings_the_advice_is_general_and_says_so() -> None:
    found = diagnose([REAL / "ahead" / "events.log"])
    assert found.plain()["settings_known"] is False
    assert any("The settings of the run are unknown" in note for note in found.notes)
    assert all(finding.changes == () for finding in found.findings)
    known = diagnose([REAL / "ahead" / "events.log"], experiment_file=REAL / "ahead" / "experiment.toml")
    assert not any("unknown" in note for note in known.notes)
    assert known.findings[0].cost_s == found.findings[0].cost_s


@pytest.mark.parametrize("phase", ["train_prover", "train_verifier", "warmup"])
def test_sampling_is_blamed_only_for_the_steps_that_wait_for_rollouts(phase: str, tmp_path: Path) -> None:
    log = steps(idle_ms=3000.0, trunc_pct=0.0)
    log.lines = [line.replace("phase=train_prover", f"phase={phase}") for line in log.lines]
    settings = REAL / "ahead" / "experiment.toml"
    (finding,) = diagnose([log.write(tmp_path / "events.log")], experiment_file=settings).findings
    assert finding.signature == "starved-trainer"
    assert finding.changes == (("training.minibatches=2",) if phase == "train_prover" else ())
    assert "The time budget of `pvg report` shows" in finding.remedy


def test_a_finding_that_no_setting_helps_says_so(tmp_path: Path) -> None:
    path = steps(queue_ms=lambda load: 20.0 * load).write(tmp_path / "events.log")
    settings = find_experiment("modchain")
    (finding,) = diagnose([path], experiment_file=settings).findings
    assert finding.signature == "front-end-queue"
    assert finding.settings == ()
    assert finding.remedy == signatures.NOTHING_TO_SET
