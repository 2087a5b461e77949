"""What an environment server offers: games and tasks of pvg as OpenEnv episodes. Requests and replies are plain data.

    episode = GameEnvironment("negotiation", open_game("negotiation")).episode()
    reply = episode.reset({"seed": 7})              # {"observation": {"prompt": ..., "seat": ...}, "reward": None, ...}
    reply = episode.step({"message": "5"})

An action is {"message": TEXT}, and an observation has the field "prompt", as in OpenEnv's own TextArena environment.

A game asks one seat per step. Seats that decide together are asked one after the other, and none sees what the others
decided. With {"seat": NAME, "opponents": "random" | "greedy"} the client plays one seat, and scripts play the others. A
fork is {"state": TEXT}, with the text from an earlier `state` reply. A task takes one step, and its reward is 1 or 0.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar, get_args

from pvg.errors import PvgError, StateError, shortened
from pvg.games.game import Action, GameRules, PlaysByScript, Script
from pvg.records import Problem, Role, Split
from pvg.seeds import seed_for
from pvg.tasks.task import Task

S = TypeVar("S")

VALIDATION_ERROR, EXECUTION_ERROR = "VALIDATION_ERROR", "EXECUTION_ERROR"
LONGEST_ID = 255  # characters, as in OpenEnv
SEED_LIMIT = 2**31  # of the seeds that pvg draws; a client may send larger ones
MOST_PHASES = 1000  # that scripts play until the client's seat decides

TEXT, NUMBER = {"type": "string"}, {"type": "number"}
NUMBERS = {"type": "object", "additionalProperties": NUMBER}
ACTION_SCHEMA = {
    "title": "Action",
    "type": "object",
    "properties": {"message": TEXT, "metadata": {"type": "object"}},
    "required": ["message"],
    "additionalProperties": False,
}


class BadRequestError(PvgError):
    """A request that an episode refuses. `code` is one of OpenEnv's error codes."""

    def __init__(self, message: str, code: str = VALIDATION_ERROR) -> None:
        super().__init__(message)
        self.code = code


class ServedEpisode(Protocol):
    """One session. Raises BadRequestError for a request that makes no sense; then the episode is as before."""

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]: ...

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]: ...

    def state(self) -> dict[str, Any]: ...


class ServedEnvironment(Protocol):
    name: str
    description: str

    def schema(self) -> dict[str, Any]:
        """The JSON schemas of an action, an observation and a state, as OpenEnv's route /schema gives them."""
        ...

    def episode(self) -> ServedEpisode: ...


# --- games ------------------------------------------------------------------------------------------------------------


class GameEnvironment(Generic[S]):
    """A game. Sessions share it, because states are values."""

    def __init__(self, name: str, game: GameRules[S]) -> None:
        self.name, self._game = name, game
        self.description = f"The game {name} of pvg. Send text as message; the observation says which seat decides."

    def schema(self) -> dict[str, Any]:
        seen = {"prompt": TEXT, "seat": TEXT, "phase": TEXT, "note": TEXT, "values": NUMBERS, "rewards": NUMBERS}
        return _schema(seen, {"game": TEXT, "start": TEXT, "seed": NUMBER, "state": TEXT})

    def episode(self) -> GameEpisode[S]:
        return GameEpisode(self.name, self._game)


