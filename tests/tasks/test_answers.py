"""Reading final answers: a table of written forms labelled by hand, and what no text may do.

A line of `answer_forms.jsonl`: `text` is the solution, `answer` its value as a person reads it, null without a single
clear answer.
"""

import os
import signal
from fractions import Fraction
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.config.task import DataTask
from pvg.tasks import expressions
from pvg.tasks.answers import MOST_DIGITS, NO_ANSWER, UNCLEAR, extract, parse_number, read, same_answer, same_number
from pvg.tasks.data import grader_of
from pvg.tasks.expressions import value_of_latex

pytestmark = pytest.mark.slow

FORMS = [orjson.loads(line) for line in Path(__file__).with_name("answer_forms.jsonl").read_bytes().splitlines()]


def test_every_form_is_read_as_a_person_reads_it():
    assert len(FORMS) > 500
    for form in FORMS:
        found = extract(form["text"])
        assert (None if found is None else found.value) == (form["answer"] and Fraction(form["answer"])), form


def test_a_form_is_right_for_its_answer_alone():
    grader = grader_of(DataTask(grader="number"))
    for form in FORMS:
        text, answer = form["text"], Fraction(form["answer"] or 5)
        grade = grader.grade(grader.reference(str(answer)), text)
        assert (grade.correct, grade.well_formed) == (form["answer"] is not None,) * 2, form
        for other in (-answer, answer + 1):
            assert other == 0 or not grader.grade(grader.reference(str(other)), text).correct, form


@pytest.mark.parametrize(
    ("text", "written", "marker"),
    [
        ("####\n$1,200.00 a year", "1,200.00", "####"),
        ("#### The final answer is \\boxed{72}", "72", "####"),
        ("#### 4\nThe answer is 5. \\boxed{6}", "6", "boxed"),
        ("#### 5\nActually I am wrong, the answer is 6.", "6", "phrase"),
        ("\\boxed{5}\nso #### 6\nThat was easy.", "6", "####"),
        ("#### Step 2: the answer is 7", "7", "phrase"),
        ("\\boxed{5} then \\boxed{\\frac{1}{2}} 9", "1/2", "boxed"),
        ("#### 3 \\frac{1}{2}", "3 1/2", "####"),
        ("\\boxed{10^6}", "1000000", "boxed"),
        ("so 5 - 3 = 2, pages 5-6", "6", "last number"),
    ],
)
def test_the_last_marker_counts(text, written, marker):
    found = extract(text)
    assert found is not None
    assert (found.text, found.marker) == (written, marker)


def test_the_reasons_for_no_answer():
    assert (read("no digits"), read("#### 7 or 8"), read("#### none")) == (NO_ANSWER, UNCLEAR, UNCLEAR)


@pytest.mark.parametrize(
    "text",
    [
        *("4\\pi", "5\\pi", "\\sqrt{25}", "\\sqrt{3}", "2\\sqrt{3}", "5x", "5i", "5!", "\\log 5", "\\pm 5", "10^6"),
        *("5²", "\\frac{5}{x}", "10⁶", "\\le 5", "x \\le 5", "> 5", "[5, \\infty)", "(5, \\infty)", "5+"),
        *("5-6", "2 + 3", "48 + 24 = 72", "72 (= 6 dozen)", "72,5", "1/2/3", "It is 7", "not 18", "7 or 8"),
        *("none", "", "-", "3/0"),
    ],
)  # fmt: skip
def test_what_no_reference_may_be(text):
    assert parse_number(text) is None
    with pytest.raises(ValueError, match="is not a number"):
        grader_of(DataTask(grader="number")).reference(text)


def test_many_equal_values_are_survived():
    for text, answer in (("7=" * 8 + "7", 7), ("7=" * 1200 + "7", None), ("x=" * 400 + "7", 7), ("=" * 5000, None)):
        found = extract(f"#### {text}")
        assert (found and found.value) == answer


def test_comparison_is_exact():
    assert same_number("0.1", "1/10")
    assert same_number("$1,200.00", "1200")
    assert not same_number("0.33", "1/3")
    assert not same_number("9007199254740993", "9007199254740992")  # equal as floats
    assert not same_number("none", "none")  # what has no value equals nothing
    assert same_answer("none ", "none")
    assert not same_answer(None, None)


def test_absurdly_long_numbers_are_none():
    for text in ("9" * (MOST_DIGITS + 1), "1e" + "9" * 50, "1 x 10^" + "9" * 5000, "0." + "1" * 200, "1/" + "9" * 5000):
        assert parse_number(text) is None
        assert extract(f"#### {text}") is None
    assert parse_number("9" * MOST_DIGITS) == 10**MOST_DIGITS - 1


