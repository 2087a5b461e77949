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
    if "--json" in sys.argv:
        details = f'{{"type": "Stopped", "message": "{said}", "remedy": "", "exit_code": 130}}'
        _write(1, f'{{"schema_version": 1, "error": {details}}}\n')
    _write(2, f"{said}\n")
    os._exit(130)


def _write(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the caller has closed it, or its reader has ended
        os.write(descriptor, text.encode())


sys.excepthook = _interrupted
