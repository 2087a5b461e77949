"""Protocols: the rules by which a rollout is made (`PROTOCOLS`), and what the decoupled game and the challenge add
(docs/protocols.md).

In the decoupled game (Kim and Lee, arXiv 2602.23248) a fixed solver solves every problem of the task once, before the
first round (SOLVE). The prover translates its solutions, and every translation stores the solution that it translates.

Invariant: each problem keeps one solver's solution for the whole run, also after kills and resumes.

In the challenge protocol the verifier asks about one step of a solution, and the prover's answer continues its
completion. The verifier scores the whole completion; the task grades only the solution. The mint draws the step,
because it has no verifier yet. The choice uses neither role nor grade (invariant 3).

    question 7+5+8?     prover 7+5=2;2+8=1;A1     verifier 2?     prover 2+8=0;

A task that is `AnswersQuestions` provides the questions, and answers them in place of the prover. The verifier then
chooses among MOST_CONSIDERED drawn ones before it reads the answer:

    question deg/bf>d?     prover d.;e+d;gh     verifier ?bd;fe     task =+
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pvg.config.base import RunId
from pvg.config.experiment import spoken_room
from pvg.config.game import ChallengeProtocol, CriticProtocol, DebateProtocol, DecoupledProtocol, OwnProtocol, Protocol
from pvg.errors import ConfigurationError
from pvg.extensions import called, load
from pvg.game.roles import Assignment, PromptSection
from pvg.game.session import Session, sample_chunks
from pvg.game.states import Phase
from pvg.game.voices import ConsultancyRules, CriticRules, DebateRules
from pvg.games.game import CheckedDialogue, MeasuresPlay, Outcome, PaysSeats, PlaysByScript, Script
from pvg.models.tokenizer import Tokenizer
from pvg.records import BASE_SOURCE, Float32, Grade, Int32, Problem, Role, Rollout, SolverSolution
from pvg.rollout.dispatcher import GroupOrder
from pvg.rollout.interaction import DIRECT, MOST_PHASES, Ask, Direct, Interaction, SampleCall, Talk
from pvg.seeds import generator_for, seed_for
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_players import find_player
from pvg.tasks.task import AnswersQuestions, SplitsSteps, Task, correct_solution
from pvg.telemetry.spans import span
from pvg.verifier.data import Style
from pvg.verifier.scorer import Scorer, TextSolution

if TYPE_CHECKING:
    from torch import Tensor


SOLVER_SOURCE = "solver"


async def solve(session: Session) -> None:
    """Run the phase from the last committed chunk on, then enter MINT."""
    problems = [problem for split in ("train", "test") for problem in session.task.problems(split)]
    size, first = session.rollout.chunk, session.state.step
    info = session.begin("rollouts", len(problems), min(first * size, len(problems)))

    async def load(number: int) -> int:
        version = session.state.version + (number == 0)
        if number == first:
            with span("sync"):
                tensors = await session.players.compute(lambda: solver_weights(session))
                await session.players.publish(tensors, version)
        return version

    def orders(number: int) -> tuple[list[GroupOrder], SampleCall]:
        chunk = problems[number * size : (number + 1) * size]
        seed = seed_for(session.seed, "solve", number)
        call = SampleCall(0, SOLVER_SOURCE, step=number, seed=seed, prefix=f"000/solve/{number:05d}")
        return [session.order(problem, Role.HELPFUL, group, 1) for group, problem in enumerate(chunk)], call

    await sample_chunks(session, info, -(-len(problems) // size), orders, load)
    with span("record"):
        session.prompts.solutions = await read_solutions(session)
    await session.leave_phase(session.state.enter(Phase.MINT))


async def read_solutions(session: Session) -> dict[str, SolverSolution]:
    """The committed solutions by problem id."""
    return solutions_of(await session.ledger.read_rollouts(0, Phase.SOLVE.value))


def solutions_of(solved: Iterable[Rollout]) -> dict[str, SolverSolution]:
    return {
        r.problem_id: SolverSolution(r.id, r.text, r.grade.answer, r.grade.correct, r.grade.well_formed) for r in solved
    }


def solver_weights(session: Session) -> Mapping[str, Tensor]:
    """The weights of `game.protocol.solver`, in the shapes of the base prover.

    Raises ConfigurationError for a prover of another model, and what `find_player` raises for a run without one.
    """
    protocol, base = session.game.protocol, session.players.base.weights()
    assert isinstance(protocol, DecoupledProtocol), "only the decoupled game has a solver"
    solver = protocol.solver
    if solver == BASE_SOURCE:
        return base
    found = find_player(RunId(solver if "/" in solver else f"./{solver}"))
    tensors, _ = read_checkpoint(found.run.weights, found.weights)
    if {name: tensor.shape for name, tensor in tensors.items()} != {name: value.shape for name, value in base.items()}:
        raise ConfigurationError(
            f"The prover of game.protocol.solver = {solver!r} does not have the architecture of models.prover.",
            "Choose a run that was trained from the same model.",
        )
    return tensors


Place = tuple[int, int]  # start and end of a step in the text

MOST_QUOTED = 160  # characters of a step that a question quotes; pvg.config.experiment.QUOTED_ROOM leaves room for them
MOST_CONSIDERED = 16  # questions of an AnswersQuestions task that the verifier scores for one solution, to limit time
PIECES = {True: re.compile(r"[^\n]+"), False: re.compile(r"[^;]+;?")}


def steps_of(task: Task, text: str) -> list[Place]:
    """Places of the steps of a solution, in order; no step is empty."""
    if isinstance(task, SplitsSteps):
        return task.steps(text)
    found = PIECES["\n" in text.strip()].finditer(text)
    return [match.span() for match in found if match.group().strip(" \t;")]


class ProtocolParts(NamedTuple):
    """What protocols are made of. `scorer`: of the round's verifier; None: there is none yet."""

    task: Task
    tokenizer: Tokenizer
    prompts: PromptSection
    scorer: Scorer | None
    seed: int

    @property
    def style(self) -> Style:
        return self.prompts.kind

    def room(self, section: CriticProtocol | DebateProtocol) -> int:
        return spoken_room(section, in_words=self.style != "tag")


