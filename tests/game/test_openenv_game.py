"""Whole games on a server that speaks OpenEnv's protocol: a task of one step, and an environment of several."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kill_drill import small_experiment

sys.path.insert(0, str(Path(__file__).parent.parent / "games"))
from environment_servers import Counting, TaskEnvironment, served
from small_games import completed

from pvg.config.load import build_experiment
from pvg.game.run import play
from pvg.records import Split
from pvg.store.run_directory import RunDirectory
from pvg.tasks import open_task
from pvg.telemetry.events import PhaseInfo, SilentObserver

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


class SlowCounting(Counting):
    """Once the game has begun, `reset` and `step` reply only after the client's event loop has made another tick."""

    begun = threading.Event()
    ticks = 0  # of the client's event loop
    replies, blocked = 0, 0

    def episode(self) -> SlowCounting:
        return SlowCounting()

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        self.wait()
        return super().reset(data)

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        self.wait()
        return super().step({"message": len(action["message"])})

    def reply(self, reward: float | None) -> dict[str, Any]:
        return super().reply(reward) | {"observation": {"prompt": f"{self.seed % 10}+{self.sum % 10}?"}}

    def wait(self) -> None:
        if not self.begun.is_set():
            return
        before, waits = SlowCounting.ticks, 0
        while SlowCounting.ticks == before and waits < 200:
            threading.Event().wait(0.01)
            waits += 1
        SlowCounting.replies += 1
        SlowCounting.blocked += SlowCounting.ticks == before


class Begins(SilentObserver):
    def phase_started(self, info: PhaseInfo) -> None:
        SlowCounting.begun.set()


def test_a_slow_environment_does_not_block_the_event_loop(tmp_path: Path) -> None:
    data = small_experiment().plain()
    data["game"] |= {"rounds": 1, "test": {"problems": 2, "samples": 1}}
    data["training"] |= {"steps": 1, "groups": 2}
    data["rollout"] |= {"group_size": 2, "max_tokens": 4}

    async def tick() -> None:
        while True:
            SlowCounting.ticks += 1
            await asyncio.sleep(0.001)

    async def work(run: RunDirectory) -> str:
        ticking = asyncio.create_task(tick())
        outcome = await play(experiment, run, observer=Begins(), stop=asyncio.Event(), resume=False)
        ticking.cancel()
        return outcome.status

    with served(SlowCounting()) as server:
        data["task"] = {"kind": "play", "game": f"openenv:{server.url}", "problems": 8, "test_problems": 4}
        data["task"] |= {"references": ["base"], "horizon": 2}
        experiment = build_experiment(data)
        run = RunDirectory.create(tmp_path, "slow", experiment)
        with run.lock():
            assert asyncio.run(work(run)) == "complete"
    assert (SlowCounting.replies > 20, SlowCounting.blocked) == (True, 0)
