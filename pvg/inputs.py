"""Checks user input: the files that a command reads, and the settings in them.

A FIFO or a device instead of a file could block a command or fill its memory. Deep nesting, huge integers and NUL
characters pass the TOML parser but break other libraries later. This module refuses all of these first. It also names
the hosts under which a server of pvg accepts requests.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from io import BufferedReader
from json import JSONDecodeError
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from pvg.errors import PATH_MISTAKES, ConfigurationError, StateError, UsageError, path_error, shortened, user_paths

MIB = 1 << 20
TEXT_BYTES = 4 * MIB  # experiments, profiles, studies, a user's Python
REPORT_BYTES = 256 * MIB  # a benchmark report has raw samples
BLOCK, SPACED = 16 << 10, 1024  # bytes of a sampled block, and how many are spread over a file
DEEPEST = 16  # levels of nested tables and lists; pvg's settings have 3
LARGEST = 2**63 - 1  # JSON libraries and manifests support 64-bit integers

LOOPBACK = "127.0.0.1"  # pvg's own servers listen here


def has_place(url: str) -> bool:
    """Whether a URL has a host and a port that a program may ask for. Python encodes hosts in IDNA."""
    try:
        parts = urlsplit(url)
        return parts.port != 0 and bool((parts.hostname or "").encode("idna"))
    except ValueError:  # a port beyond 65535, half a bracket, or a host with an empty or a long part
        return False


def names_this_machine(host: str) -> bool:
    """Whether the Host header of a request names this machine. A page of another site could read a server here with a
    DNS name that points to it, and its requests have that name."""
    try:
        return urlsplit(f"//{host}").hostname in (LOOPBACK, "localhost", "::1")
    except ValueError:
        return False


def text_of(data: bytes, place: str | Path) -> str:
    """The text of a file that a user wrote: UTF-8, with or without a byte order mark. Raises ConfigurationError, with
    `place` and the line, for another encoding."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = error.start - data.rfind(b"\n", 0, error.start)
        utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        what = "but UTF-16" if utf_16 else f"(byte {byte} of the line)"
        raise ConfigurationError(
            f"{place}, line {line}: not UTF-8 {what}.", "Save the file with the encoding UTF-8."
        ) from None


def json_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of each line that is not empty."""
    for number, line in enumerate(data_of(file).removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield number, line


def json_row(
    line: bytes, place: str, error: type[ConfigurationError | UsageError], remedy: str, *, exact: bool = True
) -> Any:
    """The data of a line of JSON. `exact`: fractions and integers beyond 64 bits are Decimals with the digits of the
    file, also in lists and objects.

    Raises `error`, with `place` and `remedy`, for a line that is not JSON, for a number that Python cannot hold, and
    for a key that an object has twice, of which parsers drop one. Raises RecursionError for deep nesting."""
    try:
        row = orjson.loads(line)  # stricter than json: no NaN, and only UTF-8
        flat = isinstance(row, dict) and not any(isinstance(value, dict | list | float) for value in row.values())
        # A key may have other spellings, with \u or \/.
        if flat and not re.search(rb"\\[u/]", line) and all(line.count(orjson.dumps(key)) == 1 for key in row):
            return row
        kinds: dict[str, Any] = {"parse_float": Decimal, "parse_int": _integer} if exact else {}
        return json.loads(line, object_pairs_hook=_object, **kinds)
    except _RepeatedKeyError as twice:
        raise error(f"{place}: it has the key {twice.args[0]!r} twice.", "Correct the line.") from None
    except JSONDecodeError as wrong:
        problem = f"not valid JSON ({wrong.msg}, at character {wrong.pos + 1} of the line)"
        try:
            text_of(line, "")
        except ConfigurationError as encoding:
            problem, remedy = encoding.message.rpartition(": ")[2].rstrip("."), encoding.remedy or remedy
        raise error(f"{place}: {problem}.", remedy) from None
    except (ValueError, InvalidOperation):  # more digits, or a larger exponent, than Python reads
        raise error(f"{place}: a number in it is too large or too small.", "Write it as a text.") from None


class _RepeatedKeyError(Exception):
    """Its argument: the key."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedKeyError(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return found


def _integer(digits: str) -> int | Decimal:
    if len(digits) < 19:
        return int(digits)
    number = Decimal(digits)
    return int(number) if abs(number) <= LARGEST else number


def _without_waiting(path: str, flags: int) -> int:
    """Open without blocking; otherwise opening a FIFO would wait for its other end."""
    return os.open(path, flags | os.O_NONBLOCK, 0o644)