class ChallengeRules(Direct):
    """A solution, a question about it, and an answer of at most `max_tokens` tokens. A task that is `AnswersQuestions`
    answers at once."""

    def __init__(self, task: Task, style: str, max_tokens: int) -> None:
        self._task = task
        self._style = style
        self._max_tokens = max_tokens

    def seats(self, state: Talk) -> Sequence[str]:
        if not state.said:
            return self.voices
        _, last = state.said[-1]
        if len(state.said) == 1:
            return () if last.cut else ("verifier",)
        asks = len(state.said) == 2 and last.text and not isinstance(self._task, AnswersQuestions)
        return self.voices if asks else ()

    def prompt(self, state: Talk, seat: str, role: Role) -> str:
        if len(state.said) != 2:
            return ""
        (_, solution), (_, question) = state.said
        if not question.text or not isinstance(self._task, AnswersQuestions):
            return question.text
        return question.text + self._task.answer(state.problem, solution.text, question.text)

    def limit(self, state: Talk, seat: str) -> int | None:
        return self._max_tokens if state.said else None

    def scripted(self, script: Script, state: Talk, seat: str, seed: int) -> str:
        """The first question; the answer repeats the first step."""
        solution = state.said[0][1].text
        if seat == "verifier":
            return next(iter(self.questions(state.problem, solution)), "")
        return solution[slice(*steps_of(self._task, solution)[0])]

    def questions(self, problem: Problem, solution: str) -> list[str]:
        if isinstance(self._task, AnswersQuestions):
            return self._task.questions(problem, solution)
        steps = [solution[slice(*place)].strip()[:MOST_QUOTED] for place in steps_of(self._task, solution)]
        if self._style == "tag":
            return [f"{number}?" for number, _ in enumerate(steps, 1)]
        return [
            f"Check step {number}: {step}\nWrite this step again, with its calculation. Is it right?"
            for number, step in enumerate(steps, 1)
        ]


