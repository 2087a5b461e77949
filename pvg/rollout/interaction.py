"""The interaction engine: plays the rules of games and protocols with an engine, and records what was sampled.

Rules (pvg.games.game) say who decides in a state, what each seat reads, and what follows. A decision is a request to
the one who decides for the seat: the policy, another policy, a script, or a function that decides for all waiting
interactions at once. All interactions of a call take their next phase together, and the next phase begins when all
decisions are there. So the requests and their order depend only on the arguments, and a run repeats bit by bit.

In Diplomacy and negotiation, every decision is a rollout with its own prompt. In a `Dialogue`, every voice has one
rollout: the prompt of a turn is the exact token ids of everything before it. No text is tokenized twice, so log-probs
stay exact, and a server's prefix cache contains everything except what the voice heard.

A deadline applies to one phase: its clock starts with the phase's first request. An interaction that it cuts is dropped
as a whole. A fork plays `warmup` phases once, and then several continuations from the state that it reached.

Invariants:
- The request seed of a decision depends only on the call's seed and the decision's place: group, sample, phase, seat.
- The turns of a rollout, concatenated, are its completion.
- `Rollout.sampled_mask` is True exactly for tokens that an engine sampled.
- Each token's version is the engine's version when the token was sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from pvg.errors import ConfigurationError
from pvg.games.game import Action, Dialogue, GameRules, PlaysByScript, Rules, Script
from pvg.records import Float32, Grade, Group, Int32, Problem, Role, Rollout, Timing, Turn, VersionSpan
from pvg.rollout.engine import Completion, Engine, GenerationRequest, Sampling
from pvg.rollout.gathering import Deadline, Grader, GroupOrder, GroupSampling, all_or_none, gatherings_of, request_seed
from pvg.seeds import seed_for
from pvg.tasks.answers import same_answer

S = TypeVar("S")

# --- who decides ------------------------------------------------------------------------------------------------------


class Policy(Protocol):
    """A model with its engine: a Dispatcher (pvg.rollout.dispatcher imports this module)."""

    engine: Engine
    concurrency: int
    grader: Grader
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Ask(Generic[S]):
    """What a Speaker knows of an interaction. The role is left out, because the verifier reads what a Speaker says.
    `said`: the token ids of the first voice so far, int32 [C]."""

    id: str
    problem: Problem
    state: S
    said: Int32


# Decides for a seat in all interactions that wait for it. Each text may depend only on its own interaction.
Speaker = Callable[[Sequence[Ask[Any]]], Awaitable[Sequence[str]]]
Decider = Script | Speaker | Policy


class Talk(NamedTuple):
    """What was said in an interaction so far: the seats and their actions, in order."""

    problem: Problem
    said: tuple[tuple[str, Action], ...] = ()


class Direct:
    """The rules of one decision, a solution of the problem, and the base of rules with more turns (`Dialogue`)."""

    voices: Sequence[str] = ("prover",)

    def start(self, problem: Problem) -> Talk:
        return Talk(problem)

    def seats(self, state: Talk) -> Sequence[str]:
        return () if state.said else self.voices

    def prompt(self, state: Talk, seat: str, role: Role) -> str:
        return ""

    def parse(self, state: Talk, seat: str, text: str) -> Action:
        return Action(text, text)

    def step(self, state: Talk, actions: Mapping[str, Action], seed: int) -> Talk:
        return state._replace(said=(*state.said, *actions.items()))

    def limit(self, state: Talk, seat: str) -> int | None:
        return None


def _unwritten(*_: Any) -> Any:
    raise AssertionError("these rules have prompts, so their Interaction must write them")


@dataclass(frozen=True, slots=True)
class Interaction(Generic[S]):
    """Rules, how their texts become tokens, and who decides for some seats in place of the policy.

    `encode`: the token ids of a prompt that begins a rollout, int32 [P]. `turn`: what a voice hears, as token ids
    int32 [O] and as text for readers; its second argument is True for what the voice hears last, without an answer.
    `room`: the most tokens of a rollout after its first turn; None: the rules limit it. An interaction ends before what
    no longer fits. The script "greedy" decides for the other seats of a Dialogue.
    """

    rules: Rules[S]
    encode: Callable[[str], Int32] = _unwritten
    turn: Callable[[str, bool], tuple[Int32, str]] = _unwritten
    deciders: Mapping[str, Decider] = field(default_factory=dict)
    room: int | None = None


DIRECT: Interaction[Any] = Interaction(Direct())


@dataclass(frozen=True, slots=True)
class SampleCall:
    """What all rollouts of one call share.

    - `deadline`: stragglers are cancelled in the engine and left out. With a deadline for the whole batch, a group may
      end up empty.
    - `gate` replaces the call's own bound on the requests in flight.
    - `interaction`: what `Dispatcher.sample` plays.
    - `reference`: rollouts need `reference_logprobs`, which the engine must give.
    """

    round: int
    source: str
    step: int
    seed: int
    prefix: str
    deadline: Deadline | None = None
    gate: AbstractAsyncContextManager[None] | None = None
    interaction: Interaction[Any] = DIRECT
    reference: bool = False

    def rollout_id(self, order: GroupOrder, index: int) -> str:
        return f"{self.prefix}/{order.group:05d}/{index:02d}"


# --- games and their forks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GameStart(Generic[S]):
    """A state to play from. `problem` names it."""

    problem: Problem
    state: S


def game_start(game: Rules[S], problem: Problem) -> GameStart[S]:
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
    """What one seat decided in `state`. `number`: of the phase, from 0 at the start. `rollout`: None without a model,
    and in a Dialogue. `batch`: the number of decisions that were requested together."""

    seat: str
    number: int
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


# --- one rollout ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Line:
    """A rollout of `seat` while it is sampled: `completions`, `texts`, and what was `heard` after each, from whom.
    `seed_number`: distinguishes its first request from others of the interaction. `rollout` needs a `grade`."""

    id: str
    order: GroupOrder
    seat: str = "prover"
    seed_number: int = 0
    completions: tuple[Completion, ...] = ()
    texts: tuple[str, ...] = ()
    heard: tuple[tuple[Int32, str, str], ...] = ()
    grade: Grade | None = None

    def tokens(self) -> list[Int32]:
        """The token ids of all turns so far, in order."""
        found: list[Int32] = []
        for turn, completion in enumerate(self.completions):
            found += [completion.token_ids, *(ids for ids, _, _ in self.heard[turn : turn + 1])]
        return found

    def request(self, call: SampleCall, sample: int, sampling: Sampling, **options: Any) -> GenerationRequest:
        """For the next turn in sample `sample` of the order. `options`: other fields of the request."""
        turn, prompt_ids, group = len(self.completions), self.order.prompt_ids, self.order.group
        if turn:
            prompt_ids = np.concatenate([prompt_ids, *self.tokens()])
        seed = request_seed(call.seed, group, sample, self.seed_number + turn)
        options["group"] = group
        return GenerationRequest(f"{self.id}/{turn}" if turn else self.id, prompt_ids, sampling, seed, **options)

    def left(self, room: int) -> int:
        """The tokens left of `room` for all turns after the first; negative if what was heard last does not fit."""
        return room - sum(map(len, self.tokens()[1:]))

    def say(self, completion: Completion, text: str, grade: Grade | None = None) -> None:
        self.completions, self.texts = (*self.completions, completion), (*self.texts, text)
        self.grade = self.grade or grade

    def rollout(self, call: SampleCall) -> Rollout:
        order, grade, first = self.order, self.grade, self.completions[0]
        assert grade is not None
        tokens, spans, turns, start = self.tokens(), list[VersionSpan](), list[Turn](), 0
        for place, ids in enumerate(tokens):
            number, heard = divmod(place, 2)
            if not heard:
                shifted = [replace(span, start=start + span.start) for span in self.completions[number].spans]
                spans += [span for span in shifted if not spans or span.version != spans[-1].version]
            _, text, seat = self.heard[number] if heard else (ids, self.texts[number], self.seat)
            turns.append(Turn(start, not heard, text, seat))
            start += len(ids)
        single, times = len(tokens) == 1, [completion.timing for completion in self.completions]

        def of_all(of_turns: Sequence[Float32]) -> Float32:  # with 0 for what was heard
            parts = [np.zeros(len(ids), dtype=np.float32) for ids in tokens]
            parts[::2] = of_turns
            return of_turns[0] if single else np.concatenate(parts)

        references = [each.reference_logprobs for each in self.completions if each.reference_logprobs is not None]
        return Rollout(
            id=self.id,
            problem_id=order.problem.id,
            question=order.problem.question,
            reference=order.problem.answer,
            role=order.role,
            round=call.round,
            source=call.source,
            step=call.step,
            group=order.group,
            prompt_ids=order.prompt_ids,
            completion_ids=first.token_ids if single else np.concatenate(tokens),
            logprobs=of_all([completion.logprobs for completion in self.completions]),
            spans=first.spans if single else tuple(spans),
            finish_reason=first.finish_reason,  # of the solution, which is graded
            text="".join(turn.text for turn in turns),
            grade=grade,
            timing=Timing(sum(each.queued_s for each in times), sum(each.service_s for each in times)),
            routed_experts=first.routed_experts if len(self.completions) == 1 else None,
            solver=order.solver,
            kept_answer=None if order.solver is None else same_answer(grade.answer, order.solver.answer),
            turns=() if single else tuple(turns),
            reference_logprobs=of_all(references) if references else None,
        )


# --- one table --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Table(Generic[S]):
    """An interaction in progress. `group`: the place of its group. `until`: the number of phases after which it ends,
    but not before the seat `waits_for` decides; None: never. `pending`: the decisions of the current phase. `lines`:
    the rollouts of a Dialogue's voices. `cut`: by a deadline. `full`: no room is left for another turn."""

    start: GameStart[S]
    order: GroupOrder
    group: int
    deciders: Mapping[str, Decider]
    states: list[S]
    sample: int = 0
    fork: int = 0
    until: int | None = None
    waits_for: str | None = None
    decisions: list[SeatDecision[S]] = field(default_factory=list)
    pending: dict[str, SeatDecision[S]] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)
    cut: bool = False
    full: bool = False

    @property
    def phase(self) -> int:
        return len(self.states) - 1


