"""Targets: functions in their own processes, in the sandbox, and HTTP endpoints that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from pvg.attack.targets import TargetAnswer, TargetSpec, open_target
from pvg.errors import MissingRequirementError, UsageError

GRADERS = """
import math, os, sys, time
assert __file__

try:
    import no_such_package
except ImportError:
    def right(problem, text):
        return problem.answer in text and problem == "How many?" and problem.fields["level"] == 3
else:
    sys.exit("it exists")

async def later(problem, text):
    return 0.25

class Tensor:
    def item(self):
        return 0.75

def tensor(problem, text):
    return Tensor()

def numbers(problem, text):
    print("noise on stdout", flush=True)
    return {"nan": math.nan, "inf": math.inf, "none": None, "list": [1.0], "huge": 10**400}[text]

def fails(problem, text):
    raise RuntimeError("\\x1b[2J" + text * 1000)

def hangs(problem, text):
    if text == "hang":
        time.sleep(3600)
    return True

def leaves(problem, text):
    if text == "leave":
        os._exit(7)
    return False

def forks(problem, text):
    os.fork()
    return text == "good"

def reads(problem, text):
    import subprocess
    subprocess.run(["cat"])
    return input() == text

def starts(problem, text):
    import subprocess
    child = subprocess.Popen(["sleep", "3600"])
    open(problem.fields["pids"], "a").write(f"{os.getpid()} {child.pid}")
    time.sleep(3600)
