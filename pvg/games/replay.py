"""`ReplayedGame`: an environment that changes with every step, as a `Game` whose states are values.

    game = ReplayedGame("textarena:TicTacToe-v0", lambda: TextArenaEnvironment("TicTacToe-v0", 2))
    state = game.start(game.opening("train", 0))

Environments of other projects are objects: they have `reset` and `step`, and no way back. A state is therefore the seed
of the start and the moves since then, with what the environment showed. `step` needs an environment at this state. The
game keeps the latest environments, so a game that is played straight on costs one step of the environment per move. A
fork, or a state that was loaded, replays the moves in a new environment.

Invariant: a replay shows what was shown before. Otherwise the environment has chance that the seed does not determine,
and the game raises StateError.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

import orjson

from pvg.errors import ServerUnavailableError, StateError, shortened
from pvg.games.game import Action
from pvg.records import Problem, Role, Split
from pvg.seeds import seed_for

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


class SteppedEnvironment(Protocol):
    """`reset` once, then one `step` per move. The seeds determine all chance. Only a broken connection or a wrong
    setting raises; a text never does. `reset` raises NoRoomError if fewer environments must be open first."""

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
    turns."""

    def __init__(self, name: str, open_environment: Callable[[], SteppedEnvironment]) -> None:
        self.name = name
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
            environment, shown = self._played(seed, ())
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
            with _closed_on_error(environment):
                shown = environment.step(move, seed)
            return self._keep(ReplayedState(state.seed, (*state.moves, (move, seed)), shown), environment)

    def values(self, state: ReplayedState) -> Mapping[str, float]:
        return dict(state.shown.values)

    def dump(self, state: ReplayedState) -> bytes:
        """JSON. The prompt is not in it, only its digest."""
        data = {"game": self.name, "seed": state.seed, "moves": state.moves, "shown": state.shown.digest()}
        return orjson.dumps(data)

    def load(self, data: bytes) -> ReplayedState:
        """Replays the moves. Raises StateError for bytes that are no state of this game, and if the replay shows
        something else than when the state was dumped."""
        seed, moves, digest = self._read(data)
        with self._lock:
            environment, shown = self._played(seed, moves)
            if shown.digest() != digest:
                environment.close()
                raise not_repeatable(self.name)
            return self._keep(ReplayedState(seed, moves, shown), environment)

    def close(self) -> None:
        """Close all environments. The game can still be used."""
        with self._lock:
            while self._live:
                self._live.popitem()[1].close()
            if self._opener is not None:
                self._opener.close()
                self._opener = None

    def _read(self, data: bytes) -> tuple[int, Moves, str]:
        try:
            found = orjson.loads(data)
            name, seed, digest = found["game"], found["seed"], found["shown"]
            moves = tuple((text, step_seed) for text, step_seed in found["moves"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            raise StateError(f"These bytes are no state of {self.name}.") from None
        if name != self.name:
            raise StateError(f"This state belongs to the game {shortened(str(name))!r}, not to {self.name!r}.")
        seeds = (seed, *(step_seed for _, step_seed in moves))
        if not all(type(number) is int and 0 <= number < 2**63 for number in seeds):
            raise StateError(f"The state of {self.name} has a seed that is no number from 0 to 2^63.")
        if len(moves) > MOST_MOVES or not all(isinstance(text, str) and len(text) <= LONGEST_MOVE for text, _ in moves):
            raise StateError(f"The state of {self.name} has too many or too long moves.")
        return seed, moves, str(digest)

    def _replayed(self, state: ReplayedState) -> SteppedEnvironment:
        environment, shown = self._played(state.seed, state.moves)
        if shown != state.shown:
            environment.close()
            raise not_repeatable(self.name)
        return environment

    def _played(self, seed: int, moves: Moves) -> tuple[SteppedEnvironment, Shown]:
        """A new environment after these moves, and what it shows."""
        environment, shown = self._started(seed)
        with _closed_on_error(environment):
            for text, step_seed in moves:
                if not shown.seat:
                    raise StateError(f"The state of {self.name} has moves after the end of the game.")
                shown = environment.step(text, step_seed)
        return environment, shown

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


def not_repeatable(name: str) -> StateError:
    return StateError(
        f"{name} showed something else when pvg repeated the same moves with the same seeds.",
        "Its chance does not depend on the seed, or its version changed. pvg cannot fork or resume such a game.",
    )
