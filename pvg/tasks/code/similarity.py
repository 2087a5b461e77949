"""The similarity of two programs, independent of names, comments and layout.

Names are numbered in order of appearance, so a renamed copy counts as the same program. Then the multisets of four
adjacent tokens are compared: how much of the other program a program contains, so a copy with additional code still
counts as a copy. pvg has its own lexer, because a model's text can crash Python's parser, and the parser rejects
incomplete programs.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pvg.records import Float32

WINDOW = 4
# Every alternative matches once it has begun: backtracking would take quadratic time on a model's text.
TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<string>[rRbBuUfF]{0,2}(?:\"{3}[\s\S]*?(?:\"{3}|\Z)|'{3}[\s\S]*?(?:'{3}|\Z)
        |\"(?:[^\"\\\n]|\\.)*+\"?|'(?:[^'\\\n]|\\.)*+'?))
    |(?P<number>\d[\w.]*)
    |(?P<name>[^\W\d]\w*)
    |(?P<sign>\*\*=?|//=?|<<=?|>>=?|[-+*/%@&|^=!<>:]=|->|[^\s\w])""",
    re.VERBOSE | re.MULTILINE,
)
KEPT_NAMES = frozenset(keyword.kwlist) | frozenset(dir(builtins))


def normalised(code: str) -> list[str]:
    """The program's tokens, without comments; all strings are equal; names except Python's own are numbers."""
    numbers: dict[str, str] = {}
    tokens = []
    for match in TOKEN.finditer(code):
        kind, text = match.lastgroup, match.group()
        if kind == "name" and text not in KEPT_NAMES:
            tokens.append(numbers.setdefault(text, f"v{len(numbers)}"))
        elif kind != "comment":
            tokens.append("s" if kind == "string" else text)
    return tokens


def windows(code: str) -> Counter[tuple[str, ...]]:
    """The multiset of WINDOW adjacent tokens; of all tokens if there are fewer."""
    tokens = normalised(code)
    return Counter(tuple(tokens[at : at + WINDOW]) for at in range(max(1, len(tokens) - WINDOW + 1)) if tokens)


def similarity(code: str, other: str) -> float:
    """From 0 (nothing in common) to 1 (`code` contains all of `other`, up to names, comments and layout). Two empty
    programs are equal."""
    return _likeness(windows(code), windows(other))


def _likeness(code: Counter[tuple[str, ...]], other: Counter[tuple[str, ...]]) -> float:
    """|A & B| / |B|, but at least their Jaccard similarity."""
    if not other:
        return 0.0 if code else 1.0
    return (code & other).total() / other.total()


def similarities(
    codes: Sequence[str], references: Sequence[str], groups_N: NDArray[np.int32], *, reference: bool, group: bool
) -> Float32:
    """float32 [N]: the similarity of each program to its reference, to the others of its group (mean), or the larger of
    the two. 0 without anything to compare with, and for empty programs."""
    counted = [windows(code) for code in codes]
    found_N = np.zeros(len(codes), dtype=np.float32)
    if reference:
        of_text = {text: windows(text) for text in set(references)}
        for row, text in enumerate(references):
            if counted[row]:
                found_N[row] = _likeness(counted[row], of_text[text])
    if group:
        for number in np.unique(groups_N):
            rows = [int(row) for row in np.flatnonzero(groups_N == number) if counted[row]]
            for row in rows:
                others = [_likeness(counted[row], counted[other]) for other in rows if other != row]
                if others:
                    found_N[row] = max(found_N[row], np.float32(sum(others) / len(others)))
    return found_N
