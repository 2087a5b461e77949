"""The `GameRules` protocol: games with several players and turns, as pure functions on a state.

    state = game.start(problem)
    while seats := game.seats(state):
        texts = {seat: write(game.prompt(state, seat, Role.HELPFUL)) for seat in seats}
        state = game.step(state, {seat: game.parse(state, seat, text) for seat, text in texts.items()}, seed)
    print(game.values(state))

A state is an immutable, hashable value, so a fork of a game is a reference to its state. pvg.rollout.interaction plays
them with an engine. pvg.games.negotiation is a small example.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import orjson

from pvg.errors import ConfigurationError, ServerUnavailableError, StateError, UsageError
from pvg.extensions import called
from pvg.records import Grade, Problem, Role, Split
from pvg.seeds import seed_for
from pvg.telemetry.catalogue import METRICS

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)

Script = Literal["random", "greedy"]


@dataclass(frozen=True, slots=True)
class Action:
    """What one seat decided. `move` belongs to the game. `text` is its standard written form. `note` says what was
    illegal or could not be read, and what happened instead; it is empty for a legal decision. `cut`: the completion
    reached its length limit (`parse` leaves this to pvg)."""

    move: Any
    text: str
    note: str = ""
    cut: bool = field(default=False, compare=False)
    grade: Grade | None = field(default=None, compare=False)

    @property
    def legal(self) -> bool:
        return not self.note


class Rules(Protocol[S]):
    """Who speaks in an interaction, what each seat reads, and what follows. All methods are pure: equal arguments give
    equal results, and no argument changes."""

    def start(self, problem: Problem) -> S: ...

    def seats(self, state: S) -> Sequence[str]:
        """The seats that decide now, all at once, in a fixed order. Empty if the interaction is over."""

    def prompt(self, state: S, seat: str, role: Role) -> str:
        """The text that the policy reads before it decides for `seat`, which is one of `seats(state)`."""

    def parse(self, state: S, seat: str, text: str) -> Action:
        """The decision in a completion. Takes any text, never raises, and takes time linear in the text."""

    def step(self, state: S, actions: Mapping[str, Action], seed: int) -> S:
        """The next state, given the actions of exactly `seats(state)`. `seed` determines all chance."""


@runtime_checkable
class Dialogue(Protocol[S_contra]):
    """An optional part of rules: the prompt of each turn of a voice continues the exact token ids of its earlier turns,
    and all its turns are one rollout. Without it, each decision has a prompt of its own and is a rollout.

    The first turn of the first voice is a solution: pvg writes its prompt, and the task grades it. At a voice's later
    turns `prompt` is what it reads since its last one, and in a final state what it reads last ("": nothing). If rules
    have an attribute `solvers`, the task grades all turns of the voices that it names, once, as `Action.grade`.
    """

    @property
    def voices(self) -> Sequence[str]:
        """The seats of the policy, in a fixed order."""

    def limit(self, state: S_contra, seat: str) -> int | None:
        """The most tokens of the seat's next turn. None: `rollout.max_tokens`, which also bounds the first turn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What followed from a dialogue: the role and the grade of the solution, and the verifier's score, a logit."""

    role: Role
    grade: Grade
    score: float

    @property
    def votes(self) -> float:
        """The share of the verifier's votes for the solution: the sigmoid of its score."""
        return 0.5 + 0.5 * math.tanh(0.5 * self.score)


@runtime_checkable
class PaysSeats(Protocol[S_contra]):
    """An optional part of a Dialogue, needed with several voices: what they earn."""

    def pay(self, state: S_contra, outcome: Outcome) -> Mapping[str, float]:
        """The reward of each voice, in the final state. `game.reward` pays the first voice if it is never among
        them."""


@runtime_checkable
class MeasuresPlay(Protocol[S_contra]):
    """An optional part of a Dialogue: measures of the final state, as metrics of training and of a round's test."""

    def measures(self, state: S_contra, outcome: Outcome) -> Mapping[str, float]:
        """By name; a metric is the mean over the dialogues in which it is not NaN. Always the same names."""


class GameRules(Rules[S], Protocol[S]):
    """The rules of a game with starts of its own, in which each decision is a rollout."""

    def opening(self, split: Split, number: int) -> Problem:
        """Start number `number` (from 0) of a split. Ids are distinct, also between the splits. The metadata holds what
        `start` needs, as JSON values."""

    def phase(self, state: S) -> str:
        """A short name of the phase, such as "F1902M". Statistics and credit groups use it."""

    def values(self, state: S) -> Mapping[str, float]:
        """What the state is worth to each seat of the game, in a fixed order. Rewards are differences of values."""

    def dump(self, state: S) -> bytes:
        """The state as bytes, for the record of the game."""


