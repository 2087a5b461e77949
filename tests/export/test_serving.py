"""`pvg score` and `pvg serve --player verifier` as separate processes, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
from calling import pvg, pvg_serving
from typer.testing import CliRunner

from pvg.api import Run
from pvg.config.base import parse_run_id
from pvg.errors import StateError, UsageError
from pvg.export.reward_server import MOST_BYTES
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import find_player, open_round
from pvg.verifier.scorer import VerifierScorer
from pvg_cli.main import app

pytestmark = pytest.mark.slow

QUESTION = "7+5+8+3+6?"
SOLUTIONS = ["7+5=2;2+8=0;0+3=3;3+6=9;A9", "7+5=2;2+8=0;0+3=4;4+6=0;A0", "A9", ""]


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Run("mine")


@pytest.fixture(scope="module")
def wanted(run: Run) -> list[float]:
    with VerifierScorer.load(run) as scorer:
        return [float(score) for score in scorer.score_texts(QUESTION, SOLUTIONS)]


@pytest.fixture(scope="module")
def url(run: Run) -> Iterator[str]:
    with pvg_serving("serve", "mine", "--player", "verifier", "--port", "0", "--json") as (process, document):
        yield document["url"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Stopped. The run is not affected." in errors
        assert "Traceback" not in errors


def post(address: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address, data=data, headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def rows(*solutions: str) -> dict[str, Any]:
    return {"rows": [{"question": QUESTION, "solution": text} for text in solutions]}


def test_the_score_route_gives_the_scores_of_the_run(url: str, run: Run, wanted: list[float]) -> None:
    status, answer = post(f"{url}/score", rows(*SOLUTIONS))
    assert status == 200
    assert [row["score"] for row in answer["results"]] == wanted
    threshold = run.rounds[-1]["threshold"]
    assert [row["accepted"] for row in answer["results"]] == [score >= threshold for score in wanted]
    with urllib.request.urlopen(f"{url}/health", timeout=60) as health:
        told = json.load(health)
        assert (told["schema_version"], told["threshold"]) == (1, threshold)


def test_the_served_verifier_is_attacked_like_the_run(url: str) -> None:
    words = ("--task", "small.toml", "--problems", "2", "--limit", "60", "--json", "--out")
    served, here = pvg("attack", f"{url}/score", *words, "over-http"), pvg("attack", "mine", *words, "here")
    assert served.code == here.code == 0, served.err + here.err
    first, second = (
        {found["name"]: found["accepted"] for found in called.document["card"]["attacks"]} for called in (served, here)
    )
    for name in ("unchanged", "truncated", "look-alike characters"):
        assert first[name] == second[name], name
    assert first["unchanged"]["n"] == 2


def test_the_reward_route_speaks_openrlhf(url: str, wanted: list[float]) -> None:
    body = {"query": [QUESTION + text for text in SOLUTIONS], "prompts": [QUESTION] * 4, "labels": [""] * 4}
    status, answer = post(f"{url}/get_reward", body)
    assert (status, answer["rewards"]) == (200, wanted)
    assert len(answer["scores"]) == len(answer["extra_logs"]["accepted"]) == 4


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("score", b"{", "Invalid JSON"),
        ("score", {"rows": [{"question": "7?"}]}, "rows.0.solution: Field required"),
        ("score", {"rows": [{"question": "7?", "solution": ""}] * 4097}, "rows: List should have at most 4096 items"),
        ("score", {"rows": [{"question": QUESTION, "solution": "x"}]}, "cannot express 'x'"),
        ("score", {"rows": [{"question": QUESTION, "solution": "1+" * 500}]}, "exceeds the verifier's context"),
        ("get_reward", {"query": ["7?1"], "prompts": []}, '"query" has 1 texts, but "prompts" has 0'),
        ("get_reward", {"query": ["7?1"], "prompts": ["8?"]}, "does not begin with prompts[0]"),
    ],
)
def test_a_wrong_request_gets_a_sentence(url: str, route: str, body: Any, words: str) -> None:
    status, answer = post(f"{url}/{route}", body)
    assert status == 400
    assert words in answer["error"]


def test_what_must_not_reach_the_verifier(url: str) -> None:
    assert post(f"{url}/score", rows("A9"), Origin="http://example.org")[0] == 403
    assert post(f"{url}/score", rows("A9"), Host="example.org")[0] == 403
    assert post(f"{url}/score", b" " * (MOST_BYTES + 1))[0] == 413
    assert post(f"{url}/nothing", rows("A9"))[0] == 404


def test_a_file_is_scored_line_by_line(run: Run, wanted: list[float]) -> None:
    lines = [json.dumps({"question": QUESTION, "solution": text, "id": n}) for n, text in enumerate(SOLUTIONS * 100)]
    Path("rows.jsonl").write_text("\n\n".join(lines))
    called = pvg("score", "mine", "rows.jsonl", "--out", "scores.jsonl", "--json")
    assert called.code == 0, called.err
    found = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
    assert [row["score"] for row in found] == wanted * 100
    assert [row["line"] for row in found] == [*range(1, 801, 2)]
    assert [row["id"] for row in found] == [*range(400)]
    assert called.document["rows"] == 400
    assert called.document["accepted"] == sum(row["accepted"] for row in found)
    again = pvg("score", "mine", "rows.jsonl")
    assert again.out == Path("scores.jsonl").read_text()
    piped = CliRunner().invoke(app, ["score", "mine", "-"], input="\n\n".join(lines))
    assert piped.stdout == again.out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "7?"', "wrong.jsonl, line 2: not valid JSON"),
        ("[1]", "wrong.jsonl, line 2: this is not a JSON object."),
        ('{"question": "7+\udcff"}', "wrong.jsonl, line 2: not UTF-8 (byte 17 of the line)"),
        ('{"question": "7?"}', "wrong.jsonl, line 2: 'solution' is missing."),
        ('{"question": "7?", "solution": "A2", "solution": "A3"}', "line 2: it has the key 'solution' twice."),
        ('{"question": ' + "[" * 900 + "]" * 900 + "}", "wrong.jsonl, line 2: "),
        ('{"question": " ", "solution": "A2"}', "wrong.jsonl, line 2: 'question' is empty."),
        ('{"question": NaN, "solution": "A2"}', "expected a JSON value, at character 14 of the line)"),
        ('{"question": "7?", "solution": "x"}', "wrong.jsonl, line 2: The tokenizer"),
        ('{"question": "7?", "solution": "A2", "id": 330512345678901234567}', "line 2: 'id' is neither a text nor an"),
    ],
)
def test_a_wrong_line_is_named(run: Run, line: str, words: str) -> None:
    text = '{"question": "7+5?", "solution": "A2"}\n' + line + "\n"
    Path("wrong.jsonl").write_text(text, errors="surrogateescape")
    called = pvg("score", "mine", "wrong.jsonl", "--out", "none.jsonl")
    assert called.code == 2
    assert words in called.err
    assert not Path("none.jsonl").exists()
    assert not [*Path().glob(".*none*")]


# Calls pvg with each line of stdin. Says its exit code, its errors, and whether torch is loaded.
WATCHED = """
import json, sys
from typer.testing import CliRunner
from pvg_cli.main import app
for line in sys.stdin:
    done = CliRunner().invoke(app, line.split(), prog_name="pvg")
    print(json.dumps([done.exit_code, done.stderr, "torch" in sys.modules]))
