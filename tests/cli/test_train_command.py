"""`pvg train` up to the point where the game is called, and from where it returns; the game itself is replaced here."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calling import pvg
from run_samples import begin, commit, played, state, step, tell

from pvg.config.experiment import Experiment
from pvg.config.load import changed
from pvg.errors import MissingRequirementError
from pvg.game.run import GameOutcome
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.events import Observer, PhaseInfo, Progress

Play = Callable[..., Any]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `play` was called with; it tells its observer a little and commits a complete game of one round."""
    made: list[dict[str, Any]] = []

    async def play(
        experiment: Experiment,
        run: RunDirectory,
        *,
        observer: Observer,
        stop: asyncio.Event,
        resume: bool,
        supply: object,
        ranks: object,
    ) -> GameOutcome:
        made.append({"experiment": experiment, "run": run, "resume": resume})
        info = PhaseInfo(0, 1, "train_prover", "steps", 2)
        observer.noticed("hello")
        observer.phase_started(info)
        observer.progressed(Progress(1, {"helpful_accuracy": 0.5}, {"rollout": 0.1}))
        observer.alerted("collapse", "It fell.")
        observer.phase_finished(info, {"helpful_accuracy": 0.75})
        observer.round_finished(0, {"helpful_accuracy": 0.875})
        tell(run, {"kind": "round", "round": 0, "metrics": {"helpful_accuracy": 0.875}})
        commit(run, state("complete", rounds=[{"helpful_accuracy": 0.875}]))
        return GameOutcome("complete", run.path, [{"helpful_accuracy": 0.875}], 1.0)

    monkeypatch.setattr("pvg.game.run.play", play)
    return made


