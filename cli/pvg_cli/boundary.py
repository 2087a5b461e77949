"""Common parts of all commands: errors, exit codes, signals, and the one JSON document on stdout.

Exit codes: 0 done; 1 a check failed; 2 wrong usage or configuration; 3 the environment lacks something; 70 a defect of
pvg (the command prints the traceback and says how to report it); 130 stopped by Ctrl-C or SIGTERM.

Invariant: with --json, stdout holds exactly one JSON document, on success and on error. All other text goes to stderr.
If several processes of torchrun run `pvg train`, only the first of them prints the document.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import shlex
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pvg.errors import (
    DISK_FULL,
    EXIT_USAGE,
    PATH_MISTAKES,
    MissingRequirementError,
    PvgError,
    StoppedAtStart,
    UsageError,
    causes,
    first_line,
    one_line,
    packages_in,
    path_error,
    raised_by_pvg,
    variables_quoted,
    visible,
)
from pvg_cli import follows, kept_for_documents, write_utf8

EXIT_DEFECT = 70  # EX_SOFTWARE of sysexits.h; no check and no user error uses this code
# Mistakes of the user, whatever path they concern: a file of another user, and names that pvg itself never makes.
EVERYWHERE = frozenset({errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP})
# Errors of the machine, whatever path they concern: errno -> the remedy. Any other OSError is a mistake of the user in
# a `user_paths` block (pvg.errors), and a defect elsewhere.
MACHINE_ERRORS: dict[int, str] = {
    errno.EROFS: "Make the file system writable, or copy the folder to a writable disk and work there.",
    errno.EIO: "Check the disk, and restore damaged files from a copy.",
    errno.ESTALE: "Check the network file system, and try again.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n), and try again.",
    **dict.fromkeys(DISK_FULL, "Free some space on that disk, and try again."),
}
NO_TEMPORARY = "Free some space, or set TMPDIR to a folder that can be written: export TMPDIR=FOLDER"
OWN = frozenset({"", "__main__", "pvg", "pvg_cli"})  # packages whose failed import is a defect of pvg
PRINTING = frozenset({"pvg_cli", "rich", "typer", "click"})  # packages that write to stdout and stderr
SCHEMA_VERSION = 1  # of a document that names no other version
EXIT_STOPPED = 130  # the code that shells report for a program ended by SIGINT

# The base class of usage errors. Newer versions of typer contain their own copy of click.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]


def emit(document: Mapping[str, Any]) -> None:
    """Write the command's one JSON document, with its `schema_version`. `pvg_cli.documents` has their types."""
    print_json({"schema_version": SCHEMA_VERSION, **document})


def stopped(message: str, *, document: bool) -> typer.Exit:
    """The end of a command at Ctrl-C. `document`: whether it prints the JSON document of an error."""
    say(message)
    if document:
        emit(error_document("Stopped", message, "", EXIT_STOPPED))
    return typer.Exit(EXIT_STOPPED)


def error_document(kind: str, message: str, remedy: str, exit_code: int) -> dict[str, Any]:
    """What a command prints with --json instead of its document."""
    return {"error": {"type": kind, "message": message, "remedy": remedy, "exit_code": exit_code}}


def print_json(document: Mapping[str, Any]) -> None:
    """Write a document as it is, such as a JSON Schema."""
    write_utf8(json_text(document) + b"\n")


def json_text(document: Mapping[str, Any]) -> bytes:
    import orjson

    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def say(text: str, colour: str | None = None) -> None:
    """Print a line on stderr. The console decides about the colour. Control characters are escaped."""
    if colour is None:
        typer.echo(visible(text), err=True)
        return
    from rich.text import Text

    from pvg_cli.output import stderr

    stderr().print(Text(visible(text), style=colour), soft_wrap=True)


def first_prints(as_json: bool) -> bool:
    """`as_json` in the first process of torchrun, and without torchrun. False in another one: it prints no document of
    `pvg train`, whatever happens to the first."""
    return as_json and not follows()


def _was_printing(trace: TracebackType | None) -> bool:
    """Whether printing raised the error. Other packages than these write the files of a run."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").partition(".")[0] in PRINTING


def _end_at_once() -> None:
    """End the process without Python's normal exit, which waits for other threads (perhaps for the load of a model) and
    takes a second to unload torch."""
    with contextlib.suppress(OSError, ValueError):  # the reader of the output has ended
        sys.stdout.flush()
    os._exit(EXIT_STOPPED)


def _silence_stdout() -> None:
    """Drop what is left in the buffer of stdout. Otherwise Python writes it again at exit and prints its own error."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _end_if_unread(error: BaseException | None, trace: TracebackType | None) -> None:
    """End the command with code 0 if `error` says that the reader has closed stdout, as `head` does. rich makes a
    SystemExit of that error."""
    broken = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(broken, BrokenPipeError) and (broken is not error or _was_printing(trace)):
        _silence_stdout()
        raise typer.Exit


