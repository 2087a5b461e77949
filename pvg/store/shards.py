"""Rollouts as immutable Arrow files, written atomically and identified by their checksum.

Invariants: a shard never changes after it is written. Every bit is read back as it was written. A shard that no commit
names is not part of the run. Shards are not compressed, so they can be memory-mapped and read by row.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from mmap import mmap
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pvg.errors import StateError
from pvg.records import Checks, Grade, Role, Rollout, RoutedExperts, SolverSolution, Timing, Turn, VersionSpan
from pvg.store.atomic import (
    atomic_file,
    check_file,
    damaged,
    expected_file,
    is_temporary,
    make_directory,
    read_stored,
    sync_directory,
)
from pvg.store.samples import CHECK_COLUMNS, SAMPLE_COLUMNS, MappedSolutions, SampleColumns

SHARD_SCHEMA = b"1"
ROLLOUTS = "rollouts"

# Strings that many rows share are stored once and referenced by index.
_SHARED = pa.dictionary(pa.int32(), pa.string())


class ShardColumn(NamedTuple):
    """`of`: what a shard stores of a rollout."""

    type: pa.DataType
    of: Callable[[Rollout], Any]
    nullable: bool = False


def _own(name: str, type_: pa.DataType, *, nullable: bool = False) -> tuple[str, ShardColumn]:
    """A field of the rollout."""
    return name, ShardColumn(type_, attrgetter(name), nullable)


COLUMNS: dict[str, ShardColumn] = dict(
    [
        _own("id", pa.string()),
        _own("problem_id", _SHARED),
        _own("question", _SHARED),
        _own("reference", _SHARED),
        ("role", ShardColumn(_SHARED, lambda r: r.role.value)),
        _own("round", pa.int64()),
        _own("source", _SHARED),
        _own("step", pa.int64()),
        _own("group", pa.int64()),
        _own("prompt_ids", pa.list_(pa.int32())),
        _own("completion_ids", pa.list_(pa.int32())),
        _own("logprobs", pa.list_(pa.float32())),
        ("span_starts", ShardColumn(pa.list_(pa.int64()), lambda r: [span.start for span in r.spans])),
        ("span_versions", ShardColumn(pa.list_(pa.int64()), lambda r: [span.version for span in r.spans])),
        _own("finish_reason", _SHARED),
        _own("text", pa.string()),
        ("correct", ShardColumn(pa.bool_(), attrgetter("grade.correct"))),
        ("well_formed", ShardColumn(pa.bool_(), attrgetter("grade.well_formed"))),
        ("answer", ShardColumn(pa.string(), attrgetter("grade.answer"), nullable=True)),
        ("note", ShardColumn(pa.string(), attrgetter("grade.note"))),
        ("queued_s", ShardColumn(pa.float64(), attrgetter("timing.queued_s"))),
        ("service_s", ShardColumn(pa.float64(), attrgetter("timing.service_s"))),
        _own("score", pa.float64(), nullable=True),
        _own("verifier_version", _SHARED, nullable=True),
        _own("reward", pa.float64(), nullable=True),
    ]
)
# The results of executed solutions, the solver's solution that a rollout translates, the turns of a dialogue, and what
# a reader found. Null for other rollouts.
MORE_COLUMNS: dict[str, ShardColumn] = {
    name: ShardColumn(type_, of, nullable=True)
    for name, type_, of in (
        ("visible_passed", pa.float64(), lambda r: r.grade.checks and r.grade.checks.visible),
        ("tests_passed", pa.float64(), lambda r: r.grade.checks and r.grade.checks.passed),
        ("certified", pa.bool_(), lambda r: r.grade.checks and r.grade.checks.certified),
        ("solver_id", pa.string(), lambda r: r.solver and r.solver.id),
        ("solver_text", pa.string(), lambda r: r.solver and r.solver.text),
        ("solver_answer", pa.string(), lambda r: r.solver and r.solver.answer),
        ("solver_correct", pa.bool_(), lambda r: r.solver and r.solver.correct),
        ("solver_well_formed", pa.bool_(), lambda r: r.solver and r.solver.well_formed),
        ("kept_answer", pa.bool_(), lambda r: r.kept_answer),
        ("turn_starts", pa.list_(pa.int64()), lambda r: [turn.start for turn in r.turns] or None),
        ("turn_sampled", pa.list_(pa.bool_()), lambda r: [turn.sampled for turn in r.turns] or None),
        ("turn_texts", pa.list_(pa.string()), lambda r: [turn.text for turn in r.turns] or None),
        ("turn_seats", pa.list_(pa.string()), lambda r: [turn.seat for turn in r.turns] or None),
        ("turn_scores", pa.list_(pa.float64()), lambda r: [turn.score for turn in r.turns] or None),
        ("sr", pa.float64(), lambda r: r.sr),
        ("cir", pa.float64(), lambda r: r.cir),
    )
}

# Null for rollouts without routed experts. The bytes of a row and their shape [tokens, layers, experts per token, bytes
# of a number]. Offsets have 64 bits, because such a shard may have many gigabytes.
EXPERTS, EXPERTS_SHAPE = "routed_experts", "routed_shape"
SCHEMA = pa.schema(
    [
        *(pa.field(name, column.type, nullable=column.nullable) for name, column in COLUMNS.items()),
        pa.field(EXPERTS, pa.large_binary()),
        pa.field(EXPERTS_SHAPE, pa.list_(pa.int64())),
        *(pa.field(name, column.type) for name, column in MORE_COLUMNS.items()),
    ],
    metadata={b"pvg.shard": SHARD_SCHEMA},
)

SOLVER_COLUMNS = ("solver_id", "solver_text", "solver_answer", "solver_correct", "solver_well_formed")
TURN_COLUMNS = ("turn_starts", "turn_sampled", "turn_texts", "turn_seats", "turn_scores")
# The list columns that are read back as arrays.
ARRAYS: dict[str, np.dtype[Any]] = {
    "prompt_ids": np.dtype(np.int32),
    "completion_ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A commit's description of a shard. `path` is relative to the run directory; `checksum` is the file's sha256."""

    path: str
    rows: int
    bytes: int
    checksum: str

    @property
    def round(self) -> int:
        return int(Path(self.path).parent.name.removeprefix("round-"))

    @property
    def label(self) -> str:
        return Path(self.path).stem

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ShardInfo:
        return cls(**plain)