class Questions:
    """Decides for the verifier in a challenge. `scorer` finds the weakest step; None: `seed` and the id draw a step."""

    def __init__(self, rules: ChallengeRules, parts: ProtocolParts, scorer: Scorer | None) -> None:
        self._rules, self._parts, self._scorer = rules, parts, scorer

    async def __call__(self, asks: Sequence[Ask[Talk]]) -> list[str]:
        options, chosen = [self._options(ask) for ask in asks], [0] * len(asks)
        if self._scorer is not None:
            candidates = [self._candidates(ask, questions) for ask, questions in zip(asks, options, strict=True)]
            scores_N = await self._scorer.score([each for part in candidates for each in part])
            choose = np.argmin if isinstance(self._parts.task, AnswersQuestions) else weakest
            for number, end in enumerate(np.cumsum([len(part) for part in candidates]).tolist()):
                if part := candidates[number]:
                    chosen[number] = int(choose(scores_N[end - len(part) : end]))
        return [questions[number] if questions else "" for questions, number in zip(options, chosen, strict=True)]

    def _options(self, ask: Ask[Talk]) -> list[str]:
        """The questions from which the verifier chooses; without a verifier at most one. The seed and the id draw."""
        questions = self._rules.questions(ask.problem, ask.state.said[0][1].text)
        count, drawn = len(questions), partial(generator_for, self._parts.seed, "challenge", ask.id)
        if isinstance(self._parts.task, AnswersQuestions):
            most = 1 if self._scorer is None else MOST_CONSIDERED
            numbers = range(count) if count <= most else sorted(drawn().choice(count, most, replace=False).tolist())
            return [questions[number] for number in numbers]
        return questions if self._scorer is not None or not count else [questions[int(drawn().integers(count))]]

    def _candidates(self, ask: Ask[Talk], questions: Sequence[str]) -> list[TextSolution]:
        """What the verifier scores: the solution with each question that the task would answer, or the solution before
        its first step and after each step; nothing without questions."""
        ids, encode = ask.said[:-1], self._parts.tokenizer.encode
        if isinstance(self._parts.task, AnswersQuestions):
            parts = [np.concatenate([ids, encode(question)]) for question in questions]
        else:
            places = steps_of(self._parts.task, ask.state.said[0][1].text)
            ends = [*(start for start, _ in places[:1]), *(end for _, end in places)]
            parts = [ids[: tokens_of(self._parts.tokenizer, ids, end)] for end in ends]
        texts = [self._parts.tokenizer.decode(part) for part in parts]
        return [
            TextSolution(f"{ask.id}/prefix-{len(part)}", ask.problem.question, text, part)
            for part, text in zip(parts, texts, strict=True)
        ]


def turn_renderer(style: str, tokenizer: Tokenizer) -> Callable[[str, bool], tuple[Int32, str]]:
    """`Interaction.turn` for this prompt style. What is heard last gets no answer, so it is no message of a chat."""

    def turn(text: str, last: bool) -> tuple[Int32, str]:
        if style == "tag":
            return tokenizer.plain(text), text
        shown = f"\n{text}\n"
        return tokenizer.next_turn(text) if style == "chat" and not last else tokenizer.plain(shown), shown

    return turn


def weakest(scores_K: Float32) -> int:
    """The step, counted from 0, that lowers the score most; the first one on a tie. `scores_K` float32 [steps + 1]:
    scores of the solution before the first step and after each step."""
    return int(np.argmin(np.diff(scores_K)))


def tokens_of(tokenizer: Tokenizer, ids: Int32, characters: int) -> int:
    """The smallest number of tokens of `ids` int32 [C] whose text has `characters` characters; all if it is shorter."""
    return bisect_left(range(len(ids)), characters, key=lambda count: len(tokenizer.decode(ids[:count])))


def challenge(section: ChallengeProtocol, parts: ProtocolParts) -> Interaction[Talk]:
    if parts.style == "chat" and not isinstance(parts.task, AnswersQuestions):
        parts.tokenizer.next_turn("?")  # raises before anything is sampled
    rules = ChallengeRules(parts.task, parts.style, section.tokens)
    asked = parts.scorer if section.step == "weakest" else None
    questions = Questions(rules, parts, asked)
    return Interaction(rules, turn=turn_renderer(parts.style, parts.tokenizer), deciders={"verifier": questions})


def voice_encoder(style: str, tokenizer: Tokenizer) -> Callable[[str], Int32]:
    """`Interaction.encode` for this prompt style: a voice's first prompt as token ids int32 [P]."""
    if style == "chat":
        return lambda text: tokenizer.chat([{"role": "user", "content": text}])
    return lambda text: tokenizer.opening(f"{text}\n\n" if style == "text" else text)


