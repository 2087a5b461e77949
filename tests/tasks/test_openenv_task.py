"""`task.kind = "openenv"`: problems and grades of a server, and environments that are no task."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "games"))
from environment_servers import Refusal, Sums, TaskEnvironment, served

from pvg.config.task import OpenEnvTask
from pvg.errors import ServerUnavailableError
from pvg.tasks.play import OpenEnv


class Foreign:
    """An environment of another project, with the field names of its author: one step, whose reward is a share."""

    def __init__(self, steps: int = 1, prompts: int = 1000, seeded: bool = True, over: bool = False) -> None:
        self.steps, self.prompts, self.seeded, self.over = steps, prompts, seeded, over
        self.resets = 0

    def episode(self) -> Foreign:
        return self

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        self.resets += 1
        self.number = (data["seed"] if self.seeded else self.resets) % self.prompts
        self.left = self.steps
        return {"observation": {"question": f"{self.number}?", "hint": ["x"]}, "reward": None, "done": self.over}

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        if set(action) != {"reply"}:
            raise Refusal("Invalid message")
        if action["reply"] == "boom":
            raise Refusal("could not parse", "EXECUTION_ERROR")
        self.left -= 1
        reward = {"none": None, "half": 0.5, "yes": True}.get(action["reply"], 0.0)
        return {"observation": {"question": ""}, "reward": reward, "done": self.left == 0}


def section(url: str, **settings: Any) -> OpenEnvTask:
    small = {"problems": 6, "test_problems": 4, "prompt_field": "question", "action_field": "reply"}
    return OpenEnvTask(url=url, **{**small, **settings})


@pytest.fixture
def task() -> Iterator[OpenEnv]:
    with served(Foreign()) as server, OpenEnv(section(server.url, threshold=0.5)) as task:
        yield task


def test_a_task_that_pvg_serves_gives_the_grades_of_the_task_itself() -> None:
    own = {"prompt_field": "prompt", "action_field": "message", "sessions": 3}
    with served(TaskEnvironment(Sums())) as server, OpenEnv(section(server.url, **own)) as task:
        problems = list(task.problems("train"))
        assert len({problem.question for problem in [*problems, *task.problems("test")]}) == 10
        assert problems == list(task.problems("train"))
        assert all(problem.answer == "" for problem in problems), "the reference is not known here"
        right = [str(int(problem.question.removesuffix("+1?")) + 1) for problem in problems]
        texts = [right[0], "x", "7777777", "", "\ud800", right[5]]
        grades = task.grade_many(list(zip(problems, texts, strict=True)))
        assert [grade.correct for grade in grades] == [True, False, False, False, False, True]
        assert [grade.well_formed for grade in grades] == [True, False, True, False, False, True]
        assert (grades[0].answer, grades[1].note) == (right[0], "wrong sum")
        again = OpenEnv(section(server.url, **own))
        assert [problem.id for problem in again.problems("train")] == [problem.id for problem in problems]
        again.__exit__()


def test_the_threshold_decides_and_an_error_of_the_environment_is_a_wrong_solution(task: OpenEnv) -> None:
    problem = next(task.problems("train"))
    assert [task.grade(problem, text).correct for text in ("half", "yes", "no", "none")] == [True, True, False, False]
    assert task.grade(problem, "none").note == "the environment gave no reward"
    failed = task.grade(problem, "boom")
    assert (failed.correct, failed.well_formed) == (False, False)
    assert "could not parse" in failed.note
    assert task.grade(problem, "yes").correct


def test_a_server_that_stops_and_one_that_lost_the_session() -> None:
    with served(Foreign()) as server, OpenEnv(section(server.url)) as task:
        problem = next(task.problems("train"))
        server.end_sessions()
        assert task.grade(problem, "yes").correct
    with pytest.raises(ServerUnavailableError, match="No environment answers at"):
        task.grade(problem, "yes")
