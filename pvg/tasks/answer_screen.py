"""What may not reach a grader of reasoning-gym: some of them pass the answer on to Python's `eval`.

`n_queens`, `binary_matrix`, `spiral_matrix` and `string_insertion` do it to give an answer written as a Python list a
part of the score; `countdown`, `puzzle24` and `polynomial_multiplication` through sympy's parser. The answer was
written by a model that is rewarded for whatever the grader accepts, so it must be harmless before: data without names
for the first, a formula without powers of numbers for the second. `nan` is stopped too: a grader that asks whether a
distance is too large finds that it is not.

Datasets whose graders cannot be made safe are not opened at all (`UNSAFE_GRADERS`). All of it was found by reading and
trying reasoning-gym 0.1.19.

    refusal("countdown", "__import__('os').system('...')", reference)    -> "not plain arithmetic"
    refusal("countdown", "5*(52 - 11)", reference)                       -> ""
"""

from __future__ import annotations

import re

# Answers to problems are short; graders parse, compare and permute, not always in linear time.
LONGEST_ANSWER = 4000
LONGEST_FORMULA = 600

# The letters of these datasets' answers, which name no variable of a grader, or quoted words in brackets: neither can
# call, loop or look anything up.
LIST = re.compile(r"[A-EQ0-9_\s]*+|(?:[0-9\s,\[\]-]|'[A-Za-z0-9_ ]*+'|\"[A-Za-z0-9_ ]*+\")*+")
# No `**` and no `//`: sympy would compute 9**9**9**9.
ARITHMETIC = re.compile(r"(?:[-+().0-9\s]|\*(?!\s*\*)|/(?!\s*/))*+")
# Only a variable of one letter is raised to a power.
POLYNOMIAL = re.compile(
    r"(?:[-+()0-9\s]|[a-zA-Z](?![A-Za-z0-9_(])(?:\s?\*\*\s?[0-9]{1,2}+(?![0-9]|\s*\*\*))?|\*(?!\s*\*))*+"
)
NOT_FINITE = re.compile(r"\b(?:nan|inf|infinity)j?\b", re.IGNORECASE)

SCREENS = {
    **dict.fromkeys(("n_queens", "binary_matrix", "spiral_matrix", "string_insertion"), (LIST, "no plain list")),
    **dict.fromkeys(("countdown", "puzzle24"), (ARITHMETIC, "not plain arithmetic")),
    "polynomial_multiplication": (POLYNOMIAL, "no plain polynomial"),
}
FORMULAS = frozenset({"countdown", "puzzle24", "polynomial_multiplication"})

SIMPLIFIES = "its grader lets sympy simplify whatever the model wrote, which may never end"
UNSAFE_GRADERS = {
    "simple_integration": SIMPLIFIES,
    "intermediate_integration": SIMPLIFIES,
    "game_of_life_halting": "its grader takes any answer for the right one",
}


def refusal(dataset: str, answer: str, reference: str) -> str:
    """Why `answer` is not shown to the grader of `dataset`, "" when it may be. The reference itself always may."""
    reason = ""
    longest = LONGEST_FORMULA if dataset in FORMULAS else LONGEST_ANSWER
    if answer == reference:
        reason = ""
    elif len(answer) > max(longest, 4 * len(reference)):
        reason = "far too long"
    elif NOT_FINITE.search(answer) and not NOT_FINITE.search(reference):
        reason = "not a finite number"
    elif dataset in SCREENS:
        allowed, complaint = SCREENS[dataset]
        reason = "" if allowed.fullmatch(answer) else complaint
    return reason
