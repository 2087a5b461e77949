"""Grade-school word problems in the published JSONL form: one object a line, fields `question` and `answer`.

    {"question": "Natalia sold ...", "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips ...\\n#### 72"}

Invariant: an id depends on the split and the question alone (`gsm8k-train-1a2b3c4d`), so it is stable when lines are
reordered, added or left out by `limit`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import orjson

from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.inputs import expanded
from pvg.records import Grade, Problem, Split
from pvg.sections import Gsm8kTask
from pvg.tasks.answers import extract, parse_number, read

SHORT_ID = 8
LONG_ID = 16  # for the questions of a file whose short digests are the same
REMEDY = "Set it with --set task.path=DIRECTORY; the directory holds train.jsonl and test.jsonl in the published form."


class Gsm8k:
    """The GSM8K task of one section. A file is read each time its problems are asked for."""

    def __init__(self, section: Gsm8kTask) -> None:
        """Raises MissingRequirementError when `task.path` is not set or lacks a file."""
        if section.path is None:
            raise MissingRequirementError("gsm8k needs its data, and task.path is not set.", REMEDY)
        self._directory = expanded(section.path, "task.path")
        self._limit = section.limit
        self._max_steps = section.max_steps
        for split in ("train", "test"):
            if not self._file(split).is_file():
                raise MissingRequirementError(f"There is no file {self._file(split)}.", REMEDY)

    def problems(self, split: Split) -> Iterator[Problem]:
        """The first `limit` problems of at most `max_steps` calculations of the split's file, in its order; a question
        that comes again is left out.

        Raises ConfigurationError, naming file and line, for a line that is no problem. The whole file is checked,
        whatever the limit.
        """
        rows = list(_rows(self._file(split)))
        short = Counter(_digest(question)[:SHORT_ID] for question, _, _ in rows)
        wanted = [row for row in rows if self._max_steps is None or calculations(row[2]) <= self._max_steps]
        for question, answer, solution in wanted[: self._limit]:
            digest = _digest(question)
            length = SHORT_ID if short[digest[:SHORT_ID]] == 1 else LONG_ID
            yield Problem(f"gsm8k-{split}-{digest[:length]}", question, answer, {"solution": solution})

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct: the extracted number (see pvg.tasks.answers) has exactly the reference's value.

        Well-formed: there is one answer. A marked answer that names several numbers or a calculation is not
        well-formed. Without any marker the last number counts as the answer, and the note says so: base models seldom
        write a marker, and a task on which nothing is well-formed teaches nothing.
        """
        found = read(completion)
        if isinstance(found, str):
            return Grade(correct=False, well_formed=False, note=found)
        note = "no answer marker: the last number was taken" if found.marker == "last number" else ""
        return Grade(found.value == parse_number(problem.answer), well_formed=True, answer=found.text, note=note)

    def _file(self, split: str) -> Path:
        return self._directory / f"{split}.jsonl"


def calculations(solution: str) -> int:
    """How many calculations a published solution takes: its `<<...>>` annotations, or its lines where these are more,
    since not every calculation is annotated."""
    lines = [line for line in solution.splitlines() if line.strip() and not line.startswith("####")]
    return max(len(lines), solution.count("<<"), 1)


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()


def _rows(file: Path) -> Iterator[tuple[str, str, str]]:
    """Question, final answer and worked solution of each line, without repetitions."""
    first_seen: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        question, solution = _fields(line, f"{file}, line {number}")
        found = extract(solution)
        if found is None or found.marker != "####":
            raise ConfigurationError(f"{file}, line {number}: the answer ends in no '#### NUMBER'.")
        if question not in first_seen:
            first_seen[question] = (number, found.text)
            yield question, found.text, solution
        elif parse_number(first_seen[question][1]) != found.value:
            raise ConfigurationError(
                f"{file}, line {number}: the question of line {first_seen[question][0]} again, with another answer "
                f"({found.text} instead of {first_seen[question][1]})."
            )


def _fields(line: bytes, place: str) -> tuple[str, str]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{place}: not valid JSON ({error}).", "Fetch the file again.") from None
    if not isinstance(row, dict):
        raise ConfigurationError(f"{place}: not a JSON object.")
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise ConfigurationError(f"{place}: the field {field!r} is missing or not a text.")
    return row["question"], row["answer"]