@dataclass(slots=True)
class _TableGroup(Generic[S]):
    """The tables of one order or start that no deadline cut. The other fields: see Group."""

    tables: list[_Table[S]]
    spread_s: float = 0.0
    cancelled: int = 0
    lost_tokens: int = 0

    def drop(self, table: _Table[S], sampled_tokens: int) -> None:
        """Give up a table that was cut after `sampled_tokens` tokens of its current turn."""
        before = (len(completion.token_ids) for line in table.lines.values() for completion in line.completions)
        self.lost_tokens += sampled_tokens + sum(before)
        self.cancelled += 1
        self.tables.remove(table)
        table.cut = True


MOST_PHASES = 200  # of a Dialogue
MOST_TURNS = 10**6  # of a voice; keeps the request seeds of two voices apart
TABLES_AT_A_TIME = 256  # handled per turn of the event loop: a few milliseconds of work
GROUPS_AT_A_TIME = 32  # likewise


@dataclass(slots=True)
class _Hall(Generic[S]):
    """What all tables of a call share. `seats`: those of a game, in order. `bounds`: the bound on the requests of each
    policy."""

    interaction: Interaction[S]
    policy: Policy
    call: SampleCall
    groups: list[_TableGroup[S]]
    seats: Sequence[str] = ()
    bounds: dict[int, AbstractAsyncContextManager[Any]] = field(default_factory=dict)
    dialogue: Dialogue[S] | None = field(init=False)
    voices: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        rules = self.interaction.rules
        self.dialogue = rules if isinstance(rules, Dialogue) else None
        self.voices = () if self.dialogue is None else self.dialogue.voices

    # --- one phase ----------------------------------------------------------------------------------------------------

    async def play_phase(self, tables: Sequence[_Table[S]]) -> None:
        """All decisions of the next phase of `tables`, then its results."""
        rules, waiting = self.interaction.rules, dict[int, tuple[Decider, list[tuple[_Table[S], str]]]]()
        for table in tables:
            for seat in rules.seats(table.states[-1]):
                silent = self.voices and seat not in self.voices
                decider = table.deciders.get(seat, "greedy" if silent else self.policy)
                waiting.setdefault(id(decider), (decider, []))[1].append((table, seat))
        for decider, asked in waiting.values():  # one after the other, so that none changes the batches of another
            if isinstance(decider, str):
                texts: Sequence[str] = [self.scripted(table, seat, decider) for table, seat in asked]
            elif callable(decider):
                texts = await decider([self.asked(table) for table, _ in asked])
            else:
                await self.sample(decider, asked)
                continue
            for (table, seat), text in zip(asked, texts, strict=True):
                self.decided(table, seat, rules.parse(table.states[-1], seat, text))
        for place, table in enumerate(tables):
            if not (table.cut or table.full):
                await asyncio.to_thread(self.advance, table) if getattr(rules, "waits", False) else self.advance(table)
            if place % TABLES_AT_A_TIME == TABLES_AT_A_TIME - 1:
                await asyncio.sleep(0)

    async def sample(self, policy: Policy, asked: Sequence[tuple[_Table[S], str]]) -> None:
        """The decisions of `policy`. Drops the tables that the deadline cuts."""
        bound = self.bounds.setdefault(id(policy), asyncio.Semaphore(policy.concurrency))  # first come, first served
        due: list[list[tuple[_Table[S], str]]] = [[] for _ in self.groups]
        for table, seat in asked:
            due[table.group].append((table, seat))
        gatherings = gatherings_of(len(self.groups), self.call.deadline)
        for group, own, gathering in zip(self.groups, due, gatherings, strict=True):
            if gathering.watch is not None:
                gathering.watch.count(len(group.tables) - len({id(table) for table, _ in own}))

        def start(gathering: GroupSampling, own: Sequence[tuple[_Table[S], str]], tasks: asyncio.TaskGroup) -> int:
            decisions = (partial(self.decide, table, seat, policy, len(asked)) for table, seat in own)
            return gathering.start((gathering.admitted(n, bound, each) for n, each in enumerate(decisions)), tasks)

        try:
            await all_or_none(partial(start, *each) for each in zip(gatherings, due, strict=True))
        finally:
            for watch in filter(None, (gathering.watch for gathering in gatherings)):
                watch.stop()
        for number, (group, own, gathering) in enumerate(zip(self.groups, due, gatherings, strict=True)):
            cut = gathering.cut
            for place, task in enumerate(gathering.tasks):
                if place in cut and not own[place][0].cut:
                    group.drop(own[place][0], gathering.sampled_tokens.get(place, 0))
                elif place not in cut:
                    task.result()  # raises if it was cancelled by anything but the deadline
            group.spread_s += gathering.spread_s
            gathering.tasks.clear()  # 32,000 tasks freed at once would block the event loop for 60 ms
            if number % GROUPS_AT_A_TIME == GROUPS_AT_A_TIME - 1:
                await asyncio.sleep(0)

    async def decide(
        self,
        table: _Table[S],
        seat: str,
        policy: Policy,
        batch: int,
        leave: Callable[[], Awaitable[None]],
        tell: Callable[[int], None] | None,
    ) -> None:
        """Calls `leave` before grading, so that grading does not affect which request the engine gets next, or when."""
        line, state, room, grade = self.line(table, seat), table.states[-1], self.interaction.room, None
        sampling, grader, rules = policy.sampling, policy.grader, self.interaction.rules
        most = sampling.max_tokens
        if self.dialogue is not None and (limit := self.dialogue.limit(state, seat)) is not None:
            most = limit if line.completions else min(limit, most)  # pvg plans max_tokens for first turns
        if room is not None and line.completions:
            most = min(most, line.left(room))
            if most < 1:
                line.heard, table.full = line.heard[:-1], True
                return
        if most != sampling.max_tokens:  # rows with one object for all are sent to workers in less time
            sampling = replace(sampling, max_tokens=most)
        request = line.request(self.call, table.sample, sampling, on_tokens=tell)
        completion = await policy.engine.generate(request)
        await leave()
        completion = await policy.engine.with_reference(request, completion) if self.call.reference else completion
        if (seat in self.voices[:1] and not line.completions) or seat in getattr(rules, "solvers", ()):
            text, grade = await grader.grade(table.order.problem, completion)
        else:
            text = grader.text(completion)
        line.say(completion, text, grade)
        action = rules.parse(state, seat, text)
        line.grade = line.grade or Grade(action.legal, action.legal, action.text, action.note)
        action = replace(action, cut=completion.finish_reason == "length", grade=grade)
        self.decided(table, seat, action, batch, None if self.voices else line.rollout(self.call))

    def line(self, table: _Table[S], seat: str) -> Line:
        """The rollout to which the seat's next turn belongs. Each decision of a game has its own."""
        order, state, first = table.order, table.states[-1], seat in self.voices[:1]
        if (line := table.lines.get(seat)) is not None:
            self.hear(table, line, self.read(state, seat), last=False)
            return line
        if not first:
            prompt = self.interaction.rules.prompt(state, seat, order.role)
            problem = order.problem if self.voices else replace(order.problem, question=prompt)
            order = replace(order, problem=problem, prompt_ids=self.interaction.encode(prompt))
        if not self.voices:
            number = 1 + table.phase * len(self.seats) + self.seats.index(seat)
            return Line(f"{self.call.rollout_id(order, table.sample)}/{table.phase:03d}-{seat}", order, seat, number)
        number = MOST_TURNS * self.voices.index(seat)
        line = table.lines[seat] = Line(self.line_id(table, table.sample, seat), order, seat, number)
        return line

    def line_id(self, table: _Table[S], sample: int, seat: str) -> str:
        rollout_id = self.call.rollout_id(table.order, sample)
        return rollout_id if seat == self.voices[0] else f"{rollout_id}/{seat}"

    def hear(self, table: _Table[S], line: Line, text: str, *, last: bool) -> None:
        """Add what the line's voice reads since its last turn. In a phase with several seats, it reads the others."""
        phase = max(decision.number for decision in table.decisions if decision.seat == line.seat)
        others = (each.seat for each in table.decisions if each.number >= phase and each.seat != line.seat)
        line.heard = (*line.heard, (*self.interaction.turn(text, last), "+".join(dict.fromkeys(others))))

    def read(self, state: S, seat: str) -> str:
        """What a voice reads since its last turn. The verifier reads it too, so it does not depend on the role."""
        return self.interaction.rules.prompt(state, seat, Role.HELPFUL)

    def decided(
        self, table: _Table[S], seat: str, action: Action, batch: int = 1, rollout: Rollout | None = None
    ) -> None:
        table.pending[seat] = SeatDecision(seat, table.phase, table.states[-1], action, rollout, batch)

    def asked(self, table: _Table[S]) -> Ask[S]:
        line = table.lines.get(self.voices[0]) if self.voices else None
        said = np.concatenate(line.tokens()) if line is not None else np.zeros(0, dtype=np.int32)
        return Ask(self.call.rollout_id(table.order, table.sample), table.order.problem, table.states[-1], said)

    def scripted(self, table: _Table[S], seat: str, script: Script) -> str:
        rules = self.interaction.rules
        if not isinstance(rules, PlaysByScript):
            what = f"Nothing decides for the seat {seat!r}, because the rules have no method `scripted`."
            raise ConfigurationError(what, "Add one (pvg.games.game.PlaysByScript), or let `seats` leave the seat out.")
        seed = seed_for(self.call.seed, "script", table.order.group, table.sample, table.phase, seat)
        return rules.scripted(script, table.states[-1], seat, seed)

    def advance(self, table: _Table[S]) -> None:
        rules, state = self.interaction.rules, table.states[-1]
        seed = seed_for(self.call.seed, "chance", table.order.group, table.sample, table.phase)
        decisions = [table.pending[seat] for seat in rules.seats(state)]
        table.pending = {}
        table.decisions += decisions
        table.states.append(rules.step(state, {decision.seat: decision.action for decision in decisions}, seed))
        if self.voices and table.phase > MOST_PHASES:
            rollout_id = self.call.rollout_id(table.order, table.sample)
            what = f"{rollout_id} is not over after {MOST_PHASES} phases."
            raise ConfigurationError(what, "Let `seats` of your game.protocol return () at the end.")

    # --- whole games --------------------------------------------------------------------------------------------------

    def ending(self, table: _Table[S]) -> Literal["over", "horizon"] | None:
        seats = self.interaction.rules.seats(table.states[-1])
        if table.full or not seats:
            return "over"
        if table.until is not None and table.phase >= table.until and table.waits_for in (None, *seats):
            return "horizon"
        return None

    async def play_out(self, forks: Sequence[Fork]) -> None:
        """Play the warmup of each group's fork with its table, then all continuations, in step."""
        for warm in (True, False):
            while live := [table for group in self.groups for table in group.tables if self.ending(table) is None]:
                await self.play_phase(live)
            for group, fork in zip(self.groups, forks, strict=True) if warm else ():
                group.cancelled *= fork.samples
                group.tables = [each for table in group.tables for each in self.continuations(table, fork)]

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
                pending={},
                lines={seat: replace(line, id=self.line_id(table, sample, seat)) for seat, line in table.lines.items()},
                sample=sample,
                fork=phase,
                until=None if fork.horizon is None else phase + fork.horizon,
                waits_for=None,
            )
            for sample in range(fork.samples)
        ]

    def decides(self, seat: str | None, state: S) -> bool:
        seats = self.interaction.rules.seats(state)
        return bool(seats) if seat is None else seat in seats

    def played(self, table: _Table[S]) -> PlayedGame[S]:
        ended = self.ending(table)
        assert ended is not None
        return PlayedGame(table.start, table.sample, table.fork, tuple(table.states), tuple(table.decisions), ended)

    def rollout(self, table: _Table[S]) -> Rollout:
        """The rollout of the first voice in an interaction that is over, with those of the other voices that spoke."""
        found = {seat: self.finished(table, seat) for seat in self.voices if seat in table.lines}
        if (first := found.pop(self.voices[0], None)) is not None:
            return replace(first, others=found, end=table.states[-1])
        what = f"{self.call.rollout_id(table.order, table.sample)} is over, but {self.voices[0]!r} did not speak."
        raise ConfigurationError(what, "Let `seats` of your game.protocol name this seat.")

    def finished(self, table: _Table[S], seat: str) -> Rollout:
        line, room = table.lines[seat], self.interaction.room
        if not table.full and (last := self.read(table.states[-1], seat)):
            before = line.heard
            self.hear(table, line, last, last=True)
            if room is not None and line.left(room) < 0:
                line.heard = before
        found, own = line.rollout(self.call), [each.number for each in table.decisions if each.seat == seat]
        if table.order.shared is None:
            return found
        return replace(found, compared=2 * own.index(table.fork) if table.fork in own else -1)