@settings(deadline=None)
@given(st.text() | st.text(alphabet="#0123456789.,/ -+eE$%=(){}\\boxedfrac½²٣ answer is not\n"))
def test_any_text_is_survived(text):
    for shown in (text, f"#### {text}", f"\\boxed{{{text}}}"):
        found = extract(shown)
        if found is not None:
            assert abs(found.value) < 10 ** (3 * MOST_DIGITS)
            assert parse_number(found.text) == found.value  # an answer as given is read the same again


@pytest.mark.timeout(60)  # quadratic time would take minutes over these
@pytest.mark.parametrize(
    "piece",
    [
        *("9", "#", "####\n", "#### ", "#### a\n", "\\boxed{", "\\boxed", "answer ", "answer: ", "answer:\n"),
        *("1 x 10^", "answer to ", "111 ", "1,", "1/", "1e", "-", "<", "<a", "<<a", "\\frac{", "{", "("),
        *("=", "$", "the ", " ", "\n", "½", "²", "√", "1.", "** ", "*", "\\", "_1", "not ", "a ", "?", "million "),
        *("_", ".", "\r", "* ", "m^2 ", "in 2 ", "1+", "7="),
    ],
)  # fmt: skip
def test_huge_texts_are_read(piece):
    text = piece * (100_000 // len(piece))
    assert (found := extract(text + "\n#### 72")) is not None
    assert found.value == 72
    text = piece * (50_000 // len(piece))
    for before in ("", "5 ", "#### ", "#### 5", "The answer is ", "The answer is 5", "\\boxed{5}"):
        for after in ("", "b", " 5", "a=5"):
            extract(before + text + after)


# --- the process that reads LaTeX -------------------------------------------------------------------------------------


def test_an_endless_expression_ends_at_its_limit_and_the_next_one_is_read(monkeypatch):
    expressions._reader.close()
    monkeypatch.setattr(expressions, "LIMIT_S", 1.0)
    assert value_of_latex("9^{9^{9^9}}") is None
    assert value_of_latex("\\sqrt{49}") == 7


def test_a_process_that_hangs_or_is_killed_is_replaced(monkeypatch):
    assert value_of_latex("\\sqrt{64}") == 8
    for number in (signal.SIGSTOP, signal.SIGKILL):
        monkeypatch.setattr(expressions, "PATIENCE_S", 0.2)
        os.kill(expressions._reader._process.pid, number)
        assert value_of_latex(f"\\sqrt{{81}} {'' if number == signal.SIGSTOP else ' '}") in (None, 9)
        monkeypatch.undo()
        assert value_of_latex(f"\\sqrt{{{int(number) ** 2}}}") == int(number)


@pytest.mark.parametrize("mark", ["\n", "\r", "\r\n", "\x0b", "\x85", "\u2028"])
def test_a_line_break_in_an_expression_is_a_space(mark):
    value_of_latex.cache_clear()
    roots = "\\sqrt{81}", "\\sqrt{49}"
    assert value_of_latex(f"\\frac{{\\sqrt{{16}}}}{mark}{{2}}") == 2
    assert [value_of_latex(root) for root in roots] == [9, 7]
    found = [extract(f"\\boxed{{{root}{mark}}}") for root in roots]
    assert [each and each.value for each in found] == [9, 7]


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, MemoryError])
def test_an_answer_to_an_abandoned_expression_is_not_that_of_the_next_one(monkeypatch, stopped):
    def raises(*_):
        raise stopped

    value_of_latex.cache_clear()
    monkeypatch.setattr(expressions, "wait", raises)
    with pytest.raises(stopped):
        value_of_latex("\\sqrt{36}")
    monkeypatch.undo()
    assert [value_of_latex(f"\\sqrt{{{value**2}}}") for value in (7, 6, 5)] == [7, 6, 5]


def test_an_answer_with_the_number_of_another_expression_is_refused():
    value_of_latex.cache_clear()
    assert value_of_latex("\\sqrt{36}") == 6
    expressions._reader._process.stdin.write(b"0 1\n")  # its answer stays in the pipe
    assert value_of_latex("\\sqrt{49}") is None
    assert value_of_latex("\\sqrt{25}") == 5


def test_what_is_not_one_rational_number_has_no_value():
    for latex in (
        "\\pi",
        "\\sqrt{2}",
        "\\frac{1}{0}",
        "x",
        "5x",
        "(1, 2)",
        "\\begin{",
        "}{",
        "\\sqrt{-4}",
        "",
        "999!!!",
    ):
        assert value_of_latex(latex) is None
    assert value_of_latex("0.1+0.2") == Fraction(3, 10)
