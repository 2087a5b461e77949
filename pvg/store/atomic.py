"""Files of a run. Atomic writes: after a kill at any instant, a file has its old or its new content.

Invariant: a path written here never has partial content. A writer that dies leaves a file in the same folder whose name
begins with `.tmp-`. It is never read, and recovery of the folder removes it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from pvg.errors import DISK_FULL, MissingRequirementError, StateError
from pvg.inputs import open_input

TEMPORARY_PREFIX = ".tmp-"
TEMPORARY_NAME = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}(?P<of>.+)-[0-9a-f]{{8}}")  # names of temporary_beside
RUST_ERROR = re.compile(r"\(os error (\d+)\)")
ROOM = {
    errno.ENOSPC: "Free some space on that disk",
    errno.EDQUOT: "Free some of your quota on that disk",
    errno.EFBIG: "Raise the file size limit (ulimit -f unlimited)",
}
MARKED_BYTES = 1000
OLD_S = 3600.0  # longer than any process takes to write one file


class DamagedFileError(StateError):
    """A stored file is missing, truncated, or differs from what was written. The message names the file."""


def open_stored(path: Path) -> BufferedReader:
    """A file of a run, opened for reading. Raises DamagedFileError for a FIFO, a socket or a device: to open a FIFO
    would wait for its writer. Other errors are those of `open`."""
    try:
        return open_input(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENXIO):
            raise
        remedy = "Move it away, or restore the file from a copy."
        raise DamagedFileError(f"{path} is not a regular file.", remedy) from None


def read_stored(path: Path) -> bytes:
    """The bytes of a file of a run. Raises what `open_stored` does."""
    with open_stored(path) as file:
        return file.read()


def damaged(path: Path, reason: str) -> DamagedFileError:
    return DamagedFileError(f"{path} is damaged: {reason}.", "Restore it from a copy of the run.")


@contextmanager
def expected_file(path: Path) -> Iterator[None]:
    """The block opens `path`. Raises DamagedFileError if it is missing or a folder."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise damaged(path, "the file is missing") from None
    except IsADirectoryError:
        raise damaged(path, "a folder is in its place") from None


def check_file(path: Path, size: int | None = None, sha256: str = "") -> None:
    """Raises DamagedFileError if the file is missing, or has another size or checksum than was committed (None, "": not
    compared)."""
    with expected_file(path), open_stored(path) as file:
        found = os.fstat(file.fileno()).st_size
        if size is not None and found != size:
            raise damaged(path, f"{found} bytes instead of {size}")
        if sha256 and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise damaged(path, "its checksum differs from the committed one")


def write_atomic(path: Path, data: bytes | memoryview, before: Callable[[], None] | None = None) -> None:
    """Replace `path` by `data`, as `atomic_file` does."""
    with atomic_file(path, before) as file:
        file.write(data)


@contextmanager
def atomic_file(
    path: Path, before: Callable[[], None] | None = None, *, named: Path | None = None
) -> Iterator[BinaryIO]:
    """Replace `path`, durably, by what the block writes in pieces: temporary file in the same folder, write, fsync,
    rename, fsync of the folder.

    `before` is called just before the rename. If it or the block raises, `path` stays unchanged and the temporary file
    is removed. Raises MissingRequirementError if the disk is full. Any other OSError propagates. In both cases the old
    file is intact and the temporary file is removed. `named`: the name under which a user knows a file that is not of a
    run.
    """
    temporary = temporary_beside(path)
    with disk_full_explained(named or path, of_run=named is None):
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if before is not None:
                before()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


