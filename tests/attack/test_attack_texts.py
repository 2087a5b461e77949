"""The texts of static attacks have the truth that the attack says, and depend only on problem and seed."""

from __future__ import annotations

from pathlib import Path

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


def test_without_an_answer_only_attacks_that_need_none_have_texts() -> None:
    case = AttackCase("p", "Write a poem.", "Roses are red.")
    assert ATTACKS["empty"].attempts(case, 0)
    assert ATTACKS["answer changed"].attempts(case, 0) == []
    assert ATTACKS["meaning kept"].attempts(case, 0)


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
        ("{", "Invalid JSON"),
        ("", "has no problems"),
    ],
)
def test_what_a_file_of_problems_lacks_is_said_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "mine.jsonl").write_text(line)
    with pytest.raises(UsageError, match=complaint):
        cases_of_file(tmp_path / "mine.jsonl", 8)


def test_a_file_gives_its_other_fields_to_the_target_and_answers_are_read_from_texts(tmp_path: Path) -> None:
    rows = ['{"problem": "2+2?", "text": "#### 4", "level": 3}', '{"problem": "3+3?", "text": "six", "answer": 6}']
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    first, second = cases_of_file(tmp_path / "mine.jsonl", 8)
    assert first.fields == {"id": "1", "answer": "4", "level": 3}
    assert (second.answer, second.others) == ("6", ("4",))
    assert len(cases_of_file(tmp_path / "mine.jsonl", 1)) == 1