class RolloutShards:
    """The shards of one run. `directory`: the run directory; shards are in its `rollouts/round-NNN/`."""

    def __init__(self, directory: Path, unchanged: Callable[[], None] | None = None) -> None:
        """`unchanged` is called just before a shard gets its name. If it raises, there is no shard."""
        self.directory = directory
        self._unchanged = unchanged

    def write(self, round_: int, label: str, rollouts: Sequence[Rollout]) -> ShardInfo:
        """Store `rollouts` as `rollouts/round-002/<label>.arrow`, durably. A commit must name it to make it part of the
        run.

        Raises StateError if the shard exists, MissingRequirementError if the disk is full, TypeError for token ids or
        log-probs with another dtype than a Rollout's.
        """
        relative = f"{ROLLOUTS}/round-{round_:03d}/{label}.arrow"
        path = self.directory / relative
        if path.exists():
            raise StateError(f"The shard {path} already exists, and shards never change.", "Recover the run first.")
        make_directory(path.parent)
        with atomic_file(path, self._unchanged) as arrow:
            file = _ShardFile(arrow.write)
            _write_batch(file, rollouts)
        return ShardInfo(relative, len(rollouts), file.size, file.sha256.hexdigest())

    def read(self, shard: ShardInfo | Path) -> list[Rollout]:
        """The rollouts of a shard, in the order of writing.

        With a ShardInfo, verifies the bytes against its checksum; with a path, only the file's structure. Raises
        DamagedFileError, and StateError for a shard of another schema.
        """
        if isinstance(shard, ShardInfo):
            return _to_rollouts(self.map(shard))
        path = self.path_of(shard)
        with expected_file(path):
            batch = _open(pa.BufferReader(read_stored(path)), path)
        try:
            batch.validate(full=True)  # references that point outside the file would crash the process
            return _to_rollouts(batch)
        except (pa.ArrowException, ValueError) as error:
            raise damaged(path, str(error).splitlines()[0]) from None

    def map(self, info: ShardInfo) -> pa.RecordBatch:
        """The shard's rows, memory-mapped and verified. A column takes memory only when it is used."""
        self.verify(info)
        path = self.path_of(info)
        return _open(pa.memory_map(str(path)), path)

    def read_where(self, info: ShardInfo, id_prefixes: Sequence[str]) -> list[Rollout]:
        """The rollouts of a shard whose ids begin with one of the prefixes, in the order of the shard. Creates no
        Rollout for other rows. Raises DamagedFileError."""
        batch = self.map(info)
        ids = batch.column("id")
        chosen_N = np.zeros(batch.num_rows, dtype=bool)
        for prefix in id_prefixes:
            chosen_N |= pc.starts_with(ids, prefix).to_numpy(zero_copy_only=False)
        return _to_rollouts(batch.take(pa.array(np.flatnonzero(chosen_N)))) if chosen_N.any() else []

    def sample_columns(self, infos: Sequence[ShardInfo]) -> SampleColumns:
        """Roles, grades and lengths of all rollouts of these shards, each verified. Raises DamagedFileError."""
        parts = [SampleColumns.of_batch(self.map(info)) for info in infos]
        return SampleColumns.joined([columns_in_memory([]), *parts])

    def solutions(self, info: ShardInfo) -> MappedSolutions:
        """The shard's solutions, memory-mapped and verified. Raises DamagedFileError."""
        return MappedSolutions(self.map(info), info.label)

    def verify(self, info: ShardInfo) -> None:
        """Raises DamagedFileError if the file is missing, truncated, or differs from what was written."""
        check_file(self.path_of(info), info.bytes, info.checksum)

    def recover(self, committed: Sequence[ShardInfo]) -> list[Path]:
        """Remove shards and temporary files that no commit names; returns their paths.

        `committed`: the shards of every commit that may still be resumed (FileStateStore.commits). Only for the process
        that drives the run. Does not verify the committed shards; see `verify`.
        """
        kept = {self.directory / info.path for info in committed}
        removed = []
        for path in sorted((self.directory / ROLLOUTS).glob("round-*/*")):
            if path not in kept and (path.suffix == ".arrow" or is_temporary(path)):
                path.unlink(missing_ok=True)
                removed.append(path)
        for folder in {path.parent for path in removed}:
            sync_directory(folder)
        return removed

    def path_of(self, shard: ShardInfo | Path) -> Path:
        return self.directory / (shard.path if isinstance(shard, ShardInfo) else shard)


