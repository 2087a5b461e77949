"""The committed state of a game: one small JSON document that names everything that the run has finished.

Invariants:
1. `state.json` is replaced atomically and contains its checksum; `state.previous.json` is the previous commit.
2. The previous commit is useful only while the files that it names exist. So code that prunes checkpoints, weights or
   shards keeps everything that *any* state of `FileStateStore.commits()` names, and prunes after `save`, never before.
   A checkpoint is then removed at the second commit that no longer names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pvg.errors import StateError
from pvg.store.atomic import DamagedFileError, read_stored, remove_temporaries, write_atomic

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
        envelope = orjson.loads(read_stored(path))
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing.") from None
    except IsADirectoryError:
        raise DamagedFileError(f"{path} is a folder, not a file.") from None
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
