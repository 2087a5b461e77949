"""Problems from files: the three forms, and what is said of lines that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from problems_of_tests import OWN, fenced, write_rows

from pvg.config.task import CodeTask
from pvg.errors import ConfigurationError
from pvg.tasks.code import Code, CodeEntry, UnusableError, read_entries
from pvg.tasks.code_problems import code_of

pytestmark = pytest.mark.slow

APPS_CALL: dict[str, Any] = {
    "problem_id": 7,
    "question": "Return the number doubled.",
    "solutions": json.dumps(["class Solution:\n    def double(self, n):\n        return 2 * n", "other"]),
    "input_output": json.dumps({"fn_name": "double", "inputs": [[1], [2], [-3]], "outputs": [[2], [4], [-6]]}),
    "starter_code": "class Solution:\n    def double(self, n: int) -> int:",
    "difficulty": "introductory",
}
APPS_STDIN: dict[str, Any] = {
    "problem_id": 8,
    "question": "Print the sum.",
    "solutions": ["print(sum(map(int, input().split())))"],
    "input_output": {"inputs": ["1 2\n", ["3 4"], "5 6"], "outputs": ["3\n", ["7"], "11"]},
    "starter_code": "",
}
HUMAN_EVAL: dict[str, Any] = {
    "task_id": "Human/0",
    "prompt": "from typing import List\n\n\ndef lengths(words: List[str]) -> List[int]:\n    ''' Lengths. '''\n",
    "canonical_solution": "    return [len(word) for word in words]\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([]) == []\n    assert True, 'well'\n"
    "    assert candidate(['a', 'bc']) == [1, 2], 'two'\n    assert candidate(('x',)) == (1,)\n",
    "entry_point": "lengths",
}


HIDDEN = [{"input": [[1]], "output": "DEEP"}]
DEEP = json.dumps({**OWN, "id": "b", "hidden": HIDDEN}).replace('"DEEP"', "[" * 1000 + "]" * 1000)


@pytest.fixture(autouse=True)
def two_visible_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CodeTask, "visible_tests", 2)


def opened(folder: Path, **settings: Any) -> Code:
    return Code(CodeTask(path=folder, sandbox="reduced", **settings))


def test_all_three_forms(tmp_path: Path) -> None:
    with opened(write_rows(tmp_path, APPS_CALL, APPS_STDIN, HUMAN_EVAL, OWN)) as task:
        call, stdin, human, own = task.problems("train")
        assert [p.id for p in (call, stdin, human, own)] == ["apps-7", "apps-8", "Human/0", "add-up"]
        assert [(t.case, t.output) for t in code_of(call).tests] == [("[1]", 2), ("[2]", 4), ("[-3]", -6)]
        assert len(code_of(call).visible) == 2
        assert call.question.startswith("Return the number doubled.\n\nclass Solution:")
        assert [(t.case, t.output) for t in code_of(stdin).tests] == [("1 2\n", "3\n"), ("3 4", "7"), ("5 6", "11")]
        assert [(t.case, t.output) for t in code_of(human).tests] == [
            ("[[]]", []), ("[['a', 'bc']]", [1, 2]), ("[('x',)]", [1]),
        ]  # fmt: skip
        # What the prompt imports, a solution may use.
        solution = "def lengths(words: List[str]):\n    return list(map(len, words))"
        assert task.grade(human, fenced(solution)).correct
        for problem in (call, stdin, human, own):
            assert task.grade(problem, problem.answer).correct


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{broken", "line 2: not valid JSON"),
        ("[1]", "line 2: neither pvg's form"),
        ({"question": "q", "reference": "r"}, "line 2: neither pvg's form"),
        ({**OWN, "id": "b", "visible": []}, "line 2: it has no visible test"),
        ({**OWN, "id": "b", "hidden": [], "inputs": []}, "line 2: it has no hidden test"),
        ({**OWN, "id": "b", "visible": [{"input": [1]}]}, "line 2: a test is an object with input and output"),
        ({**OWN, "id": "b", "visible": [{"input": 1, "output": 1}]}, "line 2: an input is not a list of arguments"),
        ({**OWN, "id": "b", "reference": 3}, "line 2: the field 'reference' is missing or not a text"),
        ({**APPS_CALL, "solutions": "[]"}, "line 2: it has no solution to be the reference"),
        ({**APPS_CALL, "solutions": "["}, "line 2: the field 'solutions' is not valid JSON"),
        ({**APPS_CALL, "input_output": '{"inputs": [], "outputs": [1]}'}, "line 2: its inputs and outputs are not two"),
        ({**HUMAN_EVAL, "test": "x ="}, "line 2: its test is not Python"),
        ({**HUMAN_EVAL, "test": "x = 1"}, "line 2: its test has no function check"),
        (
            {**HUMAN_EVAL, "test": "def check(candidate):\n    assert abs(candidate([1]) - 2) < 1"},
            "line 2: its test 'assert abs(candidate([1]) - 2) < 1' does not compare",
        ),
        (
            {**HUMAN_EVAL, "test": "def check(candidate):\n    for _ in 'ab':\n        assert candidate([]) == []"},
            "line 2: its test \"for _ in 'ab':\" does not compare",
        ),
        ({**OWN, "id": "b", "question": "Read the Certificate."}, "line 2: it contains the word certificate"),
        (
            {**HUMAN_EVAL, "test": "def check(candidate):\n    assert candidate({[1]}) == 1"},
            "line 2: its test 'assert candidate({[1]}) == 1' does not compare",
        ),
        (
            {**APPS_CALL, "input_output": {"fn_name": ["double"], "inputs": [[1]], "outputs": [2]}},
            "line 2: the field 'fn_name' is missing or not a text",
        ),
        (DEEP, "line 2: its data is nested too deeply"),
        ('{"a": NaN}', "line 2: not valid JSON"),
        ({**HUMAN_EVAL, "entry_point": "other"}, "line 2: its prompt defines no function 'other'"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, row: Any, said: str) -> None:
    file = write_rows(tmp_path, OWN, row) / "train.jsonl"
    try:
        first, why = read_entries(file, 2)
    except ConfigurationError as error:
        why = UnusableError(error.message)
    else:
        assert isinstance(first, CodeEntry)
        assert first.id == "add-up"
    assert str(why).startswith(f"{file}, {said}")
    assert "\n" not in str(why)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**OWN, "id": "b", "visible": []}, "line 2: it has no visible test."),
        (
            {**OWN, "id": "b", "question": "Another.", "inputs": [["text"]]},
            "line 2: the reference of 'b' fails its tests (TypeError",
        ),
        (
            {**OWN, "id": "b", "question": "Another.", "check": "def valid(:"},
            "line 2: the check of 'b' does not accept the input of test 1 (SyntaxError",
        ),
        (
            {**OWN, "id": "b", "question": "Another.", "check": "def valid(numbers):\n    return len(numbers) < 3"},
            "line 2: the check of 'b' does not accept the input of test 3 (valid returns False)",
        ),
        (DEEP, "line 2: its data is nested too deeply."),
    ],
)
def test_unusable_problems_are_refused_or_left_out(tmp_path: Path, row: Any, said: str) -> None:
    folder = write_rows(tmp_path, OWN, row)
    with opened(folder) as task, pytest.raises(ConfigurationError) as told:
        list(task.problems("train"))
    assert told.value.message.startswith(f"{folder / 'train.jsonl'}, {said}")
    assert "task.unusable" in told.value.remedy
    with opened(folder, unusable="skip") as task:
        assert [problem.id for problem in task.problems("train")] == ["add-up"]


@pytest.mark.parametrize("packed", [False, True])
def test_large_integers_stay_exact(tmp_path: Path, packed: bool) -> None:
    large: Any = {"fn_name": "double", "inputs": [[1], [2**70]], "outputs": [[2], [2**71]]}
    row = {**APPS_CALL, "input_output": json.dumps(large) if packed else large}
    (entry,) = read_entries(write_rows(tmp_path, row) / "train.jsonl", 1)
    assert isinstance(entry, CodeEntry)
    assert [(test.case, test.output) for test in entry.code.hidden] == [(f"[{2**70}]", 2**71)]
