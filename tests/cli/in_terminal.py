"""Running a program on a pseudo-terminal of 80 columns."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Sequence


def in_terminal(command: Sequence[str], *, answer: str = "") -> tuple[int, str]:
    """The exit code, and what the program has shown. `answer` is typed at once."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        if answer:
            os.write(ours, f"{answer}\n".encode())
        shown = b""
        while True:
            try:
                block = os.read(ours, 1 << 16)
            except OSError:  # the terminal's other end is closed
                break
            if not block:
                break
            shown += block
    os.close(ours)
    text = shown.decode().replace("\r\n", "\n").replace("\x1b[1m", "").replace("\x1b[0m", "")
    return process.returncode, "\n".join(line.rstrip() for line in text.split("\n"))
