"""The data task: each grader, each kind of file, and every way in which a file can be wrong."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).parents[1] / "game"))
from tiny_chat import chatting

from pvg.config.rollout import ChatPrompts
from pvg.config.task import DataTask
from pvg.errors import ConfigurationError
from pvg.game.roles import prompt_renderer
from pvg.records import Problem, Role, Wording
from pvg.tasks import open_task
from pvg.tasks.data import grader_of
from pvg.tasks.expressions import value_of
from pvg.tasks.task import WORDINGS

REGEX = {"pattern": "Color: ([a-z ]+)", "form": "End with a line 'Color: ' followed by the color."}


def section(grader: str = "number", **more: Any) -> DataTask:
    return DataTask(grader=grader, **(REGEX if grader == "regex" else {}), **more)  # type: ignore[arg-type]


def lines(*rows: tuple[Any, Any]) -> str:
    return "".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows)


def read(path: Path, split: str = "train", **more: Any) -> list[Problem]:
    return list(open_task(section(path=path, **more)).problems(split))  # type: ignore[arg-type]


# --- graders ----------------------------------------------------------------------------------------------------------

RIGHT, WRONG, UNREADABLE = (True, True), (False, True), (False, False)


@pytest.mark.parametrize(
    ("grader", "answer", "completion", "expected"),
    [
        ("exact", "Ada Lovelace", "She wrote it.\n<answer>Ada Lovelace</answer>", RIGHT),
        ("exact", "Ada Lovelace", "<answer> Ada\n Lovelace </answer> That is all.", RIGHT),
        ("exact", "Ada Lovelace", "It was\nAda Lovelace", RIGHT),
        ("exact", "caf\u00e9", "<answer>cafe\u0301</answer>", RIGHT),
        ("exact", "Ada Lovelace", "<answer>Ada Lovelac</answer>", WRONG),
        ("exact", "Ada Lovelace", "<answer>ada lovelace</answer>", WRONG),
        ("exact", "Ada Lovelace", "<answer>Ada Lovelace or Babbage</answer>", WRONG),
        ("exact", "Ada Lovelace", "<answer>Ada Lovelace</answer> no: <answer>Babbage</answer>", WRONG),
        ("exact", "Ada Lovelace", "<answer></answer>", UNREADABLE),
        ("exact", "Ada Lovelace", " \n", UNREADABLE),
        ("number", "1,080", "48 + 2\n#### $1,080.00 in all", RIGHT),
        ("number", "she had 10 * 2 = 20\n#### 20", "#### 20", RIGHT),
        ("number", "0.1", "#### 1/10", RIGHT),
        ("number", "1,080", "#### 1081", WRONG),
        ("number", "1,080", "#### 1080 or 1081", UNREADABLE),
        ("number", "1,080", "I do not know", UNREADABLE),
        ("choice", "B", "So it is the second.\nAnswer: B", RIGHT),
        ("choice", "(b)", "Answer: (B)", RIGHT),
        ("choice", "B", "**Answer:** **B**", RIGHT),
        ("choice", "B", "The answer is b.", RIGHT),
        ("choice", "B", "Answer: B) the dog", RIGHT),
        ("choice", "B", "Final answer: \\boxed{B}", RIGHT),
        ("choice", "B", "I think so.\n(B)", RIGHT),
        ("choice", "B", "Answer: Option B", RIGHT),
        ("choice", "B", "Answer:\nB", RIGHT),
        ("choice", "B", "**Answer:**\r\n\r\n**B) 11**\nThat is all.", RIGHT),
        ("choice", "B", "**Answer:**\nThe answer is B", RIGHT),
        ("choice", "B", "Answer: B (11)", RIGHT),
        ("choice", "B", "Answer: B - 11", RIGHT),
        ("choice", "B", "Answer: $\\boxed{\\text{B}}$", RIGHT),
        ("choice", "B", "So it is\n$\\boxed{\\text{B}}$", RIGHT),
        ("choice", "B", "Answer: \\(B\\)", RIGHT),
        ("choice", "D", "Answer: D) Both A and B", RIGHT),
        ("choice", "D", "Answer: (D) Both (A) and (B)", RIGHT),
        ("choice", "C", "Answer: C) Vitamins A and D", RIGHT),
        ("choice", "B", "Answer: B) Washington, D.C.", RIGHT),
        ("choice", "A", "Answer: A. 3/E", RIGHT),
        ("choice", "A", "Answer: A) P(B) = 0.5", RIGHT),
        ("choice", "B", "Answer: B) Hepatitis A. It spreads fast.", RIGHT),
        ("choice", "A", "Answer: A) 9 B) 11", UNREADABLE),
        ("choice", "A", "Answer: (A) 9, (B) 11", UNREADABLE),
        ("choice", "A", "Answer: A. 9 B. 11", UNREADABLE),
        ("choice", "A", "Answer: A. 9, C. 14", UNREADABLE),
        ("choice", "A", "Answer:\nA) 9\nB) 11", UNREADABLE),
        ("choice", "A", "Answer: A, B", UNREADABLE),
        ("choice", "A", "Answer: A - B", UNREADABLE),
        ("choice", "A", "Answer: A (B)", UNREADABLE),
        ("choice", "A", "Answer: A) the dog or C", UNREADABLE),
        ("choice", "A", "Answer:", UNREADABLE),
        ("choice", "A", "Answer: A) 9 and C) 11", UNREADABLE),
        ("choice", "A", "Answer: A. 9 & C. 11", UNREADABLE),
        ("choice", "A", "Answer: (A) 9 and (C) 11", UNREADABLE),
        ("choice", "A", "Answer: A: 1 and D: 2", UNREADABLE),
        ("choice", "B", "Answer: B) none, so C or D", UNREADABLE),
        ("choice", "A", "Answer: A) Both A or B, D", UNREADABLE),
        ("choice", "C", "Answer: C. All of A, or D", UNREADABLE),
        ("choice", "D", "Answer: D) All of A, B and C", RIGHT),
        ("choice", "C", "Answer: C. Vitamin D.", RIGHT),
        ("choice", "A", "Answer: A. Hepatitis B.", RIGHT),
        ("choice", "B", "Answer: B\nNo, wait.\nAnswer: C", WRONG),
        ("choice", "B", "Answer: B \u2014 C is too small", RIGHT),
        ("choice", "B", "The answer to question A is B", RIGHT),
        ("choice", "B", "The answer is B and not C.", RIGHT),
        ("choice", "B", "Answer: B rather than C", RIGHT),
        ("choice", "B", "Answer: B</s>", RIGHT),
        ("choice", "B", "The answer is B. No, it is C.", UNREADABLE),
        ("choice", "B", "Answer: B\nWait, that is wrong.", UNREADABLE),
        ("choice", "B", "Answer: B, or maybe C", UNREADABLE),
        ("choice", "B", "Answer: B, C", UNREADABLE),
        ("choice", "B", "Answer: B, C is also right", UNREADABLE),
        ("choice", "A", "Answer: a dog", UNREADABLE),
        ("choice", "B", "Answer: B or C", UNREADABLE),
        ("choice", "B", "Answer: B) or C)", UNREADABLE),
        ("choice", "B", "Answer: K", UNREADABLE),
        ("choice", "B", "Answer: Bees", UNREADABLE),
        ("choice", "B", "I do not know", UNREADABLE),
        ("choice", "C", "The answer is A. No, the answer is C.", RIGHT),
        ("choice", "D", "Answer: A. On second thought, Answer: D", RIGHT),
        ("choice", "B", "Answer: B, because C is too small", RIGHT),
        ("choice", "B", "Answer: B since it is larger than C", RIGHT),
        ("choice", "B", "Answer: B\nThe answer is clear.", RIGHT),
        ("choice", "A", "Answer: A) 9 C) 14", UNREADABLE),
        ("choice", "A", "Answer: A. 9 C. 14", UNREADABLE),
        ("choice", "A", "The answer isn't A.", UNREADABLE),
        ("choice", "A", "Answer: A\nThe answer is not A.", UNREADABLE),
        ("choice", "A", "The answer is A? No, C.", UNREADABLE),
        ("choice", "A", "Answer: A. B.", UNREADABLE),
        ("choice", "A", "Answer: A) B)", UNREADABLE),
        ("choice", "A", "Answer: [A] [B]", UNREADABLE),
        ("choice", "A", "Answer: A; B", UNREADABLE),
        ("choice", "A", "Answer: A:B", UNREADABLE),
        ("choice", "A", "Answer: a) b) c)", UNREADABLE),
        ("choice", "A", "Answer: A) yes | B", UNREADABLE),
        ("choice", "A", "Answer: A. I mean B.", UNREADABLE),
        ("choice", "A", "Answer: A, no", UNREADABLE),
        ("choice", "A", "Answer: A. Or B.", UNREADABLE),
        ("choice", "A", "Answer: A) yes. B.", UNREADABLE),
        ("choice", "A", "Answer: A.B.", UNREADABLE),
        ("choice", "A", "Answer: A! B", UNREADABLE),
        ("choice", "A", "Answer: {A, B}", UNREADABLE),
        ("choice", "A", "Answer\uff1aA\u3002B\u3002", UNREADABLE),
        ("choice", "A", "Answer: \uff21 or \uff22", UNREADABLE),
        ("choice", "A", "Answer: ~~A~~", UNREADABLE),
        ("choice", "A", "A!\nA or B!", UNREADABLE),
        ("choice", "E", "Answer: e.g. a dog", UNREADABLE),
        ("choice", "I", "Answer: i.e. the second", UNREADABLE),
        ("choice", "D", "Answer: D.C.", UNREADABLE),
        ("choice", "D", "Answer: d.h. ein Hund", UNREADABLE),
        ("choice", "B", "Answer: B!", RIGHT),
        ("choice", "B", "The answer is B!", RIGHT),
        ("choice", "B", "Answer: B\u3002", RIGHT),
        ("choice", "B", "Answer\uff1aB", RIGHT),
        ("choice", "B", "Answer: \uff22", RIGHT),
        ("choice", "B", "Answer: B\u200b", RIGHT),
        ("choice", "B", "Answer: {B}", RIGHT),
        ("choice", "B", "Answer: B. I am sure.", RIGHT),
        ("choice", "B", "Answer: B, I think", RIGHT),
        ("choice", "B", "Answer: B) A dog", RIGHT),
        ("choice", "B", "Answer: B - no change", RIGHT),
        ("choice", "B", "Answer: ~~A~~ B", RIGHT),
        ("choice", "B", "So it is\nB!", RIGHT),
        ("choice", "A", "Answer: A) B cells", RIGHT),
        ("choice", "A", "Answer: A) No", RIGHT),
        ("choice", "A", "Answer: A) P(x | B)", RIGHT),
        ("choice", "A", "Answer: A. It is true. I checked.", RIGHT),
        ("choice", "C", "Answer: C) E. coli", RIGHT),
        ("choice", "D", "Answer: D) A and B", RIGHT),
        ("choice", "A", "Answer: A) I", RIGHT),
        ("choice", "A", "Answer: A) I only", RIGHT),
        ("regex", "dark red", "It is like blood.\nColor: dark  red", RIGHT),
        ("regex", "dark red", "Color: red", WRONG),
        ("regex", "dark red", "Color: dark red\nColor: blue", WRONG),
        ("regex", "dark red", "dark red", UNREADABLE),
        ("regex", "dark red", "Color: dark red\n" + "\n \n" * 2000, RIGHT),
        ("regex", "dark red", "Reason. " * 50 + "Color: dark red", RIGHT),
        ("regex", "dark red", "Color: dark red\n" + "y" * 2100, RIGHT),
        ("regex", "dark red", "Color: dark red\n" + "more\n" * 9, RIGHT),
        ("regex", "dark red", "Color: dark red\n" + "more\n" * 10, UNREADABLE),
        ("regex", "dark red", "Color: dark red." + "y" * 200, UNREADABLE),
        ("expression", "10.5", "<answer>3 * (4 - 1/2)</answer>", RIGHT),
        ("expression", "2^3", "<answer>8.0</answer>", RIGHT),
        ("expression", "1/3", "<answer>2 ÷ 6</answer>", RIGHT),
        ("expression", "1/3", "<answer>0.333333333333</answer>", WRONG),
        ("expression", "0.3", "<answer>0.1 + 0.2</answer>", RIGHT),
        ("expression", "8", "<answer>2 + 3</answer>", WRONG),
        ("expression", "8", "<answer>2 +</answer>", UNREADABLE),
        ("expression", "8", "<answer>__import__('os')</answer>", UNREADABLE),
        ("expression", "8", "<answer>8 if 1 else 2</answer>", UNREADABLE),
    ],
)
def test_grades(grader: str, answer: str, completion: str, expected: tuple[bool, bool]) -> None:
    opened = grader_of(section(grader))
    grade = opened.grade(opened.reference(answer), completion)
    assert (grade.correct, grade.well_formed) == expected


@pytest.mark.parametrize("grader", ["exact", "number", "choice", "expression"])
def test_the_example_of_the_prompt_is_graded_as_the_role_wants(grader: str) -> None:
    opened = grader_of(section(grader))
    wording = opened.wording if isinstance(opened.wording, Wording) else WORDINGS[opened.wording]
    reference = opened.reference("B" if grader == "choice" else "11")
    assert opened.grade(reference, wording.answers[Role.HELPFUL]).correct
    wrong = opened.grade(reference, wording.answers[Role.SNEAKY])
    assert wrong.well_formed
    assert not wrong.correct


@given(st.text(max_size=300), st.sampled_from(["exact", "number", "choice", "regex", "expression"]))
@settings(deadline=None)
def test_no_text_makes_a_grader_raise(text: str, grader: str) -> None:
    opened = grader_of(section(grader))
    reference = opened.reference("B" if grader == "choice" else "11")
    for completion in (text, f"Answer: {text}", f"<answer>{text}", f"#### {text}", f"Color: {text}"):
        grade = opened.grade(reference, completion)
        assert grade.well_formed or not grade.correct


def test_a_grader_survives_hostile_lengths() -> None:
    texts = ["<answer>" * 10**5, "Answer: " * 10**5, "(" * 10**6, "Color: a" * 10**5, "Color: a\n" * 10**5]
    for grader in ("exact", "choice", "regex", "expression"):
        opened = grader_of(section(grader))
        reference = opened.reference("B" if grader == "choice" else "11")
        for text in texts:
            assert not opened.grade(reference, text).correct


# --- expressions ------------------------------------------------------------------------------------------------------

numbers = st.fractions(max_denominator=50).map(lambda value: (f"({value})", value))


@pytest.mark.slow
@given(
    st.recursive(
        numbers,
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda each: (
                f"({each[0][0]} {each[1]} {each[2][0]})",
                {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__}[each[1]](each[0][1], each[2][1]),
            )
        ),
        max_leaves=6,
    )
)
def test_an_expression_has_the_value_of_fractions(expression: tuple[str, Fraction]) -> None:
    text, value = expression
    assert value_of(text) == (value if len(text) <= 300 else None)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9", "9^9^9^9", "2**100000", "(1/3)**999999", "1" * 301, "9" * 290 + "**200", "(" * 150 + "1" + ")" * 149,
        "-" * 300, "1/0", "0**-1", "2**0.5", "5 (3)", "()", "7//2", "0x10", "1_000", "1e9", "1j", "x", "True", "1,2",
        "1 2", "", " ", "1;2", "1=1", "\0", "²", "٣",
    ],
)  # fmt: skip
def test_what_has_no_value(text: str) -> None:
    assert value_of(text) is None


# --- settings ---------------------------------------------------------------------------------------------------------


# --- files ------------------------------------------------------------------------------------------------------------

ROWS = [(f"What is {number} + {number}?", 2 * number) for number in range(40)]


def write_parquet(file: Path, **columns: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), file)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path, kind: str) -> None:
    (tmp_path / "all.jsonl").write_text(lines(*ROWS))
    expected = read(tmp_path / "all.jsonl")
    file = tmp_path / f"problems.{kind}"
    if kind == "parquet":
        write_parquet(file, asked=[row[0] for row in ROWS], right=[row[1] for row in ROWS], other=[[1]] * len(ROWS))
    elif kind == "csv":
        text = "asked,other,right\r\n" + "".join(f'"{question}",x,{answer}\r\n' for question, answer in ROWS)
        file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    else:
        file.write_text("".join(json.dumps({"asked": row[0], "right": row[1]}) + "\r\n\r\n" for row in ROWS))
    task = open_task(section(path=file, question="asked", answer="right"))
    assert list(task.problems("train")) == expected
    assert {problem.question for problem in expected} | {problem.question for problem in task.problems("test")} == {
        row[0] for row in ROWS
    }


def test_the_held_out_share_does_not_change_with_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(lines(*ROWS))
    task = open_task(section(path=file))
    assert "a tenth" in task.note  # type: ignore[attr-defined]
    before = {problem.id for problem in task.problems("test")}
    by_hand = [row for row in ROWS if int(hashlib.sha256(row[0].encode()).hexdigest()[-8:], 16) % 10 == 0]
    assert [problem.question for problem in task.problems("test")] == [row[0] for row in by_hand]
    file.write_text(lines(*reversed(ROWS), *((f"And {n}?", n) for n in range(100))))
    assert before < {problem.id for problem in read(file, "test")}


@pytest.mark.parametrize(
    ("kind", "written", "reference"),
    [
        (pyarrow.float16(), [0.2, 1000.5, -0.0], ["0.2", "1000.5", "-0.0"]),
        (pyarrow.float32(), [0.2, 1e-7, 16777215.0], ["0.2", "0.0000001", "16777215.0"]),
        (pyarrow.float64(), [0.1, 7.0, 1e-7], ["0.1", "7.0", "0.0000001"]),
        (pyarrow.decimal128(5, 2), [Decimal("5.00"), Decimal("-0.10")], ["5.00", "-0.10"]),
        (pyarrow.decimal256(40, 1), [Decimal("1234567890123456789012345.5")], ["1234567890123456789012345.5"]),
        (pyarrow.int64(), [2**53 + 1, -7], ["9007199254740993", "-7"]),
        (pyarrow.uint64(), [2**64 - 1], ["18446744073709551615"]),
        (pyarrow.large_string(), ["1.50"], ["1.50"]),
        ("json", ["0.10", "1e22", "36893488147419103233", "5.00", "1e-7"],
         ["0.10", "10000000000000000000000", "36893488147419103233", "5.00", "0.0000001"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoded", [False, True])
def test_a_number_has_the_digits_of_the_file(
    tmp_path: Path, kind: Any, written: list[Any], reference: list[str], encoded: bool
) -> None:
    questions = [f"q{number}?" for number in range(len(written))]
    others = [f"o{number}?" for number in range(40)]
    if kind == "json":
        rows = [
            f'{{"question": "{question}", "answer": {text}}}' for question, text in zip(questions, written, strict=True)
        ]
        file = tmp_path / "a.jsonl"
        file.write_text("\n".join([*rows, lines(*((question, 1) for question in others))]))
    else:
        narrow = kind.to_pandas_dtype() if pyarrow.types.is_floating(kind) else (lambda value: value)
        column = pyarrow.array([narrow(value) for value in [*written, *written[:1] * 40]], kind)
        column = column.dictionary_encode() if encoded else column
        file = write_parquet(tmp_path / "a.parquet", question=[*questions, *others], answer=column)
    task = open_task(section(path=file, grader="exact"))
    found = {problem.question: problem.answer for split in ("train", "test") for problem in task.problems(split)}  # type: ignore[arg-type]
    assert [found[question] for question in questions] == reference


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        (np.float16, 2049, "may have lost digits"),
        (np.float32, 16777217, "may have lost digits"),
        (np.float64, 2.0**53, "may have lost digits"),
        (np.float32, np.inf, "may have lost digits"),
        (np.float64, np.nan, "is empty"),
        (bool, True, "is true, not a text"),
        ("datetime64[s]", "2020-01-01", "is of type datetime"),
    ],
)
def test_a_column_of_unsure_numbers_is_refused(tmp_path: Path, kind: Any, value: Any, complaint: str) -> None:
    file = write_parquet(tmp_path / "a.parquet", question=["a?"], answer=np.array([value], dtype=kind))
    with pytest.raises(ConfigurationError, match=f"row 1: the column 'answer' .*{complaint}"):
        read(file)


def test_a_csv_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    rows = "".join(f"q{number}?,{number},{'x' * 200_000 if number == 3 else ''},,\r\n" for number in range(40))
    (tmp_path / "a.csv").write_bytes(
        b"\xef\xbb\xbf\r\n,,,,\r\nquestion,answer,context,,\r\n" + f"{rows},,,,\r\n".encode()
    )
    task = open_task(section(path=tmp_path / "a.csv"))
    assert len([*task.problems("train"), *task.problems("test")]) == 40


def test_train_and_test_come_from_one_folder(tmp_path: Path) -> None:
    def write(name: str, question: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_parquet(tmp_path / name, question=[question], answer=["1"])

    write("main/train-00000-of-00001.parquet", "main?")
    write("data/test-00000-of-00001.parquet", "data test?")
    with pytest.raises(ConfigurationError, match=r"different folders, .*main/train.*, .*data/test"):
        read(tmp_path)
    write("data/train-00000-of-00001-0123abcd.parquet", "data?")
    write("data/train-hard.parquet", "hard?")
    task = open_task(section(path=tmp_path))
    assert [problem.question for problem in task.problems("train")] == ["data?"]
    assert re.search("pvg reads .*data, and not .*main", task.note)  # type: ignore[attr-defined]
    (tmp_path / "data/test-00000-of-00001.parquet").unlink()
    (tmp_path / "main/train-00000-of-00001.parquet").unlink()
    with pytest.raises(ConfigurationError, match="has 1 problem"):
        read(tmp_path)
    write("train.parquet", "root?")
    with pytest.raises(ConfigurationError, match="different folders"):
        read(tmp_path)


HUGE = json.dumps({"question": "x" * 200_000, "answer": "1"})


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b"", "has no rows"),
        ("a.csv", b"", "has no rows"),
        ("a.jsonl", b"\n \n", "has no rows"),
        ("a.csv", b"question,answer\n", "has no rows"),
        ("a.jsonl", b"not json\n", "line 1: not valid JSON"),
        ("a.jsonl", b"[1]\n", "line 1: not a JSON object"),
        ("a.jsonl", b'{"question": "\xff", "answer": "1"}\n', "line 1: not UTF-8 \\(byte 15 of the line\\)"),
        ("a.csv", b"question,answer\nok?,1\n\xff,1\n", "line 3: not UTF-8"),
        ("a.csv", "question,answer\na?,1\n".encode("utf-16"), "line 1: not UTF-8 but UTF-16"),
        ("a.jsonl", lines(("a?", 1)).encode("utf-16"), "line 1: not UTF-8 but UTF-16"),
        ("a.csv", b"question,answer\na?,1,2\n", "line 2: 3 fields, and line 1 names 2 columns"),
        ("a.csv", b"question,question\na?,1\n", "line 1: two columns have the same name"),
        ("a.csv", b'question,answer\n"a?,1\n', "line 2: not valid CSV"),
        ("a.csv", b"question,answer\n" + b"x" * 200_000 + b",1\n", "line 2: the question has 200,000 characters"),
        ("a.csv", b"question,answer\na?\n", "line 2: 1 field, .* write a comma for each empty field"),
        ("a.csv", b"question;answer, short\na?;1\n", "line 1: .* Separate the columns by commas instead of ';'"),
        ("a.csv", b"question,text\na?,1\n", r"no column 'answer', but: question, text\. .* -s task\.answer=NAME"),
        ("a.jsonl", lines(("a?", 1)).encode() + b'{"question": "b?"}\n', "line 2: .* Correct the row, or name"),
        ("a.csv", b"q,a\na?,1\n", r"'question' or 'answer', but: q, a\. .* -s task\.question=NAME -s task\.ans"),
        ("a.csv", b"question;answer\na?;1\n", "line 1: .* Separate the columns by commas instead of ';'"),
        ("a.jsonl", b'{"question": "a?"}\n', "line 1: there is no column 'answer'"),
        ("a.jsonl", b'{"question": "a?", "answer": null}\n', "column 'answer' is empty"),
        ("a.jsonl", b'{"question": "a?", "answer": " "}\n', "column 'answer' is empty"),
        ("a.jsonl", b'{"question": "a?", "answer": true}\n', "column 'answer' is true, not a text"),
        ("a.jsonl", b'{"question": "a?", "answer": [1]}\n', "column 'answer' is of type list"),
        ("a.jsonl", b'{"question": "a?", "answer": {"b": 1}}\n', "column 'answer' is of type dict"),
        ("a.jsonl", b'{"question": 3, "answer": 1}\n', "column 'question' is of type int"),
        ("a.jsonl", b'{"question": "a\\u0000?", "answer": 1}\n', "contains a NUL character"),
        ("a.csv", b"question,answer\na\0?,1\n", "contains a NUL character"),
        ("a.jsonl", b'{"question": "a?", "answer": 1, "answer": 2}\n', "line 1: it has the key 'answer' twice"),
        ("a.jsonl", b'{"answer": 1, "\\u0061nswer": 2}\n', "line 1: it has the key 'answer' twice"),
        ("a.jsonl", b'{"answer": 1, "a": [{"b": 1, "b": 2}]}\n', "line 1: it has the key 'b' twice"),
        ("a.jsonl", b'{"a": 1e-99999999999999999999}\n', "line 1: a number in it is too large or too small"),
        ("a.jsonl", b'{"a": [0e9999999999999999999]}\n', "line 1: a number in it is too large or too small"),
        ("a.jsonl", b'{"a": ' + b"[" * 1000 + b"]" * 1000 + b"}\n", "line 1: it is nested too deeply"),
        ("a.jsonl", HUGE.encode(), "the question has 200,000 characters"),
        ("a.jsonl", b'{"question": "a?", "answer": "many"}\n', "line 1: the answer 'many' is not a number"),
        ("a.jsonl", lines(("a?", 1), ("a?", 2)).encode(), "line 2: repeats the question of .* with another answer"),
        ("a.jsonl", lines(("a?", 1), ("a?", "1.0")).encode(), "has 1 problem, too few to hold out"),
        ("a.parquet", b"PAR1 no more", "not valid parquet"),
        ("a.txt", b"question", "not a kind of file that pvg reads"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_explained_in_one_line(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=complaint) as raised:
        read(tmp_path / name)
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)


def test_prompts_say_how_to_write_the_answer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(*ROWS))
    tokenizer = chatting()
    render = prompt_renderer(ChatPrompts(), tokenizer)
    for grader, form in (("number", "####"), ("exact", "<answer>"), ("expression", "<answer>"), ("regex", "Color: ")):
        problem = read(tmp_path / "a.jsonl", grader=grader)[0]
        for role in Role:
            assert form in tokenizer.decode(render(problem, role))
