"""`evaluate` on a real, tiny game: stopped and gone on with, and with changed settings."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from evaluation_drill import evaluated_experiment, own_files
from traces.openai_server import said, serving

from pvg.evaluation import runner

sys.path.insert(0, str(Path(__file__).parent.parent / "game"))
sys.path.insert(0, str(Path(__file__).parent.parent / "reporting"))
from page_checks import check

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError, TrainingDivergedError, UsageError
from pvg.evaluation.report import PARTS, REPORT_FILE, EvaluationReport, parse_parts, parse_rounds, report_of
from pvg.evaluation.runner import evaluate
from pvg.evaluation.trace_report import legibility
from pvg.game.run import play
from pvg.records import Role
from pvg.reporting.run_page import collect, run_page
from pvg.reporting.run_summary import read_run
from pvg.store.atomic import DamagedFileError
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver
from pvg.traces.loaders import LoadedTraces, trace_of

pytestmark = pytest.mark.slow


class StopIn(SilentObserver):
    """Asks to stop at the first progress of a phase, as Ctrl-C does; remembers the phases."""

    def __init__(self, stop: asyncio.Event, phase: str) -> None:
        self._stop, self._wanted, self._now = stop, phase, ""
        self.phases: list[str] = []
        self.places: list[tuple[int, int, str]] = []
        self.notices: list[str] = []

    def phase_started(self, info: PhaseInfo) -> None:
        self._now = f"{info.phase}, {info.unit}" if info.phase == "attack" else info.phase
        self.phases.append(self._now)
        self.places.append((info.part, info.parts, info.label))

    def noticed(self, message: str) -> None:
        self.notices.append(message)

    def progressed(self, progress: Progress) -> None:
        if self._now == self._wanted:
            self._stop.set()


def changed(experiment: Experiment, **sections: dict) -> Experiment:
    plain = experiment.plain()
    for name, values in sections.items():
        plain[name] |= values
    return build_experiment(plain)


def played(root: Path, name: str, experiment: Experiment) -> RunDirectory:
    run = RunDirectory.create(root, name, experiment)
    with run.lock():
        asyncio.run(play(experiment, run, observer=SilentObserver(), stop=asyncio.Event(), resume=False))
    return run


def evaluated(run: RunDirectory, experiment: Experiment, until: str = "", **request):
    stop = asyncio.Event()
    observer = StopIn(stop, until)
    with run.lock():
        outcome = asyncio.run(evaluate(experiment, run, **request, observer=observer, stop=stop))
    return outcome, observer


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunDirectory:
    return played(tmp_path_factory.mktemp("runs"), "tiny", evaluated_experiment())


@pytest.fixture(scope="module")
def measured(finished: RunDirectory) -> RunDirectory:
    """The run with a whole evaluation, stopped twice on the way."""
    before = own_files(finished)
    for phase in ("baseline", "attack, steps of cgc"):
        outcome, _ = evaluated(finished, evaluated_experiment(), until=phase)
        assert (outcome.status, outcome.report.status) == ("interrupted", "partial")
        assert outcome.report.stale == []
    assert [attack.kind for attack in outcome.report.rounds[0].exploit] == ["src"]  # finished before the second stop
    outcome, observer = evaluated(finished, evaluated_experiment())
    assert (outcome.status, outcome.report.status) == ("complete", "complete")
    assert "baseline" not in observer.phases  # it was done when the second call was stopped
    assert {label for _, _, label in observer.places} == {"attacks and measures of round 0"}
    assert own_files(finished) == before
    return finished


def copy_of(run: RunDirectory, place: Path) -> RunDirectory:
    shutil.copytree(run.path, place / run.name)
    return RunDirectory(place / run.name)


def test_the_report_has_every_part_and_fits_its_schema(measured: RunDirectory) -> None:
    plain = orjson.loads((measured.evaluation / REPORT_FILE).read_bytes())
    jsonschema.Draft202012Validator(EvaluationReport.model_json_schema()).validate(plain)
    (found,) = plain["rounds"]
    assert all(found[part.replace("-", "_")] is not None for part in PARTS)
    assert [attack["kind"] for attack in found["exploit"]] == ["src", "cgc"]
    assert all(attack["steps"] == 5 for attack in found["exploit"] if attack["status"] == "censored")
    sources = [flaws["source"] for flaws in found["detection"]["sources"]]
    assert sources == ["base", "round-000", "attack-src", "attack-cgc"]
    assert found["detection"]["helpful_accuracy"]["n"] == 8 * 4
    assert [(one["name"], one["traces"]) for one in found["legibility"]] == [("round-000", 8 * 4), ("base", 8 * 4)]
    assert found["legibility"][0]["measures"].keys() == {"accuracy", "characters"}  # this prover states no answer
    assert [point["name"] for point in plain["baseline"]["points"]] == ["base", "step 2", "step 3"]
    assert plain["baseline"]["points"][0]["kl"]["value"] == 0.0


def test_a_second_call_computes_nothing(measured: RunDirectory) -> None:
    before = (measured.evaluation / REPORT_FILE).read_bytes()
    files = {path: path.stat().st_mtime_ns for path in (measured.evaluation / "units").iterdir()}
    outcome, observer = evaluated(measured, evaluated_experiment())
    assert outcome.status == "complete"
    assert set(observer.phases) == {"measures"}
    assert observer.places == [(4, 4, "attacks and measures of round 0")]
    assert {path: path.stat().st_mtime_ns for path in (measured.evaluation / "units").iterdir()} == files
    after = orjson.loads((measured.evaluation / REPORT_FILE).read_bytes())
    assert {**after, "created": ""} == {**orjson.loads(before), "created": ""}


def test_another_definition_makes_measures_stale_and_keeps_samples_and_attackers(
    measured: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_of(measured, tmp_path)
    monkeypatch.setattr(runner, "MEASURED", runner.MEASURED + 1)
    outcome, _ = evaluated(run, evaluated_experiment(), parts=("best-of-n",))
    assert "calibration of round 0" in outcome.report.stale
    (found,) = outcome.report.rounds
    assert found.calibration is None
    assert found.best_of_n is not None
    outcome, observer = evaluated(run, evaluated_experiment())
    assert outcome.report.stale == []
    assert outcome.report.rounds == report_of(measured).rounds
    assert set(observer.phases) == {"measures", "reading"}


def test_a_reader_reads_the_helpful_solutions_as_pvg_measure_does(tmp_path: Path) -> None:
    """Another reader, or a stop, changes nothing else."""
    sections = {"models": {"prover": {"source": "embedded:modchain-prover"}}, "rollout": {"max_tokens": 40}}
    settings = changed(evaluated_experiment(), task={"min_terms": 5, "max_terms": 5}, **sections)
    run = played(tmp_path, "legible", settings)
    other = changed(settings, evaluate={"reader": str(tmp_path / "none")})
    with pytest.raises(ConfigurationError, match="none"):
        evaluated(run, other, parts=("calibration", "legibility"))
    outcome, _ = evaluated(run, settings, until="reading", parts=("legibility",))
    assert outcome.status == "interrupted"
    outcome, observer = evaluated(run, settings, parts=("legibility",))
    assert set(observer.phases) == {"reading"}
    (own, base), reader = outcome.report.rounds[0].legibility or [], f"run:{run.path}/round-0"
    assert (own.name, own.traces, own.problems, base.name) == ("round-000", 8 * 4, 8, "base")
    shards, infos = (
        RolloutShards(run.evaluation),
        orjson.loads((run.evaluation / "samples/round-000.json").read_bytes()),
    )
    rows = [row for info in infos["result"] for row in shards.read(ShardInfo.from_plain(info))]
    traces = [trace_of(row) for row in rows if row.role is Role.HELPFUL]
    told, loaded = lambda *_: None, LoadedTraces("round-000", "run", traces, [])
    again = legibility(loaded, settings.models.prover.source, tmp_path / "kept.jsonl", 40, told, print)
    assert asyncio.run(again).measures == own.measures
    assert {"accuracy", "cir", "sr", "transfer"} <= own.measures.keys()
    for other in (reader, f"run:{tmp_path / 'gone'}/round-0"):
        outcome, _ = evaluated(run, changed(settings, evaluate={"reader": other}), parts=("calibration",))
        assert outcome.report.stale == ["legibility of round 0"]

    # What a server refuses to a reader is read again, until the server can.
    able = []

    def answer(route: str, body: Any) -> Any:
        if route == "models":
            return {"data": [{"id": "m"}]}
        if route == "chat/completions":
            return said("A0")
        values = [None, *([-0.1] * (len(body["prompt"]) - 1)), -1.0]
        logprobs = {"text_offset": list(range(len(values))), "token_logprobs": values}
        return {"choices": [{"text": "", "logprobs": logprobs if able else None}]}

    async def work() -> None:
        async with serving(answer) as server:
            behind_url = changed(settings, evaluate={"reader": server.url, "problems": 2, "samples": 2})
            for refused in (["cir"], []):
                asked = len(server.asked)
                request = {"parts": ("legibility",), "observer": SilentObserver(), "stop": asyncio.Event()}
                with run.lock():
                    outcome = await evaluate(behind_url, run, **request)
                found = outcome.report.rounds[0].legibility[0]
                assert (found.refused, "cir" in found.measures) == (refused, not refused)
                assert {"sr", "transfer"} < found.measures.keys()
                able.append(True)
            assert {route for route, _, _ in server.asked[asked:]} == {"models", "completions"}

    asyncio.run(work())


def test_a_shorter_attack_is_another_attack(measured: RunDirectory, tmp_path: Path) -> None:
    run = copy_of(measured, tmp_path)
    other = changed(evaluated_experiment(), evaluate={"attack_steps": 2, "attacks": ["cgc"]})
    outcome, observer = evaluated(run, other, parts=("exploit",))
    assert observer.phases == ["attack, steps of cgc", "samples"]
    (attack,) = outcome.report.rounds[0].exploit or []
    assert (attack.limit, attack.steps) == (2, 2)
    assert "detection of round 0" not in outcome.report.stale
    sources = [flaws.source for flaws in outcome.report.rounds[0].detection.sources]
    assert sources == ["base", "round-000"]  # the other attackers' flaws are none of this one's
    outcome, observer = evaluated(run, evaluated_experiment(), parts=("exploit", "detection"))
    assert "attack, steps of cgc" not in observer.phases  # the longer one's policy was kept beside it
    assert outcome.report.rounds[0].exploit == report_of(measured).rounds[0].exploit
    assert outcome.report.rounds[0].detection == report_of(measured).rounds[0].detection


def test_smaller_micro_batches_train_the_next_attack_and_keep_all_results(
    measured: RunDirectory, tmp_path: Path
) -> None:
    run = copy_of(measured, tmp_path)
    memory = {
        "training": {"micro_batch_tokens": 64, "gradient_checkpointing": True},
        "verifier": {"micro_batch_tokens": 128},
    }
    outcome, observer = evaluated(run, changed(evaluated_experiment(), **memory))
    assert set(observer.phases) == {"measures"}
    assert outcome.report.stale == []
    assert outcome.report.rounds == report_of(measured).rounds
    assert outcome.report.config_hash == report_of(measured).config_hash
    (notice,) = (text for text in observer.notices if "The last bits of the results may change" in text)
    (line,) = (line for line in (run.evaluation / "events.log").read_text().splitlines() if "event=settings" in line)
    for text in (notice, line):
        assert all(key in text for key in ("training.micro_batch_tokens", "verifier.micro_batch_tokens"))


def test_a_baseline_that_diverges_costs_the_tax_alone(
    measured: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is trained once: later calls, and a study, find its result."""
    trained = []

    async def diverging(*_: object) -> None:
        trained.append(1)
        raise TrainingDivergedError("a number that is not finite", "")

    monkeypatch.setattr("pvg.evaluation.training.train", diverging)
    run = copy_of(measured, tmp_path)
    other = changed(evaluated_experiment(), evaluate={"baseline_probes": 3})
    for parts in (("tax", "calibration"), ("tax", "calibration"), ("calibration",)):
        outcome, _ = evaluated(run, other, parts=parts)
        assert (outcome.status, outcome.report.status) == ("complete", "complete")
        assert outcome.report.rounds[0].tax is None
        assert outcome.report.rounds[0].calibration is not None
        assert outcome.report.baseline is not None
        assert outcome.report.baseline.points == []
        assert any("diverged: a number that is not finite" in note for note in outcome.report.notes)
        assert len(trained) == 1
        assert outcome.report.missing(("tax", "calibration"), [0], ("src", "cgc")) == ""
    page = check(run_page(collect(run, read_run(run), 0)))
    assert "the training of the correctness baseline diverged" in page.text


