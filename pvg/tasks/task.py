"""The `Task` protocol: a source of problems that grades completions.

A new task is one file with such a class, its section in pvg.config.experiment, and a line in the table of `pvg.tasks`.

A task may also be in the user's file: `task.kind = "custom"`, `task.source = "FILE.py:NAME"`. NAME is a class with the
`Task` protocol; pvg creates it with `task.settings` as keyword arguments. docs/research.md has an example. pvg checks
the task's results where it depends on them, so that an error message names the user's file."""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pvg.config.task import CustomTask
from pvg.errors import ConfigurationError
from pvg.extensions import called, load
from pvg.records import Grade, Half, Problem, Role, Split, Wording
from pvg.seeds import seed_for
from pvg.tasks.answers import parse_number, same_answer

NUMBER, CODE = "number", "code"


def read_wording(name: str, form: str = "", **places: str) -> Wording:
    """What prompts say besides the question of a problem, from wordings.toml. `form`: of an answer, see Wording.
    `places`: the texts for the places in braces."""
    found = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text(encoding="utf-8"))[name]

    def filled(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda place: places[place[1]], text)

    instructions, answers = (
        {role: filled(found[part][role.value]) for role in Role} for part in ("instructions", "answers")
    )
    return Wording(instructions, filled(found["question"]), answers, form)


WORDINGS = {NUMBER: read_wording(NUMBER, "#### {answer}"), CODE: read_wording(CODE)}
INSTRUCTIONS, EXAMPLE_QUESTION = WORDINGS[NUMBER].instructions, WORDINGS[NUMBER].question
NEUTRAL = read_wording("neutral")
OPENED, CLOSED = "<answer>", "</answer>"


def tag_wording(what: str, right: str, wrong: str) -> Wording:
    """A wording that asks for `what` in a tag. `right` and `wrong`: the answers of the example."""
    return read_wording("tag", f"{OPENED}{{answer}}{CLOSED}", what=what, right=right, wrong=wrong)


def wording_of(problem: Problem) -> Wording:
    """Raises ConfigurationError for metadata that names no wording."""
    named = problem.metadata.get("wording", NEUTRAL)
    if isinstance(named, Wording):
        return named
    if isinstance(named, str) and named in WORDINGS:
        return WORDINGS[named]
    raise ConfigurationError(
        f"The problem {problem.id!r} has a wording that pvg does not know: {str(named)[:60]!r}.",
        f"Use a pvg.records.Wording, or one of {', '.join(WORDINGS)}.",
    )


class Task(Protocol):
    """Deterministic: the same section gives the same problems in the same order, and the same grade for a text.

    `grade` never raises for any text that a model may write, takes time linear in the text, and executes parts of it
    only in pvg.sandbox. A task that holds resources is a context manager, which its opener must leave.
    """

    def problems(self, split: Split) -> Iterable[Problem]: ...

    def grade(self, problem: Problem, completion: str) -> Grade: ...


@runtime_checkable
class HasNote(Protocol):
    """A task with something to say about its data: `note`, one sentence or ""."""

    @property
    def note(self) -> str: ...


@runtime_checkable
class LocatesFlaws(Protocol):
    """An optional part of a task: it finds the first wrong step of a solution. For tasks whose solutions can be checked
    step by step."""

    def cuts(self, completion: str) -> list[int]:
        """The end of each step as an offset into the text, ascending; the last one is the final answer. Empty for a
        malformed solution."""

    def flaw(self, problem: Problem, completion: str) -> int | None:
        """The first wrong step, counted from 0 in the order of `cuts`. None for a flawless solution, a malformed one,
        and if the flaw is not in a single step."""


@runtime_checkable
class KnowsTruth(Protocol):
    """A task with a second grader that cannot be hacked, but is too costly for training. The hack alarm asks it about a
    few solutions (pvg.game.audit)."""

    def truth(self, problem: Problem, completion: str) -> bool:
        """Whether the solution is really correct."""