@runtime_checkable
class ExplainsRules(Protocol):
    """An optional part of a game: its rules and the form of a decision, as the system message of a chat model
    (`prompts = "chat"` or `"text"`). Other models read the prompt alone."""

    @property
    def instructions(self) -> str: ...


@runtime_checkable
class PlaysByScript(Protocol[S_contra]):
    """An optional part of a game: opponents without a model, as fixed references for a rating."""

    def scripted(self, script: Script, state: S_contra, seat: str, seed: int) -> str:
        """The completion of a script. "random": uniform over the legal decisions. "greedy": the best immediate
        result."""


# `CheckedGame`: a game in a user's file. Its errors name the file and the method.

R = TypeVar("R")


# What the methods of a game return; `seats` and `values` have checks of their own.
RESULTS: dict[str, type] = {
    **{"opening": Problem, "start": object, "phase": str, "prompt": str, "parse": Action},
    **{"step": object, "dump": bytes},
}


LONGEST_TEXT = 1_000_000  # characters


class CheckedGame:
    """The game of `FILE.py:NAME` for the setting `key`. An exception in the user's code and a result of a wrong type
    become a ConfigurationError. Errors of pvg pass through."""

    def __init__(self, key: str, name: str, game: Any) -> None:
        self._key, self._name, self._game = key, name, game
        for method, kind in RESULTS.items():
            setattr(self, method, partial(self._checked, method, kind))
        if isinstance(game, ExplainsRules):
            self.instructions = game.instructions
        if isinstance(game, PlaysByScript):
            self.scripted = partial(self._checked, "scripted", str)

    def seats(self, state: Any) -> Sequence[str]:
        seats = self._called("seats", state)
        if (
            not isinstance(seats, Sequence)
            or isinstance(seats, str)
            or not all(isinstance(each, str) for each in seats)
        ):
            raise self.wrong(f"seats must return a tuple of names, not {seats!r}")
        if len(set(seats)) < len(seats):
            raise self.wrong(f"seats must return each name once, not {seats!r}")
        return seats

    def values(self, state: Any) -> Mapping[str, float]:
        values = self._called("values", state)
        if not isinstance(values, Mapping):
            raise self.wrong(f"values must return a mapping, not {type(values).__name__}")
        if missing := [seat for seat in self.seats(state) if seat not in values]:
            raise self.wrong(f"values must have every seat, but {missing[0]!r} is missing")
        return values

    def _called(self, method: str, *arguments: Any) -> Any:
        return called(self._key, self._name, lambda: getattr(self._game, method)(*arguments), method=method)

    def _checked(self, method: str, kind: type[R], *arguments: Any) -> R:
        found = self._called(method, *arguments)
        if found is None or not isinstance(found, kind):
            wanted = "a state" if kind is object else kind.__name__
            raise self.wrong(f"{method} must return {wanted}, not {type(found).__name__}")
        if isinstance(found, str) and len(found) > LONGEST_TEXT:  # rules without an end may double it each time
            raise self.wrong(f"{method} returned a text of {len(found):,} characters; the most are {LONGEST_TEXT:,}")
        if isinstance(found, str) and found.encode(errors="replace").decode() != found:
            raise self.wrong(f"{method} must return Unicode text, without a lone surrogate, not {found!a}")
        return found

    def wrong(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._key} = {self._name!r}: {what}.", "See docs/research.md for an example.")


