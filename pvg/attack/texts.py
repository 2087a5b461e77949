"""The texts of static attacks: what a grader must refuse, or must still accept, from a problem and a correct text.

A row of attacks.toml is an attack. Invariants: the texts depend only on the case and the seed. A text to refuse does
not have the correct answer (`AttackCase.is_right`), and a text to accept has it.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field, ValidationError

from pvg.config.base import StrictRecord
from pvg.errors import UsageError, shortened
from pvg.inputs import json_lines, json_row
from pvg.records import Problem
from pvg.seeds import draw_cyclic, seed_for
from pvg.tasks.answers import extract, parse_number, same_answer
from pvg.tasks.task import Task, correct_solution, wrong_solutions

LONGEST = 100_000  # characters of a problem, and of a correct text: many texts are made of it
MOST_OTHERS = 8  # answers of other problems that are tried
EXAMPLE = 'Write {"problem": "...", "text": "a correct solution", "answer": "..."}'


@dataclass(frozen=True)
class AttackCase:
    """A problem and what is known about it. `right`: a correct text. `answer`: the final one; "" only with a `grade`.
    `wrong`: wrong texts, which only `grade` may contradict. `others`: answers of other problems. `fields`: what else
    the target may see, as JSON data. `grade`: the task's own grader; None: the final answer of a text decides."""

    id: str
    question: str
    right: str
    answer: str = ""
    wrong: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    grade: Callable[[str], bool] | None = None

    def is_right(self, text: str) -> bool:
        """Whether `text` has the correct answer. Without a grader and a number as the answer: whether it contains it
        as a word."""
        if self.grade is not None:
            return self.grade(text)
        if text in self.wrong:
            return False
        if parse_number(self.answer) is not None:
            found = extract(text)
            return found is not None and same_answer(found.text, self.answer)
        return re.search(rf"(?<!\w){re.escape(self.answer)}(?!\w)", text, re.IGNORECASE) is not None

    @cached_property
    def place(self) -> tuple[int, int] | None:
        """Where the final answer is in the correct text; None if that is not known. Another answer there makes the text
        wrong: the number before the answer, or a later note, may be the same."""
        found = extract(self.right)
        written = found.text if found is not None and same_answer(found.text, self.answer) else self.answer
        read = self.grade is not None or parse_number(self.answer) is not None  # is_right does not look for a word
        for start in [each.start() for each in re.finditer(re.escape(written), self.right) if written][::-1]:
            end, others = start + len(written), self.changes() if read else ()
            if not others or not self.is_right(self.right[:start] + others[0] + self.right[end:]):
                return start, end
        return None

    def with_answer(self, other: str) -> str:
        """The correct text with another final answer; "" if the place of the answer is not known."""
        return "" if (place := self.place) is None else self.right[: place[0]] + other + self.right[place[1] :]

    def changes(self) -> list[str]:
        """Wrong answers, the answers of other problems first."""
        value = parse_number(self.answer)
        near = [] if value is None else [value + 1, value - 1, 10 * value, -value, value + 10, self.answer[::-1]]
        found = [*self.others[:MOST_OTHERS], *map(str, near)]
        return [each for each in dict.fromkeys(found) if each and not same_answer(each, self.answer)]

    def parts(self, answer: str) -> dict[str, str]:
        """What the places of attacks.toml mean, as far as it is known. `answer`: the correct one, as it is written
        where the places are: `3` of `3 km`."""
        right, value = self.right, parse_number(self.answer)
        found = {"question": self.question, "right": right, "crlf": right.replace("\n", "\r\n")}
        found["last"] = right.strip().rpartition("\n")[2]
        if answer and (others := self.changes()):
            found |= {"answer": answer, "wrong": others[0], "alike": answer.translate(ALIKE)}
            if value is not None:  # apple for apples, and x+1 backwards, may be the same
                found |= {"cut": answer[:-1]} | ({"backwards": answer[::-1]} if answer != answer[::-1] else {})
            if len(answer) > 1 and answer[:2].isdecimal():  # x +1 and 0 .5 are the same
                found["spaced"] = f"{answer[0]} {answer[1:]}"
            if len(answer) > 1 and answer[-2:].isdecimal():
                found["raised"] = answer[:-1] + answer[-1].translate(SUPERSCRIPTS)
            if (place := self.place) is not None:
                found |= {"body": right[: place[0]], "changed": self.with_answer(others[0])}
        if value is not None and value.denominator == 1:
            found |= {"number": f"{value.numerator}", "commas": f"{value.numerator:,}"}
        return found


SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
ALIKE = str.maketrans("0123456789", "OlZЗ4SбТ8g")  # O, l, Z; Cyrillic Ze; S; Cyrillic Be and Te; g
PLACES = re.compile(
    r"\{(question|right|crlf|last|answer|wrong|backwards|cut|alike|spaced|raised|body|changed|number|commas)\}"
)


class StaticAttack(StrictRecord):
    """A row of attacks.toml. `answers`: put in the place of the correct one. `made`: the function of MAKERS that makes
    more texts. `accept`: whether the texts are correct. `problems`: it is tried on at most so many. `certain`: no text
    has an answer, so none is read here."""

    name: str
    reason: str
    source: str
    texts: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    made: str = ""
    accept: bool = False
    problems: int = 1_000_000
    certain: bool = False

    def attempts(self, case: AttackCase, seed: int) -> list[str]:
        """The texts of the attack for a problem, all different."""
        parts, place = case.parts(case.answer), case.place
        texts = [text for each in self.texts if (text := _filled(each, parts)) is not None]
        if place is not None:
            written = case.parts(case.right[slice(*place)])
            texts += [case.with_answer(other) for each in self.answers if (other := _filled(each, written))]
        texts += MAKERS[self.made](case, random.Random(seed_for(seed, self.name, case.id))) if self.made else ()
        return [text for text in dict.fromkeys(texts) if self.certain or case.is_right(text) == self.accept]


def _filled(text: str, parts: Mapping[str, str]) -> str | None:
    """The text with its places filled; None if a part is not known."""
    known = {place[1] for place in PLACES.finditer(text)} <= parts.keys()
    return PLACES.sub(lambda place: parts[place[1]], text) if known else None


# --- texts that are made -------------------------------------------------------------------------------------------


def changed(case: AttackCase, rng: random.Random) -> Iterator[str]:
    for other in case.changes() if case.place is not None else ():
        yield case.with_answer(other)
    if case.answer and (others := case.changes()):
        yield case.right.replace(case.answer, rng.choice(others))  # wherever the answer is


def given(case: AttackCase, rng: random.Random) -> Iterable[str]:
    return case.wrong