def open_input(path: str | Path) -> BufferedReader:
    """A regular file, opened for reading.

    Raises OSError for a folder, a FIFO or a device; its `strerror` is a text for the user.
    """
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 (the caller closes it)
    except ValueError:
        raise OSError(errno.EINVAL, "the name contains a NUL character", str(path)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def open_own(path: Path, flags: int) -> int:
    """A file whose name pvg has chosen, opened for writing and created if it is missing. Raises StateError for a link,
    which may lead to a file that is not pvg's, and for a FIFO or a socket: to open a FIFO would wait for its reader.
    Other errors are those of `open`."""
    if path.is_symlink():
        raise StateError(f"{path} is a link, through which pvg does not write.", "Put the file itself in its place.")
    try:
        file = _without_waiting(str(path), flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a FIFO without a reader, or a socket
            raise
    raise StateError(f"{path} is not a regular file.", "Move it away, or restore the file from a copy.")


def read_input(path: str | Path, most: int = TEXT_BYTES) -> bytes:
    """The bytes of a regular file. Raises OSError as `open_input` does, and for a file larger than `most` bytes."""
    with open_input(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EINVAL, f"it is larger than {most // MIB} MiB", str(path))
    return data


def read_text(path: str | Path) -> str:
    """The text of a file of at most TEXT_BYTES, with \\n as its line ends. Raises the errors of `read_input` and
    `text_of`."""
    return text_of(read_input(path), path).replace("\r\n", "\n").replace("\r", "\n")


@user_paths()
def data_of(file: Path) -> bytes:
    """The bytes of a file of data, which may be large. Raises ConfigurationError for a FIFO, a device or a folder."""
    check_regular(file)
    return file.read_bytes()


def check_regular(file: Path) -> None:
    """For a task's data, which may be large. Raises ConfigurationError for a FIFO, a device or a folder; accepts a
    missing file."""
    if file.exists() and not file.is_file():
        raise ConfigurationError(f"{file} is not a regular file.")


def file_digest(file: Path, *, weights: bool = False) -> str:
    """SHA-256 of a file in hex. Of `weights` larger than TEXT_BYTES, only of the size and of some blocks, so that it
    takes less than a second: those where tensors begin and end (safetensors), and SPACED others. It notices training,
    merging and converting, and may miss single numbers that were changed by hand."""
    with user_paths(), open_input(file) as opened:
        found = os.fstat(opened.fileno())
        return _digest(file, weights and found.st_size > TEXT_BYTES, found.st_size, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=4096)
def _digest(file: Path, sampled: bool, size: int, *changes: int) -> str:
    """`changes`: with the size, what tells this content from others of the same path in this process."""
    with user_paths(), open_input(file) as opened:
        if not sampled:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for start in sorted({*_tensor_places(opened, size), *range(0, size, size // SPACED)}):
            opened.seek(start)
            digest.update(opened.read(BLOCK))
        return digest.hexdigest()


def _tensor_places(file: BufferedReader, size: int) -> Iterator[int]:
    """Where the blocks at the begin and at the end of each tensor of a safetensors file are. None for other files."""
    length = int.from_bytes(file.read(8), "little")
    try:
        header = orjson.loads(file.read(length)) if length < min(size, REPORT_BYTES) else {}
        for tensor in header.values():
            for place in tensor.get("data_offsets", ()):
                yield from (8 + length + place, max(0, 8 + length + place - BLOCK))
    except (AttributeError, TypeError, ValueError):  # not safetensors
        return


def expanded(path: str | Path, where: str) -> Path:
    """`path` with `~` and `~user` replaced. It may be missing. Raises UsageError, with the setting `where`, for an
    unknown user and for what can be no path, and MissingRequirementError without the permission to look there."""
    try:
        found = Path(path).expanduser()
        os.stat(found)
    except RuntimeError:
        user = Path(path).parts[0]
        raise UsageError(f"{where}: {user} is not a user of this machine.", "Write the full path.") from None
    except ValueError:  # a NUL character, or half of a surrogate pair
        raise UsageError(f"{where}: {shortened(str(path))!r} cannot be a path.", "Give another path.") from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR) and error.errno in PATH_MISTAKES:
            raise path_error(error, *PATH_MISTAKES[error.errno]) from None
    return found


def check_settings(data: dict[str, Any], origin: str) -> None:
    """Raises ConfigurationError, with key and `origin`, for values that no setting can have: nesting deeper than
    DEEPEST, integers beyond 64 bits, numbers that are not finite, NUL characters, dates."""
    for key, value, depth in _walk(data):
        if complaint := _complaint(value, depth) or ("has a NUL character in its key" if "\0" in key else ""):
            raise ConfigurationError(f"{shortened(key)}: the value {complaint} ({origin}).")


def _walk(data: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """(dotted key, value, depth) of every value in the data, without recursion."""
    waiting: list[tuple[str, Any, int]] = [(key, value, 1) for key, value in data.items()]
    while waiting:
        key, value, depth = waiting.pop()
        yield key, value, depth
        if isinstance(value, dict):
            waiting += [(f"{key}.{inner}", item, depth + 1) for inner, item in value.items()]
        elif isinstance(value, list):
            waiting += [(key, item, depth + 1) for item in value]


def _complaint(value: Any, depth: int) -> str:
    if depth > DEEPEST:
        return f"is nested more than {DEEPEST} levels deep"
    if isinstance(value, str):
        return "contains a NUL character" if "\0" in value else ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"is {value}, which is not a finite number"
    if isinstance(value, bool | dict | list):
        return ""
    if isinstance(value, int):
        return "" if -LARGEST - 1 <= value <= LARGEST else "is an integer beyond 64 bits"
    return f"is a {type(value).__name__}, which no setting can have; write it as a string"