class CheckedDialogue(CheckedGame):
    """The rules of a protocol in a user's file, with the same checks. pvg asks for no prompt of the first turn."""

    def __init__(self, key: str, name: str, rules: Any) -> None:
        super().__init__(key, name, rules)
        names = called(key, name, lambda: getattr(rules, "voices", None), method="voices")
        if not isinstance(names, tuple) or not names or len(set(names)) < len(names):
            raise self.wrong(f"voices must be a tuple of names, that of the prover first, not {names!r}")
        if wrong := [name for name in names if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9-]*", name)]:
            raise self.wrong(f"a voice needs a name of small letters, digits and hyphens, not {wrong[0]!r}")
        self.voices: tuple[str, ...] = names
        self.solvers: Sequence[str] = getattr(rules, "solvers", ())
        self._names = dict[str, frozenset[str]]()  # of the first result of a method
        self.prompt = self._heard
        if isinstance(rules, PaysSeats):
            self.pay = self._paid
        elif len(names) > 1:
            raise self.wrong(f"a method `pay` must say what {names[1]!r} earns")
        if isinstance(rules, MeasuresPlay):
            self.measures = self._measured

    def _heard(self, state: Any, seat: str, role: Role) -> str:
        text = self._checked("prompt", str, state, seat, role)
        if not text and seat in self.seats(state):
            raise self.wrong("prompt must return what the prover reads before its next turn, not an empty text")
        return text

    def rendered(self, render: Callable[..., R], *arguments: Any) -> R:
        """`render` of a text of the rules, as token ids."""
        try:
            return render(*arguments)
        except UsageError as error:
            wrong = self.wrong(f"prompt must return what the model can read. {error.message.rstrip('.')}")
            raise ConfigurationError(wrong.message, error.remedy) from None

    def _numbers(self, method: str, *arguments: Any) -> Mapping[str, float]:
        found = self._called(method, *arguments)
        if not isinstance(found, Mapping) or not all(isinstance(value, int | float) for value in found.values()):
            raise self.wrong(f"{method} must return a mapping from names to numbers, not {found!r}")
        return found

    def _always(self, method: str, found: Mapping[str, float]) -> Mapping[str, float]:
        """`found`, if the results of the method always have the same names: a batch is paid and measured together."""
        if (before := self._names.setdefault(method, frozenset(found))) != found.keys():
            names = " and ".join(str(sorted(each)) for each in (before, found))
            raise self.wrong(f"{method} must always return the same names, not {names}")
        return found

    def _measured(self, state: Any, outcome: Outcome) -> Mapping[str, float]:
        found = self._numbers("measures", state, outcome)
        own = ("critic_", "debate_", "consultancy_")  # of pvg.game.voices
        known = (each for each in found if f"train_prover/{each}" in METRICS or f"round/{each}" in METRICS)
        if taken := [each for each in known if not each.startswith(own)]:
            raise self.wrong(f"measures must not have the name of a metric of pvg, such as {taken[0]!r}")
        return self._always("measures", found)

    def _paid(self, state: Any, outcome: Outcome) -> Mapping[str, float]:
        found = self._numbers("pay", state, outcome)
        if wrong := [name for name in found if name not in self.voices or not math.isfinite(found[name])]:
            raise self.wrong(f"pay must return finite numbers for voices, not {found[wrong[0]]} for {wrong[0]!r}")
        if missing := [name for name in self.voices[1:] if name not in found]:
            raise self.wrong(f"pay must return what each voice earns, but {missing[0]!r} is missing")
        return self._always("pay", found)

    def limit(self, state: Any, seat: str) -> int | None:
        limit = self._called("limit", state, seat)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise self.wrong(f"limit must return a number of tokens from 1 on, or None, not {limit!r}")
        return limit


# `ReplayedGame`: an environment that changes with every step, as a `Game` whose states are values.

LIVE = 64  # environments that a game keeps open
LONGEST_MOVE = 20_000  # characters; a longer completion is cut
MOST_MOVES = 10_000
SEED_LIMIT = 2**31  # environments often accept no larger seed

Moves = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """What an environment shows between two moves. `seat` decides next; "" if the game is over. `values` has every seat
    of the game. `note`: why the game ended."""

    seat: str
    prompt: str
    values: tuple[tuple[str, float], ...]
    note: str = ""

    def digest(self) -> str:
        return hashlib.sha256(repr((self.seat, self.prompt, self.values)).encode(errors="replace")).hexdigest()[:16]


class NoRoomError(ServerUnavailableError):
    """An environment cannot be opened, because too many are open already."""


class LostSessionError(ServerUnavailableError):
    """The connection to an environment ended, and with it the environment."""


class SteppedEnvironment(Protocol):
    """`reset` once, then one `step` per move. The seeds determine all chance. Only a broken connection or a wrong
    setting raises; a text never does. `reset` raises NoRoomError if fewer environments must be open first. After a
    LostSessionError the moves are played again in a new environment."""

    def reset(self, seed: int) -> Shown: ...

    def step(self, text: str, seed: int) -> Shown: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReplayedState:
    """`moves`: the text of each move and the seed of its step. `shown` follows from the other fields."""

    seed: int
    moves: Moves
    shown: Shown = field(compare=False, repr=False)


@contextmanager
def _closed_on_error(environment: SteppedEnvironment) -> Iterator[None]:
    try:
        yield
    except BaseException:
        environment.close()
        raise


