"""The committed state of a game: one small JSON document that names everything the run has finished.

Invariants:
1. `state.json` is replaced as a whole, and carries the checksum of what it says; `state.previous.json` is the commit
   before it.
2. Going back to the previous commit is only worth something while the files it names still exist. So whoever prunes
   checkpoints, weights or shards keeps what *every* state of `FileStateStore.commits()` names, and prunes after `save`,
   never before it. A checkpoint is then removed at the second commit that no longer names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from pvg.errors import StateError
from pvg.store.atomic import DamagedFileError, remove_temporaries, write_atomic

STATE_SCHEMA = 1

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What a store found: the last valid commit (None: nothing was ever committed).

    `notice` is empty, or says why the commit before the last one was taken instead.
    """

    state: dict[str, Any] | None
    notice: str = ""


class StateStore(Protocol):
    """Where the game's state lives: a file by default; a shared store may serve several machines."""

    def load(self, check: Callable[[State], None] | None = None) -> LoadedState: ...

    def save(self, state: State) -> None: ...


class FileStateStore:
    """The state as a file at `path` (`state.json`), with the commit before it at `state.previous.json`."""

    def __init__(self, path: Path, unchanged: Callable[[], None] | None = None) -> None:
        """`unchanged` is called just before the rename of a commit. If it raises, nothing is committed."""
        self.path = path
        self._unchanged = unchanged
        self.previous_path = path.with_name(f"{path.stem}.previous{path.suffix}")

    def load(self, check: Callable[[State], None] | None = None) -> LoadedState:
        """The last commit, or the one before it, with a notice, where the last is damaged. Changes no file.

        `check` looks at the files which a state names and raises DamagedFileError when one is damaged; the commit is
        then passed over like a damaged one. Raises StateError when there is no valid commit left, and when a pvg of
        another schema wrote the state.
        """
        if not self.path.exists() and not self.previous_path.exists():
            return LoadedState(None)
        try:
            return LoadedState(_read(self.path, check))
        except DamagedFileError as error:
            reason = error.message
        try:
            state = _read(self.previous_path, check)
        except DamagedFileError as error:
            raise StateError(
                f"{reason} The commit before it cannot be used either: {error.message}",
                "Restore the damaged files from a copy, or start a new run with --name.",
            ) from None
        return LoadedState(state, f"{reason} Went back to the commit before it ({self.previous_path.name}).")

    def save(self, state: State) -> None:
        """Commit `state`: plain JSON data with string keys. The valid commit on disk becomes the previous one.

        Killed at any instant, `state.json` holds the old commit or the new one, and a damaged `state.json` never
        replaces a valid `state.previous.json`. Raises ValueError for what JSON cannot give back (NaN, tuples).
        """
        data = _pack(state)
        for path in (self.path, self.previous_path):
            remove_temporaries(path.parent, path.name)
        if _is_valid(self.path):
            write_atomic(self.previous_path, self.path.read_bytes(), self._unchanged)
        write_atomic(self.path, data, self._unchanged)

    def go_back(self) -> None:
        """Make the commit before the last the last one, in one replacement; for when `load` passed over the last.

        Not `save(loaded.state)`: that would first move the commit that was passed over to `state.previous.json`, and a
        kill at that instant would leave nothing to resume. Raises DamagedFileError when there is none to go back to.
        """
        _read(self.previous_path, None)
        write_atomic(self.path, self.previous_path.read_bytes(), self._unchanged)

    def commits(self) -> list[dict[str, Any]]:
        """The valid states on disk, newest first: what any of them names must not be pruned (invariant 2)."""
        return [_read(path, None) for path in (self.path, self.previous_path) if _is_valid(path)]


def _pack(state: State) -> bytes:
    if orjson.loads(orjson.dumps(state)) != state:
        raise ValueError("The state is not plain JSON data: NaN, infinity, tuples and records do not come back alike.")
    envelope = {"schema": STATE_SCHEMA, "checksum": _checksum(STATE_SCHEMA, state), "state": state}
    return orjson.dumps(envelope, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _checksum(schema: int, state: State) -> str:
    return hashlib.sha256(orjson.dumps([schema, state], option=orjson.OPT_SORT_KEYS)).hexdigest()


def _read(path: Path, check: Callable[[State], None] | None) -> dict[str, Any]:
    try:
        envelope = orjson.loads(path.read_bytes())
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
            f"{path} has schema {schema}, and this pvg reads schema {STATE_SCHEMA}.",
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