def spoken(rules: Any, parts: ProtocolParts, room: int | None) -> Interaction[Any]:
    """Rules whose seats the policy plays."""
    style, tokenizer = parts.style, parts.tokenizer
    return Interaction(rules, voice_encoder(style, tokenizer), turn_renderer(style, tokenizer), room=room)


def debate(section: DebateProtocol, parts: ProtocolParts) -> Interaction[Talk]:
    if parts.style == "chat" and section.turns == "ABA":
        parts.tokenizer.next_turn("?")  # raises before anything is sampled
    return spoken(DebateRules(parts.task, parts.prompts, section), parts, parts.room(section))


# `game.protocol` -> the interaction that makes a rollout. In the decoupled game the solver has spoken before the first
# round, so the translator's first prompt has its solution.
PROTOCOLS: dict[str, Callable[[Any, ProtocolParts], Interaction[Any]]] = {
    "direct": lambda section, parts: DIRECT,
    "decoupled": lambda section, parts: DIRECT,
    "challenge": challenge,
    "critic": lambda own, parts: spoken(CriticRules(parts.task, parts.prompts, own), parts, parts.room(own)),
    "debate": debate,
    "consultancy": lambda section, parts: Interaction(ConsultancyRules(Assignment(parts.task, parts.prompts))),
}


def own_protocol(section: OwnProtocol, parts: ProtocolParts) -> Interaction[Any]:
    """Rules in a user's file. Their constructor gets the `task` and the section `prompts` of the settings if it has
    such parameters."""
    key, name = "game.protocol", section.kind
    maker, given = load(key, name), {"task": parts.task, "prompts": parts.prompts}

    def made() -> Any:
        wanted = signature(maker).parameters
        return maker(**{parameter: value for parameter, value in given.items() if parameter in wanted})

    rules: Any = CheckedDialogue(key, name, called(key, name, made))
    found = spoken(rules, parts, section.tokens)
    return replace(found, encode=partial(rules.rendered, found.encode), turn=partial(rules.rendered, found.turn))


def interaction_for(section: Protocol, parts: ProtocolParts) -> Interaction[Any]:
    """What `game.protocol` plays: an entry of PROTOCOLS, or the rules in a user's file. Raises ConfigurationError for a
    file or rules that cannot be used."""
    return own_protocol(section, parts) if isinstance(section, OwnProtocol) else PROTOCOLS[section.kind](section, parts)


class SpokenTurn(NamedTuple):
    """A turn of a rollout: `sampled` if its voice writes it, else heard. `token_ids` int32 [T]. `phase`: of the
    dialogue, from 1. `by`: who spoke; empty if only the rules did."""

    text: str
    token_ids: Int32
    sampled: bool
    phase: int
    by: Sequence[str]


class SpokenLine(NamedTuple):
    """The rollout of a voice. `prompt_ids` int32 [P]: of its first turn, after `by` spoke; None: pvg writes it."""

    prompt_ids: Int32 | None
    turns: list[SpokenTurn]
    by: Sequence[str] = ()


