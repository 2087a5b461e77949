"""A whole prover-verifier game on a task that another process serves with OpenEnv's protocol."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest
from kill_drill import small_experiment

sys.path.insert(0, str(Path(__file__).parent.parent / "games"))
from environment_servers import TaskEnvironment, served
from small_games import completed

from pvg.config.load import build_experiment
from pvg.records import Split
from pvg.tasks import open_task

pytestmark = pytest.mark.slow

SPLITS: tuple[Split, ...] = ("train", "test")


def test_a_prover_is_trained_and_every_grade_is_that_of_the_task(tmp_path: Path) -> None:
    data = small_experiment().plain()
    data["game"] |= {"rounds": 1, "mint_problems": 12}
    data["verifier"]["steps"] = data["training"]["steps"] = 3
    task = open_task(build_experiment({"task": data["task"]}).task)
    with served(TaskEnvironment(task)) as server:
        data["task"] = {"kind": "openenv", "url": server.url, "problems": 200, "test_problems": 16, "sessions": 2}
        experiment = build_experiment(data)
        run = completed(experiment, tmp_path)
        assert server.sessions == 0, "the task's connections are closed with the run"
    columns = ["question", "text", "correct", "well_formed", "answer", "note"]
    shards = [pa.ipc.open_file(path).read_all().select(columns) for path in sorted(run.rollouts.rglob("*.arrow"))]
    rollouts = [row for shard in shards for row in shard.to_pylist()]
    assert len(rollouts) >= 12 * 4 + 3 * 16
    problems = {problem.question: problem for split in SPLITS for problem in task.problems(split)}
    assert {row["correct"] for row in rollouts} == {True, False}
    for row in rollouts:
        grade = task.grade(problems[row["question"]], row["text"])
        assert (row["correct"], row["well_formed"], row["note"]) == (grade.correct, grade.well_formed, grade.note)
        assert (row["answer"] or "") == (grade.answer or "")
