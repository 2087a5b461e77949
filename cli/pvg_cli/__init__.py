"""The command line of pvg.

Ctrl-C while the modules of a command load ends the process with one line and exit code 130, instead of a traceback.
"""

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
        document = f'{{"error": {{"type": "Stopped", "message": "{said}", "remedy": "", "exit_code": 130}}}}\n'
        os.write(1, document.encode())
    os.write(2, f"{said}\n".encode())
    os._exit(130)


sys.excepthook = _interrupted
