"""Scores the rows of a JSONL file with a run's verifier, in constant memory.

Each line is an object with "question" and "solution". An "id" is copied to the result. Importing this module loads no
torch, so that `pvg score` can check the file first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from pvg.errors import ConfigurationError, UsageError, shortened, user_paths
from pvg.export.finished import Platt
from pvg.inputs import not_json, open_input

if TYPE_CHECKING:
    from pvg.verifier.scorer import VerifierScorer

ROWS_AT_ONCE = 256  # scored together and then written
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors on Windows begin a file with it
EXACT_FLOAT = 2.0**53  # from here on a float may have lost digits of the number in the file
EXAMPLE = 'Write {"question": "...", "solution": "..."}'


@dataclass(frozen=True, slots=True)
class Verdict:
    """`score`: the verifier's logit. `accepted`: whether it reaches the run's threshold. `probability`: of being
    correct; None without a calibration."""

    score: float
    accepted: bool
    probability: float | None

    @classmethod
    def of(cls, score: float, threshold: float, calibration: Platt | None) -> Verdict:
        return cls(score, score >= threshold, None if calibration is None else calibration.probability(score))

    def plain(self) -> dict[str, Any]:
        known = {} if self.probability is None else {"probability": self.probability}
        return {"score": self.score, **known, "accepted": self.accepted}


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line numbers (from 1) and objects of a JSONL file. Empty lines are skipped. Raises UsageError for a path that
    is not a regular file, and with the line number for a line that is not an object with two texts."""
    with user_paths():
        if path.is_dir():
            raise UsageError(f"{path} is a folder, not a file of solutions.", f"Give a file in it: {path}/FILE.jsonl")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file, and pvg reads it twice.", "Save the solutions in a file.")
        try:
            file = open_input(path)
        except FileNotFoundError:
            raise UsageError(f"There is no file {str(path)!r}.", "Give a JSONL file.") from None
    with file, user_paths():
        for number, line in enumerate(file, 1):
            if text := line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").strip():
                yield number, _row(path, number, text)


def check_rows(path: Path) -> None:
    """Read the whole file. Raises UsageError as `read_rows` does, and for a file without rows."""
    rows = 0
    for _ in read_rows(path):
        rows += 1
    if not rows:
        raise UsageError(f"{path} has no solutions.", f"{EXAMPLE}, one per line.")


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    place = f"{path.name}, line {number}"
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        problem, remedy = not_json(line, error)
        raise UsageError(f"{place}: this is {problem}.", remedy or "Write one JSON object per line.") from None
    if not isinstance(row, dict):
        raise UsageError(f"{place}: this is not a JSON object.", EXAMPLE)
    for key in ("question", "solution"):
        if not isinstance(row.get(key), str):
            wrong = f"{key!r} is missing" if key not in row else f"{key!r} is {shortened(repr(row[key]))}, not a text"
            raise UsageError(f"{place}: {wrong}.", EXAMPLE)
    if not row["question"].strip():
        raise UsageError(f"{place}: 'question' is empty.", "Write the question, or remove the line.")
    if not _is_copied_exactly(row.get("id")):
        raise UsageError(f"{place}: 'id' has a number that is too large, or too many levels.", "Write it as a text.")
    return row


def _is_copied_exactly(identity: object) -> bool:
    """Whether the result can have the same "id". orjson reads an integer of more than 64 bits as a float, and cannot
    write everything that it reads."""
    try:
        orjson.dumps({"id": identity})
    except TypeError:
        return False
    parts = [identity]
    while parts:
        part = parts.pop()
        if isinstance(part, float) and abs(part) >= EXACT_FLOAT:
            return False
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
    return True


async def score_rows(
    scorer: VerifierScorer, path: Path, calibration: Platt | None
) -> AsyncIterator[tuple[dict[str, Any], Verdict]]:
    """The result of each row, in order: a plain object for one line of output, and its verdict. Raises UsageError with
    the line number for a row that cannot be scored."""
    chunk: list[tuple[int, dict[str, Any]]] = []
    for row in read_rows(path):
        chunk.append(row)
        if len(chunk) == ROWS_AT_ONCE:
            for result in await _scored(scorer, path, chunk, calibration):
                yield result
            chunk = []
    for result in await _scored(scorer, path, chunk, calibration):
        yield result


async def _scored(
    scorer: VerifierScorer, path: Path, chunk: list[tuple[int, dict[str, Any]]], calibration: Platt | None
) -> list[tuple[dict[str, Any], Verdict]]:
    assert scorer.threshold is not None
    found = await asyncio.gather(*(_score(scorer, path, number, row) for number, row in chunk))
    results = []
    for (number, row), score in zip(chunk, found, strict=True):
        verdict = Verdict.of(score, scorer.threshold, calibration)
        copied = {"id": row["id"]} if "id" in row else {}
        results.append(({"line": number, **copied, **verdict.plain()}, verdict))
    return results


async def _score(scorer: VerifierScorer, path: Path, number: int, row: dict[str, Any]) -> float:
    from pvg.verifier.scorer import TextSolution

    try:
        (score,) = await scorer.score([TextSolution(f"of line {number}", row["question"], row["solution"])])
    except (UsageError, ConfigurationError) as error:
        raise type(error)(f"{path.name}, line {number}: {error.message}", error.remedy) from error
    return float(score)
