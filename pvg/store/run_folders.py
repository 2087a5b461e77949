"""What users do with the folders of runs: tags, sizes, removal, and runs without a game.

    write_tags(run, ["good"]); remove_run(run)

Invariant: a kill at any instant of a removal leaves the whole run, or a folder that no command takes for a run. The
next removal deletes such a folder.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from pvg.errors import StateError, UsageError, path_error, user_paths
from pvg.store.atomic import is_temporary, read_stored, sync_directory, write_atomic
from pvg.store.run_directory import RunDirectory, is_removed, removed_name

SAMPLING_PHASE = "init"  # the state a run stays in while `pvg rollout` fills it
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@user_paths()
def read_tags(run: RunDirectory) -> list[str]:
    """The tags of a run, in the order in which they were added. Raises StateError if the file is damaged."""
    try:
        found = orjson.loads(read_stored(run.tags))
    except FileNotFoundError:
        return []
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, list) or not all(isinstance(tag, str) for tag in found):
        raise StateError(f"{run.tags} is not a list of tags.", "Delete the file. Only the tags are lost.")
    return found


@user_paths()
def write_tags(run: RunDirectory, tags: Sequence[str]) -> list[str]:
    """Replace the tags of a run, without repetitions. A process that plays the run is not affected. Raises UsageError
    for a text that cannot be a tag."""
    for tag in tags:
        if not TAG.fullmatch(tag):
            raise UsageError(f"{tag!r} cannot be a tag.", "Use at most 40 letters, digits, dots, dashes, underscores.")
    wanted = list(dict.fromkeys(tags))
    if not wanted:
        run.tags.unlink(missing_ok=True)
        return wanted
    try:
        write_atomic(run.tags, orjson.dumps(wanted, option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        if error.filename and is_temporary(Path(error.filename)):
            error.filename = str(run.path)  # a folder that cannot be written; its user does not know the temporary file
        raise
    return wanted


def has_only_samples(state: Mapping[str, Any]) -> bool:
    """Whether a run with the committed `state` (empty: none) is of `pvg rollout`, which plays no game and leaves a run
    in its first phase."""
    return state.get("phase", SAMPLING_PHASE) == SAMPLING_PHASE and bool(state.get("shards"))


def refuse_samples(run: RunDirectory, state: Mapping[str, Any]) -> None:
    """Raises UsageError if `run` with the committed `state` (empty: none) is of `pvg rollout`, which has no game."""
    if has_only_samples(state):
        raise UsageError(
            f"The run {run.name!r} contains samples of `pvg rollout`, not a game.", "Start a game: pvg train"
        )


def folder_bytes(folder: Path) -> int:
    """The size of all files below `folder`, in bytes. A file with several names counts once. Links are not followed."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(place, name))
            except FileNotFoundError:  # a temporary file of a process that plays the run
                continue
            seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())


def remove_run(run: RunDirectory, waiting: Callable[[str], None]) -> None:
    """Delete a run, and what killed removals have left beside it.

    The folder first gets a name that is no run's, and then loses its files. Raises UsageError if a process plays the
    run; `waiting` is that of `RunDirectory.lock`. Raises StateError if files cannot be deleted.
    """
    if run.path.is_symlink():
        raise UsageError(
            f"{run.path} is a link to {run.path.resolve()}.", "Give that folder, or delete only the link with rm."
        )
    folder = run.path.resolve()
    grave = folder.parent / removed_name(folder.name, secrets.token_hex(4))
    with run.lock(waiting=waiting), user_paths():
        os.rename(folder, grave)
        sync_directory(folder.parent)
    for left in [path for path in folder.parent.iterdir() if is_removed(path)]:
        _delete(left)


def _delete(folder: Path) -> None:
    try:
        # First the file that makes a folder a run, in case a user gives the folder its old name.
        RunDirectory(folder).experiment_file.unlink(missing_ok=True)
        shutil.rmtree(folder)
    except FileNotFoundError:  # another `pvg runs remove` deletes it at this moment
        return
    except OSError as error:
        raise path_error(error, StateError, f"Delete the rest yourself: rm -r {folder}") from error
