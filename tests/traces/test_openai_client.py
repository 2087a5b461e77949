"""The client of OpenAI-compatible servers, against a real HTTP server."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from traces.openai_server import said, serving

from pvg.errors import ConfigurationError, ServerUnavailableError, UsageError
from pvg.traces.http_client import OpenAiClient, RefusedByServer

ASK = [{"role": "user", "content": "2+2?"}]
KEY = "sk-secret-0123456789"


def test_a_chat_completion_carries_the_model_the_options_and_the_key(monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)

    async def work():
        async with serving(lambda route, body: said("4")) as server:
            async with OpenAiClient.open(server.url + "/", "small", key_variable="MY_KEY") as client:
                choice = await client.chat(ASK, max_tokens=3)
            return choice, server.asked

    choice, [(route, body, headers)] = asyncio.run(work())
    assert choice["message"]["content"] == "4"
    assert (route, body) == ("chat/completions", {"model": "small", "messages": ASK, "max_tokens": 3})
    assert headers["Authorization"] == f"Bearer {KEY}"


def test_the_only_model_of_a_server_needs_no_name():
    async def work(models):
        def answer(route, body):
            return {"data": [{"id": name} for name in models]} if route == "models" else said(body["model"])

        async with serving(answer) as server, OpenAiClient.open(server.url) as client:
            return (await client.chat(ASK))["message"]["content"]

    assert asyncio.run(work(["one"])) == "one"
    with pytest.raises(UsageError, match="lists 2 models"):
        asyncio.run(work(["one", "two"]))


def test_busy_servers_are_asked_again_and_never_more_than_the_limit_at_once():
    async def work():
        fails = iter([429, 503, 500])

        def answer(route, body):
            status = next(fails, None)
            return said("4") if status is None else web.json_response({"error": "busy"}, status=status)

        async with serving(answer, delay_s=0.01) as server:
            async with OpenAiClient.open(server.url, "m", concurrency=2) as client:
                found = await asyncio.gather(*(client.chat(ASK) for _ in range(6)))
            return len(found), server.most, len(server.asked)

    assert asyncio.run(work()) == (6, 2, 9)


@pytest.mark.parametrize(
    ("status", "kind"), [(401, ConfigurationError), (404, RefusedByServer), (400, RefusedByServer)]
)
def test_a_refusal_is_one_error_without_the_key(monkeypatch, status, kind):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    async def work():
        refusal = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
        async with serving(lambda *_: web.json_response(refusal, status=status)) as server:
            async with OpenAiClient.open(server.url, "m") as client:
                with pytest.raises(kind) as caught:
                    await client.chat(ASK)
            return caught.value, len(server.asked)

    error, asked = asyncio.run(work())
    assert asked == 1
    assert KEY not in f"{error!r} {error.remedy} {error.__cause__} {error.__context__}"


def test_a_redirect_is_not_followed(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    async def work():
        async with serving(lambda *_: said("stolen")) as other:
            moved = web.Response(status=307, headers={"Location": f"{other.url}/chat/completions"})
            async with serving(lambda *_: moved) as server, OpenAiClient.open(server.url, "m") as client:
                with pytest.raises(ConfigurationError, match="redirect"):
                    await client.chat(ASK)
            return other.asked

    assert asyncio.run(work()) == []


def test_a_slow_server_ends_in_an_error():
    async def slow():
        async with (
            serving(lambda *_: said("4"), delay_s=5) as server,
            OpenAiClient.open(server.url, "m", timeout_s=0.05) as client,
        ):
            await client.chat(ASK)

    with pytest.raises(ServerUnavailableError, match="no reply"):
        asyncio.run(slow())


def test_a_wait_for_a_late_reply_is_said_once(monkeypatch):
    monkeypatch.setattr("pvg.traces.http_client.QUIET_S", 0.0)

    async def slow():
        async with (
            serving(lambda *_: said("4"), delay_s=0.05) as server,
            OpenAiClient.open(server.url, "m", timeout_s=30, say=lines.append) as client,
        ):
            await client.chat(ASK)
            await client.chat(ASK)

    lines = []
    asyncio.run(slow())
    assert len(lines) == 1
    assert "30 s" in lines[0]


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [1]}, {"choices": [{}]}, [], "text"])
def test_a_reply_of_another_form_is_refused(reply):
    async def work():
        answer = web.Response(text=json.dumps(reply))
        async with serving(lambda *_: answer) as server, OpenAiClient.open(server.url, "m") as client:
            await client.chat(ASK)

    with pytest.raises(ServerUnavailableError):
        asyncio.run(work())


@pytest.mark.parametrize(
    "url", ["ftp://host/v1", "host:80", "http://", "http://me:secret@host/v1", "http://h/v1?key=1"]
)
def test_what_is_no_address_is_refused_before_any_request(url):
    async def work():
        async with OpenAiClient.open(url, "m"):
            raise AssertionError

    with pytest.raises(UsageError) as caught:
        asyncio.run(work())
    assert "secret" not in str(caught.value)


def test_a_named_variable_must_have_a_key(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)

    async def work():
        async with OpenAiClient.open("http://127.0.0.1:9/v1", "m", key_variable="MY_KEY"):
            raise AssertionError

    with pytest.raises(UsageError, match="MY_KEY"):
        asyncio.run(work())
