"""Asks a target about the texts of the static attacks, and makes the robustness card of what it answered.

Each answer is kept by a digest of what was asked, as it comes. So a killed attack continues where it was, and a card
can be made at any time from the answers so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from pvg.attack.targets import Target, TargetAnswer
from pvg.attack.texts import AttackCase, StaticAttack
from pvg.config.base import StrictRecord
from pvg.errors import ConfigurationError, MissingRequirementError, UsageError, shortened, visible
from pvg.telemetry.events import Observer, PhaseInfo, Progress
from pvg.traces.kept_results import KeptResults, digest_of_question
from pvg.verifier.intervals import Estimate, share_of

CARD_FILE, ANSWERS_FILE = "card.json", "answers.jsonl"
MOST_EXAMPLES = 3  # of each attack
LONGEST_EXAMPLE = 2000  # characters that a card keeps of a text


class AttackExample(StrictRecord):
    """A text on which the target was wrong. `text`: cut in the middle if it is long; `characters`: of the whole."""

    problem: str
    question: str
    answer: str
    text: str
    characters: int
    score: float | None

    @classmethod
    def of(cls, problem: str, question: str, answer: str, text: str, score: float | None) -> AttackExample:
        cut = {"question": shortened(question, LONGEST_EXAMPLE), "text": shortened(text, LONGEST_EXAMPLE)}
        return cls(problem=problem, answer=answer, characters=len(text), score=score, **cut)


class AttackResult(StrictRecord):
    """A static attack. `accept`: its texts are correct. `texts`: asked so far, of `planned`. `errors`, `timeouts`: of
    them, which count neither as accepted nor as refused; `error`: the most frequent one. `accepted`: the share of the
    others. `examples`: the texts on which the target was wrong, the shortest first."""

    name: str
    reason: str
    source: str
    accept: bool
    planned: int
    texts: int
    errors: int
    timeouts: int
    error: str
    accepted: Estimate
    examples: list[AttackExample]


class TrainedAttack(StrictRecord):
    """A prover that learned against the target. `steps`: until the exploit if it was `found`, otherwise the steps
    tried. `error_rate` and `accepted`: of its last samples on test problems, the share of wrong solutions and the
    share of these that the target accepts. `errors`: the samples without an answer of the target."""

    model: str
    status: Literal["found", "censored", "no_signal", "diverged"]
    limit: int
    steps: int | None = None
    error_rate: Estimate | None = None
    accepted: Estimate | None = None
    errors: int = 0
    examples: tuple[AttackExample, ...] = ()
    reason: str = ""


class RobustnessCard(StrictRecord):
    """`data`: the file, the task or the run that has the problems. `model`, `template`: of a judge behind a URL; ""
    for none, and for pvg's template. `identity`: a digest of the target. `wrong`, `right`: the accepted share of all
    wrong and of all correct texts. `created`: ISO 8601, UTC."""

    schema_version: Literal[1] = 1
    status: Literal["complete", "interrupted"]
    target: str
    data: str = ""
    model: str = ""
    template: str = ""
    identity: str
    threshold: float
    problems: int
    seed: int
    created: str
    code_version: str
    wrong: Estimate
    right: Estimate
    attacks: list[AttackResult]
    trained: TrainedAttack | None = None

    def above(self, limit: float) -> list[str]:
        """The attacks of which the target accepts a larger share than `limit`, and those that got no answer: nothing is
        known about them."""
        shares = {found.name: found.accepted.value for found in self.attacks if not found.accept}
        if self.trained is not None:
            shares["trained attack"] = None if self.trained.accepted is None else self.trained.accepted.value
        return [name for name, share in shares.items() if share is None or share > limit]

    def refused_above(self, limit: float) -> list[str]:
        """The attacks whose texts are correct, and of which the target refuses a larger share than `limit`: a target
        that refuses everything accepts nothing wrong."""
        shares = {found.name: found.accepted.value for found in self.attacks if found.accept}
        return [name for name, share in shares.items() if share is None or 1.0 - share > limit]


def refuse_other(folder: Path, names: Mapping[str, str]) -> None:
    """Raises UsageError if the folder has a card with other `names`: of its target, data, model and template."""
    before: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        before = orjson.loads((folder / CARD_FILE).read_bytes())
    for name, value in names.items():
        if (old := before.get(name, value)) != value:
            says = f"{folder} has the card of another {name}: {visible(str(old))!r}, not {value!r}."
            raise UsageError(says, "Choose another folder: --out FOLDER")


class Asking:
    """Asks a target about each text once, at most `target.concurrency` at a time. Scores are kept; errors and time-outs
    only until this call of the command ends, because a server may recover."""

    def __init__(self, target: Target, kept: KeptResults) -> None:
        self.target, self._kept, self._unanswered = target, kept, dict[str, TargetAnswer]()
        self._room = asyncio.Semaphore(target.concurrency)

    def known(self, question: str, fields: Mapping[str, Any], text: str) -> TargetAnswer | None:
        key = digest_of_question(self.target.identity, question, dict(fields), text)
        score = self._kept.get(key)
        return self._unanswered.get(key) if score is None else TargetAnswer(score)

    async def ask(self, question: str, fields: Mapping[str, Any], text: str) -> TargetAnswer:
        async with self._room:
            if (answer := self.known(question, fields, text)) is None:
                answer = await self.target.judge(question, fields, text)
                key = digest_of_question(self.target.identity, question, dict(fields), text)
                if answer.score is None:
                    self._unanswered[key] = answer
                else:
                    self._kept.put(key, answer.score)
            return answer


@dataclass(frozen=True, slots=True)
class Attempt:
    """A text of an attack. `place`: the number of the problem, which several cases may have."""

    attack: StaticAttack
    place: int
    case: AttackCase
    text: str

    @property
    def asked(self) -> tuple[str, Mapping[str, Any], str]:
        return self.case.question, self.case.fields, self.text


def attempts_of(cases: Sequence[AttackCase], attacks: Iterable[StaticAttack], seed: int) -> list[Attempt]:
    """All texts of the attacks. Those of one attack are together, problem by problem."""
    places = {question: place for place, question in enumerate(dict.fromkeys(case.question for case in cases))}
    return [
        Attempt(attack, places[case.question], case, text)
        for attack in attacks
        for case in cases[: attack.problems]
        for text in attack.attempts(case, seed)
    ]


LATE = "it does not answer within --limit seconds"


def _check(answer: TargetAnswer, text: str, then: str) -> None:
    """Raises an error if this is no score of a plain correct text."""
    if answer.score is None:
        own = "Raise --limit" if answer.timed_out else f"It must return a number or a bool for {shortened(text)!r}"
        kind = MissingRequirementError if answer.missing else ConfigurationError
        says = f"The target fails on a correct text: {answer.error.rstrip('.') or LATE}."
        raise kind(says, f"{(answer.remedy or own).rstrip('.')}. {then}")


async def ask_all(asking: Asking, attempts: Sequence[Attempt], observer: Observer, stop: asyncio.Event) -> bool:
    """Ask about each attempt that has no answer yet. Returns whether all have one now, because a stop may be requested.
    Raises MissingRequirementError or ConfigurationError if the target cannot answer about a plain correct text, at the
    start or after errors."""
    first = attempts[0].case
    plain = first.question, first.fields, first.right
    missing = [each for each in attempts if asking.known(*each.asked) is None]
    _check(await asking.ask(*plain), first.right, "Then repeat the command.")
    info = PhaseInfo(0, 1, "static", "texts", len(attempts), len(attempts) - len(missing))
    observer.phase_started(info)
    queue, done, waiting = iter(missing), info.done, set[asyncio.Task[TargetAnswer]]()
    unanswered = in_a_row = 0
    try:
        while not stop.is_set():
            while len(waiting) < 2 * asking.target.concurrency and (each := next(queue, None)) is not None:
                waiting.add(asyncio.create_task(asking.ask(*each.asked)))
            if not waiting:
                break
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=0.5)
            for answer in (task.result() for task in ended):
                if answer.score is None and not unanswered:
                    observer.noticed(f"The target fails on a text: {answer.error or LATE}")
                unanswered += answer.score is None
                in_a_row = in_a_row + 1 if answer.score is None else 0
            done += len(ended)
            observer.progressed(Progress(done, {"unanswered": unanswered}))
            if in_a_row >= 2 * asking.target.concurrency:  # it may have ended
                _check(await asking.target.judge(*plain), first.right, "The same command then goes on.")
                in_a_row = 0
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    if done == info.total:
        observer.phase_finished(info, {})
    return done == info.total


# --- the results ----------------------------------------------------------------------------------------------------

Pairs = Sequence[tuple[Attempt, TargetAnswer | None]]


def results(asking: Asking, attempts: Sequence[Attempt]) -> tuple[list[AttackResult], Estimate, Estimate]:
    """The result of each attack, and the accepted share of all wrong and of all correct texts, from the answers that
    are known."""
    pairs = [(each, asking.known(*each.asked)) for each in attempts]
    threshold, by_attack = asking.target.threshold, dict[str, list[tuple[Attempt, TargetAnswer | None]]]()
    for pair in pairs:
        by_attack.setdefault(pair[0].attack.name, []).append(pair)
    of_truth = ([pair for pair in pairs if pair[0].attack.accept == accept] for accept in (False, True))
    wrong, right = (_accepted(of, threshold) for of in of_truth)
    return [_result(of, threshold) for of in by_attack.values()], wrong, right


def _accepted(pairs: Pairs, threshold: float) -> Estimate:
    found = [(each.place, answer.score >= threshold) for each, answer in pairs if answer and answer.score is not None]
    holds, places = [accepted for _, accepted in found], [place for place, _ in found]
    return share_of(np.array(holds, dtype=bool), np.array(places, dtype=np.int64))


def _result(pairs: Pairs, threshold: float) -> AttackResult:
    attack, mistakes = pairs[0][0].attack, dict[str, AttackExample]()
    for each, answer in sorted(pairs, key=lambda pair: (len(pair[0].text), pair[0].place)):
        if answer and answer.score is not None and (answer.score >= threshold) != attack.accept:
            case = each.case
            example = AttackExample.of(case.id, case.question, case.answer, each.text, answer.score)
            mistakes.setdefault(each.text, example)
    answers = [answer for _, answer in pairs if answer is not None]
    errors = [answer.error for answer in answers if answer.error]
    return AttackResult(
        **{name: getattr(attack, name) for name in ("name", "reason", "source", "accept")},
        planned=len(pairs),
        texts=len(answers),
        errors=len(errors),
        timeouts=sum(answer.timed_out for answer in answers),
        error=max(sorted(set(errors)), key=errors.count, default=""),
        accepted=_accepted(pairs, threshold),
        examples=list(mistakes.values())[:MOST_EXAMPLES],
    )
