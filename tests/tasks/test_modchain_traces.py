"""Clean and flawed traces against the grader: each was written without the other's code."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.config.task import ModchainTask
from pvg.tasks.modchain import MISTAKES, Modchain, chain_problem, clean_trace, flawed_trace, possible_mistakes

TASK = Modchain(ModchainTask(problems=1, test_problems=1))
NOTES = {
    "wrong_sum": "wrong sum in step ",
    "wrong_operand": "wrong operand in step ",
    "swapped_operand": "swapped operand in step ",
    "dropped_step": "dropped step",
    "wrong_answer": "wrong final answer",
}


@st.composite
def problems(draw):
    modulus = draw(st.integers(2, 100))
    return chain_problem(draw(st.lists(st.integers(0, modulus - 1), min_size=2, max_size=12)), modulus)


def test_the_clean_trace_of_the_documentation():
    assert clean_trace(chain_problem((7, 5, 8, 3, 6), 10)) == "7+5=2;2+8=0;0+3=3;3+6=9;A9"


@settings(deadline=None)
@given(problems())
def test_a_clean_trace_is_correct_and_flawless(problem):
    grade = TASK.grade(problem, clean_trace(problem))
    assert grade.correct
    assert grade.note == ""


@settings(deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_every_possible_mistake_is_named_and_never_ends_right(problem, seed):
    rng = np.random.default_rng(seed)
    for kind in possible_mistakes(problem):
        grade = TASK.grade(problem, flawed_trace(problem, kind, rng))
        assert grade.note.startswith(NOTES[kind]), (kind, grade)
        assert grade.well_formed
        assert not grade.correct


@settings(deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_the_rest_of_a_flawed_trace_follows_from_the_mistake(problem, seed):
    modulus = problem.metadata["modulus"]
    for kind in possible_mistakes(problem):
        *steps, answer = flawed_trace(problem, kind, np.random.default_rng(seed)).split(";")
        numbers = [tuple(int(n) for n in step.replace("=", "+").split("+")) for step in steps]
        wrong_sums = sum((a + b) % modulus != c for a, b, c in numbers)
        assert wrong_sums == (kind == "wrong_sum")
        assert all(before[2] == after[0] for before, after in itertools.pairwise(numbers))
        assert (int(answer[1:]) == numbers[-1][2]) == (kind != "wrong_answer")
        assert len(steps) == len(problem.metadata["terms"]) - 1 - (kind == "dropped_step")


def test_usual_problems_have_room_for_every_kind_and_mistakes_reach_every_step():
    problem = chain_problem((7, 5, 8, 3, 6), 10)
    assert possible_mistakes(problem) == MISTAKES
    rng = np.random.default_rng(0)
    for kind in ("wrong_sum", "wrong_operand", "swapped_operand"):
        notes = {TASK.grade(problem, flawed_trace(problem, kind, rng)).note for _ in range(200)}
        assert notes == {f"{NOTES[kind]}{step}" for step in (1, 2, 3, 4)}


def test_equal_generators_write_equal_traces():
    problem = chain_problem((7, 5, 8, 3, 6), 10)
    for kind in MISTAKES:
        first, second = (flawed_trace(problem, kind, np.random.default_rng(3)) for _ in range(2))
        assert first == second


@pytest.mark.parametrize(
    ("operands", "modulus", "missing"),
    [
        ((0, 1, 2), 3, {"wrong_operand"}),  # every number is in the problem
        ((4, 4, 4), 10, {"swapped_operand"}),
        ((4, 5), 10, {"dropped_step"}),
        ((4, 0, 0), 10, {"dropped_step"}),  # dropping + 0 changes nothing
    ],
)
def test_a_problem_without_room_for_a_mistake_says_so(operands, modulus, missing):
    problem = chain_problem(operands, modulus)
    assert set(MISTAKES) - set(possible_mistakes(problem)) == missing
    for kind in missing:
        with pytest.raises(ValueError, match="is not possible"):
            flawed_trace(problem, kind, np.random.default_rng(0))
