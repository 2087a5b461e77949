"""Written solutions of modchain problems, clean and flawed: the supervised data of the embedded models.

A flawed solution holds exactly one mistake and carries on consistently from it, so that it looks like a clean one to
whoever does not check the step; its final answer is always wrong, and the grader's note names the mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from pvg.records import Problem
from pvg.tasks.modchain import operands_of

Mistake = Literal["wrong_sum", "wrong_operand", "swapped_operand", "dropped_step", "wrong_answer"]
MISTAKES: tuple[Mistake, ...] = get_args(Mistake)


def clean_trace(problem: Problem) -> str:
    """The flawless solution."""
    operands, modulus = operands_of(problem)
    steps, running = _steps(operands[0], operands[1:], modulus)
    return _written(steps, running)


def possible_mistakes(problem: Problem) -> tuple[Mistake, ...]:
    """The kinds of mistake this problem has room for.

    `wrong_operand` needs a number that is not in the problem, `swapped_operand` two different operands, and
    `dropped_step` three operands of which one behind the first is not 0 (adding 0 may be dropped unpunished).
    """
    operands, modulus = operands_of(problem)
    room = {
        "wrong_operand": len(set(operands)) < modulus,
        "swapped_operand": len(set(operands)) > 1,
        "dropped_step": len(operands) > 2 and any(operands[1:]),
    }
    return tuple(kind for kind in MISTAKES if room.get(kind, True))


def flawed_trace(problem: Problem, kind: Mistake, rng: np.random.Generator) -> str:
    """A solution with one mistake of `kind`, at a place and with a wrong value drawn from `rng`.

    Raises ValueError for a kind that is not among `possible_mistakes(problem)`.
    """
    if kind not in possible_mistakes(problem):
        raise ValueError(f"{problem.id} has no room for the mistake {kind!r}")
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
    """The right steps from `running` over `operands`, and the value they end at."""
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
