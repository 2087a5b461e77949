"""Stored rollouts without `Rollout` objects: their statistics as arrays, and their solutions row by row.

A `Rollout` object takes about 9 kB, too much for the statistics of a large mint. `SampleColumns` reads roles, grades
and lengths from memory-mapped shards, without texts. `MappedSolutions` reads single solutions from the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pvg.records import Int32, Role

CHECK_COLUMNS = ("visible_passed", "tests_passed", "certified")  # null for solutions that were not executed
# What `SampleColumns` reads.
GRADES, LENGTHS = ("role", "correct", "well_formed", "finish_reason"), ("completion_ids", "turn_starts", "turn_sampled")
SAMPLE_COLUMNS = (*GRADES, *LENGTHS, *CHECK_COLUMNS)

Bools = NDArray[np.bool_]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """N rollouts. `truncated_N`: ended by rollout.max_tokens. `tokens_N`: tokens sampled by the prover. `answers_N`: in
    dialogues, those sampled after its first turn; -1 for other rollouts. `checks_N3`: the shares of visible and of all
    tests that passed, and whether certified (1 or 0), as in `Checks`; NaN for solutions that were not executed."""

    helpful_N: Bools
    correct_N: Bools
    well_formed_N: Bools
    truncated_N: Bools
    tokens_N: Int64
    answers_N: Int64
    checks_N3: Float64

    @classmethod
    def of_batch(cls, batch: pa.RecordBatch) -> SampleColumns:
        lengths_N = batch.column("completion_ids").value_lengths().to_numpy().astype(np.int64)
        tokens_N, answers_N = _sampled_tokens(batch, lengths_N)
        return cls(
            _is(batch, "role", Role.HELPFUL.value),
            batch.column("correct").to_numpy(zero_copy_only=False),
            batch.column("well_formed").to_numpy(zero_copy_only=False),
            _is(batch, "finish_reason", "length"),
            tokens_N,
            answers_N,
            np.stack([_number(batch, name) for name in CHECK_COLUMNS], axis=1),
        )

    @classmethod
    def joined(cls, parts: Sequence[SampleColumns]) -> SampleColumns:
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.helpful_N)

    @property
    def proven_N(self) -> Bools:
        certified_N = self.checks_N3[:, 2]
        proven_N: Bools = self.helpful_N | self.correct_N | np.isnan(certified_N) | (certified_N == 1.0)
        return proven_N

    @property
    def flaws_N(self) -> Bools:
        return ~self.helpful_N & ~self.correct_N & self.well_formed_N & self.proven_N


def _is(batch: pa.RecordBatch, name: str, word: str) -> Bools:
    """bool [N]: whether a column of shared strings has the value `word`."""
    column = batch.column(name)
    words = np.array([found == word for found in column.dictionary.to_pylist()], dtype=bool)
    found_N: Bools = words[column.indices.to_numpy()]
    return found_N


def _number(batch: pa.RecordBatch, name: str) -> NDArray[np.float64]:
    """float64 [N]: a column of numbers or flags; NaN for null."""
    return np.asarray(batch.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False))


def _sampled_tokens(batch: pa.RecordBatch, lengths_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two arrays [N]: the tokens of each row that the prover sampled, and, for dialogues, those after its first turn
    (-1 for other rows). `lengths_N`: the completion lengths."""
    answers_N = np.full(batch.num_rows, -1, dtype=np.int64)
    starts, sampled = (batch.column(name) for name in ("turn_starts", "turn_sampled"))
    turns_N = starts.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    rows_T = np.repeat(np.arange(batch.num_rows), turns_N)
    starts_T, sampled_T = (column.flatten().to_numpy(zero_copy_only=False) for column in (starts, sampled))
    first_T = np.diff(rows_T, prepend=-1) > 0
    # A turn ends where the row's next turn begins; the last one ends with the completion.
    ends_T = np.where(np.append(first_T, True)[1:], lengths_N[rows_T], np.append(starts_T, 0)[1:])
    tokens_T = (ends_T - starts_T) * sampled_T
    tokens_N = lengths_N.copy()
    dialogues = turns_N > 0
    tokens_N[dialogues] = answers_N[dialogues] = 0
    np.add.at(tokens_N, rows_T, tokens_T)
    np.add.at(answers_N, rows_T[~first_T], tokens_T[~first_T])
    return tokens_N, answers_N


# --- solutions --------------------------------------------------------------------------------------------------------

SOLUTION_COLUMNS = ("question", "text", "completion_ids", "problem_id")


class SolutionRow(NamedTuple):
    """The parts of a row that a verifier may see, without its role and its label. `id` (shard and row number) names the
    row in messages."""

    question: str
    text: str
    completion_ids: Int32
    problem_id: str
    id: str


class MappedSolutions:
    """The solutions of a verified `batch`, read row by row. `name` names them in messages."""

    def __init__(self, batch: pa.RecordBatch, name: str) -> None:
        self.batch = batch
        self._name = name

    def row(self, number: int) -> SolutionRow:
        question, text, tokens, problem_id = (self.batch.column(name)[number] for name in SOLUTION_COLUMNS)
        return SolutionRow(
            question.as_py(),
            text.as_py(),
            tokens.values.to_numpy().copy(),
            problem_id.as_py(),
            f"{self._name}, row {number}",
        )

    def opening(self, number: int) -> SolutionRow:
        """The first turn of the row's dialogue: the solution as it was before others spoke."""
        row, starts = self.row(number), self.batch.column("turn_starts")[number].as_py()
        if starts is None:
            return row
        text = self.batch.column("turn_texts")[number].as_py()[0]
        return row._replace(text=text, completion_ids=row.completion_ids[: starts[1]])