def solutions_in_memory(rollouts: Sequence[Rollout]) -> MappedSolutions:
    """The solutions of rollouts in memory, in the form of `RolloutShards.solutions`."""
    sink = io.BytesIO()
    _write_batch(_ShardFile(sink.write), rollouts)
    return MappedSolutions(_open(pa.BufferReader(sink.getbuffer()), Path("memory")), "memory")


def columns_in_memory(rollouts: Sequence[Rollout]) -> SampleColumns:
    """Roles, grades and lengths of rollouts in memory."""
    columns = _columns(rollouts, SAMPLE_COLUMNS)
    return SampleColumns.of_batch(pa.RecordBatch.from_arrays(list(columns.values()), list(columns)))


# --- files -------------------------------------------------------------------------------------------------------


def _open(source: Any, path: Path) -> pa.RecordBatch:
    try:
        reader = pa.ipc.open_file(source)
        version = (reader.schema.metadata or {}).get(b"pvg.shard")
        if version is None or reader.num_record_batches != 1:
            raise damaged(path, "it is not a rollout shard")
        if version != SHARD_SCHEMA or reader.schema != SCHEMA:
            what = f"{path} is of another version of pvg, whose rollouts have other columns."
            raise StateError(what, "Use the pvg that wrote the run (code_version in its manifest/).")
        return reader.get_batch(0)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged(path, str(error).splitlines()[0]) from None


# --- rows to columns -----------------------------------------------------------------------------------------------


class _ShardFile:
    """A file for pyarrow that passes on everything by `write`, counted and digested. In place of the experts' buffer it
    writes the rows that the buffer stands for: their column, by far the largest one, is never copied."""

    closed = False

    def __init__(self, write: Callable[[memoryview], Any]) -> None:
        self._write = write
        self.size = 0
        self.sha256 = hashlib.sha256()
        self._standing_in: dict[int, list[NDArray[np.uint8]]] = {}  # by the buffer's address

    def write_for(self, buffer: pa.Buffer, rows: list[NDArray[np.uint8]]) -> None:
        """Write `rows`, as many bytes, when `buffer` is to be written."""
        self._standing_in[buffer.address] = rows

    def write(self, data: bytes | pa.Buffer) -> int:
        rows = self._standing_in.pop(data.address, None) if isinstance(data, pa.Buffer) and data.size else None
        before = self.size
        for part in [data] if rows is None else rows:
            view = memoryview(cast("bytes", part)).cast("B")
            self._write(view)
            self.sha256.update(view)
            self.size += len(view)
        return self.size - before

    def close(self) -> None:
        """Raises RuntimeError if pyarrow has copied a buffer that rows stand for, so that they are not written."""
        if self._standing_in:
            raise RuntimeError("pyarrow did not write the buffer of the routed experts itself")

    def tell(self) -> int:
        return self.size

    def flush(self) -> None: ...


def _write_batch(file: _ShardFile, rollouts: Sequence[Rollout]) -> None:
    columns = _expert_columns([rollout.routed_experts for rollout in rollouts], file)
    columns |= _columns(rollouts, [*COLUMNS, *MORE_COLUMNS])
    batch = pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)
    with pa.ipc.new_file(pa.PythonFile(file, mode="w"), SCHEMA) as writer:
        writer.write_batch(batch)
    file.close()


def _columns(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, pa.Array]:
    """These columns of the rollouts, without those of their experts."""
    columns = {}
    for name in names:
        column = COLUMNS.get(name) or MORE_COLUMNS[name]
        values = [column.of(rollout) for rollout in rollouts]
        if name in ARRAYS:
            columns[name] = _lists(values, ARRAYS[name])
        else:
            columns[name] = _shared(values) if column.type == _SHARED else pa.array(values, column.type)
    return columns


