"""The values of expressions: of arithmetic, by Python's parser, and of LaTeX that is more than a plain number, such as
`\\sqrt{25}` or `10^6`, with the package math-verify.

Some texts keep sympy busy for hours, and no thread can be stopped. So another process reads them, and the kernel ends
it when a text has taken LIMIT_S seconds of its CPU time. CPU time, because a loaded machine must not change a grade.

This file is also the program of that process. It imports nothing from pvg.
"""

from __future__ import annotations

import ast
import atexit
import operator
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
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
        self._requests = 0

    def ask(self, text: str) -> str:
        """What the process writes about a text of one line; "" if it has ended or does not answer.

        An answer carries the number of its request, and an exception ends the process. So no answer can be taken for
        that of another text.
        """
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            self._requests += 1
            try:
                process.stdin.write(f"{self._requests} {text}\n".encode())
                process.stdin.flush()
                line = process.stdout.readline() if wait([process.stdout.fileno()], PATIENCE_S) else b""
                number, _, found = line.decode().partition(" ")
            except BrokenPipeError:
                number = found = ""
            except BaseException:  # such as Ctrl-C: the answer may still come
                self.close()
                raise
            if number != str(self._requests):
                self.close()
                return ""
            return found.strip()

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
    """The value of a LaTeX expression if it is a rational number; otherwise, and if reading it takes too long, None."""
    found = _reader.ask(" ".join(text.split()))
    return Fraction(found) if found else None


# The exact value of an arithmetic expression, for graders. Nothing is executed.

LONGEST = 300  # characters
MOST_BITS = 2048  # numbers of about 600 digits
MOST_POWER = 256

SPELLED = str.maketrans({"^": "**", "×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "\n": " ", "\t": " "})
ALLOWED = re.compile(r"[-+*/().0-9 ]+")  # no names, so no calls; no e, x, j or _, so numbers are plain decimals
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class _Refused(Exception):
    """The text has no value that this module computes."""


def value_of(text: str) -> Fraction | None:
    """The exact value of an expression; None for a text that is not one, is too large, or divides by zero."""
    if len(text) > LONGEST:
        return None
    text = text.strip().translate(SPELLED)
    if not ALLOWED.fullmatch(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about "5 (3)", which looks like a call
            tree = ast.parse(text, mode="eval")
        return _value(tree.body, text)
    except (_Refused, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None  # MemoryError: what Python's parser raises for deep nesting


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        # From the text, because the parser has rounded 0.1 to a float.
        return _bounded(Fraction(text[node.col_offset : node.end_col_offset]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if operation := OPERATIONS.get(type(node.op)):
            return _bounded(operation(left, right))
    raise _Refused


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MOST_POWER:
        raise _Refused
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(int(exponent)) > MOST_BITS:
        raise _Refused
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise _Refused
    return value


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
    for line in sys.stdin.buffer:
        number, _, latex = line.decode().partition(" ")
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            found = value(latex.strip())
        except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
            found = ""  # not a number
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(number, found, flush=True)


if __name__ == "__main__":
    _answer_lines(float(sys.argv[1]))
