"""What may not reach a grader of reasoning-gym: some of them pass the answer on to Python's `eval`.

`n_queens`, `binary_matrix`, `spiral_matrix` and `string_insertion` do it to give an answer written as a Python list a
part of the score; `countdown`, `puzzle24`, the integrations and `polynomial_multiplication` through sympy's parser. The
answer was written by a model that is rewarded for whatever the grader accepts, so it must be harmless before: data
without names for the first, a formula without powers of powers for the second. (Read in reasoning-gym 0.1.19.)

    refusal("countdown", "__import__('os').system('...')", reference)    -> "not plain arithmetic"
    refusal("countdown", "5*(52 - 11)", reference)                       -> ""
"""

from __future__ import annotations

import re

# Answers to problems are short; graders parse, compare and permute, not always in linear time.
LONGEST_ANSWER = 4000
LONGEST_FORMULA = 600
# How often a formula may raise a parenthesis to a power: each time can multiply the number of its digits.
MOST_POWERS_OF_PARENTHESES = 3

LIST_GRADERS = frozenset({"n_queens", "binary_matrix", "spiral_matrix", "string_insertion"})
ARITHMETIC_GRADERS = frozenset({"countdown", "puzzle24"})
ALGEBRA_GRADERS = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})

# The letters of these datasets' answers, which name no variable of a grader, and quoted words in brackets: neither can
# call, loop or look anything up.
WORDS = re.compile(r"[A-EQ0-9_\s]*+")
LISTED = re.compile(r"(?:[0-9\s,\[\]-]|'[A-Za-z0-9_ ]*+'|\"[A-Za-z0-9_ ]*+\")*+")
ARITHMETIC = re.compile(r"(?:[0-9]{1,6}+(?:\.[0-9]{1,6}+)?|[-+()\s]|\*(?!\s*\*)|/(?!\s*/))*+")
FUNCTIONS = "a?(?:sin|cos|tan)h?|exp|log|ln|sqrt|pi"
# Single capitals but C, E, I and X are functions of sympy (N, S, O, Q): not needed, and N evaluates without end.
ALGEBRA = re.compile(
    rf"(?:\*\*\s?(?:-?[0-9]{{1,2}}+|\(-?[0-9]{{1,2}}+(?:/[0-9]{{1,2}}+)?\))(?![0-9]|\s*\*\*)"
    rf"|[0-9]{{1,9}}+(?:\.[0-9]{{1,9}}+)?|(?:{FUNCTIONS}|[a-zCEIX])(?![A-Za-z0-9_])|[-+()\s/]|\*(?!\s*\*))*+"
)
POWER_OF_PARENTHESES = re.compile(r"\)\s*\*\*")


def refusal(dataset: str, answer: str, reference: str) -> str:
    """Why `answer` is not shown to the grader of `dataset`, "" when it may be. `reference` may be as long as it is."""
    if len(answer) > max(LONGEST_ANSWER, 4 * len(reference)):
        return "far too long"
    if dataset in LIST_GRADERS and not (WORDS.fullmatch(answer) or LISTED.fullmatch(answer)):
        return "neither words nor a plain list"
    if dataset in ARITHMETIC_GRADERS and (len(answer) > LONGEST_FORMULA or not ARITHMETIC.fullmatch(answer)):
        return "not plain arithmetic"
    if dataset in ALGEBRA_GRADERS:
        powers = len(POWER_OF_PARENTHESES.findall(answer))
        if len(answer) > LONGEST_FORMULA or powers > MOST_POWERS_OF_PARENTHESES or not ALGEBRA.fullmatch(answer):
            return "not a plain formula"
    return ""