async def sample_groups(policy: Policy, orders: Sequence[GroupOrder], call: SampleCall) -> list[Group]:
    """Play `call.interaction` for each rollout of the orders. See `Dispatcher.sample`."""
    interaction = call.interaction
    groups: list[_TableGroup[Any]] = []
    for number, order in enumerate(orders):
        start = game_start(interaction.rules, order.problem)
        table = _Table(start, order, number, interaction.deciders, [start.state], until=order.shared or 0)
        groups.append(_TableGroup([table]))
    hall = _Hall(interaction, policy, call, groups)
    if call.gate is not None:
        hall.bounds[id(policy)] = call.gate
    await hall.play_out([Fork(order.shared or 0, order.size) for order in orders])
    found: list[Group] = []
    for order, group in zip(orders, groups, strict=True):
        rollouts = tuple(hall.rollout(table) for table in group.tables)
        found.append(Group(order.problem, order.role, rollouts, group.spread_s, group.cancelled, group.lost_tokens))
        group.tables.clear()
        if len(found) % GROUPS_AT_A_TIME == 0:
            await asyncio.sleep(0)
    return found


async def play_games(
    policy: Policy,
    starts: Sequence[GameStart[S]],
    game: GameRules[S],
    call: SampleCall,
    *,
    encode: Callable[[str], Int32],
    forks: Fork | Sequence[Fork] = WHOLE_GAME,
    opponents: Sequence[Mapping[str, Decider]] | None = None,
) -> list[list[PlayedGame[S]]]:
    """Play the continuations of each start: `forks[n].samples` games for `starts[n]`.

    `encode`: the token ids of a prompt, int32 [P]. `opponents[n]`: who decides for some seats of start n in place of
    the policy. A rollout has the id `{prefix}/{start:05d}/{sample:02d}/{phase:03d}-{seat}`, the number of its start as
    its group, the prompt as its question, and a grade that is correct if the decision is legal.

    Raises ConfigurationError if a script should play a game that has none, and what the engine raises.
    """
    each = [forks] * len(starts) if isinstance(forks, Fork) else forks
    against: Sequence[Mapping[str, Decider]] = [{}] * len(starts) if opponents is None else opponents
    groups: list[_TableGroup[S]] = []
    for number, (start, fork, deciders) in enumerate(zip(starts, each, against, strict=True)):
        order = GroupOrder(start.problem, Role.HELPFUL, np.zeros(0, dtype=np.int32), number, 1)
        table = _Table(start, order, number, deciders, [start.state], until=fork.warmup, waits_for=fork.seat)
        groups.append(_TableGroup([table]))
    seats = list(game.values(starts[0].state)) if starts else []
    hall = _Hall(Interaction(game, encode), policy, call, groups, seats)
    await hall.play_out(each)
    return [[hall.played(table) for table in group.tables] for group in groups]


# A played game as a plain record of metrics.jsonl, with everything that `pvg view` shows of it.

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


def game_record(
    round_: int, name: str, game: GameRules[Any], played: PlayedGame[Any], players: Mapping[str, str]
) -> GameRecord:
    """The record of a game, from its start. `players`: seat -> "policy", "random", "greedy" or "base"."""
    phases, left = [], MOST_STATE_BYTES
    for number, state in enumerate(played.states):
        dump = game.dump(state) if left > 0 else b""
        left -= len(dump)
        decided = [decision for decision in played.decisions if decision.number == number]
        seats = [SeatRecord(each.seat, each.action.text, each.action.note) for each in decided]
        phase = game.phase(state) if decided else ""
        phases.append(PhaseRecord(phase, dump.hex() if left >= 0 else "", dict(game.values(state)), seats))
    return GameRecord(round_, name, played.start.problem.id, dict(players), played.ended, phases)
