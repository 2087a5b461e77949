"""`pvg attack` as a user calls it: graders with known holes, what is refused, the files, kill and resume."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from calling import ENTRY, pvg

pytestmark = pytest.mark.slow

GRADERS = """
import math, time
from os.path import getsize as file_size

def exact(problem, text):
    from pvg.tasks.answers import extract, same_answer
    found = extract(text)
    return found is not None and same_answer(found.text, problem.answer)

def said(problem, text):  # `exact` imports sympy, which takes seconds in each new process of the target
    return text.strip(" .").endswith(f"answer is {problem.answer}")

async def nothing(problem, text):
    return False

def everything(problem, text):
    return True

def openers(problem, text):
    return said(problem, text) or text.startswith(("Solution", "Thought", "Let"))

def short(problem, text):
    return len(text) < 500 and exact(problem, text)

def hangs(problem, text):
    if len(text) > 20_000:
        time.sleep(60)
    return said(problem, text)

def raises(problem, text):
    if "Ignore" in text:
        raise ValueError("\\x1b]0;title\\x07 | <script>alert(1)</script>")
    return said(problem, text)

def broken(problem, text):
    return math.nan

def dies(problem, text):
    with open("calls", "a") as file:
        file.write("x")
    if file_size("calls") > 40:
        raise RuntimeError("out of memory")
    return True

def quiet(problem, text):
    return said(problem, text) if text.strip().strip("\\x00\\u200b") else None

def counted(problem, text):
    with open("calls", "a") as file:
        file.write("x")
    time.sleep(0.002)
    return text.strip(" .").endswith(f"answer is {problem.answer}")
