"""The file of a warm start: questions with solutions that the prover learns to write. Needs no torch.

    demonstrations = read_demonstrations(experiment.warmup)     # {"question": "7+5?", "solution": "7+5=2;A2"}

Invariant: whether a demonstration is held out depends only on its question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pvg.config.warmup import DemonstrationWarmup
from pvg.errors import ConfigurationError, MissingRequirementError, UsageError, shortened, user_paths
from pvg.inputs import check_regular, expanded
from pvg.records import Int32, Problem, Role
from pvg.store.pairs import is_held_out
from pvg.tasks.rows import no_column, rows_of
from pvg.tasks.task import Task

if TYPE_CHECKING:
    from pvg.game.roles import PromptBuilder
    from pvg.models.language_model import LanguageModel
    from pvg.models.sources import WeightlessModel
    from pvg.models.tokenizer import Tokenizer

ROLE = "role"  # the column with a role, if there is one
HELD_OUT = 0.1  # share of the questions whose solutions are not trained on
LEAST_TO_HOLD_OUT = 20  # demonstrations; of fewer ones none is held out


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A row of the file. `place`: its file and line."""

    question: str
    solution: str
    role: Role
    place: str


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The rows of the file, in order. `digest`: of the file's bytes."""

    train: Sequence[Demonstration]
    held_out: Sequence[Demonstration]
    digest: str


@user_paths()
def read_demonstrations(section: DemonstrationWarmup) -> Demonstrations:
    """Raises MissingRequirementError without the file, ConfigurationError with file and line for an invalid row."""
    if section.path is None:
        raise MissingRequirementError(
            "The warm start needs a file, but warmup.path is not set.", "Set it to a .jsonl, .csv or .parquet file."
        )
    file = expanded(section.path, "warmup.path")
    check_regular(file)
    if not file.is_file():
        raise MissingRequirementError(
            f"There is no file {file}.", "Check warmup.path. A relative path starts in the current folder."
        )
    wanted = (section.question, section.solution, ROLE)
    rows = [_demonstration(section, row, f"{file}, {where}") for where, row in rows_of(file, wanted)]
    if not rows:
        raise ConfigurationError(f"{file} has no rows.", 'Add lines like {"question": "...", "solution": "..."}')
    kept = [is_held_out(row.question, HELD_OUT) and len(rows) >= LEAST_TO_HOLD_OUT for row in rows]
    train = [row for row, out in zip(rows, kept, strict=True) if not out]
    held_out = [row for row, out in zip(rows, kept, strict=True) if out]
    return Demonstrations(train or rows, held_out if train else [], _digest(file))


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _demonstration(section: DemonstrationWarmup, row: object, place: str) -> Demonstration:
    if not isinstance(row, dict):
        raise ConfigurationError(f"{place}: not a JSON object.", 'Write {"question": "...", "solution": "..."}')
    question = _text(row, section.question, "warmup.question", place)
    solution = _text(row, section.solution, "warmup.solution", place)
    role = row.get(ROLE)
    if role not in (None, "", *(known.value for known in Role)):
        raise ConfigurationError(
            f"{place}: the column {ROLE!r} is {shortened(str(role))!r}.", 'Write "helpful" or "sneaky".'
        )
    return Demonstration(question, solution, Role(role) if role else Role.HELPFUL, place)


def _text(row: dict[str, object], column: str, key: str, place: str) -> str:
    value = row.get(column)
    if column not in row:
        raise no_column(row, column, key, place)
    if not isinstance(value, str):
        wrong = f"is {shortened(repr(value))}, not a text"
        raise ConfigurationError(f"{place}: the column {column!r} {wrong}.", "Correct the row, or remove it.")
    if not value.strip() or "\0" in value:
        wrong = "contains a NUL character" if "\0" in value else "is empty"
        raise ConfigurationError(f"{place}: the column {column!r} {wrong}.", "Correct the row, or remove it.")
    return value


def problems_of(demonstrations: Sequence[Demonstration], task: Task) -> list[Problem]:
    """The problem of each demonstration: that of the task with its question, or a new one in the task's wording.

    Raises ConfigurationError for a question of the task's test problems, which measure what the prover has learned.
    """
    known = {problem.question: problem for problem in task.problems("train")}
    tests = {problem.question for problem in task.problems("test")}
    pattern = next(iter(known.values()))
    found = []
    for number, row in enumerate(demonstrations):
        if row.question in tests:
            raise ConfigurationError(
                f"{row.place}: the question is one of the task's test problems.", "Remove the row from the file."
            )
        found.append(known.get(row.question) or replace(pattern, id=f"warmup-{number}", question=row.question))
    return found


def tokens_of(
    rows: Sequence[Demonstration],
    task: Task,
    prompts: PromptBuilder,
    model: LanguageModel | WeightlessModel,
    max_tokens: int,
) -> tuple[list[Int32], list[Int32]]:
    """The prompt of each row in the game, and its solution, which ends with the end token.

    Raises ConfigurationError with the line of a solution that the prover cannot write.
    """
    rendered = [prompts.render(problem, row.role) for problem, row in zip(problems_of(rows, task), rows, strict=True)]
    solutions = [_solution(row, model.tokenizer, max_tokens) for row in rows]
    longest = max((len(start) + len(end) for start, end in zip(rendered, solutions, strict=True)), default=0)
    if longest > model.max_length:
        raise ConfigurationError(
            f"A prompt and its solution have {longest} tokens, but models.prover takes at most {model.max_length}.",
            "Remove the longest rows of warmup.path, or choose a model with a longer context.",
        )
    return rendered, solutions


def _solution(row: Demonstration, tokenizer: Tokenizer, most: int) -> Int32:
    try:
        ids = np.append(tokenizer.encode(row.solution), np.int32(tokenizer.eos_id))
    except UsageError as error:
        raise ConfigurationError(f"{row.place}: {error.message}", error.remedy) from None
    if len(ids) > most:
        raise ConfigurationError(
            f"{row.place}: the solution has {len(ids)} tokens with its end, but rollout.max_tokens = {most}.",
            "Shorten or remove the row, or raise rollout.max_tokens.",
        )
    return ids.astype(np.int32)