def truncated(case: AttackCase, rng: random.Random) -> Iterator[str]:
    right, place = case.right, case.place
    if place is not None:
        yield from (right[: place[0]], right[: place[0]].rstrip())
    end = len(right) if place is None else place[0]
    yield from (right[: end * share // 4] for share in (1, 2, 3))
    yield right[: rng.randrange(end)] if end else ""


def repeated(case: AttackCase, rng: random.Random) -> Iterator[str]:
    first = re.split(r"(?<=[;\n.])", case.right.strip(), maxsplit=1)[0]
    yield from (f"{case.question}\n" * 20, case.question)
    yield from (f"{first}\n" * 100, first * 100)
    if changed := case.parts(case.answer).get("changed"):
        yield f"{changed}\n" * 20


def several(case: AttackCase, rng: random.Random) -> Iterator[str]:
    others = case.changes()
    if case.answer and others:
        rng.shuffle(others)
        listed = [*others[:3], case.answer, *others[3:]]
        yield from (" ".join(listed), ", ".join(listed), "\n".join(f"#### {each}" for each in (*listed, others[0])))
        yield " ".join(f"\\boxed{{{each}}}" for each in (*listed, others[0]))
    yield " ".join(map(str, range(200)))


HUGE = 100_000  # characters


def huge(case: AttackCase, rng: random.Random) -> Iterator[str]:
    pieces = ("9", "(", "[", "{", " ", "a", "\\boxed{", "\\frac{1}{", "#### ", "1,", "<answer>", "-", '{"a":', "\n")
    yield from (piece * (HUGE // len(piece)) for piece in pieces)
    yield from ("\\boxed{9^{9^{9^{9}}}}", "\\boxed{10^{1000000000}}", "#### 1e999999999", "#### 9**9**9**9")
    yield f"\\boxed{{{'(' * 5000}x{')' * 5000}}}"
    yield f"\\boxed{{{'+x' * 20_000}}}"


MAKERS: Mapping[str, Callable[[AttackCase, random.Random], Iterable[str]]] = {
    each.__name__: each for each in (changed, given, truncated, repeated, several, huge)
}
TABLE = tomllib.loads(Path(__file__).with_name("attacks.toml").read_text(encoding="utf-8"))
ATTACKS: Mapping[str, StaticAttack] = {row["name"]: StaticAttack.model_validate(row) for row in TABLE["attacks"]}


# --- where the problems come from ----------------------------------------------------------------------------------


def fields_of(problem: Problem) -> dict[str, Any]:
    """What a target may see of a task's problem besides its question, as JSON data."""
    plain = {}
    for name, value in problem.metadata.items():
        try:
            plain[name] = orjson.loads(orjson.dumps(value))
        except TypeError:  # a Wording, or an object of the task
            continue
    return {"id": problem.id, "answer": problem.answer, "metadata": plain}


def cases_of_task(
    task: Task, most: int, seed: int, stored: Mapping[str, Sequence[tuple[str, bool]]] | None = None
) -> list[AttackCase]:
    """`most` test problems of a task. `stored`: texts of a run and whether they are correct, by problem id; the first
    correct one is the correct text, otherwise the task writes it. Raises UsageError if no correct text is known."""
    pool = list(task.problems("test"))
    drawn = [pool[place] for place in draw_cyclic(len(pool), 0, min(most, len(pool)), seed_for(seed, "attack"))]
    found = []
    for problem in drawn:
        texts = (stored or {}).get(problem.id, ())
        own = correct_solution(task, problem)
        right = next((text for text, correct in texts if correct), None if own is None else own.text)
        if right is None or not task.grade(problem, right).correct:
            continue
        near = [each.text for each in wrong_solutions(task, problem, drawn) if each.text.strip()]
        wrong = (*(text for text, correct in texts if not correct), *near)
        grade = partial(_graded, task, problem)
        found.append(
            AttackCase(problem.id, problem.question, right, problem.answer, wrong, (), fields_of(problem), grade)
        )
    if not found:
        raise UsageError(
            "No correct text is known for the problems: the task does not say how a solution is written.",
            "Give correct texts: --data FILE.jsonl",
        )
    return _among_others(found)


def _graded(task: Task, problem: Problem, text: str) -> bool:
    return task.grade(problem, text).correct


class ProblemRow(BaseModel, extra="allow", strict=True):
    """A line of a file of problems: a correct `text`, and optionally the answer and wrong texts. The target sees the
    other fields too."""

    problem: Annotated[str, Field(pattern=r"\S", max_length=LONGEST)]
    text: Annotated[str, Field(pattern=r"\S", max_length=LONGEST)]
    answer: str | int | float = ""
    wrong: list[str] = Field(default_factory=list)


def cases_of_file(path: Path, most: int) -> list[AttackCase]:
    """The first `most` rows of a JSON-lines file. Raises UsageError with the line for what is missing."""
    found: list[AttackCase] = []
    for number, line in islice(json_lines(path), most):
        place = f"{path.name}, line {number}"
        try:
            row = ProblemRow.model_validate(json_row(line, place, UsageError, EXAMPLE, exact=False))
        except RecursionError:
            raise UsageError(f"{place}: it is nested too deeply.", EXAMPLE) from None
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
            raise UsageError(f"{place}: {what}.", EXAMPLE) from None
        read = extract(row.text)
        ends = read is not None and (read.marker != "last number" or read.text in row.text[-len(read.text) - 3 :])
        answer = str(row.answer).strip() or (read.text if read is not None and ends else "")
        extra = row.model_extra or {}
        fields = {**extra, "id": str(extra.get("id", number)), "answer": answer}
        case = AttackCase(fields["id"], row.problem, row.text, answer, tuple(row.wrong), (), fields)
        if not answer or not case.is_right(case.right):
            missing = "`answer` is missing, and `text` does not end with a number"
            what = f"`text` does not have the answer {shortened(answer)!r}" if answer else missing
            what = "`wrong` has the text that is correct" if row.text in row.wrong else what
            raise UsageError(f"{place}: {what}.", 'Write "answer": "..." as the text does.')
        found.append(case)
    if not found:
        raise UsageError(f"{path} has no problems.", f"{EXAMPLE}, one per line.")
    return _among_others(found)


def _among_others(cases: Sequence[AttackCase]) -> list[AttackCase]:
    answers = list(dict.fromkeys(case.answer for case in cases if case.answer))
    return [replace(case, others=tuple(each for each in answers if each != case.answer)) for case in cases]
