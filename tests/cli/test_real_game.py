"""The real game through the real commands, as small as it gets: sample, play, report."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest
from calling import SMALL, pvg

from pvg.store.run_directory import RunDirectory

pytestmark = pytest.mark.slow


def test_train_then_report_then_rollout(small_game: Path) -> None:
    shutil.copytree(small_game, "runs")
    document = pvg("report", "modchain", "--json").document
    assert document["status"] == "complete"
    assert [phase["phase"] for phase in document["phases"]] == ["mint", "train_verifier", "train_prover", "checkpoint"]
    assert all(phase["finished"] for phase in document["phases"])
    assert all(example["score"] is not None for example in document["examples"])
    assert pvg("train", "--resume", "modchain").code == 2

    longer = pvg("train", "--resume", "modchain", "-s", "game.rounds=2", "-s", "store.commit_every=3", "--json")
    assert (longer.code, longer.document["status"], len(longer.document["rounds"])) == (0, "complete", 2), longer.err
    kept = RunDirectory(Path("runs/modchain")).experiment()
    assert (kept.game.rounds, kept.store.commit_every) == (2, 10)

    sampled = pvg("rollout", "-n", "2", "--role", "sneaky", "-s", "rollout.group_size=3")
    assert sampled.code == 0, sampled.err
    assert "samples" in sampled.out
    report = pvg("report", "modchain-samples", "--json").document
    assert report["status"] == "samples"
    assert report["phases"][0]["metrics"]["rollouts"] == 6
    assert len(list(Path("runs/modchain-samples/rollouts").glob("*/*.arrow"))) == 1


def test_a_game_on_a_file_of_questions() -> None:
    numbers = product(range(4), repeat=4)
    rows = [f"7+{'+'.join(map(str, others))}?,{(7 + sum(others)) % 10}" for others in numbers]
    Path("sums.csv").write_text("\n".join(["sum,result", *rows]) + "\n")
    task = ["kind=data", "path=sums.csv", "question=sum", "answer=result", "grader=number"]
    # Modular sums, as the embedded models write them: `1+2=3;3+1=4;A4`. The last number is the answer.
    trained = pvg("train", *SMALL, *(word for setting in task for word in ("-s", f"task.{setting}")), "--json")
    assert trained.code == 0, trained.err
    assert trained.err.count("sums.csv has no test file, so pvg tests with about a tenth of its problems: ") == 1
    assert trained.document["rounds"][0]["metrics"]["helpful_accuracy"] > 0.0