def test_rounds_that_are_not_finished_are_refused(measured: RunDirectory) -> None:
    with pytest.raises(UsageError, match="Round 1 of the run 'tiny' is not finished"):
        evaluated(measured, evaluated_experiment(), rounds=[1])


def test_attacks_that_could_never_succeed_are_refused(measured: RunDirectory) -> None:
    """A window that no attack fills is refused with the settings, one that minibatches make too long by the command."""
    refusal = r"attack_window = {} batches.* do not fit into evaluate\.attack_steps = 5"
    with pytest.raises(ConfigurationError, match=refusal.format(6)):
        changed(evaluated_experiment(), evaluate={"attack_window": 6})
    other = changed(evaluated_experiment(), evaluate={"attack_window": 3}, training={"minibatches": 2})
    with pytest.raises(ConfigurationError, match=refusal.format(3)):
        evaluated(measured, other, parts=("exploit",))


def test_a_damaged_unit_is_named_and_can_be_removed(measured: RunDirectory, tmp_path: Path) -> None:
    run = copy_of(measured, tmp_path)
    path = run.evaluation / "units" / "calibration-round-000.json"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DamagedFileError, match=r"calibration-round-000\.json is damaged"):
        evaluated(run, evaluated_experiment(), parts=("calibration",))
    path.unlink()
    outcome, _ = evaluated(run, evaluated_experiment(), parts=("calibration",))
    assert outcome.report.rounds[0].calibration == report_of(measured).rounds[0].calibration


def test_parts_and_rounds_as_a_user_writes_them() -> None:
    assert parse_parts("tax, exploit") == ("exploit", "tax")
    assert parse_rounds("2,0") == [2, 0]
    assert parse_rounds(None) is None
    with pytest.raises(UsageError, match="Did you mean 'exploit'"):
        parse_parts("exploits")
    with pytest.raises(UsageError, match="not a list of rounds"):
        parse_rounds("first")