@pytest.mark.slow
def test_the_workers_start_before_this_process_imports_torch() -> None:
    code = (
        "import sys\n"
        "import pvg.workers.choice\n"
        "from pvg_cli.main import app\n"
        "pvg.workers.choice.open_supply = lambda experiment: sys.exit(f'torch: {\"torch\" in sys.modules}')\n"
        "app(['train'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr.splitlines()[-1] == "torch: False"


def test_runs_are_named_after_their_experiment_and_told(calls: list[dict[str, Any]]) -> None:
    called = pvg("train", "-s", "seed=7")
    assert called.code == 0
    (call,) = calls
    assert (call["experiment"].name, call["experiment"].seed, call["resume"]) == ("modchain", 7, False)
    assert call["run"].path == Path("runs/modchain")
    assert RunDirectory(Path("runs/modchain")).experiment() == call["experiment"]
    assert "87.5 %" in called.out
    assert "pvg view modchain" in called.out
    for line in ("hello", "prover begins: 2 steps", "ALERT collapse: It fell.", "round 0 done"):
        assert line in called.err
    again = pvg("train", "--json")
    assert "this run is modchain-2" in again.err
    assert (again.document["status"], again.document["run"]) == ("complete", "modchain-2")
    assert again.document["rounds"] == [{"round": 0, "metrics": {"helpful_accuracy": 0.875}}]
    assert again.document["resume"] is None


# --- stopping and failing --------------------------------------------------------------------------------------------


def replace_play(monkeypatch: pytest.MonkeyPatch, play: Play) -> None:
    monkeypatch.setattr("pvg.game.run.play", play)


def test_a_stopped_run_ends_with_130_and_the_exact_resume_command(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stopped(experiment: Experiment, run: RunDirectory, **_: Any) -> GameOutcome:
        commit(run, state("mint"))
        return GameOutcome("interrupted", run.path, [], 1.0)

    replace_play(monkeypatch, stopped)
    called = pvg("train")
    assert called.code == 130
    assert "pvg train --resume modchain " in called.out
    called = pvg("train", "--json", "-s", "store.root=there")
    assert called.code == 130
    assert called.document["resume"] == "pvg train --resume there/modchain"
    # A resumed run does not record these settings, so the command repeats them.
    given = ["-s", "training.micro_batch_tokens=1024", "-s", "store.commit_every=3"]
    again = "pvg train --resume modchain " + " ".join(given)
    called = pvg("train", "--resume", "modchain", *given)
    assert called.code == 130
    assert again in " ".join(called.out.split())
    assert pvg("train", "--resume", "modchain", *given, "--json").document["resume"] == again
    called = pvg("train", "modchain", "--resume", "modchain", *given[:2], "--cluster", "none", "--json")
    assert called.document["resume"] == f"pvg train modchain --resume modchain --cluster none {' '.join(given[:2])}"


def test_a_run_that_fails_before_its_first_commit_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any, **__: Any) -> GameOutcome:
        raise MissingRequirementError("There is no model.", "make models")

    replace_play(monkeypatch, failing)
    called = pvg("train", "--json")
    assert called.code == 3
    assert called.document["error"]["message"] == "There is no model."
    assert not Path("runs/modchain").exists()


# --- resuming --------------------------------------------------------------------------------------------------------


def unfinished(name: str, /, **settings: Any) -> RunDirectory:
    run = begin(Path("runs"), name, **settings)
    tell(run, step("mint", 1, helpful_accuracy=0.5))
    commit(run, state("mint", step=1))
    return run


def test_resume_takes_the_newest_unfinished_run_with_its_own_settings(calls: list[dict[str, Any]]) -> None:
    unfinished("modchain-2", seed=11)
    played(Path("runs"), "modchain-3")
    unfinished("other", name="other")
    called = pvg("train", "--resume")
    assert called.code == 0
    (call,) = calls
    assert (call["run"].name, call["experiment"].seed, call["resume"]) == ("modchain-2", 11, True)
    assert "Resuming modchain-2." in called.err
    for words in (("--resume=other",), ("--resume", "runs/other")):
        assert pvg("train", *words).code == 0
        assert calls[-1]["run"].name == "other"
        commit(RunDirectory(Path("runs/other")), state("mint", step=1))


def test_resume_may_change_what_bounds_memory(calls: list[dict[str, Any]]) -> None:
    run = unfinished("here")
    own = run.experiment()
    assert pvg("train", "--resume", "here", "-s", "training.micro_batch_tokens=1024").code == 0
    assert calls[0]["experiment"] == changed(own, {"training.micro_batch_tokens": 1024})
    assert run.experiment() == own


def test_resume_refuses_other_settings_and_shows_them(calls: list[dict[str, Any]]) -> None:
    unfinished("here")
    called = pvg("train", "--resume", "here", "-s", "training.steps=9", "-s", "seed=1")
    assert called.code == 2
    assert "seed: 0 -> 1" in called.err
    assert "training.steps: 60 -> 9" in called.err
    assert called.err.rstrip().endswith("pvg train --resume here")
    called = pvg("train", "--resume", "here", "-s", "training.steps=9", "-s", "verifier.micro_batch_tokens=1024")
    assert "verifier.micro_batch_tokens:" not in called.err
    assert called.err.rstrip().endswith("pvg train --resume here -s verifier.micro_batch_tokens=1024")
    assert calls == []


def test_resume_says_that_a_setting_is_wrong_and_not_that_the_run_is_complete(calls: list[dict[str, Any]]) -> None:
    run = played(Path("runs"), "here")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    called = pvg("train", "--resume", "here", "-s", "game.roundz=9")
    assert called.code == 2
    assert "The nearest valid key is 'game.rounds'." in called.err
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert calls == []


def test_a_complete_run_gets_more_rounds(calls: list[dict[str, Any]]) -> None:
    run = played(Path("runs"), "done")
    rounds = run.experiment().game.rounds
    refused = pvg("train", "--resume", "done")
    assert f"To play another round: pvg train --resume done -s game.rounds={rounds + 1}" in refused.err
    called = pvg("train", "--resume", "done", "-s", f"game.rounds={rounds + 1}")
    assert called.code == 0
    assert f"Resuming done. It will have {rounds + 1} rounds." in called.err
    assert calls[0]["experiment"].game.rounds == run.experiment().game.rounds == rounds + 1


def test_a_run_gets_no_rounds_that_were_not_asked_for(calls: list[dict[str, Any]]) -> None:
    """The experiment's file has five rounds; the run was started with one."""
    unfinished("short", game={"rounds": 1})
    called = pvg("train", "modchain", "--resume", "short")
    assert called.code == 2
    assert "game.rounds: 1 -> 5" in called.err
    more = pvg("train", "--resume", "short", "-s", "game.rounds=2", "-s", "seed=5")
    assert "seed: 0 -> 5" in more.err
    assert "game.rounds:" not in more.err
    assert "pvg train --resume short -s game.rounds=2" in more.err
    longer = unfinished("longer", game={"rounds": 2})
    fewer = pvg("train", "--resume", "longer", "-s", "game.rounds=1")
    assert fewer.code == 2
    assert "The run 'longer' has 2 rounds, and cannot get fewer." in fewer.err
    assert longer.experiment().game.rounds == 2
    assert calls == []


@pytest.mark.slow
def test_ones_own_model_and_data_need_no_experiment_file() -> None:
    rows = [json.dumps({"question": f"7+{n % 10}+{n // 10}+1+2", "answer": n % 10}) for n in range(100)]
    Path("sums.jsonl").write_text("\n".join(rows))
    own = (
        "--model",
        "embedded:modchain-prover",
        "--data",
        "sums.jsonl",
        "-s",
        "prompts=tag",
        "-s",
        "rollout.max_tokens=48",
    )
    planned = pvg("train", *own, "--dry-run", "--json")
    assert planned.code == 0, planned.err
    experiment = planned.document["experiment"]
    assert (experiment["name"], experiment["task"]["path"]) == ("own", "sums.jsonl")
    assert {player["source"] for player in (experiment["models"]["prover"], experiment["models"]["verifier"])} == {
        "embedded:modchain-prover"
    }
