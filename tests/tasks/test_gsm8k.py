"""The gsm8k task: the real files where they are, and every way in which a file can be missing or damaged."""

import hashlib
import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from pvg.config.task import Gsm8kTask
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.records import Problem
from pvg.tasks import open_task
from pvg.tasks.answers import parse_number
from pvg.tasks.data import Gsm8k
from pvg.tasks.task import half_of

DATA = Path(os.environ.get("PVG_GSM8K", Path(__file__).parents[3] / "shared" / "data" / "gsm8k"))
real_data = pytest.mark.skipif(
    not (DATA / "train.jsonl").is_file(), reason=f"no GSM8K in {DATA}: `PVG_GSM8K=FOLDER make test`"
)

ROWS = [("How many?", "48/2 = <<48/2=24>>24\n#### 24"), ("What else?", "#### 1,080"), ("And now?", "#### 3/4")]


def line(question, answer):
    return json.dumps({"question": question, "answer": answer})


@pytest.fixture
def write(tmp_path):
    def write_files(*lines):
        (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (tmp_path / "test.jsonl").write_text(line("Test?", "#### 1") + "\n", encoding="utf-8")
        return Gsm8kTask(path=tmp_path)

    return write_files


def test_problems_carry_question_answer_and_solution(write):
    problems = list(open_task(write(*(line(*row) for row in ROWS))).problems("train"))
    assert [problem.question for problem in problems] == ["How many?", "What else?", "And now?"]
    assert [problem.answer for problem in problems] == ["24", "1,080", "3/4"]
    assert problems[0].id == "gsm8k-train-" + hashlib.sha256(b"How many?").hexdigest()[:8]
    assert problems[0].metadata["solution"] == ROWS[0][1]


def test_ids_survive_reordering_and_limit(write):
    forward = {p.question: p.id for p in open_task(write(*(line(*row) for row in ROWS))).problems("train")}
    section = write(*(line(*row) for row in reversed(ROWS)))
    backward = {p.question: p.id for p in open_task(section).problems("train")}
    limited = list(open_task(section.model_copy(update={"limit": 2})).problems("train"))
    assert forward == backward
    assert [p.id for p in limited] == [forward["And now?"], forward["What else?"]]


def test_a_repeated_question_is_one_problem_unless_the_answers_differ(write):
    task = open_task(write(line("Again?", "#### 5"), line("Other?", "#### 6"), line("Again?", "so\n#### 5.0")))
    assert [p.question for p in task.problems("train")] == ["Again?", "Other?"]
    task = open_task(write(line("Again?", "#### 5"), line("Again?", "#### 6")))
    with pytest.raises(ConfigurationError, match=r"line 2: repeats the question of .*line 1 with another answer"):
        list(task.problems("train"))


@pytest.mark.parametrize(
    ("damaged", "complaint"),
    [
        ('{"question": "How', "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"question": "How?"}', r"there is no column 'answer', but: question\. Correct the row\.$"),
        (line("How?", "It is 7"), "does not end in '#### NUMBER'"),
        (line("How?", "#### many"), "does not end in '#### NUMBER'"),
    ],
)
def test_a_damaged_line_is_named(write, damaged, complaint):
    task = open_task(write(line(*ROWS[0]), "", damaged, line(*ROWS[1])).model_copy(update={"limit": 1}))
    with pytest.raises(ConfigurationError, match=rf"train\.jsonl, line 3: .*{complaint}"):
        list(task.problems("train"))


def parquet_of(rows, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = {"question": [row[0] for row in rows], "answer": [row[1] for row in rows]}
    parquet.write_table(pyarrow.table(columns), file)


@pytest.mark.parametrize("folder", ["", "main", "data"])
def test_parquet_gives_the_problems_of_json_lines(write, tmp_path, folder):
    expected = list(open_task(write(*(line(*row) for row in ROWS))).problems("train"))
    place = tmp_path / "parquet" / folder
    parquet_of(ROWS[:2], place / "train-00000-of-00002.parquet")
    parquet_of(ROWS[2:], place / "train-00001-of-00002.parquet")
    parquet_of([("Test?", "#### 1")], place / "test.parquet")
    assert list(open_task(Gsm8kTask(path=tmp_path / "parquet")).problems("train")) == expected
    (place / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(MissingRequirementError, match=r"has 1 of 2 files like train-00001-of-00002\.parquet"):
        open_task(Gsm8kTask(path=tmp_path / "parquet"))


@pytest.mark.parametrize(
    ("completion", "correct", "well_formed", "note"),
    [
        ("She sold 48/2 = 24.\n#### $1,080.00 in all", True, True, ""),
        ("The answer is 1080.", True, True, ""),
        ("#### 1081", False, True, ""),
        ("That makes 1080", True, True, "no answer marker: the last number was taken"),
        ("1080 of 2000", False, True, "no answer marker: the last number was taken"),
        ("I do not know", False, False, "no final answer"),
        ("", False, False, "no final answer"),
        ("#### 1080/0", False, False, "the answer is not one number"),
        ("#### 1080 or 1081", False, False, "the answer is not one number"),
        ("#### 1080\nActually I am wrong, the answer is 6.", False, True, ""),
        ("#### 6\nActually I am wrong, the answer is 1080.", True, True, ""),
        ("#### 1, 080", True, True, ""),
    ],
)
def test_grades(write, completion, correct, well_formed, note):
    grade = open_task(write(line(*ROWS[0]))).grade(Problem("p", "?", "1,080"), completion)
    assert (grade.correct, grade.well_formed, grade.note) == (correct, well_formed, note)


@real_data
def test_every_real_solution_is_right_for_its_problem_and_wrong_for_its_neighbour():
    task = Gsm8k(Gsm8kTask(path=DATA))
    for split, count in (("train", 7473), ("test", 1319)):
        problems = list(task.problems(split))
        assert len({problem.id for problem in problems}) == count
        for number, problem in enumerate(problems):
            assert parse_number(problem.answer) == published(problem)
            own = task.grade(problem, problem.metadata["solution"])
            assert (own.correct, own.note) == (True, ""), problem.id
            if number % 8 == 0:
                neighbour = problems[number - 1]
                # By another way than the grader's: the published answers are integers with commas.
                other = task.grade(problem, neighbour.metadata["solution"])
                assert other.correct == (published(problem) == published(neighbour)), problem.id
    prover = sum(half_of(problem.id) == "prover" for problem in task.problems("train"))
    assert 0.47 < prover / 7473 < 0.53


def published(problem):
    return int(problem.metadata["solution"].rpartition("####")[2].replace(",", ""))


def test_max_steps_keeps_only_problems_with_short_published_solutions(tmp_path):
    solutions = [
        "1+1 = <<1+1=2>>2\n#### 2",
        "1+1 = <<1+1=2>>2\n2+2 = <<2+2=4>>4\n#### 4",
        "Let x be it.\nThen 2x = 6.\nSo x = 3.\n#### 3",  # three lines without any annotation
        "a = <<1+1=2>>2, b = <<2+2=4>>4, c = <<4+4=8>>8\n#### 8",
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(line(f"{split} {i}?", s) for i, s in enumerate(solutions)))
    task = Gsm8k(Gsm8kTask(path=tmp_path, max_steps=2))
    assert [p.question for p in task.problems("train")] == ["train 0?", "train 1?"]
    limited = Gsm8k(Gsm8kTask(path=tmp_path, max_steps=2, limit=1))
    assert [p.question for p in limited.problems("test")] == ["test 0?"]