def example_episode(
    interaction: Interaction[Any],
    tokenizer: Tokenizer,
    problem: Problem,
    solution: str,
    later: str | None = None,
    cut: bool = False,
) -> dict[str, SpokenLine]:
    """The rollouts of a dialogue without models, by voice: the first voice writes `solution`, and scripts write
    everything else. `later`: what the voices write in all other turns, in place of scripts. `cut`: their texts reach
    the length limit.

    Raises ConfigurationError for a user's rules with which no game can be played."""
    rules: Any = interaction.rules
    lines, phases, first = dict[str, SpokenLine](), 0, rules.voices[0]
    spoke = list[tuple[int, str]]()  # phases and seats

    def check(fits: bool, what: str) -> None:
        if isinstance(rules, CheckedDialogue) and not fits:
            raise rules.wrong(what)

    def hear(voice: str, last: bool) -> None:
        text, other = (rules.prompt(state, voice, role) for role in Role)
        check(text == other, "prompt must not depend on the role after the first turn, because the verifier reads it")
        if text:
            ids, shown = interaction.turn(text, last)
            since = lines[voice].turns[-1].phase
            by = tuple(dict.fromkeys(seat for phase, seat in spoke if phase >= since and seat != voice))
            lines[voice].turns.append(SpokenTurn(shown, ids, False, phases + last, by))

    state = rules.start(problem)
    while seats := rules.seats(state):
        phases, said = phases + 1, {}
        check(phases <= MOST_PHASES, f"seats must return () at the end, but after {MOST_PHASES} phases it does not")
        for seat in seats:
            text, opening = solution, seat == first and not lines
            if later is not None and seat in rules.voices and not opening:
                text = later
            elif isinstance(rules, PlaysByScript) and not opening:
                text = rules.scripted("greedy", state, seat, 0)
            else:
                check(seat in rules.voices, f"a method `scripted` must decide for the seat {seat!r}, no voice")
            if seat in rules.voices:
                if seat in lines:
                    hear(seat, last=False)
                elif seat == first:
                    lines[seat] = SpokenLine(None, [])
                else:
                    prompts = [interaction.encode(rules.prompt(state, seat, role)) for role in Role]
                    by = tuple(dict.fromkeys(other for _, other in spoke))
                    lines[seat] = SpokenLine(max(prompts, key=len), [], by)
                rules.limit(state, seat)
                ids = np.append(tokenizer.encode(text), np.int32(tokenizer.eos_id))
                lines[seat].turns.append(SpokenTurn(text, ids, True, phases, (seat,)))
            grade = Grade(True, True, problem.answer) if seat in getattr(rules, "solvers", ()) else None
            said[seat] = replace(rules.parse(state, seat, text), cut=cut and seat in rules.voices, grade=grade)
        spoke += [(phases, seat) for seat in seats]
        state = rules.step(state, said, 0)
    check(first in lines, f"seats must let {first!r} speak")
    for voice, line in lines.items():
        hear(voice, last=True)
        if (room := interaction.room) is not None:
            least = sum(1 if turn.sampled else len(turn.token_ids) for turn in line.turns[1:])
            what = (
                f"an episode needs {least} tokens after the first turn of {voice!r}, but game.protocol.tokens = {room}"
            )
            check(least <= room, what)
    for role, correct in product(Role, (True, False)):
        outcome = Outcome(role, Grade(correct, True, problem.answer), 0.0)
        for judged in (PaysSeats, MeasuresPlay):
            if isinstance(rules, judged):
                getattr(rules, "pay" if judged is PaysSeats else "measures")(state, outcome)
    return lines


RULES_TRIED = 20  # problems of example episodes
# What a model may write at any time, as far as its vocabulary has it.
ODD_TEXTS = ("", "\n", "0", "?", "<answer>", "\\boxed{", "9" * 50)


def example_solution(parts: ProtocolParts, problem: Problem) -> str:
    """A correct solution, or the answer alone; "" if the model cannot write it."""
    right = correct_solution(parts.task, problem)
    solution = problem.answer if right is None else right.text
    return "" if parts.tokenizer.lacking(solution) else solution


def longest_episode(
    interaction: Interaction[Any], parts: ProtocolParts, problems: Sequence[Problem]
) -> dict[str, SpokenLine]:
    problem = max(problems, key=lambda each: len(each.question))
    return example_episode(interaction, parts.tokenizer, problem, example_solution(parts, problem))


def check_rules(interaction: Interaction[Any], parts: ProtocolParts, problems: Sequence[Problem]) -> None:
    """Raises ConfigurationError for a user's rules that fail in example episodes of the first problems, in those with
    other texts that a model may write, or whose methods are not pure."""
    rules, free, tokenizer = interaction.rules, replace(interaction, room=None), parts.tokenizer
    if not isinstance(rules, CheckedDialogue):
        return
    for number, problem in enumerate(problems[:RULES_TRIED]):
        solution = example_solution(parts, problem)
        episodes = (example_episode(interaction, tokenizer, problem, solution) for _ in range(2))
        first, second = ([[turn.text for turn in line.turns] for line in lines.values()] for lines in episodes)
        if first != second:
            raise rules.wrong("all methods must be pure, but the same episode has other turns when it is played again")
        for odd in (text for text in ODD_TEXTS if number == 0 and not tokenizer.lacking(text)):
            for opening, cut in product((odd, solution), (False, True)):
                example_episode(free, tokenizer, problem, opening, odd, cut)
