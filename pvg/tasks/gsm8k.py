"""The GSM8K task: grade-school word problems in the published form, rows with `question` and `answer`, as JSON lines or
as parquet (the form of the Hugging Face hub).

    {"question": "Natalia sold ...", "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips ...\\n#### 72"}

Invariant: an id depends only on the split and the question (`gsm8k-train-1a2b3c4d`), so it does not change if rows are
reordered, added, or left out by `limit`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pvg import hub
from pvg.config.base import is_hub_id
from pvg.config.task import Gsm8kTask
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.inputs import expanded
from pvg.records import Grade, Problem, Split
from pvg.tasks.answers import NO_MARKER, extract, parse_number, read
from pvg.tasks.data import files_of, rows_of
from pvg.tasks.task import NUMBER

FIELDS = ("question", "answer")
SHORT_ID = 8
LONG_ID = 16  # hex digits of an id, if short digests of a file's questions collide
REMEDY = (
    "Set it with -s task.path=hf:openai/gsm8k, or task.path=DIRECTORY. The directory needs train and test in the "
    "published form, as .jsonl or .parquet."
)
CORRECT = 'Correct the row: {"question": ..., "answer": "... #### NUMBER"}.'


class Row(NamedTuple):
    number: str
    answer: str
    solution: str


class Gsm8k:
    """The GSM8K task of one section. Reads the files of a split once, when its problems are first needed."""

    def __init__(self, section: Gsm8kTask) -> None:
        """Raises MissingRequirementError if `task.path` is not set or a file is missing, and errors of
        pvg.hub.fetch."""
        if section.path is None:
            raise MissingRequirementError("gsm8k needs its data, but task.path is not set.", REMEDY)
        source = str(section.path)
        self._directory = hub.fetch(source, "dataset") if is_hub_id(source) else expanded(section.path, "task.path")
        self._limit = section.limit
        self._max_steps = section.max_steps
        self._files: dict[Split, list[Path]] = {"train": self._files_of("train"), "test": self._files_of("test")}
        self._rows: dict[Split, dict[str, Row]] = {}

    def problems(self, split: Split) -> Iterator[Problem]:
        """The first `limit` problems of the split with at most `max_steps` calculations, in row order, without repeated
        questions.

        Raises ConfigurationError with file and line for an invalid row. All rows of the split are checked, also those
        beyond the limit.
        """
        if split not in self._rows:
            self._rows[split] = _rows(self._files[split])
        rows = self._rows[split]
        short = Counter(_digest(question)[:SHORT_ID] for question in rows)
        most = self._max_steps
        wanted = [item for item in rows.items() if most is None or calculations(item[1].solution) <= most]
        for question, row in wanted[: self._limit]:
            digest = _digest(question)
            length = SHORT_ID if short[digest[:SHORT_ID]] == 1 else LONG_ID
            yield Problem(
                f"gsm8k-{split}-{digest[:length]}", question, row.answer, {"solution": row.solution, "wording": NUMBER}
            )

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct: the extracted number (see pvg.tasks.answers) has exactly the reference's value.

        Well-formed: there is one answer. A marked answer with several numbers or a calculation is not well-formed.
        Without a marker, the last number counts as the answer, and the note says so: base models seldom write a marker,
        and a task without well-formed solutions teaches nothing.
        """
        found = read(completion)
        if isinstance(found, str):
            return Grade(correct=False, well_formed=False, note=found)
        note = NO_MARKER.format("the last number") if found.marker == "last number" else ""
        return Grade(found.value == parse_number(problem.answer), well_formed=True, answer=found.text, note=note)

    def _files_of(self, split: str) -> list[Path]:
        found = files_of(self._directory, split)
        if not found:
            raise MissingRequirementError(
                f"There is no file {self._directory / split}.jsonl or {split}.parquet.", REMEDY
            )
        return found


def calculations(solution: str) -> int:
    """The number of calculations in a published solution: its `<<...>>` annotations or its lines, whichever are more,
    because not every calculation is annotated."""
    lines = [line for line in solution.splitlines() if line.strip() and not line.startswith("####")]
    return max(len(lines), solution.count("<<"), 1)


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()


def _rows(files: Sequence[Path]) -> dict[str, Row]:
    """Question -> row, without repetitions."""
    found: dict[str, Row] = {}
    for file in files:
        for number, row in rows_of(file, FIELDS):
            place = f"{file}, {number}"
            question, solution = _fields(row, place)
            answer = extract(solution)
            if answer is None or answer.marker != "####":
                raise ConfigurationError(f"{place}: the answer does not end in '#### NUMBER'.", CORRECT)
            earlier = found.setdefault(question, Row(number, answer.text, solution))
            if parse_number(earlier.answer) != answer.value:
                raise ConfigurationError(
                    f"{place}: repeats the question of {earlier.number} with another answer "
                    f"({answer.text} instead of {earlier.answer}).",
                    "Remove one of the rows.",
                )
    if not found:
        raise ConfigurationError(f"{files[0]} has no rows.", "Add problems to it.")
    return found


def _fields(row: object, place: str) -> tuple[str, str]:
    if not isinstance(row, dict):
        raise ConfigurationError(f"{place}: not a JSON object.", CORRECT)
    for field in FIELDS:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise ConfigurationError(f"{place}: the field {field!r} is missing or not a text.", CORRECT)
    return row["question"], row["answer"]
