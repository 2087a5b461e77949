"""The command line of pvg.

Ctrl-C while the modules of a command load ends the process with one line and exit code 130, instead of a traceback. So
does a package without which no command runs, with exit code 3.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

_otherwise = sys.excepthook


def _unhandled(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For an interrupt or a missing package that no command has handled, because none runs yet."""
    said, remedy, code = "Stopped before the work started.", "", 130
    if isinstance(error, ImportError) and (error.name or "pvg").partition(".")[0] not in ("pvg", "pvg_cli"):
        said = f"error: The package {(error.name or '').partition('.')[0]} cannot be imported: {error}."
        remedy, code = "Install pvg again, with its dependencies.", 3
    elif kind is not KeyboardInterrupt:
        _otherwise(kind, error, trace)
        return
    if "--json" in sys.argv and not (sys.argv[1:2] == ["train"] and follows()):
        name = "Stopped" if code == 130 else "MissingRequirementError"
        import json

        details = {"type": name, "message": said.removeprefix("error: "), "remedy": remedy, "exit_code": code}
        write(1, f"{json.dumps({'schema_version': 1, 'error': details})}\n".encode())
    write(2, "".join(f"{line}\n" for line in (said, remedy) if line).encode(errors="backslashreplace"))
    os._exit(code)


def follows() -> bool:
    """Whether this process takes part in the `pvg train` of another process of torchrun, which prints the one JSON
    document. Raises nothing: `launched` (pvg.workers.launch) reports wrong variables. It is here because it may be
    needed before any other module is loaded."""
    rank = os.environ.get("RANK", "")
    several = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"
    return several and rank.isdecimal() and int(rank) > 0


def write(descriptor: int, text: bytes) -> None:
    """Write to stdout or stderr at once, as a signal handler may."""
    with contextlib.suppress(OSError):  # the caller has closed it, or its reader has ended or does not read
        os.write(descriptor, text)


_documents: list[TextIO] = []  # stdout, while a command keeps it for one document


def write_utf8(text: bytes) -> None:
    """Write to stdout what must be UTF-8, such as JSON and TOML, whatever the encoding of the terminal or locale."""
    stream = _documents[-1] if _documents else sys.stdout
    stream.flush()
    if hasattr(stream, "buffer"):
        stream.buffer.write(text)
    else:  # a stream of Python, without bytes
        stream.write(text.decode())
    stream.flush()


@contextlib.contextmanager
def kept_for_documents(wanted: bool) -> Iterator[None]:
    """Keep stdout for `write_utf8`. What a user's file or a library prints meanwhile goes to stderr."""
    if not wanted:
        yield
        return
    _documents.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _documents.pop()


# rich and typer read these at any value, and then fail, or fill lines of any width. A terminal has 1 to 9999 columns.
for _name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
    _size = os.environ.get(_name, "")
    if not (_size.isascii() and _size.isdigit() and 0 < len(_size.lstrip("0")) < 5):
        os.environ.pop(_name, None)

sys.excepthook = _unhandled