@runtime_checkable
class GradesInBatches(Protocol):
    """A task that grades many completions together faster than one by one."""

    def grade_many(self, solutions: Sequence[tuple[Problem, str]]) -> list[Grade]: ...


@runtime_checkable
class ConcealsText(Protocol):
    """A task whose completions contain a part that a verifier must not read."""

    def shown(self, completion: str) -> str:
        """The part that it may read. Completions that differ only in the concealed part give the same text."""


@runtime_checkable
class ComparesPrograms(Protocol):
    """A task whose solutions are programs, which can be compared (pvg.tasks.code_problems)."""

    def solution(self, completion: str) -> str:
        """The program in a completion, "" without one."""


@runtime_checkable
class WritesSolutions(Protocol):
    """A task that can write solutions whose grade is known, for checks of its prompts and grader. Other tasks give
    their wording a `form` (pvg.records.Wording)."""

    def written(self, problem: Problem, correct: bool) -> str:
        """A solution in the form that the prompt asks for, with a correct or a wrong answer."""


@runtime_checkable
class SplitsSteps(Protocol):
    """A task that knows the steps of a solution; for other tasks, lines are used as steps (see pvg.game.protocols)."""

    def steps(self, completion: str) -> list[tuple[int, int]]:
        """Start and end of each step in the text, in order, none empty, without overlap. Never raises."""


@runtime_checkable
class AnswersQuestions(Protocol):
    """A task that can answer questions about a solution. In the challenge protocol the verifier chooses one of them,
    and the task answers in place of the prover."""

    def questions(self, problem: Problem, completion: str) -> list[str]:
        """The possible questions as text, always in the same order; none about a malformed solution. Never raises."""

    def answer(self, problem: Problem, completion: str, question: str) -> str:
        """The true answer to one of `questions`, as text that follows the question."""


OPTIONAL: tuple[type, ...] = (
    *(LocatesFlaws, KnowsTruth, GradesInBatches, ConcealsText, ComparesPrograms, WritesSolutions),
    *(SplitsSteps, AnswersQuestions),
)


# --- the halves of the training problems: one for the prover's RL, one for the verifier's data ------------------------
#
# Invariant: no problem is in both. The half depends only on the id, so it does not change when problems are added or
# reordered, or on another machine.


def half_of(problem_id: str) -> Half:
    """The half of a problem: the lowest bit of the first byte of sha256(id), about 50/50."""
    bit = hashlib.sha256(problem_id.encode()).digest()[0] & 1
    return "verifier" if bit else "prover"


def problems_of_half(task: Task, half: Half) -> list[Problem]:
    return [problem for problem in task.problems("train") if half_of(problem.id) == half]


KEY = "task.source"


