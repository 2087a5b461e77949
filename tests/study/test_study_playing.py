"""Cells as processes: what is played, in which order, what a failure does to the others, and that nothing is left
behind. The `pvg` that is started here is tests/study/stand_in_pvg.py; the real one plays in tests/cli."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_samples import attack, detection, round_of
from study_samples import PVG, SMALL, evaluate, finish, folder_of, small

from pvg.config.load import changed
from pvg.errors import StateError, UsageError
from pvg.store.state import FileStateStore
from pvg.study.measures import MeasuredValue
from pvg.study.plan import Cell, StudyPlan
from pvg.study.playing import (
    CellProgress,
    Ended,
    Job,
    StudyFolder,
    _environment,
    evaluate_command,
    play_cells,
    progress_of,
    refuse_other_settings,
    steps_done,
    unevaluated,
)
from pvg.study.results import collect

pytestmark = pytest.mark.slow


class Told:
    """An observer that records its calls, and requests a stop after enough of them."""

    def __init__(self, stop_when: str = "", requests: int = 1) -> None:
        self.lines: list[str] = []
        self.running: set[str] = set()
        self.most = 0
        self.requests = 0
        self._stop_when, self._stops = stop_when, requests

    def began(self, cell: Cell, job: Job, progress: CellProgress) -> None:
        self.running.add(cell.name)
        self.most = max(self.most, len(self.running))
        self._tell(f"{job} {cell.name}")

    def progressed(self, cell: Cell, progress: CellProgress) -> None:
        self._tell(f"{cell.name} at {progress.done}")

    def ended(self, cell: Cell, how: Ended, progress: CellProgress, seconds: float) -> None:
        self.running.discard(cell.name)
        self._tell(f"{how} {cell.name}")

    def waited(self) -> None: ...

    def stopping(self, running: int) -> None:
        self._tell(f"stopping {running}")

    def _tell(self, line: str) -> None:
        self.lines.append(line)
        if self._stop_when and self._stop_when in line:
            self.requests = self._stops

    def only(self, *words: str) -> list[str]:
        return [line for line in self.lines if line.split()[0] in words]


def play(plan: StudyPlan, told: Told) -> bool:
    folder_of(plan)
    return play_cells(plan, plan.cells, pvg=PVG, observer=told, stop=told)


def behave(**behaviour: str) -> None:
    Path("behaviour.json").write_text(json.dumps({name.replace("_", "-"): how for name, how in behaviour.items()}))


def now(plan: StudyPlan) -> dict[str, CellProgress]:
    folder = StudyFolder(plan.folder)
    return {cell.name: progress_of(cell, folder, plan.evaluate) for cell in plan.cells}


def test_every_cell_is_played_in_a_process_of_its_own_seed_by_seed() -> None:
    plan, told = small(), Told()
    assert play(plan, told)
    assert told.only("train", "complete") == [
        f"{word} {cell.name}" for cell in plan.cells for word in ("train", "complete")
    ]
    played = [line.split() for line in Path("played.txt").read_text().splitlines()]
    assert [name for name, _ in played] == [cell.name for cell in plan.cells]
    assert len({pid for _, pid in played} | {str(os.getpid())}) == 5
    found = now(plan)
    assert {progress.status for progress in found.values()} == {"complete"}
    assert found["src-seed-001"].rounds[-1] == {"helpful_accuracy": 0.7, "fooled_rate": 0.25}
    assert plan.cells[1].run.experiment() == plan.cells[1].experiment


def test_games_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a study gives no number, a wide model's default is all threads that torch may use."""
    monkeypatch.setattr("pvg.study.plan.usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = SMALL.replace("threads = 1\n", "")
    assert _environment(small(text, processes=2))["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in _environment(small(text, processes=2, threads=3))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert _environment(small(text, processes=2))["OMP_NUM_THREADS"] == "7"


def test_a_failed_cell_says_why_and_stops_nobody() -> None:
    plan, told = replace(small(), processes=3), Told()
    behave(cgc_seed_000="crash", src_seed_000="die", cgc_seed_001="defect")
    assert play(plan, told)
    assert told.most == 3
    found = now(plan)
    assert [found[cell.name].reason for cell in plan.cells] == [
        "It broke.",
        "killed by SIGKILL, perhaps for lack of memory",
        "ZeroDivisionError: of all things",
        "",
    ]
    assert found["src-seed-001"].status == "complete"
    behave()
    again = Told()
    assert play_cells(plan, plan.cells[:1], pvg=PVG, observer=again, stop=again)
    assert now(plan)["cgc-seed-000"] == replace(found["src-seed-001"], rounds=now(plan)["cgc-seed-000"].rounds)


@pytest.mark.drill
def test_a_stop_reaches_every_cell_which_commits_and_is_resumed_later() -> None:
    plan, told = replace(small(), processes=2), Told(stop_when="src-seed-000 at 13")
    behave(cgc_seed_000="wait", src_seed_000="wait")
    assert not play(plan, told)
    first, *rest = told.only("stopping", "stopped")
    assert (first, sorted(rest)) == ("stopping 2", ["stopped cgc-seed-000", "stopped src-seed-000"])
    found = now(plan)
    assert [found[cell.name].status for cell in plan.cells] == ["unfinished"] * 2 + ["new"] * 2
    assert (found["cgc-seed-000"].done, found["cgc-seed-000"].reason) == (8 + 3 + 3, "")  # committed at the signal
    behave()
    assert play(plan, Told())
    assert {progress.status for progress in now(plan).values()} == {"complete"}


def test_a_second_stop_kills() -> None:
    plan, told = small(), Told(stop_when="cgc-seed-000 at 13", requests=2)
    behave(cgc_seed_000="wait")
    assert not play(plan, told)
    assert now(plan)["cgc-seed-000"].done in (13, 14)  # whichever of the two signals came first


def test_an_error_of_our_own_leaves_no_process_behind() -> None:
    class Broken(Told):
        def progressed(self, cell: Cell, progress: CellProgress) -> None:
            if progress.done:
                raise RuntimeError("a defect")

    behave(cgc_seed_000="wait")
    with pytest.raises(RuntimeError, match="a defect"):
        play(small(), Broken())
    pid = int(Path("played.txt").read_text().split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_cell_that_somebody_else_plays_is_refused_and_one_that_is_about_to_end_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = small()
    run = finish(plan.cells[0], phase="mint")
    monkeypatch.setattr("pvg.study.playing.ORPHAN_S", 0.3)
    with run.lock(), pytest.raises(StateError, match=rf"cgc-seed-000 is being played by process {os.getpid()}"):
        play(plan, Told())
    monkeypatch.setattr("pvg.study.playing.ORPHAN_S", 20.0)
    held = threading.Event()

    def hold() -> None:
        with run.lock():
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert play(plan, Told())
    thread.join()


# --- evaluations -----------------------------------------------------------------------------------------------------

ATTACKS = [attack(kind, 200, found=False) for kind in ("src", "cgc", "goodhart")]  # of SMALL
EVALUATED = SMALL.replace("seeds = 2", "seeds = 1").replace("threads = 1", 'threads = 1\nevaluate = ["exploit", "tax"]')


def test_a_game_is_evaluated_when_it_is_over_and_again_when_something_else_is_asked_for() -> None:
    plan, told = small(EVALUATED), Told()
    assert play(plan, told)
    assert told.only("train", "evaluate", "complete") == [
        f"{word} {cell.name}" for cell in plan.cells for word in ("train", "evaluate", "complete")
    ]
    said = Path("evaluated.txt").read_text().splitlines()[0].split()
    assert said[:3] == ["cgc-seed-000", "--parts", "exploit,tax"]
    assert "evaluate.samples=8" in said  # all of them: the run's own may be older ones
    other = small(EVALUATED.replace('evaluate = ["exploit", "tax"]', "evaluate = {set = {evaluate.samples = 4}}"))
    assert {progress.status for progress in now(other).values()} == {"played"}
    told = Told()
    assert play(other, told)
    assert told.only("train") == []
    said = Path("evaluated.txt").read_text().splitlines()[-1].split()
    assert "--parts" not in said
    assert "evaluate.samples=4" in said


def test_an_evaluation_gets_the_settings_with_which_it_was_checked() -> None:
    changes = "evaluate = {set = {evaluate.samples = 4, serving.max_num_seqs = 16, telemetry.metrics_port = 9100}}"
    text = EVALUATED.replace('evaluate = ["exploit", "tax"]', changes)
    plan = small(text, overrides=["serving.max_num_seqs=64"])
    assert plan.evaluate is not None
    called = evaluate_command(plan.cells[0], plan.evaluate)
    assert {"serving.max_num_seqs=64", "telemetry.metrics_port=9100", "evaluate.samples=4"} <= set(called)
    assert "serving.max_num_seqs=16" not in called


def test_the_last_round_alone_is_evaluated_and_measured_where_the_study_says_so() -> None:
    measured = EVALUATED.replace('"seconds"', '"steps_to_exploit_src"')
    all_rounds = measured.replace('evaluate = ["exploit", "tax"]', 'evaluate = {parts = ["exploit"]}')
    plan = small(all_rounds.replace("{parts", '{rounds = "last", parts'))
    assert play(plan, Told())
    assert Path("evaluated.txt").read_text().split()[:5] == ["cgc-seed-000", "--parts", "exploit", "--rounds", "1"]
    assert {progress.status for progress in now(plan).values()} == {"complete"}
    found = collect(plan, "").result("cgc", "steps_to_exploit_src")
    assert found.series[0] == [None, MeasuredValue(200.0, censored=True)]
    assert (found.summary.n, [summary.n for summary in found.rounds]) == (1, [0, 1])
    assert found.trend is not None
    assert found.trend.n == 0  # one round rises and falls nowhere
    other = small(all_rounds)
    assert {progress.status for progress in now(other).values()} == {"played"}
    assert other.evaluate is not None
    assert unevaluated(other.cells[0], other.evaluate, 2) == "its evaluation has no exploit of round 0"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"settings": {"samples": 4}}, "other settings"),  # by hand, or the study's file has been changed
        ({"config_hash": "another"}, "of another game"),
        ({"rounds": [round_of(0, *ATTACKS)]}, "no exploit of round 1"),
        ({"rounds": [{**round_of(n, *ATTACKS), "tax": None} for n in range(2)]}, "no tax of round 0"),
        ({"rounds": [round_of(n, *ATTACKS[:1]) for n in range(2)]}, "not all attacks of round 0"),
    ],
)
def test_an_evaluation_that_was_not_asked_for_counts_for_nothing(change: dict[str, object], reason: str) -> None:
    plan = small(EVALUATED)
    assert plan.evaluate is not None
    cell = plan.cells[0]
    finish(cell, {"helpful_accuracy": 0.5}, {"helpful_accuracy": 0.5})
    evaluate(cell, {}, {})
    assert now(plan)[cell.name].status == "complete"
    evaluate(cell, {}, {}, **change)
    assert now(plan)[cell.name].status == "played"
    assert reason in unevaluated(cell, plan.evaluate, 2)