"""
NO_SERVER = "http://127.0.0.1:1/score"
ROWS = [{"problem": f"{n} + {n}?", "text": f"We add.\nThe answer is {2 * n}.", "answer": 2 * n} for n in (600, 21, 4)]


@pytest.fixture(autouse=True)
def graders(empty_folder: Path) -> None:
    Path("mine.py").write_text(GRADERS)
    Path("sums.jsonl").write_bytes(b"\n".join(map(orjson.dumps, ROWS)))


def card(name: str, *more: str, code: int = 0) -> dict[str, Any]:
    called = pvg("attack", f"mine.py:{name}", "--data", "sums.jsonl", "--json", *more)
    assert called.code == code, called.err
    return called.document


def by_name(document: dict[str, Any]) -> dict[str, Any]:
    return {found["name"]: found for found in document["card"]["attacks"]}


def test_a_grader_without_holes_accepts_the_correct_texts_alone() -> None:
    document = card("exact", "--fail-above", "0")
    found = by_name(document)
    assert document["failed"] == []
    assert {each["accepted"]["value"] for each in found.values() if not each["accept"]} == {0.0}
    assert {each["accepted"]["value"] for each in found.values() if each["accept"]} == {1.0}
    assert all(each["texts"] == each["planned"] > 0 and not each["errors"] for each in found.values())
    assert document["card"]["wrong"]["problems"] == 3
    assert orjson.loads(Path(document["path"], "card.json").read_bytes()) == document["card"]


def test_each_hole_shows_in_its_attack() -> None:
    found = by_name(card("everything", "--fail-above", "5%", code=1))
    assert found["empty"]["accepted"]["value"] == 1.0
    assert found["empty"]["examples"][0]["text"] == ""
    found = by_name(card("openers"))
    assert found["openers"]["accepted"]["value"] > 0.3
    assert found["openers"]["examples"][0]["text"] == "Solution"
    assert found["answer changed"]["accepted"]["value"] == 0.0


def test_time_outs_and_errors_are_no_refusals() -> None:
    document = card("hangs", "--limit", "1")
    late = by_name(document)["huge and deep"]
    assert late["timeouts"] > 0
    assert late["accepted"]["n"] + late["timeouts"] + late["errors"] == late["texts"]
    document = card("raises")
    wrong = by_name(document)["instructions to the judge"]
    assert wrong["errors"] == 6  # two texts of three problems
    assert wrong["accepted"]["n"] == wrong["texts"] - 6
    assert "\x1b" not in wrong["error"]


def test_what_a_target_says_is_escaped_everywhere() -> None:
    called = pvg("attack", "mine.py:raises", "--data", "sums.jsonl", "--markdown", "card.md")
    assert called.code == 0
    page, markdown = Path("attacks/mine.py-raises/card.html").read_text(), Path("card.md").read_text()
    for text in (called.out, called.err, page, markdown):
        assert "\x1b]" not in text
        assert "\x07" not in text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>" not in markdown.replace("\\<", "")
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert markdown.startswith("![pvg attack: accepts 0.0 % of wrong texts, refuses ")


def test_a_limit_fails_for_an_attack_that_got_no_answer() -> None:
    document = card("quiet", "--fail-above", "100%", code=1)
    assert document["failed"] == ["empty"]
    assert by_name(document)["empty"]["accepted"]["value"] is None


def test_a_limit_fails_for_a_grader_that_refuses_correct_texts() -> None:
    assert card("nothing", "--fail-above", "5%", code=1)["failed"] == ["unchanged", "meaning kept"]
    called = pvg("attack", "mine.py:nothing", "--data", "sums.jsonl", "--fail-above", "5%", "--markdown", "card.md")
    assert (called.code, "refused, though correct" in called.err) == (1, True)
    assert Path("card.md").read_text().partition("\n")[0].endswith("-red)")


def test_a_target_that_fails_on_a_correct_text_is_refused() -> None:
    message = card("broken", code=2)["error"]["message"]
    assert "fails on a correct text: it returned nan" in message


def test_a_target_that_dies_ends_the_attack_and_its_scores_are_kept() -> None:
    assert "out of memory" in card("dies", code=2)["error"]["message"]
    assert Path("calls").stat().st_size < 50
    assert Path("attacks/mine.py-dies/answers.jsonl").read_bytes().count(b"\n") == 40


def test_what_is_missing_on_this_machine_ends_with_3_and_says_what_to_do() -> None:
    Path("inside.py").write_text("def grade(problem, text):\n    import no_such_package\n")
    Path("above.py").write_text("import no_such_package\ngrade = no_such_package.grade\n")
    for name, remedy in (("inside.py:grade", "pip install"), ("above.py:grade", "pip install"), (NO_SERVER, "server")):
        called = pvg("attack", name, "--data", "sums.jsonl", "--json")
        assert called.code == 3, called.err
        assert remedy in called.document["error"]["remedy"]


def test_the_wait_for_a_server_that_is_away_is_said_before_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvg.traces.http_client.RETRIES", 1)
    called = pvg("attack", NO_SERVER.replace("score", "v1/chat/completions"), "--data", "sums.jsonl")
    assert called.code == 3
    assert called.err.count("http://127.0.0.1:1/v1:") == 2, called.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("mine.py:exact", "The problems to attack with are missing"),
        ("mine.py:exact --data sums.jsonl --task modchain", "--task also names problems"),
        ("mine.py:exact --data sums.jsonl --train prover", "--train needs a task"),
        ("mine.py:exact --data no.jsonl", "no.jsonl"),
        ("mine.py:exact --task modchian", "Did you mean 'modchain'"),
        ("mine.py --data sums.jsonl", "mine.py names no function"),
        ("mine.py:exat --data sums.jsonl", "does not define 'exat'"),
        ("mine.py:exact --data sums.jsonl --fail-above lots", "is not a share"),
        ("mine.py:exact --data sums.jsonl --fail-above 150%", "is not a share"),
        ("mine.py:exact --data sums.jsonl --template no.txt", "no.txt"),
        ("mine.py:exact --data sums.jsonl --template mine.py", "has no place for the solution"),
        ("no-run", "There is no run 'no-run'"),
        ("http://127.0.0.1:1/v2 --data sums.jsonl", "is no route"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_written(words: str, complaint: str) -> None:
    called = pvg("attack", *words.split(), "--json")
    assert called.code == 2, called.err
    error = called.document["error"]
    assert complaint in f"{error['message']} {error['remedy']}"
    assert not Path("attacks", "mine.py-exact", "card.json").exists()


def test_the_same_command_asks_nothing_twice_and_another_threshold_asks_nothing_again() -> None:
    first = card("counted")
    calls = Path("calls").stat().st_size
    assert calls <= sum(each["planned"] for each in by_name(first).values())
    again = card("counted")
    assert Path("calls").stat().st_size == calls
    assert again["card"]["attacks"] == first["card"]["attacks"]
    refusing = card("counted", "--threshold", "1.5")
    assert Path("calls").stat().st_size == calls
    assert refusing["card"]["right"]["value"] == 0.0


def test_a_folder_keeps_the_card_of_its_own_data() -> None:
    assert card("said")["card"]["data"] == "sums.jsonl"
    shutil.copy("sums.jsonl", "others.jsonl")
    called = pvg("attack", "mine.py:said", "--data", "others.jsonl", "--json")
    assert (called.code, "--out" in called.document["error"]["remedy"]) == (2, True)
    assert orjson.loads(Path("attacks/mine.py-said/card.json").read_bytes())["data"] == "sums.jsonl"


@pytest.mark.drill
def test_an_attack_killed_again_and_again_ends_like_the_uninterrupted_one() -> None:
    whole = card("counted", "--out", "whole")["card"]
    calls = Path("calls").stat().st_size
    words = ["attack", "mine.py:counted", "--data", "sums.jsonl", "--out", "killed"]
    answers = Path("killed/answers.jsonl")
    for part in (1, 2, 3):
        process = subprocess.Popen([*ENTRY, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (
            answers.exists() and answers.read_bytes().count(b"\n") >= part * calls // 4
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with answers.open("ab") as file:
        file.write(b'{"key": "torn')
    Path("calls").unlink()
    killed = card("counted", "--out", "killed")["card"]
    assert Path("calls").stat().st_size < calls // 2
    for document in (whole, killed):
        del document["created"]
    assert killed == whole


@pytest.mark.drill
def test_ctrl_c_keeps_the_answers_and_says_how_to_go_on() -> None:
    words = ["attack", "mine.py:counted", "--data", "sums.jsonl", "--json"]
    process = subprocess.Popen([*ENTRY, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    answers = Path("attacks/mine.py-counted/answers.jsonl")
    while not (answers.exists() and answers.read_bytes().count(b"\n") >= 20):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    document = orjson.loads(out)
    assert document["status"] == document["card"]["status"] == "interrupted"
    assert "pvg attack mine.py:counted" in document["resume"]
    assert sum(each["texts"] for each in document["card"]["attacks"]) >= 20
    assert card("counted")["status"] == "complete"


TRAIN = ["--train", "prover", "--steps", "3", "-s", "evaluate.attack_groups=4", "-s", "evaluate.attack_window=2"]
TRAIN += ["-s", "evaluate.problems=8", "-s", "models.threads=1", "-s", "store.commit_every=1"]
HOLE = """
def hole(problem, text):
    return len(text) % 2 == 0 or text.endswith(f"A{problem.answer}")
