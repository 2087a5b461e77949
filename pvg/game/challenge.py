"""The challenge protocol: the verifier asks about one step of a solution, and the prover answers.

    question 7+5+8?     prover 7+5=2;2+8=1;A1     verifier 2?     prover 2+8=0;

Each solution gets one question about one step. `game.protocol.step = "weakest"` asks about the step with the lowest
V(solution up to and including the step) - V(solution before the step). `"random"` draws a step uniformly. The mint
always draws, because it has no verifier yet. The prover's answer continues its completion. The verifier scores the
whole completion, question included; the task grades only the solution. A solution without steps, or one that reached
the length limit, gets no question.

Steps come from the task if it is `SplitsSteps`. Otherwise they are the lines of the text, or the parts between
semicolons if the text has one line. With `rollout.prompts = "tag"` the question is the step's number and a question
mark; the other styles quote the step. The choice of a step uses neither role nor grade (invariant 3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pvg.config.experiment import Experiment
from pvg.config.sections import ChallengeProtocol
from pvg.game.players import Players
from pvg.game.seeds import generator_for
from pvg.models.tokenizer import Tokenizer
from pvg.records import Float32, Grade, Int32, Problem, Role, Rollout, VersionSpan
from pvg.rollout.episodes import Environment, Observation, Transcript
from pvg.tasks.task import SplitsSteps, Task
from pvg.verifier.protocol import Scorer

Place = tuple[int, int]  # start and end of a step in the text

MOST_QUOTED = 160  # characters of a step that a question quotes; pvg.rollout.episodes.QUOTED_ROOM leaves room for them
PIECES = {True: re.compile(r"[^\n]+"), False: re.compile(r"[^;]+;?")}


class ChallengeContext(Protocol):
    """What a challenge needs of a game: a `Session` provides it, and so does a run under evaluation."""

    @property
    def experiment(self) -> Experiment: ...

    @property
    def players(self) -> Players: ...

    @property
    def task(self) -> Task: ...

    @property
    def seed(self) -> int: ...


def environment_of(session: ChallengeContext, scorer: Scorer | None) -> ChallengeEnvironment | None:
    """The session's challenge environment; None if the protocol has one turn. `scorer`: of the round's verifier; None
    if there is no verifier yet."""
    experiment, protocol = session.experiment, session.experiment.game.protocol
    if not isinstance(protocol, ChallengeProtocol):
        return None
    asked = scorer if protocol.step == "weakest" else None
    tokenizer, style = session.players.base.tokenizer, experiment.rollout.prompts
    return ChallengeEnvironment(session.task, tokenizer, style, asked, session.seed, protocol.tokens)


def steps_of(task: Task, text: str) -> list[Place]:
    """Places of the steps of a solution, in order; no step is empty."""
    if isinstance(task, SplitsSteps):
        return task.steps(text)
    found = PIECES["\n" in text.strip()].finditer(text)
    return [match.span() for match in found if match.group().strip(" \t;")]


class ChallengeEnvironment(Environment):
    """Asks one question per episode and allows an answer of at most `max_tokens` tokens. `scorer` finds the weakest
    step; None: `seed` and the episode's id draw a step."""

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

    async def observe(self, transcripts: Sequence[Transcript]) -> list[Observation | None]:
        texts = [self._solution(transcript) for transcript in transcripts]
        steps = [[] if text is None else steps_of(self._task, text) for text in texts]
        numbers = await self._chosen(transcripts, steps)
        found: list[Observation | None] = []
        for text, places, number in zip(texts, steps, numbers, strict=True):
            if text is None or number is None:
                found.append(None)
            else:
                found.append(self._question(number, text[slice(*places[number])]))
        return found

    def _solution(self, transcript: Transcript) -> str | None:
        """The solution's text; None if the transcript gets no (further) question."""
        if transcript.turn or not transcript.stopped:
            return None
        return self._tokenizer.decode(transcript.completion_ids[:-1])

    async def _chosen(self, transcripts: Sequence[Transcript], steps: Sequence[Sequence[Place]]) -> list[int | None]:
        """The step to ask about for each transcript, counted from 0; None if it has no steps."""
        if self._scorer is None:
            return [
                int(generator_for(self._seed, "challenge", transcript.id).integers(len(places))) if places else None
                for transcript, places in zip(transcripts, steps, strict=True)
            ]
        prefixes = [self._prefixes(t, places) if places else [] for t, places in zip(transcripts, steps, strict=True)]
        scores_N = await self._scorer.score([prefix for part in prefixes for prefix in part])
        ends = np.cumsum([len(part) for part in prefixes])
        return [
            weakest(scores_N[end - len(part) : end]) if part else None
            for part, end in zip(prefixes, ends.tolist(), strict=True)
        ]

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
        quoted = self._tokenizer.without_controls(step.strip()[:MOST_QUOTED])
        asked = f"Check step {number + 1}: {quoted}\nWrite this step again, with its calculation. Is it right?"
        ids = self._tokenizer.encode(f"\n{asked}\n") if self._style == "plain" else self._tokenizer.next_turn(asked)
        return Observation(ids, f"\n{asked}\n", self._max_tokens)


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