def test_an_evaluation_whose_baseline_diverged_is_complete_without_a_tax() -> None:
    plan = small(EVALUATED.replace('"seconds"', '"legibility_tax"'))
    for cell in plan.cells:
        finish(cell, {"helpful_accuracy": 0.5})
        evaluate(cell, {"tax": None}, baseline={"points": []})
    assert {progress.status for progress in now(plan).values()} == {"complete"}
    assert collect(plan, "").result("cgc", "legibility_tax").series[0] == [None]


def test_detection_must_have_met_the_attackers_that_the_study_asks_for() -> None:
    plan = small(EVALUATED.replace('"tax"', '"detection"'))
    cell = plan.cells[0]
    finish(cell, {"helpful_accuracy": 0.5})
    evaluate(cell, {"detection": detection("base", "attack-src")})
    assert now(plan)[cell.name].status == "played"
    evaluate(cell, {})
    assert now(plan)[cell.name].status == "complete"


def test_an_evaluation_that_fails_keeps_the_game() -> None:
    plan = small(EVALUATED)
    behave(cgc_seed_000="unevaluable")
    assert play(plan, Told())
    found = now(plan)["cgc-seed-000"]
    assert (found.status, found.reason) == ("played", "ended with exit code 3 without output")
    behave()
    told = Told()
    assert play_cells(plan, plan.cells[:1], pvg=PVG, observer=told, stop=told)
    assert told.only("train", "evaluate", "complete") == ["evaluate cgc-seed-000", "complete cgc-seed-000"]