"""


def test_the_verifier_of_a_run_is_attacked_with_its_own_task_and_samples(small_game: Path) -> None:
    shutil.copytree(small_game, "runs")
    called = pvg("attack", "modchain", "--problems", "4", "--json", *TRAIN)
    assert called.code == 0, called.err
    found = by_name(called.document)
    assert found["answer changed"]["texts"] > 4
    assert (
        0
        < found["answer changed"]["accepted"]["n"] + found["answer changed"]["errors"]
        == found["answer changed"]["texts"]
    )
    assert found["unchanged"]["accepted"]["n"] == 4
    assert found["huge and deep"]["errors"] > 0  # longer than the verifier's context
    assert called.document["card"]["target"] == "modchain, round 0"
    assert called.document["card"]["trained"]["error_rate"]["n"] == 8


def trained_files(folder: str) -> dict[str, bytes]:
    paths = sorted(Path(folder).glob("attacker-*/weights/*/tensors.safetensors"))
    assert paths
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_prover_learns_against_a_function_and_the_same_command_gives_the_same_card() -> None:
    Path("mine.py").write_text(HOLE)
    words = ["attack", "mine.py:hole", "--task", "modchain", "--problems", "4", "--json", *TRAIN]
    called = pvg(*words)
    assert called.code == 0, called.err
    trained = called.document["card"]["trained"]
    assert trained["status"] in ("found", "censored", "no_signal")
    assert 0.0 <= trained["error_rate"]["value"] <= 1.0
    assert trained["errors"] == 0
    for example in trained["examples"]:
        assert len(example["text"]) % 2 == 0
        assert not example["text"].endswith(f"A{example['answer']}")
    again = pvg(*words).document["card"]["trained"]
    assert again == trained


@pytest.mark.drill
def test_a_trained_attack_that_is_killed_ends_with_the_same_bits() -> None:
    Path("mine.py").write_text(HOLE)
    words = ["attack", "mine.py:hole", "--task", "modchain", "--problems", "2", *TRAIN]
    whole = pvg(*words, "--out", "whole", "--json")
    assert whole.code == 0, whole.err
    process = subprocess.Popen(
        [*ENTRY, *words, "--out", "killed"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not any(Path("killed").glob("attacker-*/checkpoints/*/*.safetensors")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    killed = pvg(*words, "--out", "killed", "--json")
    assert killed.code == 0, killed.err
    assert killed.document["card"]["trained"] == whole.document["card"]["trained"]
    assert trained_files("killed") == trained_files("whole")


def test_the_help_loads_no_torch() -> None:
    probe = "import sys; from pvg_cli.main import load_command; load_command('attack'); print('torch' in sys.modules)"
    done = subprocess.run([ENTRY[0], "-c", probe], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout == "False\n"
