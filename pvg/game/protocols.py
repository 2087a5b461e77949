"""The two protocols other than the direct one: the decoupled game, and the challenge (docs/protocols.md).

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pvg.config.base import RunId
from pvg.config.game import DecoupledProtocol
from pvg.errors import ConfigurationError
from pvg.game.session import Session, sample_chunks
from pvg.game.states import Phase
from pvg.models.tokenizer import Tokenizer
from pvg.records import BASE_SOURCE, Float32, Grade, Int32, Problem, Role, Rollout, SolverSolution, VersionSpan
from pvg.rollout.dispatcher import GroupOrder
from pvg.rollout.episodes import Environment, Observation, SampleCall, Transcript
from pvg.seeds import generator_for, seed_for
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_players import find_player
from pvg.tasks.task import AnswersQuestions, SplitsSteps, Task
from pvg.telemetry.spans import span
from pvg.verifier.scorer import Scorer

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
    """The solutions by problem id, from the phase's rollouts."""
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


class ChallengeEnvironment(Environment):
    """Asks one question per episode and allows an answer of at most `max_tokens` tokens. `scorer` finds the weakest
    step; None: `seed` and the episode's id draw a step. A task that is `AnswersQuestions` answers itself."""

    graded_turn = 0

    def __init__(
        self, task: Task, tokenizer: Tokenizer, style: str, scorer: Scorer | None, seed: int, max_tokens: int
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._style = style
        self._scorer = scorer
        self._seed = seed
        self._max_tokens = max_tokens
        if style == "chat" and not isinstance(task, AnswersQuestions):
            tokenizer.next_turn("?")  # raises before anything is sampled

    async def observe(self, transcripts: Sequence[Transcript]) -> list[Observation | None]:
        texts = [self._solution(transcript) for transcript in transcripts]
        if isinstance(self._task, AnswersQuestions):
            return await self._answered(self._task, transcripts, texts)
        steps = [[] if text is None else steps_of(self._task, text) for text in texts]
        numbers = await self._chosen(transcripts, steps)
        return [
            None if text is None or number is None else self._question(number, text[slice(*places[number])])
            for text, places, number in zip(texts, steps, numbers, strict=True)
        ]

    def example(self, problem: Problem, solution: str) -> tuple[Observation, str] | None:
        """A question about `solution` and an answer, for previews: without a model. A task's answer is also in the
        observation. A prover's answer repeats the first step as written. None: the solution gets no question."""
        if isinstance(self._task, AnswersQuestions):
            questions = self._task.questions(problem, solution)
            if not questions:
                return None
            told = self._told(self._task, problem, solution, questions[0])
            return told, told.text.removeprefix(questions[0])
        places = steps_of(self._task, solution)
        if not places:
            return None
        step = solution[slice(*places[0])]
        return self._question(0, step), step

    def _solution(self, transcript: Transcript) -> str | None:
        """The solution's text; None if the transcript gets no (further) question."""
        if transcript.turn or not transcript.stopped:
            return None
        return self._tokenizer.decode(transcript.completion_ids[:-1])

    async def _answered(
        self, task: AnswersQuestions, transcripts: Sequence[Transcript], texts: Sequence[str | None]
    ) -> list[Observation | None]:
        """A question and the task's answer for each transcript."""
        problems = [transcript.problem for transcript in transcripts]
        asked = [
            [] if text is None else task.questions(problem, text) for problem, text in zip(problems, texts, strict=True)
        ]
        most = 1 if self._scorer is None else MOST_CONSIDERED
        asked = [self._some(transcript, found, most) for transcript, found in zip(transcripts, asked, strict=True)]
        if self._scorer is None:
            chosen = [0 if found else None for found in asked]
        else:
            encode = self._tokenizer.encode
            candidates = [
                [
                    _prefix(t, np.concatenate([t.completion_ids[:-1], encode(question)]), self._tokenizer)
                    for question in found
                ]
                for t, found in zip(transcripts, asked, strict=True)
            ]
            chosen = await _best(self._scorer, candidates, lambda scores_K: int(scores_K.argmin()))
        return [
            None if text is None or number is None else self._told(task, problem, text, found[number])
            for problem, text, found, number in zip(problems, texts, asked, chosen, strict=True)
        ]

    def _told(self, task: AnswersQuestions, problem: Problem, solution: str, question: str) -> Observation:
        """The question with the task's answer. It ends the episode."""
        told = question + task.answer(problem, solution, question)
        return Observation(self._tokenizer.plain(told), told, 0)

    def _some(self, transcript: Transcript, questions: list[str], most: int) -> list[str]:
        """At most `most` of the questions, drawn by the seed and the episode's id."""
        if len(questions) <= most:
            return questions
        drawn = generator_for(self._seed, "challenge", transcript.id).choice(len(questions), most, replace=False)
        return [questions[number] for number in sorted(drawn.tolist())]

    async def _chosen(self, transcripts: Sequence[Transcript], steps: Sequence[Sequence[Place]]) -> list[int | None]:
        """The step to ask about for each transcript, counted from 0; None if it has no steps."""
        if self._scorer is None:
            return [
                int(generator_for(self._seed, "challenge", transcript.id).integers(len(places))) if places else None
                for transcript, places in zip(transcripts, steps, strict=True)
            ]
        prefixes = [self._prefixes(t, places) if places else [] for t, places in zip(transcripts, steps, strict=True)]
        return await _best(self._scorer, prefixes, weakest)

    def _prefixes(self, transcript: Transcript, places: Sequence[Place]) -> list[Rollout]:
        """The solution before its first step and after each step, as rollouts for the scorer."""
        ids = transcript.completion_ids[:-1]
        ends = [places[0][0], *(end for _, end in places)]
        return [_prefix(transcript, ids[: tokens_of(self._tokenizer, ids, end)], self._tokenizer) for end in ends]

    def _question(self, number: int, step: str) -> Observation:
        if self._style == "tag":
            text = f"{number + 1}?"
            ids = self._tokenizer.encode(text)
            return Observation(ids, text, self._max_tokens)
        quoted = step.strip()[:MOST_QUOTED]
        asked = f"Check step {number + 1}: {quoted}\nWrite this step again, with its calculation. Is it right?"
        ids = self._tokenizer.plain(f"\n{asked}\n") if self._style != "chat" else self._tokenizer.next_turn(asked)
        return Observation(ids, f"\n{asked}\n", self._max_tokens)


async def _best(
    scorer: Scorer, candidates: Sequence[Sequence[Rollout]], choose: Callable[[Float32], int]
) -> list[int | None]:
    """What `choose` takes by the scores of each transcript's candidates; None for one without candidates."""
    scores_N = await scorer.score([each for part in candidates for each in part])
    ends = np.cumsum([len(part) for part in candidates]).tolist()
    return [
        choose(scores_N[end - len(part) : end]) if part else None for part, end in zip(candidates, ends, strict=True)
    ]


def weakest(scores_K: Float32) -> int:
    """The step, counted from 0, that lowers the score most; the first one on a tie. `scores_K` float32 [steps + 1]:
    scores of the solution before the first step and after each step."""
    return int(np.argmin(np.diff(scores_K)))


def tokens_of(tokenizer: Tokenizer, ids: Int32, characters: int) -> int:
    """The smallest number of tokens of `ids` int32 [C] whose text has `characters` characters; all if it is shorter."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(ids[:middle])) >= characters:
            high = middle
        else:
            low = middle + 1
    return low


def _prefix(transcript: Transcript, ids: Int32, tokenizer: Tokenizer) -> Rollout:
    """A rollout with the fields that a scorer reads: question and solution."""
    problem: Problem = transcript.problem
    return Rollout(
        id=f"{transcript.id}/prefix-{len(ids)}",
        problem_id=problem.id,
        question=problem.question,
        reference=problem.answer,
        role=Role.HELPFUL,  # scorers ignore it
        round=0,
        source="",
        step=0,
        group=0,
        prompt_ids=transcript.prompt_ids,
        completion_ids=ids,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        spans=(VersionSpan(0, 0),),
        finish_reason="length",
        text=tokenizer.decode(ids),
        grade=Grade(correct=False, well_formed=False),
    )