@contextmanager
def new_folder(path: Path, before: Callable[[], None] | None = None) -> Iterator[Path]:
    """A temporary folder, which the block fills with synced files. It then becomes `path`, durably, which must not
    exist. `before` and errors: as in `atomic_file`."""
    temporary = temporary_beside(path)
    try:
        with disk_full_explained(path):
            temporary.mkdir()
            yield temporary
            share_weights(temporary)
            sync_directory(temporary)
            if before is not None:
                before()
            os.rename(temporary, path)
            sync_directory(path.parent)
    except BaseException:
        if temporary.exists():
            shutil.rmtree(temporary)
        raise


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Create `path` (which must not exist), write `data`, fsync. Not atomic: for files inside a temporary folder."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def is_foreign(path: Path, mark: bytes) -> bool:
    """Whether `path` is a file that pvg did not write, and so must not replace: it has content, without the `mark` that
    all files of its kind have among their first bytes."""
    if not path.is_file():
        return False
    with open_input(path) as file:
        start = file.read(MARKED_BYTES)
    return bool(start) and mark not in start


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a user named, as `output_file` does."""
    with output_file(path) as file:
        file.write(data)


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """A file that a user named, to be written in pieces. It gets its name when the block ends without an error.

    Follows a link, and writes directly to an existing path that is not a file: a rename would replace a device, such as
    /dev/null for root. Raises as `write_atomic`.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with disk_full_explained(path, of_run=False), open(path, "wb") as file:
            yield file
        return
    with atomic_file(Path(os.path.realpath(path)), named=path) as file:
        yield file


def temporary_beside(path: Path) -> Path:
    """A new name in the folder of `path` that recovery recognizes as temporary."""
    return path.parent / f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}"


def is_temporary(path: Path) -> bool:
    return TEMPORARY_NAME.fullmatch(path.name) is not None


def remove_temporaries(directory: Path, name: str = "", *, older_than_s: float = 0.0) -> list[Path]:
    """Remove temporary files of dead writers of `name` (default: all) from `directory`; returns their paths.

    Only for the one process that may write `name` (RunDirectory.lock), because a living writer's temporary files look
    the same. For a `name` that any process may write: `older_than_s` = OLD_S. Files with other names stay.
    """
    found = ((path, TEMPORARY_NAME.fullmatch(path.name)) for path in directory.iterdir()) if directory.is_dir() else ()
    removed = []
    for path in sorted(path for path, match in found if match and name in ("", match["of"])):
        with suppress(FileNotFoundError):  # its writer has renamed it in the meantime
            if older_than_s and time.time() - path.lstat().st_mtime <= older_than_s:
                continue
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)
        removed.append(path)
    return removed


def remove_tree(path: Path) -> None:
    """Remove a folder that a driver on another host, which has lost the run, may be removing too. Of a link, only the
    link: it may lead to a folder that is not pvg's."""
    while os.path.lexists(path):
        with suppress(FileNotFoundError):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, and make each durable in its parent folder."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with disk_full_explained(path):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def share_weights(folder: Path) -> None:
    """Give the safetensors files below the new `folder` the permissions of any new file there.

    safetensors lets only the owner read them, whatever the umask says.
    """
    probe = temporary_beside(folder / "permissions")
    probe.touch()
    usual = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*.safetensors"):
        if stat.S_IMODE(path.stat().st_mode) != usual:
            path.chmod(usual)


def sync_directory(path: Path) -> None:
    """fsync a folder, so that the names in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_full_explained(path: Path, *, of_run: bool = True) -> Iterator[None]:
    """Convert "the disk is full" into an error with a remedy; other errors propagate, and name `path` instead of a
    temporary file. `of_run`: whether a process that plays a run writes `path`."""
    try:
        yield
    except Exception as error:
        number = _system_error(error)
        if number not in DISK_FULL:
            if isinstance(error, OSError) and error.filename and is_temporary(Path(os.fsdecode(error.filename))):
                error.filename, error.filename2 = str(path), None
            raise
        remedy = f"{ROOM[number]} and try again."
        raise MissingRequirementError(
            f"The disk is full while writing {path}: {os.strerror(number)}.",
            f"{remedy} A run keeps its commits: continue it with --resume." if of_run else remedy,
        ) from error


def _system_error(error: Exception) -> int:
    """The number of the operating system's error; 0 if there is none. Libraries in Rust (safetensors, tokenizers) tell
    it only in their text."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = RUST_ERROR.search(str(error))
    return int(found[1]) if found else 0