def explanation(error: BaseException) -> PvgError | None:
    """The error of the user or of the machine behind an exception, by its kind and the code that raised it. None: a
    defect of pvg."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in MACHINE_ERRORS:
            return path_error(cause, MissingRequirementError, MACHINE_ERRORS[cause.errno])
        if isinstance(cause, OSError) and cause.errno in EVERYWHERE and cause.filename:
            return path_error(cause, *PATH_MISTAKES[cause.errno])
        if isinstance(cause, FileNotFoundError) and packages_in(cause)[-1:] == ["tempfile"] and not cause.filename:
            return MissingRequirementError(f"{first_line(cause)}.", NO_TEMPORARY)
        if not isinstance(cause, OSError):  # libraries in other languages give the system's words alone
            for number, remedy in MACHINE_ERRORS.items():
                if os.strerror(number) in str(cause) and not raised_by_pvg(cause):
                    return MissingRequirementError(f"{first_line(cause)}.", remedy)
    extensions = sys.modules.get("pvg.extensions")  # not loaded: no user's file has run
    return (extensions and extensions.failure_of(error)) or _unimportable(error)


def _unimportable(error: BaseException) -> PvgError | None:
    """The error for a package that is missing, or whose own code fails when it is imported; None for any other one."""
    from pvg.installation import pvg_command

    for cause in causes(error):
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__) if frame.f_code.co_name == "<module>"]
        names = [frame.f_globals.get("__name__", "") for frame in frames]
        names += [cause.name or ""] if isinstance(cause, ImportError) else []
        for package in (name.partition(".")[0] for name in names):
            if package not in OWN:
                variables = " and ".join(variables_quoted(error))
                doctor = shlex.join([*pvg_command(), "doctor"])
                remedy = f"Correct the variable {variables}." if variables else f"Check the installation: {doctor}"
                return MissingRequirementError(
                    f"The package {package} cannot be imported: {first_line(error)}.", remedy
                )
    return None


@functools.cache
def announce_loading() -> None:
    """Say once on stderr that the next seconds go into loading torch and transformers, if they are not loaded."""
    if "torch" not in sys.modules:
        say("loading torch and transformers ...")


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # for example in a command that a script started with `&`
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object], numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Let `handler` handle these signals meanwhile. Only for the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class ErrorHandler:
    """Turns the exceptions of a call of `pvg` into messages and an exit code. typer itself prints a usage error."""

    def __init__(self, *, as_json: bool, debug: bool) -> None:
        self.as_json = as_json
        self.debug = debug

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end_if_unread(error, trace)
        if isinstance(error, PvgError):
            self._mistake(error)
        elif isinstance(error, KeyboardInterrupt):
            self._stopped(error if isinstance(error, StoppedAtStart) else StoppedAtStart())
            if isinstance(error, StoppedAtStart) or isinstance(error.__context__, StoppedAtStart):
                _end_at_once()
            raise typer.Exit(EXIT_STOPPED)
        elif isinstance(error, CommandLineError):
            self._usage_error(error)
        elif error is None or isinstance(error, typer.Exit):
            self._ended(error)
        elif not isinstance(error, (typer.Abort, BrokenPipeError)):
            if isinstance(error, OSError) and error.errno in DISK_FULL and _was_printing(trace) and not error.filename:
                _silence_stdout()
            if (explained := explanation(error)) is not None:
                explained.__cause__ = error  # for --debug
                self._mistake(explained)
            elif isinstance(error, Exception):
                self._defect(error)

    def _usage_error(self, error: Any) -> None:
        if hasattr(error, "message"):
            error.message = one_line(error.message.removeprefix("Value error, ")) + setting_hint(error)
        message = error.format_message() if hasattr(error, "format_message") else error  # with the option's name
        self._document("UsageError", str(message), "See --help.", EXIT_USAGE)

    def _ended(self, error: typer.Exit | None) -> None:
        """Flush stdout here, because an error at the end of the interpreter has another exit code."""
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _silence_stdout()
            if error is None:
                raise typer.Exit from None
        except OSError as full:
            if (explained := explanation(full)) is None:
                raise
            _silence_stdout()
            self._mistake(explained)

    def _mistake(self, error: PvgError) -> None:
        if self.debug:
            traceback.print_exception(error)
        say(f"error: {error.message}", typer.colors.RED)
        if error.remedy:
            say(error.remedy)
        self._document(type(error).__name__, error.message, error.remedy, error.exit_code)
        raise typer.Exit(error.exit_code) from error

    def _stopped(self, stop: StoppedAtStart) -> None:
        say(stop.message)
        if stop.remedy:
            say(stop.remedy)
        self._document("Stopped", stop.message, stop.remedy, EXIT_STOPPED)

    def _defect(self, error: Exception) -> None:
        say("".join(traceback.format_exception(error)).rstrip("\n"))
        say(
            "This is a bug in pvg. Please report it with the lines above and the output of `pvg doctor --json`.",
            typer.colors.RED,
        )
        self._document(
            type(error).__name__, visible(str(error)), "This is a bug in pvg. Please report it.", EXIT_DEFECT
        )
        raise typer.Exit(EXIT_DEFECT) from error

    def _document(self, kind: str, message: str, remedy: str, exit_code: int) -> None:
        if self.as_json:
            import json

            document = {"schema_version": SCHEMA_VERSION, **error_document(kind, message, remedy, exit_code)}
            try:
                write_utf8(json.dumps(document, indent=2).encode() + b"\n")  # orjson may be what is missing
            except OSError:  # stdout is closed or full; stderr has the message
                _silence_stdout()


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the caller has closed, as in `pvg runs >&-`. Otherwise the next file
    gets its number, and a library that writes to stdout or stderr changes that file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 (gets the lowest free number, which is that of the stream)
            os.set_inheritable(stream.fileno(), True)  # workers and servers need one too
            setattr(sys, name, stream)


# A reset: the reader of a socket left text unread. EIO: the terminal is gone, as after `disown` and a logout.
READER_ENDED = (errno.EPIPE, errno.ECONNRESET, errno.EIO)


class _ProgressPipe(io.FileIO):
    """Stderr that goes to a pipe, a socket or a terminal. If its reader ends, or if the stream does not block and is
    full, the text goes nowhere, and the work goes on."""

    def write(self, data: Any, /) -> int:
        try:
            written: int | None = super().write(data)  # None: the stream does not block, and is full
            return memoryview(data).nbytes if written is None else written
        except OSError as error:
            if error.errno not in READER_ENDED:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outlive_readers_of_stderr() -> None:
    """Let a command go on if the reader of its progress ends. Otherwise `pvg train 2>&1 | tee log` would stop, with
    exit code 0, when `tee` does. The reader of stdout is another matter: without it, the command has nothing to do."""
    stream = sys.__stderr__
    if stream is None or stream is not sys.stderr:
        return
    mode = os.fstat(stream.fileno()).st_mode
    # Node.js, for example, gives its children sockets. EIO of a file is an error of the disk.
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty():
        raw = _ProgressPipe(stream.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)


_called: list[str] = []  # the arguments of this call of `pvg`


def arguments() -> list[str]:
    """The words after `pvg` in this call."""
    return list(_called)


def command_line() -> str:
    """This call of `pvg`, as a user can type it again."""
    return shlex.join(["pvg", *_called])


def setting_hint(error: Any) -> str:
    """How to give an unknown option that is the name of a setting, to a command that takes settings."""
    option, context = getattr(error, "option_name", "") or "", getattr(error, "ctx", None)
    if context is None or not any("--set" in each.opts for each in context.command.params):
        return ""
    from pvg.config.load import valid_keys

    name = option.lstrip("-").replace("-", "_")
    found = [key for key in valid_keys() if name and f".{key}".endswith(f".{name}")]
    return f". It is a setting: {' or '.join(f'-s {key}=VALUE' for key in found[:3])}" if found else ""


class Commands(TyperGroup):
    """The group of all commands. Each call of `pvg` goes through it, so it handles errors and SIGTERM for all of them.
    With --json, an error is a JSON document too."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        open_closed_streams()
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # tables and paths; `write_utf8` is for what must stay exact
        outlive_readers_of_stderr()
        _called[:] = args
        as_json = "--json" in args
        if args[:1] == ["train"]:
            as_json = first_prints(as_json)
        handler = ErrorHandler(as_json=as_json, debug="--debug" in args)
        with handler:
            context = super().make_context(info_name, args, parent, **extra)
        context.meta["pvg.handler"] = handler
        return context

    def invoke(self, ctx: Any) -> Any:
        handler, main = ctx.meta["pvg.handler"], threading.current_thread() is threading.main_thread()
        # Commands that commit replace the handler of SIGTERM with their own.
        with handled(_interrupt, [signal.SIGTERM] if main else []), handler, kept_for_documents(handler.as_json):
            try:
                os.getcwd()
            except FileNotFoundError:
                raise UsageError("The current folder no longer exists.", "Go to another one with cd.") from None
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command. The lines of its help text are joined to paragraphs; otherwise they break twice on a narrow terminal.
    An option with a metavar in brackets, such as `--resume [RUN]`, has the value "" without a value."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in (self.help or "").split("\n\n"))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        optional = {name for each in self.params if str(each.metavar).startswith("[") for name in each.opts}
        filled: list[str] = []
        for word, following in zip(args, [*args[1:], "-"], strict=False):
            filled.append(word)
            if word in optional and following.startswith("-"):
                filled.append("")
        return super().parse_args(ctx, filled)