"""
FIELDS = {"id": "p", "answer": "7", "level": 3}


@pytest.fixture
def graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(GRADERS)
    return tmp_path


def answers(spec: TargetSpec, *texts: str, fields: Any = FIELDS) -> list[TargetAnswer]:
    async def ask() -> list[TargetAnswer]:
        async with open_target(spec) as target:
            return [await target.judge("How many?", fields, text) for text in texts]

    return asyncio.run(ask())


@pytest.mark.slow
class TestFunctions:
    def test_a_score_is_a_bool_a_number_or_what_has_one(self, graders: Path) -> None:
        found = answers(TargetSpec("mine.py:right"), "It is 7.", "It is 8.")
        assert found == [TargetAnswer(1.0), TargetAnswer(0.0)]
        assert answers(TargetSpec("mine.py:later"), "") == [TargetAnswer(0.25)]
        assert answers(TargetSpec("mine.py:tensor"), "") == [TargetAnswer(0.75)]

    def test_anything_else_is_an_error_and_no_refusal(self, graders: Path) -> None:
        for answer in answers(TargetSpec("mine.py:numbers"), "nan", "inf", "none", "list", "huge"):
            assert answer.score is None
            assert "neither a finite number nor a bool" in answer.error

    def test_an_exception_is_an_error_in_printable_characters(self, graders: Path) -> None:
        (answer,) = answers(TargetSpec("mine.py:fails"), "x")
        assert answer.error.startswith("RuntimeError: \\x1b[2Jxxx")
        assert len(answer.error) <= 200

    def test_a_call_that_hangs_or_leaves_costs_its_process_alone(self, graders: Path) -> None:
        found = answers(TargetSpec("mine.py:hangs", limit_s=0.5), "hang", "go on")
        assert found == [TargetAnswer(timed_out=True), TargetAnswer(1.0)]
        left, on = answers(TargetSpec("mine.py:leaves"), "leave", "go on")
        assert "7" in left.error
        assert on == TargetAnswer(0.0)

    def test_a_process_that_is_killed_leaves_none_that_it_started(self, graders: Path) -> None:
        fields = {**FIELDS, "pids": str(graders / "pids")}
        answers(TargetSpec("mine.py:starts", limit_s=1.0), "x", fields=fields)
        pids = [int(pid) for pid in (graders / "pids").read_text().split()]
        assert len(pids) == 2
        left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs([each for each in left if each.status() != "zombie"], timeout=30)
        assert not [each for each in alive if each.status() != "zombie"]

    def test_a_forked_process_gives_no_answer_for_the_next_question(self, graders: Path) -> None:
        assert [each.score for each in answers(TargetSpec("mine.py:forks"), *["good", "bad"] * 4)] == [1.0, 0.0] * 4

    def test_a_function_that_writes_into_every_file_breaks_its_answers_alone(self, graders: Path) -> None:
        (graders / "mine.py").write_text(
            "import contextlib, os\n\ndef writes(problem, text):\n    for place in range(3, 20):\n"
            "        with contextlib.suppress(OSError):\n            os.write(place, b'[0]\\n')\n    return True\n"
        )
        assert [each.score for each in answers(TargetSpec("mine.py:writes"), "a", "b", "c")] == [None] * 3

    def test_a_function_that_reads_stdin_finds_it_empty(self, graders: Path) -> None:
        for answer in answers(TargetSpec("mine.py:reads", limit_s=5.0), "a", "b"):
            assert answer.error.startswith("EOFError")

    def test_a_file_that_does_not_load_is_refused(self, graders: Path) -> None:
        (graders / "broken.py").write_text("import no_such_package\n\ndef grade(problem, text): ...")
        with pytest.raises(MissingRequirementError, match="no_such_package"):
            answers(TargetSpec("broken.py:grade"), "x")

    def test_another_version_of_the_file_is_another_target(self, graders: Path) -> None:
        async def identity() -> str:
            async with open_target(TargetSpec("mine.py:later")) as target:
                return target.identity

        first = asyncio.run(identity())
        assert asyncio.run(identity()) == first
        (graders / "mine.py").write_text(GRADERS + "\n")
        assert asyncio.run(identity()) != first

    def test_so_is_another_version_of_a_package(self, graders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", str(graders / "packages"))
        (graders / "packages").mkdir()
        (graders / "mine.py").write_text("from graders_of_others import grade")
        found = set()
        for limit in (1, 2):
            (graders / "packages/graders_of_others.py").write_text(
                f"def grade(problem, text): return len(text) < {limit}"
            )

            async def identity() -> str:
                async with open_target(TargetSpec("mine.py:grade")) as target:
                    return target.identity

            found.add(asyncio.run(identity()))
        assert len(found) == 2


@pytest.mark.slow
class TestSandbox:
    def test_the_function_runs_there_with_the_same_results(self, graders: Path) -> None:
        spec = TargetSpec("mine.py:right", sandbox=True)
        assert answers(spec, "It is 7.", "It is 8.") == [TargetAnswer(1.0), TargetAnswer(0.0)]
        nan, error = answers(TargetSpec("mine.py:numbers", sandbox=True), "nan", "no such key")
        assert "neither" in nan.error
        assert "KeyError" in error.error

    def test_an_import_that_it_lacks_is_an_error_with_a_remedy(self, graders: Path) -> None:
        (graders / "beside.py").write_text("")
        (graders / "mine.py").write_text("import beside\n\ndef grade(problem, text): return True\n")
        (found,) = answers(TargetSpec("mine.py:grade", sandbox=True), "x")
        assert "'beside'" in found.error
        assert "leave --sandbox out" in found.error

    def test_it_can_neither_write_a_file_nor_compute_for_ever(self, graders: Path) -> None:
        (graders / "mine.py").write_text(
            "def writes(problem, text):\n    open('/tmp/pvg-written', 'w')\n    return True\n"
            "def computes(problem, text):\n    while True: pass\n"
        )
        (written,) = answers(TargetSpec("mine.py:writes", sandbox=True), "x")
        assert written.score is None
        assert answers(TargetSpec("mine.py:computes", sandbox=True, limit_s=0.5), "x") == [TargetAnswer(timed_out=True)]


# --- HTTP -----------------------------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def asked(handler: Handler, route: str, *texts: str, **options: Any) -> list[TargetAnswer]:
    async def ask() -> list[TargetAnswer]:
        async with served(handler) as url, open_target(TargetSpec(url + route, **options)) as target:
            return [await target.judge("How many?", FIELDS, text) for text in texts]

    return asyncio.run(ask())


def chat(content: str) -> web.Response:
    return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]})


def test_pvgs_own_route_is_asked_for_its_verdict() -> None:
    async def score(request: web.Request) -> web.Response:
        (row,) = (await request.json())["rows"]
        return web.json_response({"results": [{"score": -3.0, "accepted": row["solution"] == "good"}]})

    assert asked(score, "/score", "good", "bad") == [TargetAnswer(1.0), TargetAnswer(0.0)]


def test_the_last_verdict_of_a_judge_counts_and_a_reply_without_one_is_an_error() -> None:
    replies = {
        "a": "Is it a YES? No: NO",
        "b": "no, wait: yes.",
        "c": "I cannot say.",
        "d": "incorrect",
        "e": "Correct!",
    }

    async def judge(request: web.Request) -> web.Response:
        prompt = (await request.json())["messages"][0]["content"]
        assert "How many?" in prompt
        return chat(replies[prompt.partition("Solution:\n")[2][:1]])

    options = {"model": "m"}
    no, yes, neither = asked(judge, "/v1/chat/completions", "a", "b", "c", **options)
    assert (no.score, yes.score) == (0.0, 1.0)
    assert "no verdict" in neither.error
    words = ("correct", "incorrect")
    assert [each.score for each in asked(judge, "/chat/completions", "d", "e", verdict=words, **options)] == [0.0, 1.0]


def test_a_reply_that_is_cut_has_no_verdict() -> None:
    async def judge(request: web.Request) -> web.Response:
        choice = {"finish_reason": "length", "message": {"role": "assistant", "content": "Is it YES or NO? First"}}
        return web.json_response({"choices": [choice]})

    (answer,) = asked(judge, "/v1/chat/completions", "x", model="m")
    assert "cut after" in answer.error


def test_a_template_fills_each_place_once_and_leaves_other_braces() -> None:
    seen = []

    async def judge(request: web.Request) -> web.Response:
        seen.append((await request.json())["messages"][0]["content"])
        return chat("YES")

    template = '{"p": "{problem}", "t": "{text}", "a": "{answer}"}'
    asked(judge, "/v1/chat/completions", "{problem} {answer}", model="m", template=template)
    assert seen == ['{"p": "How many?", "t": "{problem} {answer}", "a": "7"}']


def test_another_model_prompt_or_verdict_is_another_judge() -> None:
    async def identity(**options: Any) -> str:
        async with open_target(TargetSpec("http://127.0.0.1:1/v1/chat/completions", **options)) as target:
            return target.identity

    specs = [
        {"model": "m"},
        {"model": "n"},
        {"model": "m", "template": "{text}?"},
        {"model": "m", "verdict": ("A", "B")},
    ]
    assert len({asyncio.run(identity(**spec)) for spec in specs}) == len(specs)


def test_classification_and_pooling_of_vllm() -> None:
    async def route(request: web.Request) -> web.Response:
        assert "good" in (await request.json())["input"]
        found = {"probs": [0.1, 0.9]} if request.path == "/classify" else {"data": [2.5]}
        return web.json_response({"data": [found]})

    assert asked(route, "/classify", "good") == [TargetAnswer(0.9)]
    assert asked(route, "/pooling", "good") == [TargetAnswer(2.5)]


@pytest.mark.parametrize("reply", ["not json", '{"results": []}', "[]", '{"results": [{"accepted": "yes"}]}', "null"])
def test_a_reply_of_another_form_is_an_error(reply: str) -> None:
    async def route(request: web.Request) -> web.Response:
        return web.Response(text=reply, content_type="application/json")

    (answer,) = asked(route, "/score", "x")
    assert answer.score is None
    assert answer.error


@pytest.mark.slow
def test_a_slow_server_times_out_and_a_failing_one_is_an_error() -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async def broken(request: web.Request) -> web.Response:
        raise web.HTTPInternalServerError(text="\x1b[31mred")

    assert [each.timed_out for each in asked(slow, "/score", "x", limit_s=0.3)] == [True]
    (answer,) = asked(broken, "/score", "x", limit_s=30.0)
    assert "500" in answer.error
    assert answer.error.isprintable()


def test_no_redirect_is_followed_and_no_key_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    key, elsewhere = "sk-0123456789abcdef", []
    monkeypatch.setenv("MY_KEY", key)

    async def other(request: web.Request) -> web.Response:
        elsewhere.append(request.headers)
        return chat("YES")

    async def quoting(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {key}"
        return web.Response(status=400, text=f"your key {key} is not allowed")

    async def ask() -> list[TargetAnswer]:
        async with served(other) as there:

            async def redirecting(request: web.Request) -> web.Response:
                raise web.HTTPTemporaryRedirect(f"{there}/v1/chat/completions")

            found = []
            for handler in (redirecting, quoting):
                async with served(handler) as url:
                    spec = TargetSpec(f"{url}/v1/chat/completions", model="m", key_variable="MY_KEY")
                    async with open_target(spec) as target:
                        found.append(await target.judge("How many?", FIELDS, "x"))
            return found

    for answer in asyncio.run(ask()):
        assert answer.score is None
        assert key not in repr(answer)
    assert elsewhere == []


@pytest.mark.parametrize(
    "name", ["http://127.0.0.1:1/v1", "ftp://here/score", "http://me:secret@host/score", "http:///score"]
)
def test_a_url_of_no_route_is_refused_and_not_asked(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        answers(TargetSpec(name), "x")
    assert "secret" not in str(refused.value)
