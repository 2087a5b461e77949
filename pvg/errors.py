"""Errors that a user can cause or fix: one line with the problem, one with the remedy, and the exit code.

Any other exception is a defect of pvg and is not caught.
"""

from __future__ import annotations

import errno
import importlib
import linecache
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from types import ModuleType
from typing import Self
from weakref import WeakKeyDictionary

EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3

SYSTEMS = "pvg supports Linux and macOS. On Windows, run it in WSL."

# No space, no quota, and the process's file size limit: for a user, all three mean that the file does not fit.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

LONGEST_WORD = 300  # characters; longer words (a key, a value, a path) are cut in the middle
LONGEST_LINE = 2000

_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def visible(text: str) -> str:
    """`text` with every unprintable character except line ends as an escape: \\x1b, \\udc80."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """`text` as one printable line of at most LONGEST_LINE characters: line ends become spaces, control characters are
    escaped, and long words and lines are cut in the middle."""
    line = " ".join(part for part in map(str.strip, text.splitlines()) if part)
    line = visible(_LONG_WORD.sub(lambda found: shortened(found[0], LONGEST_WORD), line))
    return shortened(line, LONGEST_LINE)


def shortened(text: str, most: int = 80) -> str:
    """`text`, cut in the middle if it is longer than `most` characters."""
    head = most * 2 // 3
    return text if len(text) <= most else f"{text[:head]}...{text[head + 3 - most :]}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, which gets an s unless the number is 1: "1 thread", "2 threads"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def in_percent(share: float) -> str:
    """A share as whole percent: 0.843 is "84 %"."""
    return f"{100 * share:.0f} %"


def listed(names: Sequence[str], most: int = 20) -> str:
    """The names in one line; of many, the first ones and how many there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def reason(error: OSError) -> str:
    """The system's words for an error: "Address already in use". asyncio puts a whole sentence into `strerror`."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)


OWN = (["pvg"], ["pvg_cli"])


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that it came from: its cause, the members of a group, and what a library was handling
    when it raised it. What pvg was handling explains nothing."""
    pending, seen = [error], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        handled = None if raised_by_pvg(one) or one.__suppress_context__ else one.__context__
        if handled is not None and packages_in(handled)[:1] in OWN:  # the frame that caught it
            handled = None
        pending += [each for each in (one.__cause__, handled) if each is not None]
        pending += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def packages_in(error: BaseException) -> list[str]:
    """The packages whose code an exception passed through, the one that raised it last."""
    return [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]


def raised_by_pvg(error: BaseException) -> bool:
    """Whether pvg's own code raised an exception, and not a library that it called."""
    return packages_in(error)[-1:] in OWN


def said(error: BaseException) -> str:
    """What an exception says. A user's class of exceptions may fail to say it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the code is the user's
        return "its message cannot be read"


def first_line(error: BaseException) -> str:
    """The first line that an exception says, without its full stop; its type if it says nothing."""
    return next(filter(None, map(str.strip, said(error).splitlines())), type(error).__name__).rstrip(".")


def variables_quoted(error: BaseException) -> list[str]:
    """The environment variables whose values an exception or one of its causes quotes, such as 'abc', or that a line
    of a library uses which it passed through, if its message or that library's file has their names."""
    words, used, files = "", set[str](), set[str]()
    for cause in causes(error):
        words += f" {said(cause)}"
        for frame, number in walk_tb(cause.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] not in ("pvg", "pvg_cli"):
                files.add(frame.f_code.co_filename)
                line = linecache.getline(frame.f_code.co_filename, number)
                values = [frame.f_locals.get(name) for name in re.findall(r"\w+", line)]
                used |= {value for value in values if isinstance(value, str)}
    found = [name for name, value in os.environ.items() if value and (repr(value) in words or value in used)]
    names = set(re.findall(r"\w+", words + "".join(line for file in files for line in linecache.getlines(file))))
    return sorted(names.intersection(found))


class Closing(ABC):
    """What a `with` block closes, also if an error leaves it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...


class PvgError(Exception):
    """Base of the errors that the command line prints without a traceback.

    `message` is the problem in one line; `remedy` is what to do (a command if there is one). Both are passed through
    `one_line`, because they may quote a user's input or a file.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = one_line(message)
        self.remedy = one_line(remedy)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class UsageError(PvgError):
    """A wrong argument: an unknown name, a run that does not exist, an option that contradicts another."""


