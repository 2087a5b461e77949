"""Journals: files of one JSON object per line. A run appends to them; a resume truncates them to the last commit.

Invariants: every line except the last is complete. Bytes before a `sync`ed `offset` survive a power failure. `verify`
detects any change before a committed `mark`.

JSON has no NaN or infinity: orjson writes them as null. A caller that must report them counts them before appending.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from pvg.inputs import open_to_append
from pvg.store.atomic import DamagedFileError, disk_full_explained, open_stored, sync_directory

TAIL_BLOCK = 65_536  # bytes per read when searching backwards for the end of the last complete line
READ_BLOCK = 1 << 20  # bytes per read for a digest


class JournalMark(NamedTuple):
    """A journal at a commit: its length in bytes, and the sha256 of these bytes in hex."""

    bytes: int
    sha256: str


class JsonLines:
    """Appends objects to `path`, which it creates. One writer, one thread; `sync` may run in another thread.

    Opening cuts off an incomplete last line of a dead writer, because the next line would be appended to it. `torn` is
    the number of bytes cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        existed = path.exists()
        self._file = open(open_to_append(path), "ab", buffering=0)  # noqa: SIM115 (closed by close)
        if not existed:
            sync_directory(path.parent)
        size = os.fstat(self._file.fileno()).st_size
        self._offset = _end_of_last_line(path, size)
        self.torn = size - self._offset
        if self.torn:
            os.ftruncate(self._file.fileno(), self._offset)
        self._digest = _digest_of(path, self._offset)

    @property
    def offset(self) -> int:
        """Bytes of complete lines so far, which a commit records after `sync`."""
        return self._offset

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
        """fsync: everything before `offset` is then durable."""
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

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
                yield self._object(line, number)

    def _object(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise self._damaged(number, str(error)) from None
        if not isinstance(record, dict):
            raise self._damaged(number, "not a JSON object")
        return record

    def _damaged(self, number: int, reason: str) -> DamagedFileError:
        return DamagedFileError(
            f"{self.path}, line {number}, is damaged: {reason}.", "Restore the file, or remove that line from it."
        )


def read_json_lines(path: Path) -> JsonLinesReader:
    """The objects of `path`, one per line. Errors: see JsonLinesReader; FileNotFoundError for a missing file."""
    return JsonLinesReader(path)


def verify(path: Path, marks: Sequence[JournalMark]) -> None:
    """Check the committed part of a journal: the bytes before the last of `marks`, which ascend.

    Earlier marks narrow down the changed lines. Raises DamagedFileError with the file and the lines. A missing file
    counts as empty.
    """
    if not marks or not marks[-1].bytes:
        return
    try:
        file = open_stored(path)
    except FileNotFoundError:
        raise _not_committed(f"{path} is missing, but {marks[-1].bytes} bytes of it were committed.") from None
    except IsADirectoryError:
        raise _not_committed(f"{path} is a folder, not a file.") from None
    with file:
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
