"""The modchain task: its problems, its grammar, and the grader's notes on texts written by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.config.task import ModchainTask
from pvg.tasks import open_task
from pvg.tasks.modchain import MISTAKES, Modchain, chain_problem, clean_trace, flawed_trace, possible_mistakes
from pvg.tasks.task import LocatesFlaws

PROBLEM = chain_problem((7, 5, 8, 3, 6), 10)
TASK = Modchain(ModchainTask(problems=4, test_problems=4))


def ids(section, split):
    return [problem.id for problem in open_task(section).problems(split)]


def test_a_problem_reads_as_agreed():
    assert PROBLEM.id == "modchain-10-7+5+8+3+6"
    assert PROBLEM.question == "7+5+8+3+6?"
    assert PROBLEM.answer == "9"
    assert (PROBLEM.metadata["terms"], PROBLEM.metadata["modulus"]) == ((7, 5, 8, 3, 6), 10)


def test_the_problems_of_a_seed_never_change():
    # Ids and draws are part of what stored runs rely on: this pins them across versions of Python and of pvg.
    assert ids(ModchainTask(), "train")[:2] == ["modchain-10-0+0+9+3+9", "modchain-10-6+2+6+0+1"]


def test_splits_are_as_large_as_asked_disjoint_and_free_of_duplicates():
    section = ModchainTask(min_terms=2, max_terms=5, problems=3000, test_problems=500)
    train, test = ids(section, "train"), ids(section, "test")
    assert (len(train), len(test)) == (3000, 500)
    assert len(set(train) | set(test)) == 3500


def test_more_problems_keep_the_test_split():
    base = ModchainTask(problems=100, test_problems=50)
    larger = base.model_copy(update={"problems": 400})
    assert ids(larger, "test") == ids(base, "test")
    assert ids(larger, "train")[:100] == ids(base, "train")


def test_every_problem_of_a_small_space_is_found():
    section = ModchainTask(min_terms=2, max_terms=3, modulus=2, problems=8, test_problems=4)
    assert len(set(ids(section, "train") + ids(section, "test"))) == 12


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("7+5=2;2+8=0;0+3=3;3+6=9;A9", ""),
        ("7+5=2;2+8=1;1+3=4;4+6=0;A0", "wrong sum in step 2"),
        ("7+5=2;2+8=0;1+3=4;4+6=0;A0", "wrong operand in step 3"),  # the running value was 0
        ("7+5=2;2+8=0;0+4=4;4+6=0;A0", "wrong operand in step 3"),  # there is no 4 in the problem
        ("7+5=2;2+3=5;5+3=8;8+6=4;A4", "swapped operand in step 2"),  # 3 is there, but later
        ("7+5=2;2+3=5;5+8=3;3+6=9;A9", "swapped operand in step 2"),  # exchanged: the answer is still right
        ("5+7=2;2+8=0;0+3=3;3+6=9;A9", "swapped operand in step 1"),
        ("7+5=2;2+8=0;0+6=6;A6", "dropped step"),
        ("7+5=2;2+8=0;A0", "dropped step"),
        ("7+6=3;A3", "dropped step"),
        ("7+5=2;2+5=7;7+8=5;5+3=8;8+6=4;A4", "extra step"),
        ("7+5=2;2+8=0;0+3=3;3+6=9;9+0=9;A9", "extra step"),
        ("7+5=2;2+8=0;0+3=3;3+6=9;A8", "wrong final answer"),
        ("7+5=3;3+8=1;1+4=5;A5", "wrong sum in step 1"),  # the first flaw, not a later one
        ("7+5=2;2+4=6;6+3=9;A9", "wrong operand in step 2"),  # too few steps, yet 4 was invented, not skipped to
    ],
)
def test_the_note_names_the_first_flaw(text, note):
    grade = TASK.grade(PROBLEM, text)
    assert grade.note == note
    assert grade.well_formed
    assert grade.answer == text.rpartition("A")[2]
    assert grade.correct == (grade.answer == "9")


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("", "malformed: no final answer"),
        ("7+5=2;2+8=0;0+3=3;3+6=9;", "malformed: no final answer"),
        ("A9", "malformed: no steps"),
        ("7+5=2;2+8=0;0+3=3;3+6=9;A9 ", "malformed: text after the final answer"),
        ("7+5=2;2+8=0;0+3=3;3+6=9;A9A9", "malformed: text after the final answer"),
        ("7+5=2;2+8=0;0+3=3;3+6=9;A09", "malformed: text after the final answer"),
        ("0+7=7;7A7=4;A9", "malformed: broken step 2"),
        ("7+5=2;2+8=0;0+3=3;3+6=9A9", "malformed: broken step 4"),
        (" 7+5=2;2+8=0;0+3=3;3+6=9;A9", "malformed: broken step 1"),
        ("7+5=12;12+8=0;0+3=3;3+6=9;A9", "malformed: number out of range in step 1"),
        ("7+5=2;2+8=0;0+3=3;3+6=9;A19", "malformed: final answer out of range"),
        ("07+5=2;2+8=0;0+3=3;3+6=9;A9", "malformed: broken step 1"),
        ("7+5=2;2+8=0;0+3=3;3+6=9;A٩", "malformed: broken step 5"),
    ],
)
def test_malformed_texts_are_incorrect_and_say_why(text, note):
    grade = TASK.grade(PROBLEM, text)
    assert (grade.correct, grade.well_formed, grade.answer, grade.note) == (False, False, None, note)


def test_exactly_one_text_of_all_chains_is_flawless():
    problem = chain_problem((1, 2, 0), 3)
    texts = [f"{a}+{b}={c};{d}+{e}={f};A{g}" for a, b, c, d, e, f, g in itertools.product(range(3), repeat=7)]
    assert [text for text in texts if not TASK.grade(problem, text).note] == ["1+2=0;0+0=0;A0"]


@settings(deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="0123456789+=;A ", max_size=60))
def test_the_grader_accepts_any_text_and_correct_implies_well_formed(text):
    grade = TASK.grade(PROBLEM, text)
    assert grade.well_formed or not grade.correct
    assert grade.well_formed == (grade.answer is not None)
    assert grade.well_formed != grade.note.startswith("malformed: ")


@pytest.mark.parametrize(
    ("completion", "cuts", "flaw"),
    [
        ("1+2=3;3+3=6;A6", [6, 12, 14], None),
        ("1+2=4;4+3=7;A7", [6, 12, 14], 0),  # wrong sum
        ("1+2=3;4+3=7;A7", [6, 12, 14], 1),  # does not go on from 3
        ("1+2=3;3+3=6;A5", [6, 12, 14], 2),  # wrong answer
        ("1+2=3;A3", [6, 8], 1),  # ends too early
        ("1+2=3;3+3=6;6+1=7;A7", [6, 12, 18, 20], 2),  # one step too many
        ("1+2=3;3+3=6", [], None),
    ],
)
def test_cuts_and_the_first_wrong_step(completion, cuts, flaw):
    task, problem = Modchain(ModchainTask()), chain_problem((1, 2, 3), 10)
    assert isinstance(task, LocatesFlaws)
    assert task.cuts(completion) == cuts
    assert task.flaw(problem, completion) == flaw


@given(st.text(alphabet="0123456789+=;A", max_size=30))
def test_a_flaw_is_one_of_the_steps(completion):
    task, problem = Modchain(ModchainTask()), chain_problem((1, 2, 3), 10)
    cuts, flaw = task.cuts(completion), task.flaw(problem, completion)
    assert flaw is None or 0 <= flaw < len(cuts)
    if task.grade(problem, completion).well_formed:
        assert cuts[-1] == len(completion)
        assert (flaw is None) == (task.grade(problem, completion).note == "")


def problems_of(modulus):
    return st.lists(st.integers(0, modulus - 1), min_size=2, max_size=8).map(
        lambda terms: chain_problem(terms, modulus)
    )


@settings(deadline=None)
@given(st.integers(2, 30).flatmap(problems_of), st.sampled_from(MISTAKES), st.integers(0, 2**32))
def test_the_first_flaw_is_where_a_mistake_was_put(problem, kind, seed):
    clean = clean_trace(problem)
    assert TASK.flaw(problem, clean) is None
    if kind not in possible_mistakes(problem):
        return
    flawed = flawed_trace(problem, kind, np.random.default_rng(seed))
    pairs = zip(clean.split(";"), flawed.split(";"), strict=False)
    number = next(number for number, (right, written) in enumerate(pairs) if right != written)
    assert TASK.flaw(problem, flawed) == number
    if kind in ("wrong_sum", "wrong_operand", "swapped_operand"):
        assert number == np.random.default_rng(seed).integers(len(problem.metadata["terms"]) - 1)
    if kind == "wrong_answer":
        assert number == len(problem.metadata["terms"]) - 1


# A text of the second kind is one that changes a few characters of a flawless solution.
TEXTS = st.text(alphabet="0123456789+=;A ", max_size=40) | st.lists(
    st.tuples(st.integers(0, 25), st.sampled_from("0123456789")), max_size=3
).map(lambda changes: "".join(dict(changes).get(place, c) for place, c in enumerate(clean_trace(PROBLEM))))


@settings(deadline=None)
@given(TEXTS)
def test_the_first_flaw_agrees_with_the_grade(text):
    grade, number = TASK.grade(PROBLEM, text), TASK.flaw(PROBLEM, text)
    assert (number is None) == (grade.note == "" or not grade.well_formed)
    if "in step" in grade.note and grade.well_formed:
        assert number == int(grade.note.rpartition(" ")[2]) - 1


def test_two_mistakes_that_cancel_out_are_a_flaw_of_a_correct_solution():
    text = "7+5=2;2+3=5;5+8=3;3+6=9;A9"
    assert TASK.grade(PROBLEM, text).correct
    assert TASK.flaw(PROBLEM, text) == 1


@pytest.mark.parametrize(
    ("text", "accepted", "true"),
    [
        ("7+5=2;2+8=0;0+3=3;3+6=9;A9", True, True),
        ("7+5=2;A2", True, False),  # the rest of the question is forgotten
        ("0+0=0;A0", True, False),
        ("7+5=3;3+8=1;1+3=4;4+6=0;A0", False, False),
        ("7+5=2;3+8=1;1+3=4;4+6=0;A0", False, False),  # 3 is not the sum before
        ("7+5=2;2+8=0;0+3=3;3+6=9;A8", False, False),
        ("7+5=3;3+8=0;0+3=3;3+6=9;A9", False, False),  # the right answer, by two mistakes
        ("A9", False, False),
    ],
)
def test_the_grader_of_sums_forgets_the_question_and_the_truth_does_not(text, accepted, true):
    leaky = Modchain(ModchainTask(problems=4, test_problems=4, grader="sums"))
    assert leaky.grade(PROBLEM, text).correct == accepted
    assert leaky.truth(PROBLEM, text) == TASK.truth(PROBLEM, text) == true