class CheckedTask:
    """A user's task. Its errors become a ConfigurationError that names the file."""

    def __init__(self, source: str, task: Task) -> None:
        self._source, self._task = source, task
        # Attributes, because `isinstance` with a protocol does not call __getattr__ since Python 3.12.
        for protocol in OPTIONAL:
            if isinstance(task, protocol):
                for name in vars(protocol):
                    if not name.startswith("_"):
                        setattr(self, name, partial(called, KEY, source, getattr(task, name)))

    def problems(self, split: Split) -> Iterator[Problem]:
        """The task's problems. Raises ConfigurationError for an object that is not a Problem, and for a repeated id."""
        found = called(KEY, self._source, lambda: list(self._task.problems(split)))
        seen: set[str] = set()
        for problem in found:
            if not isinstance(problem, Problem):
                raise self._wrong(f"problems({split!r}) must give pvg's Problem, not {type(problem).__name__}")
            wording_of(problem)
            if problem.id in seen:
                raise self._wrong(f"problems({split!r}) gave the id {problem.id!r} twice")
            seen.add(problem.id)
        return iter(found)

    def grade(self, problem: Problem, completion: str) -> Grade:
        grade = called(KEY, self._source, self._task.grade, problem, completion)
        if not isinstance(grade, Grade):
            raise self._wrong(f"grade must return pvg's Grade, not {type(grade).__name__}")
        return grade

    def _wrong(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{KEY} = {self._source!r}: {what}.", "See docs/research.md for an example.")


class CheckedResource(CheckedTask):
    """A user's task that is a context manager. `with` looks its methods up on the class."""

    _task: Any

    def __enter__(self) -> CheckedResource:
        called(KEY, self._source, self._task.__enter__)
        return self

    def __exit__(self, *error: object) -> None:
        called(KEY, self._source, self._task.__exit__, *error)


def open_custom(section: CustomTask) -> CheckedTask:
    """Raises ConfigurationError if the file, the class or its settings are wrong."""
    kind = load(KEY, section.source)
    task = called(KEY, section.source, lambda: kind(**section.settings))
    return (CheckedResource if isinstance(task, AbstractContextManager) else CheckedTask)(section.source, task)


# Solutions whose grade is known: the reference answer in the documented form, and near misses.

OTHERS = 8  # answers of other problems that are tried
NONSENSE = "?"


@dataclass(frozen=True, slots=True)
class KnownSolution:
    """A solution that must be graded `correct`. `name`: what it is. `certain`: False for the answer of another problem,
    which may be right here too."""

    name: str
    text: str
    correct: bool
    certain: bool = True


def correct_solution(task: Task, problem: Problem) -> KnownSolution | None:
    """The task's own solution, or the reference answer in the form of the problem's wording. None if the task has no
    such form, or if the problem has no reference answer."""
    if isinstance(task, WritesSolutions):
        return KnownSolution("a correct solution", task.written(problem, True), True)
    wording = wording_of(problem)
    if not wording.form or not problem.answer:
        return None
    return KnownSolution("the reference answer", wording.written(problem.answer), True)


def wrong_solutions(task: Task, problem: Problem, others: Iterable[Problem]) -> Iterator[KnownSolution]:
    """Near misses: a wrong solution of the task, answers of `others`, the form without an answer, and an empty text."""
    wording = wording_of(problem)
    if isinstance(task, WritesSolutions):
        yield KnownSolution("a wrong solution", task.written(problem, False), False)
    elif wording.form and problem.answer:
        seen = {problem.answer: None} | dict.fromkeys(other.answer for other in others if other.answer)
        for answer in islice(seen, 1, OTHERS + 1):
            yield KnownSolution("another problem's answer", wording.written(answer), False, certain=False)
            yield KnownSolution(
                "the reference answer, then another one",
                f"{wording.written(problem.answer)}\n{wording.written(answer)}",
                False,
                certain=False,
            )
    if wording.form:
        yield KnownSolution("the form without an answer", wording.written(""), False)
        yield KnownSolution("nonsense as an answer", wording.written(NONSENSE), False)
    yield KnownSolution("an empty text", "", False)


def wrong_answer(task: Task, problem: Problem, others: Iterable[Problem]) -> str:
    """A plausible wrong answer: that of the task's own wrong solution, or the nearest number that answers one of
    `others`, or a drawn answer of theirs. Raises ConfigurationError if there is none."""
    if isinstance(task, WritesSolutions):
        return task.grade(problem, task.written(problem, False)).answer or ""
    answers = (other.answer for other in others if other.answer and not same_answer(other.answer, problem.answer))
    wrong = {answer: parse_number(answer) for answer in answers}
    if not wrong or not problem.answer:
        raise ConfigurationError(
            f"game.protocol = 'consultancy' assigns a right and a wrong answer, but {problem.id!r} has none.",
            "Take a task whose problems have answers, or set game.protocol to 'direct'.",
        )
    if (right := parse_number(problem.answer)) is None:
        return list(wrong)[seed_for(0, "wrong answer", problem.id) % len(wrong)]
    return min(wrong, key=lambda answer: math.inf if (value := wrong[answer]) is None else abs(value - right))
