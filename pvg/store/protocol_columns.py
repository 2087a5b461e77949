"""The columns of a shard that only some protocols need: the solver's solution that a rollout translates, and the turns
of a dialogue. They are null for other rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pvg.records import Rollout, SolverSolution, Turn

FIELDS = [
    pa.field("solver_id", pa.string()),
    pa.field("solver_text", pa.string()),
    pa.field("solver_answer", pa.string()),
    pa.field("solver_correct", pa.bool_()),
    pa.field("solver_well_formed", pa.bool_()),
    pa.field("kept_answer", pa.bool_()),
    pa.field("turn_starts", pa.list_(pa.int64())),
    pa.field("turn_sampled", pa.list_(pa.bool_())),
    pa.field("turn_texts", pa.list_(pa.string())),
]


def needed(rollouts: Sequence[Rollout]) -> bool:
    """Whether any rollout has values for these columns."""
    return any(rollout.solver is not None or rollout.turns for rollout in rollouts)


def to_columns(rollouts: Sequence[Rollout]) -> dict[str, pa.Array]:
    solvers = [rollout.solver for rollout in rollouts]
    turns = [rollout.turns for rollout in rollouts]
    values: dict[str, list[Any]] = {
        "solver_id": [None if s is None else s.id for s in solvers],
        "solver_text": [None if s is None else s.text for s in solvers],
        "solver_answer": [None if s is None else s.answer for s in solvers],
        "solver_correct": [None if s is None else s.correct for s in solvers],
        "solver_well_formed": [None if s is None else s.well_formed for s in solvers],
        "kept_answer": [rollout.kept_answer for rollout in rollouts],
        "turn_starts": [[turn.start for turn in row] if row else None for row in turns],
        "turn_sampled": [[turn.sampled for turn in row] if row else None for row in turns],
        "turn_texts": [[turn.text for turn in row] if row else None for row in turns],
    }
    return {field.name: pa.array(values[field.name], field.type) for field in FIELDS}


def of_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The fields of each row's Rollout that these columns hold."""
    if FIELDS[0].name not in batch.schema.names:
        return [{} for _ in range(batch.num_rows)]
    columns = {field.name: batch.column(field.name).to_pylist() for field in FIELDS}
    return [_fields({name: values[i] for name, values in columns.items()}) for i in range(batch.num_rows)]


def sampled_tokens(batch: pa.RecordBatch, lengths_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two arrays [N]: the tokens of each row that the prover sampled, and, for dialogues, those after its first turn
    (-1 for other rows). `lengths_N`: the completion lengths."""
    answers_N = np.full(batch.num_rows, -1, dtype=np.int64)
    if FIELDS[0].name not in batch.schema.names:
        return lengths_N, answers_N
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


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    solver = None
    if row["solver_id"] is not None:
        names = ("id", "text", "answer", "correct", "well_formed")
        solver = SolverSolution(**{name: row[f"solver_{name}"] for name in names})
    turns = zip(row["turn_starts"] or (), row["turn_sampled"] or (), row["turn_texts"] or (), strict=True)
    return {"solver": solver, "kept_answer": row["kept_answer"], "turns": tuple(Turn(*turn) for turn in turns)}
