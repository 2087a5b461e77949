"""`pvg evaluate` as a user calls it: what is refused, and the one JSON document."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from calling import pvg
from run_samples import begin, commit, state, tell

from pvg.config.experiment import Experiment
from pvg.errors import UsageError
from pvg.reporting.follow import glance_at, state_of

pytestmark = pytest.mark.slow

LITTLE = [
    word
    for setting in ("problems=4", "samples=2", "attacks=goodhart", "attack_steps=1", "attack_window=1")
    for word in ("-s", f"evaluate.{setting}")
]


def test_what_cannot_be_evaluated_is_refused() -> None:
    begin(Path("runs"), "new")
    assert "has no finished round" in pvg("evaluate", "new").err
    called = pvg("evaluate", "nwe")
    assert called.code == 2
    assert "Did you mean 'new'" in called.err
    called = pvg("evaluate", "new", "--parts", "exploits", "--json")
    assert called.code == 2
    assert "Did you mean 'exploit'" in called.document["error"]["message"]
    assert pvg("evaluate", "new", "--rounds", "x").code == 2


def test_a_run_that_is_evaluated_is_not_running_and_only_settings_that_bound_memory_can_be_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = begin(Path("runs"), "first")
    commit(run, state("train_prover", rounds=[{}], round=1))
    tell(run, {"kind": "round", "round": 0, "metrics": {"fooled_rate": 0.5}})
    tell(run, {"kind": "run", "status": "interrupted", "seconds": 2.0})
    seen = []

    async def look(experiment: Experiment, *_: object, **__: object) -> None:
        seen.append((experiment.training.micro_batch_tokens, glance_at(run).state, state_of(run)))
        raise UsageError("It has looked.")

    monkeypatch.setattr("pvg.evaluation.runner.evaluate", look)
    setting = "training.micro_batch_tokens=512"
    assert "It has looked." in pvg("evaluate", "first", "-s", setting).err
    assert seen == [(512, "stopped", "stopped")]
    called = pvg("evaluate", "first", "-s", setting, "-s", "seed=9", "-s", "rollout.engine.max_rows=64")
    assert called.code == 2
    assert "seed: 0 -> 9" in called.err
    assert "rollout.engine.max_rows: 256 -> 64" in called.err
    assert "512" not in called.err
    with run.lock():
        assert (glance_at(run).state, state_of(run)) == ("running", "running")


def test_train_then_evaluate_then_report(small_game: Path) -> None:
    shutil.copytree(small_game, "runs")
    called = pvg("evaluate", "modchain", "--parts", "exploit,detection", *LITTLE, "--json")
    assert called.code == 0, called.err
    assert re.search(r"about \d.* GB of memory", called.err.partition("begins")[0])  # before anything is sampled
    begun = re.findall(r"(part \d of \d, [\w ]+): (\w+) begins", called.err)
    measured = "part 3 of 3, attacks and measures of round 0"
    assert begun[0] == ("part 1 of 3, samples of the base prover", "sampling")
    assert begun[2:] == [(measured, work) for work in ("sampling", "attack", "sampling", "measuring")]
    found = called.document
    assert found["status"] == found["evaluation"]["status"] == "complete"
    assert found["evaluation"]["rounds"][0]["exploit"][0]["kind"] == "goodhart"
    assert found["path"] == "runs/modchain/evaluation/evaluation.json"
    reported = pvg("report", "modchain", "--json").document
    assert reported["evaluation"] == found["evaluation"]
    text = " ".join(pvg("report", "modchain", "--no-html").out.split())
    assert "New attackers" in text
    assert "fooled rate is the share" in text  # how to read the table
    assert "tax: the accuracy" not in text  # there is no such table
