"""Modchain, the task of the embedded game: chains of modular sums, generated on the fly.

    question  7+5+8+3+6?
    solution  7+5=2;2+8=0;0+3=3;3+6=9;A9

Invariants: an id names its problem (`modchain-10-7+5+8+3+6`: modulus, operands). No problem is drawn twice, so train
and test are disjoint. The draws are hashes, so they do not depend on a library's random numbers."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np

from pvg.config.task import ModchainTask
from pvg.errors import ConfigurationError
from pvg.records import Grade, Problem, Split, Wording
from pvg.tasks.task import read_wording

# A space with at most this many times the required problems is shuffled completely. Drawing until a new value appears
# would become slower as fewer values remain.
SHUFFLE_BELOW = 4
# Enough bytes of a hash that their remainder modulo 100**64 (426 bits) is uniform to within 2**-80.
DRAW_BYTES = 64

NUMBER = "(0|[1-9][0-9]?)"
STEP = re.compile(rf"{NUMBER}\+{NUMBER}={NUMBER};")
ANSWER = re.compile(rf"A{NUMBER}")


class Modchain:
    def __init__(self, section: ModchainTask) -> None:
        """Raises ConfigurationError if the settings allow fewer distinct problems than are required."""
        self._section = section
        lengths = range(section.min_terms, section.max_terms + 1)
        distinct = sum(section.modulus**terms for terms in lengths)
        asked = section.problems + section.test_problems
        if asked > distinct:
            raise ConfigurationError(
                f"task.problems + task.test_problems = {asked}, but there are only {distinct} distinct chains of "
                f"{section.min_terms} to {section.max_terms} terms modulo {section.modulus}.",
                "Set fewer problems, or raise task.max_terms or task.modulus.",
            )

    def problems(self, split: Split) -> Iterator[Problem]:
        """The problems of `split`. The test problems are drawn first, so they do not change with `problems`."""
        section = self._section
        chains = distinct_chains(section)
        if split == "test":
            drawn = itertools.islice(chains, section.test_problems)
        else:
            drawn = itertools.islice(chains, section.test_problems, section.test_problems + section.problems)
        return (chain_problem(operands, section.modulus) for operands in drawn)

    def grade(self, problem: Problem, completion: str) -> Grade:
        """Correct: well-formed, and the final answer equals the reference, even if steps are wrong. With
        `task.grader = "sums"`: well-formed, and every sum and the answer follow from the numbers before them, even if
        these are not those of the question.

        Well-formed: the whole text is one or more steps (`a+b=c;`, numbers below the modulus, no leading zeros), then
        `A<n>`, and nothing after it. The note names the first flaw of the steps and is empty for a flawless chain. A
        correct answer may have a flaw too, because two mistakes can cancel out.
        """
        operands, modulus = operands_of(problem)
        parsed = parse_solution(completion, modulus)
        if isinstance(parsed, str):
            return Grade(correct=False, well_formed=False, note=f"malformed: {parsed}")
        answer = str(parsed.answer)
        sums = self._section.grader == "sums"
        return Grade(
            correct=_consistent(parsed, modulus) if sums else answer == problem.answer,
            well_formed=True,
            answer=answer,
            note=first_flaw(parsed, operands, modulus)[1],
        )

    def truth(self, problem: Problem, completion: str) -> bool:
        """Well-formed and without a flaw (pvg.tasks.task.KnowsTruth)."""
        operands, modulus = operands_of(problem)
        parsed = parse_solution(completion, modulus)
        return not isinstance(parsed, str) and first_flaw(parsed, operands, modulus)[0] is None

    def steps(self, completion: str) -> list[tuple[int, int]]:
        """The steps up to the first malformed one; the final answer is not a step."""
        places: list[tuple[int, int]] = []
        while match := STEP.match(completion, places[-1][1] if places else 0):
            places.append(match.span())
        return places

    def cuts(self, completion: str) -> list[int]:
        """The ends of the steps, and of the answer (pvg.tasks.task.LocatesFlaws)."""
        if isinstance(parse_solution(completion, self._section.modulus), str):
            return []
        return [end for _, end in self.steps(completion)] + [len(completion)]

    def flaw(self, problem: Problem, completion: str) -> int | None:
        """The first step that does not continue the previous one with the problem's next operand, or adds wrongly. A
        chain that ends too early is wrong at its answer."""
        operands, modulus = operands_of(problem)
        parsed = parse_solution(completion, modulus)
        return None if isinstance(parsed, str) else first_flaw(parsed, operands, modulus)[0]

    def written(self, problem: Problem, correct: bool) -> str:
        """A flawless chain, or one with a wrong sum (pvg.tasks.task.WritesSolutions)."""
        return clean_trace(problem) if correct else flawed_trace(problem, "wrong_sum", np.random.default_rng(0))


# --- problems ----------------------------------------------------------------------------------------------------


def chain_problem(operands: Sequence[int], modulus: int) -> Problem:
    """The problem of summing `operands` modulo `modulus`; metadata has both (`terms`, `modulus`), and the wording."""
    chain = "+".join(map(str, operands))
    return Problem(
        id=f"modchain-{modulus}-{chain}",
        question=f"{chain}?",
        answer=str(sum(operands) % modulus),
        metadata={"terms": tuple(operands), "modulus": modulus, "wording": chain_wording(modulus)},
    )


@cache
def chain_wording(modulus: int) -> Wording:
    """What prompts in words say of chains modulo `modulus`. The embedded models need none of it."""
    terms = [number % modulus for number in (4, 9, 3)]
    right, answer = _steps(terms[0], terms[1:], modulus)
    first, second, total = right[0]
    stated = (total + 1) % modulus
    rest, wrong = _steps(stated, terms[2:], modulus)
    return read_wording(
        "modchain",
        modulus=str(modulus),
        question=f"{'+'.join(map(str, terms))}?",
        right=_written(right, answer),
        wrong=_written([(first, second, stated), *rest], wrong),
    )


def operands_of(problem: Problem) -> tuple[tuple[int, ...], int]:
    return tuple(problem.metadata["terms"]), int(problem.metadata["modulus"])


def distinct_chains(section: ModchainTask) -> Iterator[tuple[int, ...]]:
    """Operands of distinct problems until all are used; numbers of terms are about equally frequent."""
    asked = section.problems + section.test_problems
    streams = {
        terms: _numbers_below(section.modulus**terms, asked, f"0/{section.modulus}/{terms}")
        for terms in range(section.min_terms, section.max_terms + 1)
    }
    for count in itertools.count():
        if not streams:
            return
        lengths = list(streams)
        terms = lengths[_draw(f"0/{section.modulus}/length/{count}", len(lengths))]
        number = next(streams[terms], None)
        if number is None:
            del streams[terms]  # this length is exhausted; the others continue
            continue
        yield tuple(number // section.modulus**place % section.modulus for place in range(terms))


def _numbers_below(space: int, asked: int, key: str) -> Iterator[int]:
    """Distinct numbers below `space` in an order determined by `key`."""
    if space <= SHUFFLE_BELOW * asked:
        yield from sorted(range(space), key=lambda number: hashlib.sha256(f"{key}/{number}".encode()).digest())
        return
    seen: set[int] = set()
    for count in itertools.count():
        number = _draw(f"{key}/{count}", space)
        if number not in seen:
            seen.add(number)
            yield number


def _draw(key: str, below: int) -> int:
    """A number below `below`, uniform over keys."""
    return int.from_bytes(hashlib.shake_256(key.encode()).digest(DRAW_BYTES)) % below


# --- solutions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModchainSolution:
    """A well-formed solution: steps (first operand, second operand, stated sum) and the final answer."""

    steps: tuple[tuple[int, int, int], ...]
    answer: int


def parse_solution(text: str, modulus: int) -> ModchainSolution | str:
    """The parsed solution, or what is malformed in `text`."""
    steps: list[tuple[int, int, int]] = []
    position = 0
    while match := STEP.match(text, position):
        first, second, total = (int(number) for number in match.groups())
        steps.append((first, second, total))
        if max(steps[-1]) >= modulus:
            return f"number out of range in step {len(steps)}"
        position = match.end()
    final = ANSWER.match(text, position)
    if final is None:
        return "no final answer" if "A" not in text[position:] else f"broken step {len(steps) + 1}"
    if final.end() != len(text):
        return "text after the final answer"
    if int(final[1]) >= modulus:
        return "final answer out of range"
    if not steps:
        return "no steps"
    return ModchainSolution(tuple(steps), int(final[1]))


def _consistent(solution: ModchainSolution, modulus: int) -> bool:
    """Whether each sum is right and goes on from the one before, and the answer is the last sum."""
    running = solution.steps[0][0]
    for first, second, total in solution.steps:
        if first != running or total != (first + second) % modulus:
            return False
        running = total
    return solution.answer == running


def first_flaw(solution: ModchainSolution, operands: Sequence[int], modulus: int) -> tuple[int | None, str]:
    """The first flaw of a well-formed solution: its index among the steps and the answer, and a few words. (None, "")
    without a flaw.

    A wrong second operand is *swapped* if it occurs in the problem, and *wrong* (invented) if not. If leaving out or
    adding steps explains all later operands, the flaw is a dropped or an extra step.
    """
    expected = operands[1:]
    used = [second for _, second, _ in solution.steps]
    running = operands[0]
    for index, (first, second, total) in enumerate(solution.steps):
        if index == len(expected):
            return index, "extra step"
        if (first, second) != (running, expected[index]):
            return index, _operand_flaw(index, first, running, used, operands)
        if total != (first + second) % modulus:
            return index, f"wrong sum in step {index + 1}"
        running = total
    if len(used) < len(expected):
        return len(used), "dropped step"
    return (None, "") if solution.answer == running else (len(used), "wrong final answer")


def _operand_flaw(index: int, first: int, running: int, used: Sequence[int], operands: Sequence[int]) -> str:
    """The flaw in the operands of step `index`; `used` are the second operands of all steps."""
    expected = operands[1:]
    second, wanted = used[index], expected[index]
    if first != running:
        swapped = (first, second) == (wanted, running)
    elif len(used) < len(expected) and _is_subsequence(used[index:], expected[index + 1 :]):
        return "dropped step"
    elif len(used) > len(expected) and _is_subsequence(expected[index:], used[index + 1 :]):
        return "extra step"
    else:
        swapped = second in operands
    return f"{'swapped' if swapped else 'wrong'} operand in step {index + 1}"


def _is_subsequence(short: Sequence[int], long: Sequence[int]) -> bool:
    rest = iter(long)
    return all(number in rest for number in short)


# --- written solutions: the supervised data of the embedded models ----------------------------------------------------
#
# A flawed solution has exactly one mistake and continues consistently from it, so it looks correct unless that step is
# checked. Its final answer is always wrong, and the grader's note names the mistake.

Mistake = Literal["wrong_sum", "wrong_operand", "swapped_operand", "dropped_step", "wrong_answer"]
MISTAKES: tuple[Mistake, ...] = get_args(Mistake)


def clean_trace(problem: Problem) -> str:
    operands, modulus = operands_of(problem)
    steps, running = _steps(operands[0], operands[1:], modulus)
    return _written(steps, running)


def possible_mistakes(problem: Problem) -> tuple[Mistake, ...]:
    """The kinds of mistake that are possible in this problem.

    `wrong_operand` needs a number that is not in the problem, `swapped_operand` two different operands, `dropped_step`
    three operands of which one after the first is not 0 (dropping a 0 changes nothing).
    """
    operands, modulus = operands_of(problem)
    room = {
        "wrong_operand": len(set(operands)) < modulus,
        "swapped_operand": len(set(operands)) > 1,
        "dropped_step": len(operands) > 2 and any(operands[1:]),
    }
    return tuple(kind for kind in MISTAKES if room.get(kind, True))


def flawed_trace(problem: Problem, kind: Mistake, rng: np.random.Generator) -> str:
    """A solution with one mistake of `kind`; `rng` draws its place and its wrong value.

    Raises ValueError for a kind that is not in `possible_mistakes(problem)`.
    """
    if kind not in possible_mistakes(problem):
        raise ValueError(f"the mistake {kind!r} is not possible in {problem.id}")
    operands, modulus = operands_of(problem)
    first, rest = operands[0], list(operands[1:])
    place = int(rng.integers(len(rest)))
    values = range(modulus)

    if kind == "wrong_sum":
        before, running = _steps(first, rest[:place], modulus)
        stated = _other(values, (running + rest[place]) % modulus, rng)
        after, answer = _steps(stated, rest[place + 1 :], modulus)
        return _written([*before, (running, rest[place], stated), *after], answer)
    if kind == "wrong_answer":
        steps, answer = _steps(first, rest, modulus)
        return _written(steps, _other(values, answer, rng))
    if kind == "wrong_operand":
        rest[place] = _pick([value for value in values if value not in operands], rng)
    elif kind == "swapped_operand":
        rest[place] = _other(operands, rest[place], rng)
    else:
        del rest[_pick([index for index, operand in enumerate(rest) if operand], rng)]
    steps, answer = _steps(first, rest, modulus)
    return _written(steps, answer)


def _steps(running: int, operands: Sequence[int], modulus: int) -> tuple[list[tuple[int, int, int]], int]:
    """The correct steps from `running` over `operands`, and the final value."""
    steps = []
    for operand in operands:
        total = (running + operand) % modulus
        steps.append((running, operand, total))
        running = total
    return steps, running


def _written(steps: Sequence[tuple[int, int, int]], answer: int) -> str:
    return "".join(f"{first}+{second}={total};" for first, second, total in steps) + f"A{answer}"


def _other(values: Sequence[int], than: int, rng: np.random.Generator) -> int:
    return _pick([value for value in values if value != than], rng)


def _pick(values: Sequence[int], rng: np.random.Generator) -> int:
    return values[int(rng.integers(len(values)))]