class ConfigurationError(PvgError):
    """A configuration that is malformed or cannot work."""


class MissingRequirementError(PvgError):
    """The environment lacks something: an extra, a model, a data file, disk space."""

    exit_code = EXIT_ENVIRONMENT


class StateError(PvgError):
    """The state of a run directory forbids the request, such as an illegal transition. The message names both."""


def system_module(name: str) -> ModuleType:
    """Import a module of the standard library that only Linux and macOS have, such as `fcntl`. Raises
    MissingRequirementError on other systems."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise MissingRequirementError(f"This system has no Python module {name}, which pvg needs.", SYSTEMS) from None


OTHER_FILES = 256  # what a process has open besides its connections
open_files: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # connections of this process, by who has them


def allow_open_files(owner: object, connections: int, what: str, setting: str = "") -> None:
    """Raise this process's limit of open files to what the `connections` of `owner` need, one for each `what`, whose
    number is a setting, until it leaves `open_files`. Raises MissingRequirementError if the system allows fewer."""
    resource = system_module("resource")
    open_files.pop(owner, None)
    needed = connections + sum(open_files.values()) + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        open_files[owner] = connections
    except (OSError, ValueError):
        raise MissingRequirementError(
            f"{counted(connections, what)} need {needed:,} open files, but this process may open only {hard:,}.",
            f"Raise the limit: ulimit -n {needed}" + (f", or lower {setting} (-s {setting}=N)." if setting else ""),
        ) from None


# Errors of a path that a user named and can correct: errno -> the type of error, and the remedy.
PATH_MISTAKES: dict[int, tuple[type[PvgError], str]] = {
    errno.ENAMETOOLONG: (UsageError, "Give a shorter name."),
    errno.ELOOP: (UsageError, "The link points to itself. Give another path."),
    errno.EACCES: (MissingRequirementError, "Get the permission, or give another path."),
    errno.EPERM: (MissingRequirementError, "Get the permission, or give another path."),
    errno.EISDIR: (UsageError, "pvg needs a file there. Move the folder away."),
    errno.ENOTDIR: (UsageError, "pvg needs a folder there. Move the file away."),
    errno.ENOENT: (UsageError, "Give a path in a folder that exists and takes files."),
    errno.EROFS: (MissingRequirementError, "Give a path on a file system that can be written."),
    errno.EEXIST: (UsageError, "Move it away: pvg needs this path."),
}


def path_error(error: OSError, kind: type[PvgError], remedy: str) -> PvgError:
    """The error to show for `error`, with its path if it has one."""
    path = error.filename2 or error.filename  # filename2: the target of a rename
    if not path:
        return kind(f"{error.strerror}.", remedy)
    return kind(f"{shortened(os.fsdecode(path))}: {error.strerror}.", remedy)


@contextmanager
def user_paths() -> Iterator[None]:
    """For code that opens what a user named: a run, a file, a folder for results. Also a decorator.

    Converts an OSError that such a path can cause (PATH_MISTAKES) into an error with a remedy. Outside of these blocks
    the same OSError is a defect of pvg.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in PATH_MISTAKES or not error.filename:
            raise
        raise path_error(error, *PATH_MISTAKES[error.errno]) from error


class TrainingDivergedError(PvgError):
    """A loss or a gradient became NaN or infinite; earlier commits are intact."""

    exit_code = EXIT_CHECK_FAILED


class ServerUnavailableError(PvgError):
    """No server answers, or a server's answer is not that of a pvg server. The message names the servers."""

    exit_code = EXIT_ENVIRONMENT


class WeightsNotArrivedError(PvgError):
    """A server does not have the published weights, as detected by a canary. The message names server and
    version."""

    exit_code = EXIT_CHECK_FAILED


class WorkerLostError(PvgError):
    """Worker processes end again and again. The message says why the last one ended."""

    exit_code = EXIT_ENVIRONMENT


class StoppedAtStart(KeyboardInterrupt):
    """The user stopped a command while it started, so it has done nothing yet. `message`: what happened to the run;
    `remedy`: how to go on."""

    exit_code = 130  # as after SIGINT

    def __init__(self, message: str = "Stopped before the work started.", remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(message)


class RolloutFailedError(PvgError):
    """No server delivered a rollout within its deadline or retries. The message names the rollout and the last
    failure."""

    exit_code = EXIT_ENVIRONMENT
