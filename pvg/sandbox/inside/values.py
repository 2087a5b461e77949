"""Converts a function's result to plain JSON data that two processes can compare.

Only exact built-in types are accepted: an object of a class that the program defines could claim to equal anything.
"""

from __future__ import annotations

import json
import math
from typing import Any

# Relative tolerance for floats (near 0 and next to an integer, CLOSE / 1000 absolute).
CLOSE = 1e-6


class NotPlainError(ValueError):
    """A value of a type that an answer may not have."""


def plain(value: Any) -> Any:
    """`value` as JSON data: tuples as lists, sets and dictionaries as sorted lists with a type name. Raises
    NotPlainError, and RecursionError for a list that contains itself."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind in (list, tuple):
        return [plain(item) for item in value]
    if kind in (set, frozenset):
        return {"set": sorted((plain(item) for item in value), key=json.dumps)}
    if kind is dict:
        return {"dict": sorted(([plain(k), plain(v)] for k, v in value.items()), key=json.dumps)}
    raise NotPlainError(f"a value of type {kind.__name__} is not a valid answer")


def same(left: Any, right: Any) -> bool:
    """Whether two values of `plain` are the same answer: numbers by value, floats up to CLOSE. A bool is not a
    number."""
    if _is_number(left) and _is_number(right):
        return _same_number(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_number(left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=CLOSE, abs_tol=CLOSE / 1000)
    whole, broken = (left, right) if isinstance(left, int) else (right, left)
    if not math.isfinite(broken):  # a forged report may contain it
        return False
    nearest = round(broken)  # exact, because floats cannot represent every integer above 2**53
    return bool(whole == nearest and abs(broken - nearest) <= CLOSE / 1000)
