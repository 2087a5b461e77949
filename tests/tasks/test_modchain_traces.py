"""Clean and flawed traces against the grader: each was written without the other's code."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.config.task import ModchainTask
from pvg.tasks.modchain import Modchain, chain_problem, clean_trace, flawed_trace, possible_mistakes

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
