"""Whether what a certificate names is an input of a problem."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from pvg.sandbox import Program
from pvg.tasks.code.problem import CodeProblem

VALID = "valid"  # the function of a problem's own check


def case_of(code: CodeProblem, value: Any) -> str | None:
    """A certificate's value as a case; None where it is no list of arguments, no text, or not of the tests' shape."""
    if code.entry is None:
        return value if isinstance(value, str) else None
    if not isinstance(value, list):
        return None
    if not code.check and not _fits_all(value, [ast.literal_eval(test.case) for test in code.tests]):
        return None
    return repr(value)


def check_program(code: CodeProblem, case: str) -> Program | None:
    """What says whether `case` is an input, by returning True; None where the problem has no check of its own."""
    if not code.check:
        return None
    return Program(code.check, VALID, (repr([case]) if code.entry is None else case,))


def _fits_all(arguments: list[Any], samples: Sequence[list[Any]]) -> bool:
    counts = {len(sample) for sample in samples}
    return len(arguments) in counts and all(
        fits(given, [sample[place] for sample in samples if place < len(sample)])
        for place, given in enumerate(arguments)
    )


def fits(value: Any, samples: Sequence[Any]) -> bool:
    """Whether `value` is made like one of `samples`: the same types, in lists and dictionaries too. Lists and tuples
    are alike, and an integer may stand where there are floats."""
    if isinstance(value, (list, tuple)):
        held = [sample for sample in samples if isinstance(sample, (list, tuple))]
        items = [item for sample in held for item in sample]
        return bool(held) and all(fits(item, items) for item in value)
    if isinstance(value, dict):
        tables = [sample for sample in samples if isinstance(sample, dict)]
        keys, values = ([x for table in tables for x in part(table)] for part in (dict.keys, dict.values))
        return bool(tables) and all(fits(k, keys) and fits(v, values) for k, v in value.items())
    kinds = {type(sample) for sample in samples}
    return type(value) in kinds or (type(value) is int and float in kinds)
