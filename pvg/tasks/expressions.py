"""The exact value of an arithmetic expression, for graders. Nothing is executed.

    value_of("3 * (4 - 1/2)")   -> Fraction(21, 2)
    value_of("9**9**9")         -> None

Numbers, `+ - * /`, powers with whole exponents, and parentheses. `^` is a power; `×`, `·`, `÷` and the minus sign of
typesetters are read too. None for everything else.

Invariants: this never raises, and a hostile text costs little: the text has at most LONGEST characters, and no
intermediate value has a numerator or a denominator of more than MOST_BITS bits.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable
from fractions import Fraction

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