def _shared(values: Sequence[str | None]) -> pa.Array:
    return pa.array(values, pa.string()).dictionary_encode().cast(_SHARED)


def _lists(rows: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> pa.Array:
    """Arrays as one flat column with offsets, bit by bit, without any conversion (also of a NaN's payload)."""
    for row in rows:
        if row.dtype != dtype or row.ndim != 1:
            raise TypeError(f"A rollout's array must be {dtype} with one dimension, not {row.dtype} with {row.ndim}.")
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = np.concatenate([np.empty(0, dtype), *rows])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, from_pandas=False))


def _expert_columns(rows: Sequence[RoutedExperts | None], file: _ShardFile) -> dict[str, pa.Array]:
    """EXPERTS and EXPERTS_SHAPE. The bytes of EXPERTS are address space without memory; `file` writes the rows."""
    for row in rows:
        if row is not None and (row.dtype not in (np.uint8, np.uint16) or row.ndim != 3):
            raise TypeError(
                f"Routed experts must be uint8 or uint16 with three dimensions, not {row.dtype} with {row.ndim}."
            )
    flat = [np.empty(0, np.uint8) if row is None else row.reshape(-1).view(np.uint8) for row in rows]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([part.size for part in flat], out=offsets[1:])
    present = pa.array([row is not None for row in rows], pa.bool_()).buffers()[1]
    values = pa.py_buffer(mmap(-1, int(offsets[-1])) if offsets[-1] else b"")
    if values.size:
        file.write_for(values, flat)
    buffers = [present, pa.py_buffer(offsets), values]
    shapes = [None if row is None else [*row.shape, row.dtype.itemsize] for row in rows]
    return {
        EXPERTS: pa.Array.from_buffers(pa.large_binary(), len(rows), buffers),
        EXPERTS_SHAPE: pa.array(shapes, pa.list_(pa.int64())),
    }


# --- columns to rows -----------------------------------------------------------------------------------------------


def _to_rollouts(batch: pa.RecordBatch) -> list[Rollout]:
    columns: dict[str, list[Any]] = {
        name: list_rows(batch.column(name)) if name in ARRAYS else batch.column(name).to_pylist()
        for name in (*COLUMNS, *MORE_COLUMNS)
    }
    columns[EXPERTS] = routed_experts(batch)
    return [_rollout({name: values[i] for name, values in columns.items()}) for i in range(batch.num_rows)]


def _rollout(row: dict[str, Any]) -> Rollout:
    def pop(*names: str) -> list[Any]:
        return [row.pop(name) for name in names]

    checks, solver = pop(*CHECK_COLUMNS), pop(*SOLVER_COLUMNS)
    correct, well_formed, answer, note = pop("correct", "well_formed", "answer", "note")
    return Rollout(
        role=Role(row.pop("role")),
        spans=tuple(VersionSpan(*span) for span in zip(*pop("span_starts", "span_versions"), strict=True)),
        grade=Grade(correct, well_formed, answer, note, None if checks[-1] is None else Checks(*checks)),
        timing=Timing(*pop("queued_s", "service_s")),
        solver=None if solver[0] is None else SolverSolution(*solver),
        turns=tuple(map(Turn, *(values or () for values in pop(*TURN_COLUMNS)))),
        **row,
    )


def list_rows(column: pa.ListArray) -> list[NDArray[Any]]:
    """The rows of a list column as writable arrays, which share one copy of the column's values."""
    offsets = column.offsets.to_numpy()
    flat = cast("NDArray[Any]", column.values.to_numpy())[offsets[0] : offsets[-1]].copy()
    return np.split(flat, offsets[1:-1] - offsets[0]) if len(column) else []


def routed_experts(batch: pa.RecordBatch) -> list[RoutedExperts | None]:
    """The routed experts of each row, read-only views of the shard's bytes (with RolloutShards.map, of the file).
    Raises ValueError for shapes that do not fit their bytes."""
    if not batch.num_rows:
        return []
    column, shapes = batch.column(EXPERTS), batch.column(EXPERTS_SHAPE).to_pylist()
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64, len(column) + 1, column.offset * 8).tolist()
    rows: list[RoutedExperts | None] = []
    for start, end, shape in zip(ends, ends[1:], shapes, strict=False):
        if shape is None:
            rows.append(None)
            continue
        *lengths, size = shape
        if size not in (1, 2) or min(lengths) < 0:
            raise ValueError(f"routed experts with the shape {shape}")
        found = np.frombuffer(data, np.uint8, end - start, start)
        rows.append(found.view(np.uint8 if size == 1 else np.uint16).reshape(lengths))
    return rows