# --- what is there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "done"),
    [
        ({"phase": "mint", "round": 1, "step": 4}, 8),
        ({"phase": "train_verifier", "round": 1, "step": 2}, 10),
        ({"phase": "train_prover", "round": 0, "step": 4}, 7),
        ({"phase": "checkpoint", "round": 1, "step": 0}, 16),
    ],
)
def test_steps_done_are_optimizer_steps(state: dict[str, object], done: int) -> None:
    assert steps_done(small().cells[0], state) == done


def test_a_critic_game_trains_a_judge_before_its_first_verifier() -> None:
    cell = small(SMALL.replace("verifier.steps = 3", "verifier.steps = 3\ngame.protocol = 'critic'")).cells[0]
    phases = ("mint", "train_verifier", "checkpoint")
    assert [steps_done(cell, {"phase": phase, "round": 0}) for phase in phases] == [0, 3, 3 + 3 + 5]
    assert steps_done(cell, {"phase": "checkpoint", "round": 1}) == cell.steps == 3 + 2 * (3 + 5)


def test_an_ensemble_takes_the_steps_of_all_members() -> None:
    cell = small(SMALL.replace("verifier.steps = 3", "verifier.steps = 3\nverifier.ensemble = 'mean'")).cells[0]
    assert cell.steps == 2 * (3 * 3 + 5)
    done = [steps_done(cell, {"phase": phase, "round": 1, "step": 4}) for phase in ("train_verifier", "train_prover")]
    assert done == [14 + 4, 14 + 9 + 4]


