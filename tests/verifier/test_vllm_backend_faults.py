"""Servers of scores that die, hang, lie, or are not what is wanted: real HTTP, the faults of real servers."""

import asyncio
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from score_servers_of_tests import Bench, scored, servers, some

from pvg.errors import ServerUnavailableError, WeightsNotArrivedError
from pvg.verifier.vllm_backend import VllmBackend

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))
from fault_proxy import Fault, FaultProxy

HEADS = ["scalar", "implicit"]
pytestmark = [pytest.mark.usefixtures("control_key"), pytest.mark.slow]


@pytest.mark.parametrize("head", HEADS)
def test_a_server_that_was_started_again_gets_the_weights_again(head, tmp_path, executor):
    async def play():
        async with scored(tmp_path, head, executor) as (fake, bench):
            scorer, rollouts = bench.scorer(), some(20)
            await bench.assert_right(scorer, rollouts[:10])
            await fake.restart()
            await bench.assert_right(scorer, rollouts[10:])
            assert [line["version"] for line in bench.heard.weights("client.send")] == [1]
            assert len(bench.heard.weights("canary")) == 2
            assert fake.label.endswith("/1")

    asyncio.run(play())


@pytest.mark.parametrize("head", HEADS)
def test_what_a_server_said_with_other_weights_is_asked_again(head, tmp_path, executor):
    """It loses its weights in mid-batch, and no connection breaks: only its boot and its label tell."""

    async def play():
        async with scored(tmp_path, head, executor, probe_every_s=60.0) as (fake, bench):
            scorer, rollouts = bench.scorer(), some(64)
            await bench.assert_right(scorer, rollouts[:4])
            begun = sum(fake.scored.values())
            fake.before_reply = lambda number: fake.forget() if number == begun + 3 else None
            await bench.assert_right(scorer, rollouts[4:])
            assert len(bench.heard.weights("canary")) == 2

    asyncio.run(play())


@pytest.mark.parametrize("head", HEADS)
def test_one_of_two_servers_dies_and_the_other_goes_on(head, tmp_path, executor):
    async def play():
        async with scored(tmp_path, head, executor, 2, token_ms=20) as (*fakes, bench):
            doomed, killing = fakes[0], []

            def kill(number):
                if number == 5:
                    killing.append(asyncio.ensure_future(doomed.kill()))

            doomed.before_reply = kill
            await bench.assert_right(bench.scorer(), some(100))
            assert killing
            assert any(tag == "score" and fields["server"] == doomed.url for tag, fields in bench.heard.found)

    asyncio.run(play())


@pytest.mark.parametrize("kind", ["error", "malformed", "reset", "cut", "garbage", "truncated", "short_json"])
def test_broken_replies_are_asked_for_again(kind, tmp_path, executor):
    async def play():
        async with (
            servers(tmp_path, "implicit") as (fake,),
            FaultProxy(fake.url) as proxy,
            Bench(tmp_path, "implicit", executor, [proxy.url]) as bench,
        ):
            scorer = bench.scorer()
            await bench.assert_right(scorer, some(4))
            proxy.reset_all()
            proxy.plan(*[Fault(kind, after=40)] * 6)
            await bench.assert_right(scorer, some(30, seed=2))

    asyncio.run(play())


def test_a_server_that_is_away_when_a_version_is_published_is_waited_for(tmp_path, executor):
    async def play():
        async with scored(tmp_path, "implicit", executor) as (fake, bench):
            scorer, rollouts = bench.scorer(), some(6)
            await bench.assert_right(scorer, rollouts)
            await fake.kill()
            bench.train(2)
            scorer.set_version(bench.model.version())
            call = asyncio.create_task(scorer.score(rollouts))
            while len(bench.heard.weights("client.send")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
            fake.forget()
            await fake.start()
            np.testing.assert_allclose(await call, await bench.torch_scores(rollouts), atol=1e-3)
            assert [line["version"] for line in bench.heard.weights("server.delivered")] == [1, 2]

    asyncio.run(play())


def test_without_any_server_the_error_names_them(tmp_path, executor):
    async def play():
        async with servers(tmp_path, "implicit", 2) as fakes:
            urls = [fake.url for fake in fakes]
        async with Bench(tmp_path, "implicit", executor, urls) as bench:
            with pytest.raises(ServerUnavailableError) as caught:
                await bench.scorer().score(some(2))
            for url in urls:
                assert url in caught.value.message
            assert "--for verifier" in caught.value.remedy

    asyncio.run(play())


@pytest.mark.parametrize("head", HEADS)
def test_weights_that_did_not_arrive_stop_the_run(head, tmp_path, executor):
    async def play():
        async with scored(tmp_path, head, executor, 2) as (*fakes, bench):
            fakes[1].lies = True
            with pytest.raises(WeightsNotArrivedError) as caught:
                await bench.scorer().score(some(4))
            assert fakes[1].url in caught.value.message
            assert "version 1" in caught.value.message

    asyncio.run(play())


def test_a_cancelled_call_leaves_the_servers_to_others(tmp_path, executor):
    async def play():
        async with scored(tmp_path, "implicit", executor, token_ms=20) as (fake, bench):
            scorer = bench.scorer()
            call = asyncio.create_task(scorer.score(some(4)))
            while fake.running == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await bench.assert_right(scorer, some(8))

    asyncio.run(play())


def test_leaving_waits_for_no_server_but_for_what_is_computed_here(tmp_path, executor, monkeypatch):
    began, gate, ended = threading.Event(), threading.Event(), []
    references_here = VllmBackend._references_here

    def gated(self, inputs):
        began.set()
        gate.wait()
        found = references_here(self, inputs)
        ended.append(len(found))
        return found

    async def play():
        async with scored(tmp_path, "implicit", executor, probe_timeout_s=600.0) as (fake, bench):
            scorer = bench.scorer()
            await bench.assert_right(scorer, some(4))
            monkeypatch.setattr(VllmBackend, "_references_here", gated)
            fake.freeze()
            gone = asyncio.create_task(scorer.score(some(8, seed=2)))
            await asyncio.to_thread(began.wait)
            gone.cancel()
            drop = asyncio.create_task(scorer.drop())
            for _ in range(20):
                await asyncio.sleep(0)
            waits = not drop.done()
            gate.set()
            await drop  # the server never answers
            assert waits
            assert ended == [8]
            fake.thaw()
            await bench.assert_right(scorer, some(8, seed=2))

    asyncio.run(asyncio.wait_for(play(), 60))
