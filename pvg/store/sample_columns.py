"""`SampleColumns`: roles, grades and lengths of rollouts as arrays, read from memory-mapped shards without texts.

    columns = shards.sample_columns(infos)      # of stored rollouts: about 45 bytes each
    columns = SampleColumns.of(rollouts)        # of rollouts in memory

A `Rollout` object takes about 9 kB, so the statistics of a large mint must not read such objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pvg.records import Role, Rollout
from pvg.store import check_columns, protocol_columns

Bools = NDArray[np.bool_]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """N rollouts. `truncated_N`: ended by rollout.max_tokens. `tokens_N`: sampled by the prover. `answers_N`: of
    dialogues, the tokens that the prover sampled after its first turn; -1 for other rollouts. `checks_N3`: the
    shares of the visible tests and of all tests that passed, and whether certified (1 or 0), as in `Checks`; NaN for
    solutions that were not executed."""

    helpful_N: Bools
    correct_N: Bools
    well_formed_N: Bools
    truncated_N: Bools
    tokens_N: Int64
    answers_N: Int64
    checks_N3: Float64

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> SampleColumns:
        def flags(values: list[bool]) -> Bools:
            return np.array(values, dtype=bool)

        return cls(
            flags([r.role is Role.HELPFUL for r in rollouts]),
            flags([r.grade.correct for r in rollouts]),
            flags([r.grade.well_formed for r in rollouts]),
            flags([r.finish_reason == "length" for r in rollouts]),
            np.array([r.sampled_tokens for r in rollouts], dtype=np.int64),
            np.array([_answer_tokens(r) for r in rollouts], dtype=np.int64),
            check_columns.to_array([r.grade.checks for r in rollouts]),
        )

    @classmethod
    def of_batch(cls, batch: pa.RecordBatch) -> SampleColumns:
        """The rows of one shard."""
        lengths_N = batch.column("completion_ids").value_lengths().to_numpy().astype(np.int64)
        tokens_N, answers_N = protocol_columns.sampled_tokens(batch, lengths_N)
        return cls(
            _is(batch, "role", Role.HELPFUL.value),
            batch.column("correct").to_numpy(zero_copy_only=False),
            batch.column("well_formed").to_numpy(zero_copy_only=False),
            _is(batch, "finish_reason", "length"),
            tokens_N,
            answers_N,
            check_columns.array_of(batch),
        )

    @classmethod
    def joined(cls, parts: Sequence[SampleColumns]) -> SampleColumns:
        """The rows of all parts, in their order."""
        parts = [cls.of([]), *parts]
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.helpful_N)

    @property
    def proven_N(self) -> Bools:
        """`Rollout.proven`."""
        certified_N = self.checks_N3[:, 2]
        proven_N: Bools = self.helpful_N | self.correct_N | np.isnan(certified_N) | (certified_N == 1.0)
        return proven_N

    @property
    def flaws_N(self) -> Bools:
        """`Rollout.is_flaw`."""
        return ~self.helpful_N & ~self.correct_N & self.well_formed_N & self.proven_N


def _answer_tokens(rollout: Rollout) -> int:
    if not rollout.turns:
        return -1
    return int(rollout.sampled_mask[rollout.turns[1].start :].sum()) if len(rollout.turns) > 1 else 0


def _is(batch: pa.RecordBatch, name: str, word: str) -> Bools:
    """bool [N]: whether a column of shared strings holds `word`."""
    column = batch.column(name)
    words = np.array([found == word for found in column.dictionary.to_pylist()], dtype=bool)
    found_N: Bools = words[column.indices.to_numpy()]
    return found_N