class ReplayedGame:
    """A `Game`. `open_environment` makes a new environment, which `reset` starts. Threads may share the game: they take
    turns. `waits`: `start` and `step` wait for a server, so an event loop must call them in a thread."""

    def __init__(self, name: str, open_environment: Callable[[], SteppedEnvironment], *, waits: bool = False) -> None:
        self.name, self.waits = name, waits
        self._open = open_environment
        self._live: OrderedDict[ReplayedState, SteppedEnvironment] = OrderedDict()
        self._opener: SteppedEnvironment | None = None
        self._most = LIVE  # lower if no more can be open at once
        self._lock = Lock()

    def opening(self, split: Split, number: int) -> Problem:
        """The question is the first prompt. One environment shows those of all openings."""
        seed = seed_for(0, "opening", self.name, split, number) % SEED_LIMIT
        with self._lock:
            environment, self._opener = self._opener, None
            if environment is None:
                environment, shown = self._started(seed)
            else:
                with _closed_on_error(environment):
                    shown = environment.reset(seed)
            self._opener = environment
        return Problem(f"{self.name}-{split}-{number}", shown.prompt, "", {"seed": seed})

    def start(self, problem: Problem) -> ReplayedState:
        with self._lock:
            seed = int(problem.metadata["seed"])
            environment, shown = self._started(seed)
            return self._keep(ReplayedState(seed, (), shown), environment)

    def seats(self, state: ReplayedState) -> Sequence[str]:
        """One seat at a time: these environments ask their players in turn."""
        return (state.shown.seat,) if state.shown.seat else ()

    def phase(self, state: ReplayedState) -> str:
        return f"move-{len(state.moves)}"

    def prompt(self, state: ReplayedState, seat: str, role: Role) -> str:
        """The environment's own prompt. It is the same for both roles."""
        return state.shown.prompt

    def parse(self, state: ReplayedState, seat: str, text: str) -> Action:
        """The text itself, because only the environment can read it. Its reply to an illegal move is in the next
        prompt."""
        move = text[:LONGEST_MOVE].encode(errors="replace").decode()  # no lone surrogates, which JSON cannot hold
        note = f"cut after {LONGEST_MOVE:,} characters" if len(text) > LONGEST_MOVE else ""
        return Action(move, move, note)

    def step(self, state: ReplayedState, actions: Mapping[str, Action], seed: int) -> ReplayedState:
        """Raises StateError if a replay shows something else than before, and after MOST_MOVES moves."""
        if len(state.moves) >= MOST_MOVES:
            raise StateError(f"{self.name}: the game has {MOST_MOVES:,} moves and did not end.", "Set task.horizon.")
        move = actions[state.shown.seat].move
        with self._lock:
            environment = self._live.pop(state, None) or self._replayed(state)
            try:
                with _closed_on_error(environment):
                    shown = environment.step(move, seed)
            except LostSessionError:
                environment = self._replayed(state)
                with _closed_on_error(environment):
                    shown = environment.step(move, seed)
            return self._keep(ReplayedState(state.seed, (*state.moves, (move, seed)), shown), environment)

    def values(self, state: ReplayedState) -> Mapping[str, float]:
        return dict(state.shown.values)

    def dump(self, state: ReplayedState) -> bytes:
        """JSON. The prompt is not in it, only its digest."""
        data = {"game": self.name, "seed": state.seed, "moves": state.moves, "shown": state.shown.digest()}
        return orjson.dumps(data)

    def close(self) -> None:
        """Close all environments. The game can still be used."""
        with self._lock:
            while self._live:
                self._live.popitem()[1].close()
            if self._opener is not None:
                self._opener.close()
                self._opener = None

    def _replayed(self, state: ReplayedState) -> SteppedEnvironment:
        """A new environment after the moves of the state."""
        environment, shown = self._started(state.seed)
        with _closed_on_error(environment):
            for text, step_seed in state.moves:
                shown = environment.step(text, step_seed)
            if shown != state.shown:
                raise StateError(
                    f"{self.name} showed something else when pvg repeated the same moves with the same seeds.",
                    "Its chance does not depend on the seed, or its version changed. pvg cannot fork or resume such a "
                    "game.",
                )
        return environment

    def _started(self, seed: int) -> tuple[SteppedEnvironment, Shown]:
        """A new environment at its start. If there is no room for it, the least recently used ones are
        closed."""
        while len(self._live) >= self._most:
            self._close_oldest()
        while True:
            environment = self._open()
            try:
                with _closed_on_error(environment):
                    return environment, environment.reset(seed)
            except NoRoomError:
                if not self._close_oldest():
                    raise
                self._most = len(self._live) + 1  # with the new one

    def _close_oldest(self) -> bool:
        """Close an environment that is not in use. False if there is none."""
        oldest, self._opener = (self._live.popitem(last=False)[1], self._opener) if self._live else (self._opener, None)
        if oldest is not None:
            oldest.close()
        return oldest is not None

    def _keep(self, state: ReplayedState, environment: SteppedEnvironment) -> ReplayedState:
        if not state.shown.seat:
            environment.close()
            return state
        before = self._live.pop(state, None)  # the same moves, played twice
        if before is not None:
            before.close()
        self._live[state] = environment
        return state
