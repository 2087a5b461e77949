"""A task: add a digit to itself, `4+4+4?`. Solutions have the form of the embedded game: `4+4=8;8+4=2;A2`."""

import re
from collections.abc import Iterator

from pvg.records import Grade, Problem, Split

ANSWER = re.compile(r"(?:\d\+\d=\d;)+A(\d)")


class Doubling:
    """`terms`: how many terms the problems have. Every fourth problem is a test problem."""

    def __init__(self, terms: list[int]) -> None:
        self.terms = terms

    def problems(self, split: Split) -> Iterator[Problem]:
        for number, (digit, terms) in enumerate((d, t) for t in self.terms for d in range(10)):
            if (number % 4 == 0) == (split == "test"):
                question = "+".join([str(digit)] * terms) + "?"
                # The id decides whether prover or verifier learns from a problem: it must not change.
                yield Problem(f"doubling-{question}", question, answer=str(digit * terms % 10))

    def grade(self, problem: Problem, completion: str) -> Grade:
        found = ANSWER.fullmatch(completion)
        if found is None:  # not a solution: no reward pays for it
            return Grade(correct=False, well_formed=False, note="no chain of sums")
        return Grade(correct=found[1] == problem.answer, well_formed=True, answer=found[1])
