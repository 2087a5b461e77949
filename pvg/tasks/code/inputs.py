"""Whether what a certificate names is an input of a problem.

It must always be made like the inputs of the tests. A problem with a `check` of its own then decides by that. Without
one nobody knows what its inputs are but by the tests: what is named must lie within them. Numbers lie between the
least and the largest that stand there, lengths too, texts are made of the characters that stand there, lists are sorted
or free of repetitions where all are. A text for standard input besides has the lines and words of one of the tests'
(pvg.tasks.code.layout). That refuses many an input that is one, so that a program is called wrong on an input only.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Sequence
from typing import Any

from pvg.sandbox import Program
from pvg.tasks.code.layout import laid_out_alike, made_of_words_alike
from pvg.tasks.code.problem import CodeProblem

VALID = "valid"  # the function of a problem's own check


def case_of(code: CodeProblem, value: Any) -> str | None:
    """A certificate's value as a case; None where it is no list of arguments, no text, or not as said above, but for
    what the problem's own check says."""
    cases = [test.case for test in code.tests]
    if code.entry is None:
        if not isinstance(value, str) or not _is_writable(value):
            return None
        alike = made_of_words_alike if code.check else laid_out_alike
        return value if alike(value, cases) else None
    samples = [ast.literal_eval(case) for case in cases]
    if not isinstance(value, list) or len(value) not in {len(sample) for sample in samples}:
        return None
    for place, given in enumerate(value):
        held = [sample[place] for sample in samples if place < len(sample)]
        if not fits(given, held) or not (code.check or within(given, held)):
            return None
    return repr(value)


def check_program(code: CodeProblem, case: str) -> Program | None:
    """What says whether `case` is an input, by returning True; None where the problem has no check of its own."""
    if not code.check:
        return None
    return Program(code.check, VALID, (repr([case]) if code.entry is None else case,))


def fits(value: Any, samples: Sequence[Any]) -> bool:
    """Whether `value` is made like one of `samples`: the same types, in lists and dictionaries too. Lists and tuples
    are alike, and an integer may stand where there are floats. Floats are finite, and texts can be written down."""
    if isinstance(value, (list, tuple)):
        held = [sample for sample in samples if isinstance(sample, (list, tuple))]
        items = [item for sample in held for item in sample]
        return bool(held) and all(fits(item, items) for item in value)
    if isinstance(value, dict):
        tables = [sample for sample in samples if isinstance(sample, dict)]
        keys, values = ([x for table in tables for x in part(table)] for part in (dict.keys, dict.values))
        return bool(tables) and all(fits(k, keys) and fits(v, values) for k, v in value.items())
    if (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, str) and not _is_writable(value)):
        return False
    kinds = {type(sample) for sample in samples}
    return type(value) in kinds or (type(value) is int and float in kinds)


def within(value: Any, samples: Sequence[Any]) -> bool:
    """Whether `value`, which fits them, lies between `samples`."""
    if isinstance(value, (bool, type(None))):
        return value in samples
    if isinstance(value, (int, float)):
        numbers = [x for x in samples if isinstance(x, (int, float)) and not isinstance(x, bool)]
        return min(numbers) <= value <= max(numbers)
    alike: list[Any] = [sample for sample in samples if isinstance(sample, _kind(value))]
    if not min(map(len, alike)) <= len(value) <= max(map(len, alike)):
        return False
    if isinstance(value, str):
        return set(value) <= set().union(*alike)
    if isinstance(value, dict):
        keys, values = ([x for table in alike for x in part(table)] for part in (dict.keys, dict.values))
        return all(within(k, keys) and within(v, values) for k, v in value.items())
    items = [item for sample in alike for item in sample]
    kept = set[str]().union(*map(habits, alike)).intersection(*map(habits, alike))
    return kept <= habits(value) and all(within(item, items) for item in value)


def _kind(value: Any) -> type | tuple[type, ...]:
    return (list, tuple) if isinstance(value, (list, tuple)) else type(value)


def habits(items: Sequence[Any]) -> set[str]:
    """What may be no accident in a list: its order, and that nothing comes twice."""
    found = set[str]()
    written = [repr(item) for item in items]
    if len(set(written)) == len(written):
        found.add("distinct")
    try:
        pairs = list(itertools.pairwise(items))
        found |= {"rising"} if all(a <= b for a, b in pairs) else set()
        found |= {"falling"} if all(a >= b for a, b in pairs) else set()
    except TypeError:  # items that have no order
        pass
    return found


def _is_writable(text: str) -> bool:
    """Whether it has no half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
