"""The columns of a shard for the results of executed solutions. All three are null for a rollout without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pvg.records import Checks, Rollout

CERTIFIED = "certified"
FIELDS = [
    pa.field("visible_passed", pa.float64()),
    pa.field("tests_passed", pa.float64()),
    pa.field(CERTIFIED, pa.bool_()),
]


def needed(rollouts: Sequence[Rollout]) -> bool:
    """Whether any rollout has values for these columns."""
    return any(rollout.grade.checks is not None for rollout in rollouts)


def to_columns(rollouts: Sequence[Rollout]) -> dict[str, pa.Array]:
    rows = [rollout.grade.checks for rollout in rollouts]
    values = [(None, None, None) if row is None else (row.visible, row.passed, row.certified) for row in rows]
    return {field.name: pa.array([value[place] for value in values], field.type) for place, field in enumerate(FIELDS)}


def of_rows(batch: pa.RecordBatch) -> list[Checks | None]:
    """The checks of each row's grade, or None."""
    if CERTIFIED not in batch.schema.names:
        return [None] * batch.num_rows
    rows = zip(*(batch.column(field.name).to_pylist() for field in FIELDS), strict=True)
    return [None if certified is None else Checks(visible, passed, certified) for visible, passed, certified in rows]


def to_array(checks: Sequence[Checks | None]) -> NDArray[np.float64]:
    """checks_N3: visible, passed, certified (1 or 0); NaN for None."""
    rows = [(np.nan,) * 3 if row is None else (row.visible, row.passed, float(row.certified)) for row in checks]
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def array_of(batch: pa.RecordBatch) -> NDArray[np.float64]:
    """The same, read from the columns of a shard."""
    if CERTIFIED not in batch.schema.names:
        return np.full((batch.num_rows, 3), np.nan)
    columns = [batch.column(field.name).cast(pa.float64()).to_numpy(zero_copy_only=False) for field in FIELDS]
    return np.stack(columns, axis=1)