class GameEpisode(Generic[S]):
    """One session of a game."""

    def __init__(self, name: str, game: GameRules[S]) -> None:
        self._name, self._game = name, game
        self._playing: _Playing[S] | None = None

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        _only(data, "seed", "episode_id", "split", "state", "seat", "opponents")
        seed, split = _seed(data), _split(data)
        problem = self._game.opening(split, seed)
        state = self._forked(data["state"]) if data.get("state") is not None else self._game.start(problem)
        seat, script = self._opponents(data, state)
        start = "" if data.get("state") is not None else problem.id
        playing = _Playing(self._game, state, seed, start, _episode_id(data), seat, script)
        playing.play_others()
        self._playing = playing
        return playing.reply(None, "")

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        return self._started().step(_message(action))

    def state(self) -> dict[str, Any]:
        playing = self._started()
        return {
            "episode_id": playing.episode_id,
            "step_count": playing.steps,
            "game": self._name,
            "start": playing.start,
            "seed": playing.seed,
            "state": base64.b64encode(self._game.dump(playing.state)).decode(),
            "decided": list(playing.decided),
        }

    def _started(self) -> _Playing[S]:
        if self._playing is None:
            raise BadRequestError("There is no episode yet. Send reset first.", EXECUTION_ERROR)
        return self._playing

    def _forked(self, text: Any) -> S:
        if not isinstance(text, str):
            raise BadRequestError("state must be the text that an earlier state reply has in its field state.")
        try:
            return self._game.load(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            raise BadRequestError("state is not base64.") from None
        except StateError as error:
            raise BadRequestError(str(error)) from None

    def _opponents(self, data: Mapping[str, Any], state: S) -> tuple[str | None, Script]:
        """The client's seat (None: all seats), and the script that plays the others."""
        seat, script = data.get("seat"), data.get("opponents", "random")
        seats = list(self._game.values(state))
        if seat is None:
            if "opponents" in data:
                raise BadRequestError("opponents needs seat: the one seat that you play.")
            return None, "random"
        if seat not in seats:
            raise BadRequestError(f"The game has no seat {shortened(repr(seat))}. Its seats: {', '.join(seats)}.")
        if script not in get_args(Script):
            raise BadRequestError(f"opponents must be one of {', '.join(get_args(Script))}.")
        if not isinstance(self._game, PlaysByScript) and len(seats) > 1:
            raise BadRequestError(f"The game {self._name} has no scripts, so you must play all seats. Leave out seat.")
        return seat, script


class _Playing(Generic[S]):
    """A started episode. `decided`: the actions of this phase so far."""

    def __init__(
        self, game: GameRules[S], state: S, seed: int, start: str, episode_id: str, seat: str | None, script: Script
    ) -> None:
        self.game, self.state, self.seed, self.start, self.episode_id = game, state, seed, start, episode_id
        self.seat, self.script = seat, script
        self.decided: dict[str, Action] = {}
        self.steps = self.phases = 0
        self._before = dict(game.values(state))  # the values of which the client knows

    def step(self, message: str) -> dict[str, Any]:
        waiting = self.waiting()
        if not waiting:
            raise BadRequestError("The episode is over. Send reset.", EXECUTION_ERROR)
        mover = waiting[0]
        action = self.game.parse(self.state, mover, message)
        self.decided[mover] = action
        self.steps += 1
        if len(waiting) == 1:
            self._next_phase()
        self.play_others()
        return self.reply(mover, action.note)

    def waiting(self) -> list[str]:
        """The client's seats that have not decided in this phase."""
        return [seat for seat in self.game.seats(self.state) if self.seat in (None, seat) and seat not in self.decided]

    def play_others(self) -> None:
        """Let the scripts play until the client decides or the game is over."""
        for _ in range(MOST_PHASES):
            if self.waiting() or not self.game.seats(self.state):
                return
            self._next_phase()
        raise BadRequestError(f"The seat {self.seat} did not decide within {MOST_PHASES:,} phases.", EXECUTION_ERROR)

    def reply(self, mover: str | None, note: str) -> dict[str, Any]:
        """The observation of the seat that decides next. `mover`: the seat whose reward this is; None after reset."""
        values = dict(self.game.values(self.state))
        rewards = {seat: value - self._before[seat] for seat, value in values.items()}
        self._before = values
        waiting = self.waiting()
        seat = waiting[0] if waiting else ""
        observation = {
            "prompt": self.game.prompt(self.state, seat, Role.HELPFUL) if waiting else "",
            "seat": seat,
            "phase": self.game.phase(self.state),
            "note": note,
            "values": values,
            "rewards": rewards,
        }
        return {"observation": observation, "reward": rewards[mover] if mover else None, "done": not waiting}

    def _next_phase(self) -> None:
        actions = {seat: self.decided.get(seat) or self._scripted(seat) for seat in self.game.seats(self.state)}
        self.state = self.game.step(self.state, actions, seed_for(self.seed, "step", self.phases))
        self.decided = {}
        self.phases += 1

    def _scripted(self, seat: str) -> Action:
        assert isinstance(self.game, PlaysByScript)  # `reset` refuses other games
        text = self.game.scripted(self.script, self.state, seat, seed_for(self.seed, "script", self.phases, seat))
        return self.game.parse(self.state, seat, text)


# --- tasks ------------------------------------------------------------------------------------------------------------


class TaskEnvironment:
    """A task. Its problems are made when the server starts. The reference answer is never sent."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self._task = name, task
        self.description = f"The task {name} of pvg: one prompt, one answer, reward 1 if it is correct."
        self._problems: dict[Split, list[Problem]] = {split: list(task.problems(split)) for split in get_args(Split)}

    def schema(self) -> dict[str, Any]:
        flag = {"type": "boolean"}
        seen = {"prompt": TEXT, "problem": TEXT, "correct": flag, "well_formed": flag, "answer": TEXT, "note": TEXT}
        return _schema(seen, {"task": TEXT, "problem": TEXT, "seed": NUMBER})

    def episode(self) -> TaskEpisode:
        return TaskEpisode(self.name, self._task, self._problems)


class TaskEpisode:
    """One session of a task. `seed` chooses the problem: number `seed` of the split, counted in a circle."""

    def __init__(self, name: str, task: Task, problems: Mapping[Split, list[Problem]]) -> None:
        self._name, self._task, self._problems = name, task, problems
        self._problem: Problem | None = None
        self._done, self._seed, self._id = True, 0, ""

    def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        _only(data, "seed", "episode_id", "split")
        seed, split, episode_id = _seed(data), _split(data), _episode_id(data)
        problems = self._problems[split]
        if not problems:
            raise BadRequestError(f"The task has no problems in the split {split!r}.")
        self._problem = problems[seed % len(problems)]
        self._done, self._seed, self._id = False, seed, episode_id
        observation = {"prompt": self._problem.question, "problem": self._problem.id}
        return {"observation": observation, "reward": None, "done": False}

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        message = _message(action)
        if self._problem is None or self._done:
            raise BadRequestError("There is no open episode. Send reset first.", EXECUTION_ERROR)
        grade = self._task.grade(self._problem, message)
        self._done = True
        observation = {
            "prompt": "",
            "problem": self._problem.id,
            "correct": grade.correct,
            "well_formed": grade.well_formed,
            "answer": grade.answer or "",
            "note": grade.note,
        }
        return {"observation": observation, "reward": float(grade.correct), "done": True}

    def state(self) -> dict[str, Any]:
        if self._problem is None:
            raise BadRequestError("There is no episode yet. Send reset first.", EXECUTION_ERROR)
        return {
            "episode_id": self._id,
            "step_count": int(self._done),
            "task": self._name,
            "problem": self._problem.id,
            "seed": self._seed,
        }


# --- reading requests -------------------------------------------------------------------------------------------------


def _schema(observation: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    started = {"episode_id": TEXT, "step_count": {"type": "integer"}}
    return {
        "action": ACTION_SCHEMA,
        "observation": {"title": "Observation", "type": "object", "properties": observation},
        "state": {"title": "State", "type": "object", "properties": {**started, **state}},
    }


def _only(data: Mapping[str, Any], *known: str) -> None:
    if unknown := [name for name in data if name not in known]:
        raise BadRequestError(f"reset has no parameter {shortened(repr(unknown[0]))}. Known: {', '.join(known)}.")


def _seed(data: Mapping[str, Any]) -> int:
    """The seed of the request; without one, a new one."""
    seed = data.get("seed")
    if seed is None:
        return secrets.randbelow(SEED_LIMIT)
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise BadRequestError("seed must be a number from 0 to 2^63 - 1.")
    return seed


def _split(data: Mapping[str, Any]) -> Split:
    split = data.get("split", "train")
    if split not in get_args(Split):
        raise BadRequestError(f"split must be one of {', '.join(get_args(Split))}.")
    found: Split = split
    return found


def _episode_id(data: Mapping[str, Any]) -> str:
    found = data.get("episode_id")
    if found is None:
        return secrets.token_hex(8)
    if not isinstance(found, str) or len(found) > LONGEST_ID:
        raise BadRequestError(f"episode_id must be a text of at most {LONGEST_ID} characters.")
    return found


def _message(action: Mapping[str, Any]) -> str:
    """The text of an action. Clients may add `metadata`, which pvg does not use."""
    if unknown := [name for name in action if name not in ("message", "metadata")]:
        raise BadRequestError(f"An action has no field {shortened(repr(unknown[0]))}. It is {{'message': TEXT}}.")
    message = action.get("message")
    if not isinstance(message, str):
        raise BadRequestError("An action must have a text in the field message.")
    return message
