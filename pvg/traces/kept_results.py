"""`KeptResults`: results by a digest of what was asked, in a file that survives SIGKILL.

The file has one JSON object per line, {"key", "value"}. Each line is written as it comes and fsynced with the next
commit. A torn last line, which a killed process leaves, is dropped.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from pvg.errors import Closing, UsageError, user_paths
from pvg.inputs import open_own
from pvg.store.atomic import DamagedFileError, disk_full_explained, make_directory
from pvg.store.run_directory import exclusive

KEY = b'{"key"'  # the start of a line
COMMIT_S = 1.0  # between two fsyncs: what a power failure costs at most. SIGKILL costs nothing.


def digest_of_question(*parts: Any) -> str:
    """The first 32 hex digits of a sha256 over JSON data: the key of a result that depends on these parts alone."""
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]


class KeptResults(Closing):
    """Owns the file until it is closed; another process that opens it meanwhile gets a UsageError."""

    def __init__(self, path: Path) -> None:
        self.path, self._committed = path, time.monotonic()
        with ExitStack() as opening:
            with user_paths():
                make_directory(path.parent)
            opening.enter_context(exclusive(path.with_suffix(".lock"), self._in_use))
            with user_paths():
                self._file = open_own(path, os.O_RDWR)
            opening.callback(os.close, self._file)
            self._values = self._read()
            self._stack = opening.pop_all()

    def get(self, key: str) -> Any:
        """The value of a key; None if it was never put."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value that JSON can represent, not None."""
        line = orjson.dumps({"key": key, "value": value}, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        with disk_full_explained(self.path, of_run=False):
            start = os.lseek(self._file, 0, os.SEEK_END)
            try:
                while line:
                    line = line[os.write(self._file, line) :]
            except OSError:
                os.ftruncate(self._file, start)  # no torn line in the middle of a file that goes on later
                raise
        self._values[key] = value
        if time.monotonic() - self._committed >= COMMIT_S:
            self.commit()

    def commit(self) -> None:
        """Make all values durable."""
        with disk_full_explained(self.path, of_run=False):
            os.fsync(self._file)
        self._committed = time.monotonic()

    def close(self) -> None:
        """A second call does nothing."""
        if self._file < 0:
            return
        try:
            self.commit()
        finally:
            self._file = -1
            self._stack.close()

    def _read(self) -> dict[str, Any]:
        with os.fdopen(os.dup(self._file), "rb") as file:
            data = file.read()
        whole, found = data.rfind(b"\n") + 1, {}
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                row = orjson.loads(line)
                found[row["key"]] = row["value"]
            except (orjson.JSONDecodeError, LookupError, TypeError):
                raise self._not_a_result(number) from None
        torn = data[whole:]
        if not torn.startswith(KEY[: len(torn)]):
            raise self._not_a_result(len(found) + 1)
        os.ftruncate(self._file, whole)
        return found

    def _not_a_result(self, line: int) -> DamagedFileError:
        where = f"{self.path} is damaged, or not of pvg: line {line} is not a result."
        return DamagedFileError(where, "Choose another --out FOLDER, or move it away: pvg then computes all again.")

    def _in_use(self, owner: str) -> UsageError:
        return UsageError(f"{self.path.parent} is in use by {owner}.", "Wait for it, or choose another --out FOLDER.")
