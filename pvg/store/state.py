"""The committed state of a game: one small JSON document that names everything that the run has finished.

Invariants:
1. `state.json` is replaced atomically and contains its checksum; `state.previous.json` is the previous commit.
2. The previous commit is useful only while the files that it names exist. So code that prunes checkpoints, weights or
   shards keeps everything that *any* state of `FileStateStore.commits()` names, and prunes after `save`, never before.
   A checkpoint is then removed at the second commit that no longer names it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from pvg.errors import Closing, StateError
from pvg.inputs import open_own
from pvg.store.atomic import (
    DamagedFileError,
    disk_full_explained,
    expected_file,
    open_stored,
    read_stored,
    remove_temporaries,
    sync_directory,
    write_atomic,
)

# Journals: files of one JSON object per line. A run appends to them; a resume truncates them to the last commit.

TAIL_BLOCK = 65_536  # bytes per read when searching backwards for the end of the last complete line
READ_BLOCK = 1 << 20  # bytes per read for a digest


class JournalMark(NamedTuple):
    """A journal at a commit: its length in bytes, and the sha256 of these bytes in hex."""

    bytes: int
    sha256: str


class JsonLines(Closing):
    """Appends objects to `path`, which it creates. One writer, one thread; `sync` may run in another thread.

    Opening cuts off an incomplete last line of a dead writer, because the next line would be appended to it. `torn` is
    the number of bytes cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        existed = path.exists()
        self._file = open(open_own(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)  # noqa: SIM115 (closed by close)
        if not existed:
            sync_directory(path.parent)
        size = os.fstat(self._file.fileno()).st_size
        self._offset = _end_of_last_line(path, size)
        self.torn = size - self._offset
        if self.torn:
            os.ftruncate(self._file.fileno(), self._offset)
        self._digest = _digest_of(path, self._offset)

    @property
    def mark(self) -> JournalMark:
        """Length and digest of the complete lines so far. A commit records it after `sync`."""
        return JournalMark(self._offset, self._digest.hexdigest())

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line to the operating system: it survives a kill, but a power failure only after `sync`.

        Numpy scalars and arrays are written as numbers and lists. If the disk is full, cuts the file back to its
        complete lines and raises MissingRequirementError.
        """
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        rest = memoryview(line)
        with disk_full_explained(self.path):
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except BaseException:
                os.ftruncate(self._file.fileno(), self._offset)
                raise
        self._offset += len(line)
        self._digest.update(line)

    def sync(self) -> None:
        """fsync: everything before `mark` is then durable."""
        with disk_full_explained(self.path):
            os.fsync(self._file.fileno())

    def truncate(self, offset: int) -> None:
        """Cut back to a committed `offset` (bytes).

        Raises DamagedFileError if the file is shorter or no line ends there: it is not the committed file.
        """
        remedy = "Another program changed it. Restore it, or start a new run."
        if offset > self._offset:
            raise DamagedFileError(
                f"{self.path} has {self._offset} bytes of complete lines, but {offset} were committed.", remedy
            )
        if offset < 0 or _end_of_last_line(self.path, offset) != offset:
            raise DamagedFileError(f"No line of {self.path} ends at the committed offset {offset}.", remedy)
        os.ftruncate(self._file.fileno(), offset)
        if offset < self._offset:
            self._offset, self._digest = offset, _digest_of(self.path, offset)
        self.sync()

    def close(self) -> None:
        self._file.close()


class JsonLinesReader:
    """Iterates over the objects of a file. Skips an incomplete last line, which a living writer shows for an instant
    and a dead writer leaves behind; `torn` is then 1, otherwise 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises DamagedFileError with file and line for a complete line that is not a JSON object."""
        self.torn = 0
        with open_stored(self.path) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self.torn = 1
                    return
                try:
                    record = orjson.loads(line)
                    reason = "" if isinstance(record, dict) else "not a JSON object"
                except orjson.JSONDecodeError as error:
                    reason = str(error)
                if reason:
                    raise DamagedFileError(
                        f"{self.path}, line {number}, is damaged: {reason}.",
                        "Restore the file, or remove that line from it.",
                    )
                yield record


def verify(path: Path, marks: Sequence[JournalMark]) -> None:
    """Check the committed part of a journal: the bytes before the last of `marks`, which ascend.

    Earlier marks narrow down the changed lines. Raises DamagedFileError with the file and the lines. A missing file
    counts as empty.
    """
    if not marks or not marks[-1].bytes:
        return
    with expected_file(path), open_stored(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < marks[-1].bytes:
            raise _not_committed(f"{path} has {size} bytes, but {marks[-1].bytes} were committed.")
        digest, done, first_line = hashlib.sha256(), 0, 1
        for mark in marks:
            lines = _add(digest, file, mark.bytes - done)
            if digest.hexdigest() != mark.sha256:
                where = f"lines {first_line} to {max(first_line, first_line + lines - 1)}"
                raise _not_committed(f"{path}, {where}: they differ from what was committed (wrong checksum).")
            first_line += lines
            done = mark.bytes


def _not_committed(message: str) -> DamagedFileError:
    return DamagedFileError(message, "Restore the file from a copy, or start a new run.")


def _digest_of(path: Path, length: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        _add(digest, file, length)
    return digest


def _add(digest: hashlib._Hash, file: IO[bytes], length: int) -> int:
    """Add the next `length` bytes of `file` to `digest`; returns the number of lines that end in them."""
    lines = 0
    while length > 0 and (block := file.read(min(length, READ_BLOCK))):
        digest.update(block)
        lines += block.count(b"\n")
        length -= len(block)
    return lines


def _end_of_last_line(path: Path, end: int) -> int:
    """The offset after the last newline in the first `end` bytes of `path`; 0 without a newline."""
    with open(path, "rb") as file:
        while end > 0:
            start = max(0, end - TAIL_BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


STATE_SCHEMA = 1

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The last valid commit (None: nothing was committed).

    `notice` is empty, or says why the previous commit was used instead of the last one.
    """

    state: dict[str, Any] | None
    notice: str = ""


class FileStateStore:
    """The state as a file at `path` (`state.json`), with the previous commit at `state.previous.json`."""

    def __init__(self, path: Path, unchanged: Callable[[], None] | None = None) -> None:
        """`unchanged` is called just before the rename of a commit. If it raises, nothing is committed."""
        self.path = path
        self._unchanged = unchanged
        self.previous_path = path.with_name(f"{path.stem}.previous{path.suffix}")

    def load(self, check: Callable[[State], None] | None = None) -> LoadedState:
        """The last commit or, if it is damaged, the previous one with a notice. Changes no file.

        `check` verifies the files that a state names and raises DamagedFileError if one is damaged; the commit then
        counts as damaged. Raises StateError if no valid commit is left, or if a pvg with another schema wrote the
        state.
        """
        if not self.path.exists() and not self.previous_path.exists():
            return LoadedState(None)
        if self.previous_path.is_dir():  # no commit could replace it
            raise StateError(f"{self.previous_path} is a folder, not a file.", "Move the folder away.")
        try:
            return LoadedState(_read(self.path, check))
        except DamagedFileError as error:
            reason = error.message
        try:
            state = _read(self.previous_path, check)
        except DamagedFileError as error:
            raise StateError(
                f"{reason} The previous commit cannot be used either: {error.message}",
                "Restore the damaged files from a copy, or start a new run with --name.",
            ) from None
        return LoadedState(state, f"{reason} Went back to the previous commit ({self.previous_path.name}).")

    def save(self, state: State) -> None:
        """Commit `state`: plain JSON data with string keys. The valid commit on disk becomes the previous one.

        After a kill at any instant, `state.json` has the old or the new commit, and a damaged `state.json` never
        replaces a valid `state.previous.json`. Raises ValueError for data that JSON does not preserve (NaN, tuples).
        """
        data = _pack(state)
        for path in (self.path, self.previous_path):
            remove_temporaries(path.parent, path.name)
        if _is_valid(self.path):
            write_atomic(self.previous_path, read_stored(self.path), self._unchanged)
        write_atomic(self.path, data, self._unchanged)

    def go_back(self) -> None:
        """Replace the last commit by the previous one, after `load` has skipped the last.

        `save(loaded.state)` would first move the skipped commit to `state.previous.json`, and a kill at that instant
        would leave nothing to resume. Raises DamagedFileError if there is no previous commit.
        """
        _read(self.previous_path, None)
        write_atomic(self.path, read_stored(self.previous_path), self._unchanged)

    def commits(self) -> list[dict[str, Any]]:
        """The valid states on disk, newest first. Nothing that one of them names may be pruned (invariant 2)."""
        return [_read(path, None) for path in (self.path, self.previous_path) if _is_valid(path)]


def _pack(state: State) -> bytes:
    if orjson.loads(orjson.dumps(state)) != state:
        raise ValueError(
            "The state is not plain JSON data: NaN, infinity, tuples and records do not read back unchanged."
        )
    envelope = {"schema": STATE_SCHEMA, "checksum": _checksum(STATE_SCHEMA, state), "state": state}
    return orjson.dumps(envelope, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _checksum(schema: int, state: State) -> str:
    return hashlib.sha256(orjson.dumps([schema, state], option=orjson.OPT_SORT_KEYS)).hexdigest()


def _read(path: Path, check: Callable[[State], None] | None) -> dict[str, Any]:
    try:
        with expected_file(path):
            envelope = orjson.loads(read_stored(path))
    except orjson.JSONDecodeError as error:
        raise DamagedFileError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(envelope, dict) or envelope.keys() != {"schema", "checksum", "state"}:
        raise DamagedFileError(f"{path} is not a state file.")
    schema, state = envelope["schema"], envelope["state"]
    if not isinstance(state, dict) or _checksum(schema, state) != envelope["checksum"]:
        raise DamagedFileError(f"{path} does not match its checksum.")
    if schema != STATE_SCHEMA:
        raise StateError(
            f"{path} has schema {schema}, but this pvg reads schema {STATE_SCHEMA}.",
            "Resume the run with the pvg that wrote it.",
        )
    if check is not None:
        check(state)
    return state


def _is_valid(path: Path) -> bool:
    try:
        _read(path, None)
    except DamagedFileError:
        return False
    return True
