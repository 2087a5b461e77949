"""`play_games`: plays games of several turns and seats with an engine. Each decision is an ordinary `Rollout`.

    starts = [game_start(game, game.opening("train", number)) for number in range(32)]
    played = await play_games(dispatcher, starts, game, call, encode=encode, forks=Fork(warmup=1, samples=8))

A fork plays `warmup` phases once, and then several continuations from the state that it reached. States are values, so
a fork copies nothing. All games decide their next phase together, and the next phase begins when all
decisions are there: the requests and their order depend only on the arguments, so a run repeats bit by bit. Without it,
each game goes on as soon as its own decisions are there, and the engine batches what the games request at that time.

Invariant: the request seed of a decision depends only on the call's seed, the number of the start, the continuation,
the phase and the seat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from pvg.errors import ConfigurationError
from pvg.games.game import Action, GameRules, PlaysByScript, Script
from pvg.records import Grade, Int32, Problem, Role, Rollout
from pvg.rollout.dispatcher import Dispatcher
from pvg.rollout.engine import GenerationRequest
from pvg.rollout.episodes import GroupOrder, SampleCall, recorded, request_seed
from pvg.seeds import seed_for
from pvg.servers.pool import together

S = TypeVar("S")

# Who decides for a seat in place of the policy: a script of the game, or another policy on its own engine.
Opponent = Script | Dispatcher


@dataclass(frozen=True, slots=True)
class GameStart(Generic[S]):
    """A state to play from. `problem` names it."""

    problem: Problem
    state: S


def game_start(game: GameRules[S], problem: Problem) -> GameStart[S]:
    return GameStart(problem, game.start(problem))


@dataclass(frozen=True, slots=True)
class Fork:
    """`warmup` phases are played once, then `samples` continuations of at most `horizon` phases (None: to the end).

    `seat`: the warmup goes on until this seat decides (None: any seat). If the game ends during the warmup, the
    continuations begin at the last state in which it decides.
    """

    warmup: int = 0
    samples: int = 1
    horizon: int | None = None
    seat: str | None = None


WHOLE_GAME = Fork()


@dataclass(frozen=True, slots=True)
class SeatDecision(Generic[S]):
    """What one seat decided in `state`. `number`: of the phase, from 0 at the start. `rollout`: None for a script.
    `batch`: the number of decisions that were requested together: by all games in step, else by this game."""

    seat: str
    number: int
    phase: str
    state: S
    action: Action
    rollout: Rollout | None
    batch: int


@dataclass(frozen=True, slots=True)
class PlayedGame(Generic[S]):
    """One continuation. `fork`: the number of phases before the fork. `states[k]` is the state before phase k, and
    `states[-1]` the last one. `decisions`: ordered by phase and seat, with those before the fork."""

    start: GameStart[S]
    sample: int
    fork: int
    states: tuple[S, ...]
    decisions: tuple[SeatDecision[S], ...]
    ended: Literal["over", "horizon"]


@dataclass(slots=True, eq=False)
class _Table(Generic[S]):
    """A game in progress. `until`: the number of phases after which it ends, but not before the seat `waits_for`
    decides; None: never."""

    start: GameStart[S]
    number: int
    opponents: Mapping[str, Opponent]
    states: list[S]
    sample: int = 0
    fork: int = 0
    until: int | None = None
    waits_for: str | None = None
    decisions: list[SeatDecision[S]] = field(default_factory=list)

    @property
    def phase(self) -> int:
        return len(self.states) - 1


@dataclass(slots=True)
class _Hall(Generic[S]):
    """What all games of a call share. `bounds`: the bound on the requests of each dispatcher."""

    game: GameRules[S]
    policy: Dispatcher
    call: SampleCall
    encode: Callable[[str], Int32]
    seats: Sequence[str]
    bounds: dict[int, asyncio.Semaphore] = field(default_factory=dict)

    # --- one phase ----------------------------------------------------------------------------------------------------

    async def play_phase(self, tables: Sequence[_Table[S]]) -> None:
        """All decisions of the next phase of `tables`, then its results."""
        due = [(table, seat) for table in tables for seat in self.game.seats(table.states[-1])]
        by_dispatcher: dict[int, tuple[Dispatcher, list[tuple[_Table[S], str]]]] = {}
        found: dict[tuple[int, str], SeatDecision[S]] = {}
        for table, seat in due:
            opponent = table.opponents.get(seat, self.policy)
            if isinstance(opponent, Dispatcher):
                by_dispatcher.setdefault(id(opponent), (opponent, []))[1].append((table, seat))
            else:
                found[id(table), seat] = self.scripted(table, seat, opponent)
        # One engine after the other, so that none changes the batches of another.
        for dispatcher, asked in by_dispatcher.values():
            bound = self.bounds.setdefault(id(dispatcher), asyncio.Semaphore(dispatcher.concurrency))
            decided = await together([self.decide(t, seat, dispatcher, bound, len(asked)) for t, seat in asked])
            for (table, seat), decision in zip(asked, decided, strict=True):
                found[id(table), seat] = decision
        for table in tables:
            self.advance(table, [found[id(table), seat] for seat in self.game.seats(table.states[-1])])

    async def decide(
        self, table: _Table[S], seat: str, dispatcher: Dispatcher, bound: asyncio.Semaphore, batch: int
    ) -> SeatDecision[S]:
        game, call, state = self.game, self.call, table.states[-1]
        prompt = game.prompt(state, seat, Role.HELPFUL)
        problem = replace(table.start.problem, question=prompt)
        order = GroupOrder(problem, Role.HELPFUL, self.encode(prompt), table.number, 1)
        rollout_id = f"{call.rollout_id(order, table.sample)}/{table.phase:03d}-{seat}"
        seed = request_seed(call.seed, table.number, table.sample, 1 + self._turn(table, seat))
        request = GenerationRequest(rollout_id, order.prompt_ids, dispatcher.sampling, seed, group=table.number)
        async with bound:
            completion = await dispatcher.engine.generate(request)
        text = dispatcher.grader.text(completion)
        action = game.parse(state, seat, text)
        grade = Grade(action.legal, action.legal, action.text, action.note)
        rollout = recorded(order, call, rollout_id, completion, text, grade)
        return SeatDecision(seat, table.phase, game.phase(state), state, action, rollout, batch)

    def scripted(self, table: _Table[S], seat: str, script: Script) -> SeatDecision[S]:
        game, state = self.game, table.states[-1]
        assert isinstance(game, PlaysByScript), "play_games checks this"
        seed = seed_for(self.call.seed, "script", table.number, table.sample, table.phase, seat)
        action = game.parse(state, seat, game.scripted(script, state, seat, seed))
        return SeatDecision(seat, table.phase, game.phase(state), state, action, None, 1)

    def advance(self, table: _Table[S], decisions: Sequence[SeatDecision[S]]) -> None:
        state = table.states[-1]
        seed = seed_for(self.call.seed, "chance", table.number, table.sample, table.phase)
        after = self.game.step(state, {decision.seat: decision.action for decision in decisions}, seed)
        table.decisions += decisions
        table.states.append(after)

    def _turn(self, table: _Table[S], seat: str) -> int:
        return table.phase * len(self.seats) + self.seats.index(seat)

    # --- whole games --------------------------------------------------------------------------------------------------

    def ending(self, table: _Table[S]) -> Literal["over", "horizon"] | None:
        seats = self.game.seats(table.states[-1])
        if not seats:
            return "over"
        if table.until is not None and table.phase >= table.until and table.waits_for in (None, *seats):
            return "horizon"
        return None

    async def play_out(self, tables: Sequence[_Table[S]]) -> None:
        """Play all tables to their ends, in step."""
        while live := [table for table in tables if self.ending(table) is None]:
            await self.play_phase(live)

    def continuations(self, table: _Table[S], fork: Fork) -> list[_Table[S]]:
        """The tables of a fork, from a table after its warmup."""
        states, decisions = list(table.states), list(table.decisions)
        while len(states) > 1 and not self.decides(table.waits_for, states[-1]):
            states.pop()
            decisions = [decision for decision in decisions if decision.number < len(states) - 1]
        phase = len(states) - 1
        return [
            replace(
                table,
                states=list(states),
                decisions=list(decisions),
                sample=sample,
                fork=phase,
                until=None if fork.horizon is None else phase + fork.horizon,
                waits_for=None,
            )
            for sample in range(fork.samples)
        ]

    def decides(self, seat: str | None, state: S) -> bool:
        seats = self.game.seats(state)
        return bool(seats) if seat is None else seat in seats

    def played(self, table: _Table[S]) -> PlayedGame[S]:
        ended = self.ending(table)
        assert ended is not None
        return PlayedGame(table.start, table.sample, table.fork, tuple(table.states), tuple(table.decisions), ended)


async def play_games(
    dispatcher: Dispatcher,
    starts: Sequence[GameStart[S]],
    game: GameRules[S],
    call: SampleCall,
    *,
    encode: Callable[[str], Int32],
    forks: Fork | Sequence[Fork] = WHOLE_GAME,
    opponents: Sequence[Mapping[str, Opponent]] | None = None,
) -> list[list[PlayedGame[S]]]:
    """Play the continuations of each start: `forks[n].samples` games for `starts[n]`.

    `encode`: the token ids of a prompt, int32 [P]. `opponents[n]`: who decides for some seats of start n in place of
    the policy of `dispatcher`. A rollout has the id `{prefix}/{start:05d}/{sample:02d}/{phase:03d}-{seat}`, the number
    of its start as its group, the prompt as its question, and a grade that is correct if the decision is legal.

    Raises ConfigurationError if a script should play a game that has none, and what the engine raises.
    """
    each = [forks] * len(starts) if isinstance(forks, Fork) else list(forks)
    against: Sequence[Mapping[str, Opponent]] = [{}] * len(starts) if opponents is None else opponents
    if len(each) != len(starts) or len(against) != len(starts):
        raise ValueError("play_games needs one fork and one mapping of opponents for each start")
    _check_scripts(game, against)
    seats = list(game.values(starts[0].state)) if starts else []
    hall = _Hall(game, dispatcher, call, encode, seats)
    tables = [
        _Table(start, number, against[number], [start.state], until=each[number].warmup, waits_for=each[number].seat)
        for number, start in enumerate(starts)
    ]
    await hall.play_out(tables)
    groups = [hall.continuations(table, fork) for table, fork in zip(tables, each, strict=True)]
    await hall.play_out([table for group in groups for table in group])
    return [[hall.played(table) for table in group] for group in groups]


def _check_scripts(game: GameRules[Any], opponents: Sequence[Mapping[str, Opponent]]) -> None:
    scripts = {other for each in opponents for other in each.values() if not isinstance(other, Dispatcher)}
    if scripts and not isinstance(game, PlaysByScript):
        raise ConfigurationError(
            f"{type(game).__name__} has no scripts, so {sorted(scripts)[0]!r} cannot play it.",
            "Give the game a method `scripted` (pvg.games.game.PlaysByScript), or let the policy play all seats.",
        )


# A played game as a plain record of metrics.jsonl, with everything that `pvg report` needs to show it phase by
# phase.

MOST_STATE_BYTES = 2**20  # of all states of a record; a state that lists all moves grows with the game


@dataclass(frozen=True, slots=True)
class SeatRecord:
    """What one seat decided: `text` in the game's standard form, and a `note` on what was illegal."""

    seat: str
    text: str
    note: str


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A phase: its name, the state before it as `GameRules.dump` writes it (in hex; empty beyond
    MOST_STATE_BYTES), and the value of each seat."""

    phase: str
    state: str
    values: Mapping[str, float]
    decisions: Sequence[SeatRecord]


@dataclass(frozen=True, slots=True)
class GameRecord:
    """`game`: its name in the settings. `start`: the id of its start. `players`: who plays each seat. `phases`: those
    that were played; the last entry is the final state, without a name and without decisions."""

    round: int
    game: str
    start: str
    players: Mapping[str, str]
    ended: str
    phases: Sequence[PhaseRecord]

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> GameRecord:
        """The record that `plain` wrote. Raises KeyError or TypeError for another mapping."""
        phases = [
            PhaseRecord(p["phase"], p["state"], p["values"], [SeatRecord(**seat) for seat in p["decisions"]])
            for p in plain["phases"]
        ]
        found = {name: plain[name] for name in ("round", "game", "start", "players", "ended")}
        return cls(**found, phases=phases)


def game_record(
    round_: int, name: str, game: GameRules[Any], played: PlayedGame[Any], players: Mapping[str, str]
) -> GameRecord:
    """The record of a game, from its start. `players`: seat -> "policy", "random", "greedy" or "base"."""
    decisions: dict[int, list[SeatRecord]] = {}
    names: dict[int, str] = {}
    for decision in played.decisions:
        names[decision.number] = decision.phase
        seat = SeatRecord(decision.seat, decision.action.text, decision.action.note)
        decisions.setdefault(decision.number, []).append(seat)
    phases, left = [], MOST_STATE_BYTES
    for number, state in enumerate(played.states):
        dump = game.dump(state) if left > 0 else b""
        left -= len(dump)
        written = dump.hex() if left >= 0 else ""
        values = dict(game.values(state))
        phases.append(PhaseRecord(names.get(number, ""), written, values, decisions.get(number, [])))
    return GameRecord(round_, name, played.start.problem.id, dict(players), played.ended, phases)
