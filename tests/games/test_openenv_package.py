"""pvg's client on a server of the real OpenEnv package. Skipped where the package is missing: it
needs 120 others, so `make install` leaves it out. To run it: pip install openenv."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pvg.config.task import OpenEnvTask
from pvg.errors import ConfigurationError
from pvg.games import open_game
from pvg.games.openenv import OpenEnvClient, OpenEnvRefusal
from pvg.tasks.play import OpenEnv

pytest.importorskip("openenv.core.generic_client")


@contextmanager
def real_server(steps: int) -> Iterator[str]:
    """A server of OpenEnv. Its environment asks for the double of a number, `steps` times."""
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Answer(Action):  # type: ignore[misc]
        reply: str

    class Question(Observation):  # type: ignore[misc]
        question: str

    class Doubles(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            self.number, self.left = (seed or 0) % 97, steps
            return Question(question=f"twice {self.number}?")

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            correct = int(action.reply) == 2 * self.number  # raises for a text that is no number
            self.left -= 1
            self.number += 1
            return Question(question=f"twice {self.number}?", reward=0.5 * correct, done=self.left == 0)

        @property
        def state(self) -> Any:
            return State(step_count=steps - self.left)

    app = create_fastapi_app(Doubles, Answer, Question, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            threading.Event().wait(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60.0)


def test_a_server_of_openenv_is_a_task() -> None:
    fields = {"prompt_field": "question", "action_field": "reply", "threshold": 0.5, "sessions": 2}
    with real_server(steps=1) as url:
        with OpenEnv(OpenEnvTask(url=url, problems=10, test_problems=5, **fields)) as task:  # type: ignore[arg-type]
            problems = list(task.problems("train"))
            texts = [str(2 * (problem.metadata["seed"] % 97)) for problem in problems]
            texts[1], texts[2] = "1", "no number"
            grades = task.grade_many(list(zip(problems, texts, strict=True)))
            assert [grade.correct for grade in grades] == [True, False, False] + [True] * 7
            assert not grades[2].well_formed
            assert "EXECUTION_ERROR" in grades[2].note
        section = OpenEnvTask(url=url, problems=10, test_problems=5, prompt_field="question")
        refused = pytest.raises(ConfigurationError, match=r"task\.action_field")
        with OpenEnv(section) as task, refused:
            task.grade(next(task.problems("train")), "1")


def test_a_server_of_openenv_is_a_game() -> None:
    with real_server(steps=3) as url:
        game: Any = open_game(f"openenv:{url}?prompt=question&action=reply")
        state = game.start(game.opening("train", 0))
        first = state.seed % 97
        assert state.shown.prompt == f"twice {first}?"
        states = [state]
        for number in range(3):
            state = game.step(state, {"player": game.parse(state, "player", str(2 * (first + number)))}, seed=0)
            states.append(state)
        assert (game.seats(state), game.values(state)) == ((), {"player": 1.5})
        wrong = game.step(states[1], {"player": game.parse(states[1], "player", "0")}, seed=0)
        assert game.values(wrong) == {"player": 0.5}, "a fork replays the first step"
        failed = game.step(states[1], {"player": game.parse(states[1], "player", "?")}, seed=0)
        assert game.seats(failed) == ()
        assert "EXECUTION_ERROR" in failed.shown.note
        game.close()
        with OpenEnvClient(url) as plain:
            plain.reset(seed=5)
            assert plain.state()["step_count"] == 0
            with pytest.raises(OpenEnvRefusal, match="VALIDATION_ERROR"):
                plain.step({"wrong": 1})