"""
WRONG_FILES = [
    ("score mine nofile.jsonl", "nofile.jsonl: No such file or directory."),
    ("score mine early.jsonl", "early.jsonl, line 2: this is not a JSON object."),
    ("score mine empty.jsonl", "empty.jsonl has no solutions."),
    ("score mine empty.jsonl --out runs", "--out runs is a folder."),
    ("score mine empty.jsonl --out nowhere/scores.jsonl", "mkdir -p nowhere"),
    ("score mine early.jsonl --out ./early.jsonl", "--out early.jsonl would overwrite what pvg reads."),
    ("score mine runs", "runs: Is a directory."),
    ("score mine pipe.jsonl", "pipe.jsonl: it is not a regular file."),
    ("export mine --player prover --out runs", "runs exists, and it is not an export of pvg."),
    ("export mine --player verifier", "pvg export mine --player verifier --out mine-verifier"),
]


def test_files_are_checked_before_torch_is_loaded(run: Run) -> None:
    Path("early.jsonl").write_text('{"question": "7+5?", "solution": "A2"}\n[1]\n')
    Path("empty.jsonl").write_text("\n")
    Path("pipe.jsonl").unlink(missing_ok=True)
    os.mkfifo("pipe.jsonl")  # opening it waits for a writer
    lines = "".join(f"{words}\n" for words, _ in WRONG_FILES)
    command = [sys.executable, "-c", WATCHED]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, check=True)
    for (words, says), told in zip(WRONG_FILES, done.stdout.splitlines(), strict=True):
        code, errors, loaded = json.loads(told)
        assert (code, loaded) == (2, False), words
        assert says in errors, words


def test_weights_of_an_earlier_round_are_used_only_where_they_are_asked_for(run: Run) -> None:
    """A damaged or missing last commit may have had a later round than the commit before it."""
    shutil.copytree(run.path, "lost")
    settings = Path("lost/experiment.toml")
    settings.write_text(settings.read_text().replace("rounds = 1\n", "rounds = 2\n"))
    state = Path("lost/state.json")
    state.with_name("state.previous.json").write_bytes(state.read_bytes())
    state.write_bytes(b"{")
    with pytest.raises(StateError, match=r"state\.json"):
        find_player(parse_run_id("run:./lost"))
    state.unlink()
    commands = (("score", "lost", "rows.jsonl"), ("export", "lost", "--player", "prover", "--out", "no"))
    for words in (*commands, ("serve", "lost", "--player", "verifier")):
        called = pvg(*words)
        assert called.code == 2
        assert "The last commit of lost is lost, and with it perhaps the round." in called.err
        assert called.err.endswith("play on from it: pvg train --resume lost\n")
    assert open_round(RunDirectory(Path("lost")), 0)[1] == find_player(parse_run_id("run:./lost/round-0")).stage == 0
    for number, error in ((1, StateError), (7, UsageError)):  # two rounds were planned
        with pytest.raises(error):
            open_round(RunDirectory(Path("lost")), number)


def test_a_signal_says_that_no_file_was_written(run: Run) -> None:
    """The end of the terminal, at the moment when the first line is scored."""
    write_one()
    program = STOPPED_AT_WORK.replace("SIGINT", "SIGHUP")
    command = [sys.executable, "-c", program, "score", "mine", "one.jsonl", "--out", "much-scores.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130, done.stderr
    assert "Stopped before all solutions were scored. much-scores.jsonl was not written." in done.stderr
    assert "Traceback" not in done.stderr
    assert not [path for path in Path().iterdir() if "much-scores" in path.name]


def test_a_second_ctrl_c_ends_scoring_at_once_and_leaves_no_file(run: Run) -> None:
    """While the event loop is busy, so that only the signal's handler can end the process."""
    write_one()
    program = STOPPED_AT_WORK.replace("    return", "    os.kill(os.getpid(), signal.SIGINT)\n    return")
    command = [sys.executable, "-c", program, "score", "mine", "one.jsonl", "--out", "one-scores.jsonl", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130, done.stderr
    assert "Ctrl-C again quits at once." in done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "Killed"
    assert not [path for path in Path().iterdir() if "one-scores" in path.name]


STOPPED_AT_WORK = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes the tests ignore it
from pvg.export import finished as rows
from pvg_cli.main import app
scored = rows._scored
def stopped(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return scored(*arguments)
rows._scored = stopped
app(prog_name="pvg")
"""


def write_one() -> None:
    Path("one.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"question": QUESTION, "solution": "A9"}).encode())


def test_damaged_weights_are_named_with_what_helps(run: Run) -> None:
    write_one()
    shutil.copytree("runs/mine", "runs/damaged")
    weights = next(Path("runs/damaged/weights").glob("*-verifier*")) / "tensors.safetensors"
    commands = (
        ("score", "damaged", "one.jsonl"),
        ("export", "damaged", "--player", "verifier", "--out", "none"),
        ("evaluate", "damaged", "--parts", "exploit"),
    )
    for damage, says in ((Path.touch, "0 bytes instead of"), (Path.mkdir, "a folder is in its place")):
        weights.unlink()
        damage(weights)
        for command in commands:
            called = pvg(*command)
            assert called.code == 2, called.err
            assert str(weights) in called.err
            assert says in called.err
            assert called.err.endswith("\nRestore it from a copy of the run.\n")
    assert not Path("none").exists()
    assert not Path("runs/damaged/evaluation").exists()  # nothing was computed before the damage was found


def test_an_evaluated_run_has_probabilities(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from pvg.export.finished import FinishedRound, Platt

    monkeypatch.setattr(FinishedRound, "calibration", lambda _: Platt(2.0, -1.0))
    Path("one.jsonl").write_text(json.dumps({"question": QUESTION, "solution": "A9"}))
    called = pvg("score", "mine", "one.jsonl")
    row = json.loads(called.out)
    assert row["probability"] == pytest.approx(1 / (1 + 2.718281828459045 ** -(2.0 * row["score"] - 1.0)))
