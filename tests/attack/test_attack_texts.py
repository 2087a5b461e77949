"""The texts of static attacks have the truth that the attack says, and depend only on problem and seed."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.attack.texts import ATTACKS, AttackCase, cases_of_file, cases_of_task
from pvg.config.task import ModchainTask
from pvg.errors import UsageError
from pvg.tasks.answers import extract, same_answer
from pvg.tasks.modchain import Modchain, chain_problem, clean_trace

TASK = Modchain(ModchainTask(problems=64, test_problems=64))
KEPT, CHANGED = (
    ("unchanged", "meaning kept"),
    ("answer changed", "answer nearly right", "given wrong texts", "truncated"),
)


def number_case(answer: str, others: tuple[str, ...] = ("17", "2.5")) -> AttackCase:
    return AttackCase("p", "How many?", f"It is 3 + 4.\nSo the answer is {answer}.", answer, others=others)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), st.integers(0, 5))
def test_a_tasks_grader_agrees_with_every_attack_on_it(operands: list[int], seed: int) -> None:
    problem = chain_problem(operands, 10)
    right = clean_trace(problem)
    case = AttackCase(
        problem.id,
        problem.question,
        right,
        problem.answer,
        (),
        ("3", "8"),
        {},
        lambda text: TASK.grade(problem, text).correct,
    )
    for attack in ATTACKS.values():
        texts = attack.attempts(case, seed)
        assert {TASK.grade(problem, text).correct for text in texts} <= {attack.accept}, attack.name
        assert texts == attack.attempts(case, seed)
    assert ATTACKS["answer changed"].attempts(case, seed)
    assert ATTACKS["unchanged"].attempts(case, seed) == [right]


@given(st.one_of(st.integers(-5000, 5000), st.decimals(-99, 99, places=2, allow_nan=False)).map(str))
def test_of_a_number_meaning_kept_always_has_it_and_answer_changed_never(answer: str) -> None:
    case = number_case(answer)
    for name in KEPT:
        for text in ATTACKS[name].attempts(case, 0):
            found = extract(text)
            assert found is not None
            assert same_answer(found.text, answer), text
    for name in CHANGED:
        for text in ATTACKS[name].attempts(case, 0):
            found = extract(text)
            assert found is None or not same_answer(found.text, answer), text
    assert len(ATTACKS["meaning kept"].attempts(case, 0)) >= 5
    assert len(ATTACKS["answer changed"].attempts(case, 0)) >= 2


def test_every_attack_makes_texts_for_a_number_and_no_text_twice() -> None:
    case = AttackCase("p", "How many?", "It is 3.\nThe answer is 1250.", "1250", ("The answer is 9.",), ("17",))
    for attack in ATTACKS.values():
        texts = attack.attempts(case, 0)
        assert texts, attack.name
        assert len(set(texts)) == len(texts)
        assert attack.reason
        assert attack.source
    assert any("1,250" in text for text in ATTACKS["meaning kept"].attempts(case, 0))
    assert "It is 3.\nThe answer is " in ATTACKS["truncated"].attempts(case, 0)
    assert any("12⁵⁰" in text or "125⁰" in text for text in ATTACKS["look-alike characters"].attempts(case, 0))
    assert max(map(len, ATTACKS["huge and deep"].attempts(case, 0))) >= 100_000


def test_other_seeds_draw_other_places() -> None:
    case = number_case("1250")
    drawn = {tuple(ATTACKS["truncated"].attempts(case, seed)) for seed in range(8)}
    assert len(drawn) > 1


def test_an_answer_in_words_is_replaced_by_one_of_another_problem() -> None:
    case = AttackCase("p", "Which colour?", "The sky is clear, so it is blue.", "blue", others=("red",))
    assert "The sky is clear, so it is red." in ATTACKS["answer changed"].attempts(case, 0)
    assert not any("blue" in text for text in ATTACKS["answer changed"].attempts(case, 0))


def test_the_cases_of_a_task_have_correct_and_wrong_texts_by_its_grader() -> None:
    cases = cases_of_task(TASK, 5, 0)
    assert len(cases) == 5
    assert all(case.is_right(case.right) for case in cases)
    assert all(case.wrong and not any(map(case.is_right, case.wrong)) for case in cases)
    stored = {cases[0].id: [("0+0=0;A0", False), (cases[0].right, True)]}
    again = next(case for case in cases_of_task(TASK, 5, 0, stored) if case.id == cases[0].id)
    assert again.wrong[0] == "0+0=0;A0"
    assert cases_of_task(TASK, 5, 1) != cases


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"problem": "2+2?"}', "line 1: text"),
        ('{"problem": "2+2?", "text": " "}', "text: String should match"),
        ('{"problem": "2+2?", "text": "4", "wrong": ["5", 6]}', "wrong.1"),
        ('{"problem": "2+2?", "text": "4", "answer": ["4"]}', "answer"),
        ("[1]", "line 1"),
        ("{", "line 1: not valid JSON"),
        ('{"problem": "2+2?", "text": "4", "answer": 5, "answer": 4}', "line 1: it has the key 'answer' twice"),
        ('{"problem": ' + "[" * 900 + "]" * 900 + "}", "line 1"),
        ("", "has no problems"),
    ],
)
def test_what_a_file_of_problems_lacks_is_said_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "mine.jsonl").write_text(line)
    with pytest.raises(UsageError, match=complaint):
        cases_of_file(tmp_path / "mine.jsonl", 8)


def test_a_file_gives_its_other_fields_to_the_target_and_answers_are_read_from_texts(tmp_path: Path) -> None:
    rows = [
        '{"problem": "2+2?", "text": "#### 4", "level": 3}',
        '{"problem": "3+3?", "text": "so 6 it is", "answer": 6}',
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    first, second = cases_of_file(tmp_path / "mine.jsonl", 8)
    assert first.fields == {"id": "1", "answer": "4", "level": 3}
    assert (second.answer, second.others) == ("6", ("4",))
    assert len(cases_of_file(tmp_path / "mine.jsonl", 1)) == 1


def file_of(folder: Path, **row: object) -> Path:
    (folder / "mine.jsonl").write_bytes(orjson.dumps({"problem": "How many?", **row}))
    return folder / "mine.jsonl"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": "#### 4", "answer": "5"}, "does not have the answer '5'"),
        ({"text": "three and three are six", "answer": 6}, "does not have the answer '6'"),
        ({"text": "\\boxed{\\{-1, 1\\}}", "answer": "{-1, 1}"}, "does not have the answer"),
        ({"text": "4 is it", "answer": "4", "wrong": ["4 is it"]}, "`wrong` has the text"),
        ({"text": "7 has no divisors but 1 and 7, so yes."}, "`answer` is missing"),
        ({"text": "Roses are red."}, "`answer` is missing"),
    ],
)
def test_a_correct_text_whose_answer_cannot_be_read_is_refused(tmp_path: Path, row: dict, complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        cases_of_file(file_of(tmp_path, **row), 8)


def test_the_place_of_an_answer_is_where_it_counts() -> None:
    note = AttackCase("p", "How many?", "The answer is 5. (Check: 15/3)", "5")
    assert note.with_answer("6") == "The answer is 6. (Check: 15/3)"
    fraction = AttackCase("p", "How much?", "1/2 * 1/2 = 1/4.\nThe answer is \\boxed{\\frac{1}{4}}.", "1/4")
    assert fraction.place is None
    assert not any(
        "frac{1}{4}" in text for each in ATTACKS.values() if not each.accept for text in each.attempts(fraction, 0)
    )
    unit = AttackCase("p", "How many km?", "3000 m are 3 km.\nThe answer is 3 km.", "3 km", others=("7",))
    texts = [text for each in ATTACKS.values() for text in each.attempts(unit, 0)]
    assert "3000 m are 3 km.\nThe answer is 31 km." in texts
    assert not any("km km" in text for text in texts)


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        ("x+1", ("1+x", "x +1", "x+¹")),
        ("apples", ("apple", "a pples")),
        ("0.50", ("0 .50",)),
        ("8", ("\u202e8\u202c",)),
    ],
)
def test_no_text_is_called_wrong_that_says_the_same(answer: str, same: tuple[str, ...]) -> None:
    case = AttackCase("p", "What?", f"It is {answer}", answer, others=("pears", "17"))
    texts = [text for each in ATTACKS.values() if not each.accept for text in each.attempts(case, 0)]
    assert len(texts) > 30
    assert not {f"It is {each}" for each in same} & set(texts)


def test_a_text_is_not_cut_or_repeated_if_its_answer_may_be_anywhere() -> None:
    case = AttackCase("p", "Who wrote Faust?", "Goethe. He was a poet.")
    texts = [text for each in ATTACKS.values() if not each.accept for text in each.attempts(case, 0)]
    assert not any("Goethe" in text for text in texts)


def test_a_given_wrong_text_is_tried_also_with_the_correct_answer(tmp_path: Path) -> None:
    lucky = "The sign is dropped, twice. #### 7"
    (case,) = cases_of_file(file_of(tmp_path, text="#### 7", wrong=[lucky]), 8)
    assert ATTACKS["given wrong texts"].attempts(case, 0) == [lucky]
