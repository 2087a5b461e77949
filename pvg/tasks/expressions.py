"""Reads LaTeX that is more than a plain number, such as `\\sqrt{25}` or `10^6`, with the package math-verify.

Some texts keep sympy busy for hours, and no thread can be stopped. So another process reads them, and the kernel ends
it when a text has taken LIMIT_S seconds of its CPU time. CPU time, because a loaded machine must not change a grade.

This file is also the program of that process. It imports nothing from pvg.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from functools import lru_cache
from multiprocessing.connection import wait

LIMIT_S = 2.0
# The caller gives up after this time even if the process is stopped. It includes the imports of the process.
PATIENCE_S = 120.0


class _Reader:
    """The process, started when it is first needed and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, text: str) -> bytes:
        """The line that the process writes about a text; b"" if it has ended or does not answer."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(text.encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                self.close()
                return b""
            line = process.stdout.readline() if wait([process.stdout.fileno()], PATIENCE_S) else b""
            if not line:
                self.close()
            return line

    def _started(self) -> subprocess.Popen[bytes]:
        # A process that was forked from the owner must not write into the owner's pipe.
        if self._process is None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(LIMIT_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for pvg; this process ends with its input
            )
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None


_reader = _Reader()
atexit.register(_reader.close)


@lru_cache(maxsize=4096)
def value_of_latex(text: str) -> Fraction | None:
    """The value of a LaTeX expression without line breaks if it is a rational number; otherwise, and if reading it
    takes too long, None."""
    line = _reader.ask(text).strip()
    return Fraction(line.decode()) if line else None


def _answer_lines(limit_s: float) -> None:
    import logging

    import sympy
    from math_verify import LatexExtractionConfig, parse

    def value(line: str) -> str:
        found = parse(f"${line}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
        if len(found) != 1 or not isinstance(found[0], sympy.Expr) or found[0].free_symbols:
            return ""
        exact = found[0].replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part))).doit()
        return f"{exact.p}/{exact.q}" if exact.is_Rational and exact.is_finite else ""

    logging.disable()  # it warns that it has no limit of time
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            found = value(line.strip())
        except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
            found = ""  # not a number
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(found, flush=True)


if __name__ == "__main__":
    _answer_lines(float(sys.argv[1]))
