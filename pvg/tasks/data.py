"""The data task: questions and answers from a file, without Python.

    [task]
    kind = "data"
    path = "problems.jsonl"     # {"question": "What is 3 + 4?", "answer": 7}
    grader = "number"

Invariant: an id depends only on the split and the question, and the share that is held out for testing only on the
question. So neither changes if rows are reordered or added.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

from pvg import hub
from pvg.config.base import is_hub_id
from pvg.config.task import DataTask
from pvg.errors import ConfigurationError, MissingRequirementError, counted
from pvg.inputs import check_regular, expanded
from pvg.records import Grade, Problem, Split
from pvg.tasks.graders import grader_of
from pvg.tasks.rows import files_of, no_column, rows_of

REMEDY = "Set task.path to a .jsonl, .csv or .parquet file, to a folder with train and test, or to hf:OWNER/DATASET."
HELD_OUT = 10  # one of so many training problems becomes a test problem if there is no test file
ID_DIGITS = 16  # hex digits of an id
LONGEST_QUESTION = 100_000  # characters, more than any context
EXACT_FLOAT = 2.0**53  # from here on a float may have lost digits of the number in the file


class Data:
    """The task of one section. Reads the files once, when problems are first needed."""

    def __init__(self, section: DataTask) -> None:
        """Raises MissingRequirementError if `task.path` is not set or a file is missing, and errors of
        pvg.hub.fetch."""
        if section.path is None:
            raise MissingRequirementError("The data task needs a file, but task.path is not set.", REMEDY)
        source = str(section.path)
        self._section = section
        self._grader = grader_of(section)
        self._place = hub.fetch(source, "dataset") if is_hub_id(source) else expanded(section.path, "task.path")
        self._test = self._test_files()
        self._train = self._train_files()
        self._made: dict[Split, list[Problem]] = {}

    @property
    def note(self) -> str:
        """A sentence for the user about the split; "" with a test file. Raises the errors of `problems`."""
        if self._test:
            return ""
        held_out, kept = len(list(self.problems("test"))), len(list(self.problems("train")))
        return (
            f"{self._place} has no test file, so pvg tests with about a tenth of its problems: {held_out:,} of "
            f"{held_out + kept:,}."
        )

    def problems(self, split: Split) -> Iterator[Problem]:
        """The first `limit` problems of the split, in row order, without repeated questions.

        Raises ConfigurationError with file and line for an invalid row, and for a question in train and in test.
        """
        if not self._made:
            self._made = self._read()
        return iter(self._made[split][: self._section.limit])

    def grade(self, problem: Problem, completion: str) -> Grade:
        return self._grader.grade(problem.answer, completion)

    def _train_files(self) -> list[Path]:
        if self._place.is_dir():
            found = files_of(self._place, "train")
            if not found:
                raise MissingRequirementError(f"{self._place} has no train.jsonl, train.csv or train.parquet.", REMEDY)
            return found
        return [_file(self._place, "task.path")]

    def _test_files(self) -> list[Path]:
        return files_of(self._place, "test") if self._place.is_dir() else []

    def _read(self) -> dict[Split, list[Problem]]:
        train = self._rows(self._train)
        if self._test:
            test = self._rows(self._test)
            _refuse_shared(train, test)
        else:
            test = {question: row for question, row in train.items() if _held_out(question)}
            train = {question: row for question, row in train.items() if question not in test}
            if not train or not test:
                total = counted(len(train) + len(test), "problem")
                raise ConfigurationError(
                    f"{self._place} has {total}, too few to hold out a tenth of them.",
                    "Add rows, or set task.path to a folder with train and test.",
                )
        return {"train": self._problems("train", train), "test": self._problems("test", test)}

    def _problems(self, split: Split, rows: dict[str, tuple[str, str]]) -> list[Problem]:
        wording = {"wording": self._grader.wording}
        return [
            Problem(f"data-{split}-{_digest(question)[:ID_DIGITS]}", question, answer, wording)
            for question, (_, answer) in rows.items()
        ]

    def _rows(self, files: Sequence[Path]) -> dict[str, tuple[str, str]]:
        """Question -> (place, answer) of each row."""
        found: dict[str, tuple[str, str]] = {}
        for file in files:
            for where, row in rows_of(file, (self._section.question, self._section.answer)):
                place = f"{file}, {where}"
                question, answer = self._fields(row, place)
                earlier = found.setdefault(question, (place, answer))
                if not self._grader.same(earlier[1], answer):
                    raise ConfigurationError(
                        f"{place}: repeats the question of {earlier[0]} with another answer.", "Remove one of the rows."
                    )
        if not found:
            raise ConfigurationError(f"{files[0]} has no rows.", "Add problems to it.")
        return found

    def _fields(self, row: object, place: str) -> tuple[str, str]:
        if not isinstance(row, dict):
            raise ConfigurationError(f"{place}: not a JSON object.", 'Write {"question": ..., "answer": ...}.')
        question = _text(row, self._section.question, "task.question", place)
        if len(question) > LONGEST_QUESTION:
            raise ConfigurationError(
                f"{place}: the question has {len(question):,} characters.",
                f"At most {LONGEST_QUESTION:,} are possible.",
            )
        answer = _text(row, self._section.answer, "task.answer", place)
        try:
            return question, self._grader.reference(answer)
        except ValueError as error:
            raise ConfigurationError(
                f"{place}: {error}.", f"Correct the row, or set another task.grader than {self._section.grader!r}."
            ) from None


def _file(path: Path, key: str) -> Path:
    check_regular(path)
    if not path.is_file():
        raise MissingRequirementError(
            f"There is no file {path}.", f"Check {key}. {REMEDY}" if key == "task.path" else ""
        )
    return path


def _text(row: dict[str, object], column: str, key: str, place: str) -> str:
    """The text of a column. Answers may be numbers."""
    if column not in row:
        raise no_column(row, column, place, key)
    value = row[column]
    complaint = ""
    if isinstance(value, bool) or value is None:
        complaint = "is empty" if value is None else f"is {str(value).lower()}, not a text"
    elif isinstance(value, int | float | Decimal) and key == "task.answer":
        if isinstance(value, float) and (not math.isfinite(value) or abs(value) >= EXACT_FLOAT):
            complaint = f"is {value}, which may have lost digits; write it as a text"
        value = str(value)
    if not complaint and not isinstance(value, str):
        complaint = f"is of type {type(value).__name__}, not a text"
    elif isinstance(value, str) and not value.strip():
        complaint = "is empty"
    elif isinstance(value, str) and "\0" in value:
        complaint = "contains a NUL character"
    if complaint:
        raise ConfigurationError(f"{place}: the column {column!r} {complaint}.", "Correct the row, or remove it.")
    return str(value)


def _refuse_shared(train: dict[str, tuple[str, str]], test: dict[str, tuple[str, str]]) -> None:
    for question, (place, _) in test.items():
        if question in train:
            raise ConfigurationError(
                f"{place}: this test question is also a training question ({train[question][0]}).",
                "Remove one of the two rows.",
            )


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()


def _held_out(question: str) -> bool:
    """True for one of HELD_OUT questions. Not the bits that choose a problem's half (pvg.tasks.task), which are of its
    id's digest."""
    return int(_digest(question)[-8:], 16) % HELD_OUT == 0
