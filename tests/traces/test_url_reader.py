"""A reader behind a URL: what it is asked, and what is left out if it gives no log-probs."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext
from itertools import count, pairwise

import pytest
from aiohttp import web
from traces.openai_server import said, serving

from pvg.errors import ServerUnavailableError
from pvg.traces.kept_results import KeptResults
from pvg.traces.loaders import LoadedTraces, Trace
from pvg.traces.measures import READ, OtherModel, measured, requests
from pvg.traces.readers import open_reader

WORDS = " ".join(f"w{n}" for n in range(60))
TICKS = count()
TRACE = Trace("1", (("user", "2+2?"),), f"{WORDS} key {WORDS}\n#### 4", truth="4")


def believing(route, body):
    """Believes in any answer after "key": half a nat per character of the text. In a chat it says 4."""
    if route == "models":
        return {"data": [{"id": "m", "root": "org/m", "created": next(TICKS)}]}
    if route == "chat/completions":
        return said("4" if "cannot see" in body["messages"][0]["content"] else "So #### 4")
    text = body["prompt"]
    sure = "key" in text
    values = [None, *([0.0 if sure else -0.5] * (len(text) - 1))]
    logprobs = {"text_offset": list(range(len(text) + 1)), "token_logprobs": [*values, -9.0]}
    return {"choices": [{"text": f"{text}x", "logprobs": logprobs}]}


def read(answer, tmp_path, wanted=READ):
    async def work():
        loaded = LoadedTraces("s", "x", [TRACE], [])
        async with serving(answer) as server, open_reader(server.url, model="m") as reader:
            with KeptResults(tmp_path / "results.jsonl") as kept:
                found = await measured(loaded, reader, kept, wanted, 16, lambda *_: None)
        return found[0], loaded, server

    return asyncio.run(work())


def test_log_probs_of_prompts_give_every_measure(tmp_path):
    found, loaded, server = read(believing, tmp_path)
    before = math.exp(-0.5 * len(" 4"))
    assert found.chances[0] == pytest.approx(before)
    assert found.chances[-1] == 1.0
    assert len(found.chances) == 25
    assert "".join(found.units) == TRACE.parts.reasoning
    assert 0.1 < found.values()["cir"] < 0.3
    assert (found.values()["sr"], found.values()["alone"]) == (1.0, 1.0)
    assert loaded.said == []
    asked = [body["messages"][0]["content"] for route, body, _ in server.asked if route == "chat/completions"]
    assert sum("2+2?" in text for text in asked) == len(asked) - 1  # SR does not show the question


def test_a_start_token_and_a_token_over_the_border_of_the_answer_change_no_chance(tmp_path):
    """vLLM counts a start token in the places of all others. The end of "#### 4" is one token, "# 4"."""

    def shifted(route, body):
        text = body["prompt"]
        begins = [0, *(len("<s>") + place for place in (0, len(text) - 7, len(text) - 3, len(text)))]
        logprobs = {"text_offset": begins, "token_logprobs": [None, -3.0, -2.0, -0.5, -9.0]}
        return {"choices": [{"text": f"{text}x", "logprobs": logprobs}]}

    found, _, _ = read(shifted, tmp_path, ["cir"])
    assert set(found.chances) == {math.exp(-0.5)}


def test_without_log_probs_two_measures_are_left_out_and_said(tmp_path):
    def refusing(route, body):
        if route == "completions":
            return web.json_response({"error": {"message": "echo is not supported"}}, status=400)
        return believing(route, body)

    found, loaded, _ = read(refusing, tmp_path)
    assert {"sr", "transfer"} < found.values().keys()
    assert not {"cir", "tts"} & found.values().keys()
    assert [line.partition(" is left out")[0] for line in loaded.said] == loaded.refused == ["cir", "tts"]

    def without(route, body):
        found = believing(route, body)
        return {"choices": [{"text": found["choices"][0]["text"]}]} if route == "completions" else found

    assert "cir" not in read(without, tmp_path / "other")[0].values()


def test_a_server_that_can_neither_chat_nor_complete_is_no_reader(tmp_path):
    with pytest.raises(ServerUnavailableError, match="404"):
        read(lambda *_: web.Response(status=404), tmp_path)


def test_what_one_model_has_read_is_not_mixed_with_what_another_one_reads(tmp_path):
    changes = {"root": "org/m", "shift": 0.0, "echo": True}

    def changing(route, body):
        found = believing(route, body)
        if route == "models":
            found["data"][0]["root"] = changes["root"]
        if route == "completions" and not changes["echo"]:
            return web.json_response({"error": {"message": "echo is not supported"}}, status=400)
        if route == "completions":
            values = found["choices"][0]["logprobs"]["token_logprobs"]
            values[1:] = [value - changes["shift"] for value in values[1:]]
        return found

    async def work():
        async with serving(changing) as server:
            for change, noticed in (
                ({"echo": False}, False),
                ({"echo": True}, False),  # now it can give log-probs
                ({"shift": 0.02}, False),  # another batch, in 16 bits
                ({"shift": 0.3}, True),
                ({"shift": 0.0, "root": "org/n"}, True),
                ({"root": "org/m", "echo": False}, False),
                ({"shift": 0.3, "echo": True}, True),  # the log-probs of before are not forgotten
            ):
                changes.update(change)
                loaded = LoadedTraces("s", "x", [TRACE], [])
                async with open_reader(server.url, model="m") as reader:
                    with KeptResults(tmp_path / "results.jsonl") as kept, nullcontext() if not noticed else other():
                        await measured(loaded, reader, kept, ["cir", "sr"], 16, lambda *_: None)

    def other():
        return pytest.raises(OtherModel, match=r"m is another model .*results\.jsonl")

    asyncio.run(work())


def test_a_long_trace_costs_no_more_requests_than_were_said(tmp_path):
    text = "\n".join(f"step {n}" for n in range(5000)) + "\n#### 4"
    long, said_before = Trace("1", TRACE.problem, text, truth="4"), []

    async def work():
        loaded = LoadedTraces("s", "x", [long], [])
        async with serving(believing) as server, open_reader(server.url, model="m") as reader:
            said_before.extend(requests(loaded, reader, [name]) for name in READ)
            with KeptResults(tmp_path / "results.jsonl") as kept:
                for name in READ:
                    (found,) = await measured(loaded, reader, kept, [name], 16, lambda *_: None)
                    counts.append(len(server.asked))
        return found

    counts = [0]
    asyncio.run(work())
    assert said_before == [3 + most for most in (25, 1, 4 * 12, 2 * 6)]  # at most three requests tell which model it is
    assert [after - before for before, after in pairwise(counts)] == [27, 3, 2 + 4 * 12, 8]  # each continuation says 4


def test_a_server_that_has_gone_is_one_error(monkeypatch):
    monkeypatch.setattr("pvg.traces.http_client.RETRIES", 1)

    async def work():
        async with serving(believing) as server:
            url = server.url
        async with open_reader(url, model="m", say=lines.append) as reader:
            await reader.chances((), [[], []], TRACE.parts)

    lines = []

    with pytest.raises(ServerUnavailableError, match="Connect"):
        asyncio.run(work())
    assert len(lines) == 1  # before the first retry