def test_cells_with_other_settings_are_refused_with_the_settings() -> None:
    plan = small()
    refuse_other_settings(plan.cells)
    for cell in plan.cells[:2]:
        finish(cell)
    refuse_other_settings(plan.cells)
    refuse_other_settings(small(overrides=["telemetry.stall_s=5"]).cells)  # changes nothing that is computed
    with pytest.raises(StateError) as error:
        refuse_other_settings(small(overrides=["training.steps=6"], threads=2).cells)
    assert "2 cells were played with other settings" in error.value.message
    assert "cgc-seed-000, src-seed-000: models.threads: 1 -> 2; training.steps: 5 -> 6" in error.value.message


def test_a_study_goes_on_with_cells_whose_batches_were_lowered_to_fit_the_memory() -> None:
    cell = small().cells[0]
    lowered = changed(cell.experiment, {"training.micro_batch_tokens": 1024, "rollout.engine.max_rows": 8})
    assert lowered is not None
    finish(replace(cell, experiment=lowered))
    refuse_other_settings(small().cells)
    with pytest.raises(StateError, match="max_rows: 8 -> 256"):
        refuse_other_settings(small(overrides=["rollout.engine.max_rows=256"]).cells)
    with pytest.raises(StateError, match=r"training\.steps: 5 -> 6"):
        refuse_other_settings(small(overrides=["training.steps=6"]).cells)


def test_a_damaged_cell_is_told_as_one() -> None:
    plan = small()
    run = finish(plan.cells[0])
    for file in (run.state, FileStateStore(run.state).previous_path):
        file.write_bytes(b"{")
    found = now(plan)["cgc-seed-000"]
    assert found.status == "damaged"
    assert "not valid JSON" in found.reason


def test_two_processes_do_not_play_one_study() -> None:
    folder = StudyFolder(small().folder)
    again = pytest.raises(UsageError, match=f"'small' is being played by process {os.getpid()}")
    with folder.lock(), again, folder.lock():
        pass
    (folder.path / "experiment.toml").touch()
    with pytest.raises(UsageError, match="is a run, not a study"), folder.lock():
        pass
