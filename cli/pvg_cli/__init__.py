"""The command line of pvg.

Ctrl-C while the modules of a command load ends the process with one line and exit code 130, instead of a traceback.
"""

import contextlib
import os
import sys
from types import TracebackType

_otherwise = sys.excepthook


def _interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For an interrupt that no command has handled, because none runs yet."""
    if kind is not KeyboardInterrupt:
        _otherwise(kind, error, trace)
        return
    said = "Stopped before the work started."
    if "--json" in sys.argv and not (sys.argv[1:2] == ["train"] and follows()):
        details = f'{{"type": "Stopped", "message": "{said}", "remedy": "", "exit_code": 130}}'
        write(1, f'{{"schema_version": 1, "error": {details}}}\n'.encode())
    write(2, f"{said}\n".encode())
    os._exit(130)


def follows() -> bool:
    """Whether this process takes part in the `pvg train` of another process of torchrun, which prints the one JSON
    document. Raises nothing: `launched` (pvg.workers.torchrun) reports wrong variables. It is here because it may be
    needed before any other module is loaded."""
    rank = os.environ.get("RANK", "")
    several = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"
    return several and rank.isdecimal() and int(rank) > 0


def write(descriptor: int, text: bytes) -> None:
    """Write to stdout or stderr at once, as a signal handler may."""
    with contextlib.suppress(OSError):  # the caller has closed it, or its reader has ended or does not read
        os.write(descriptor, text)


sys.excepthook = _interrupted
