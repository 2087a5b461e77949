"""Fault drills through the engine: whatever servers and networks do, every rollout is delivered once, by weights that
are known, or reported as failed. Real sockets, real processes; the servers are the tests' own (tests/servers)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm_drills import Drill, Fault, engine_over, fingerprint, request, run, until

from pvg.errors import ConfigurationError, ServerUnavailableError, StateError
from pvg.records import VersionSpan
from pvg.rollout import vllm_engine
from pvg.servers import fleet

pytestmark = pytest.mark.slow

# --- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "streamed"),
    [
        (Fault("reset", after=0), False),
        (Fault("reset", after=300), True),
        (Fault("cut", after=300), False),
        (Fault("error"), True),
        (Fault("busy"), False),
        (Fault("malformed"), True),
        (Fault("short_json"), False),
        (Fault("truncated"), True),
        (Fault("garbage"), False),
    ],
    ids=str,
)
def test_a_reply_that_fails_is_asked_for_again_and_delivered_once(fault: Fault, streamed: bool, tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        counts: list[int] = []
        await d.break_generation(fault)
        asked = request(1, 30, on_tokens=counts.append if streamed else None)
        found = await d.ask(asked)
        assert found.spans == (VersionSpan(0, 0),)
        retries = d.events.named("retry")
        assert [retry["request"] for retry in retries] == ["r1", "r1"]  # once on each server
        assert all(retry["why"].startswith("http://127.0.0.1:") for retry in retries)
        if streamed:
            assert counts[-1] == len(found.token_ids)
        assert d.engine.stats.tokens == len(found.token_ids)
        await until(lambda: d.running() == 0)

    run(use, tmp_path)


def test_a_request_that_servers_refuse_is_not_asked_again(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        with pytest.raises(ConfigurationError, match=r"refuses request r1: The prompt is longer than .* 50 tokens"):
            await d.engine.generate(request(1, prompt=60))
        assert d.events.named("retry") == []
        await d.ask(request(2))

    run(use, tmp_path, max_model_len=50, longest=20)


def test_long_replies_are_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[bool] = []
    read = vllm_engine.read_generated

    def noted(*arguments: Any, **options: Any) -> Any:
        beside.append(threading.current_thread() is not threading.main_thread())
        return read(*arguments, **options)

    monkeypatch.setattr(vllm_engine, "read_generated", noted)

    async def use(d: Drill) -> None:
        await d.publish(0)
        for least in (1 << 30, 0):
            monkeypatch.setattr(vllm_engine, "LONG_REPLY", least)
            await d.ask(request(least))
            await d.ask(request(least + 1, on_tokens=lambda _: None))

    run(use, tmp_path)
    assert beside == [False, False, True, True]


# --- servers that hang, die and come back ----------------------------------------------------------------------------


def test_a_server_that_hangs_is_given_up_and_its_requests_go_to_the_other(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        d.servers[0].freeze()
        asked = [request(i) for i in range(16)]
        found = await d.ask_all(asked)
        assert [completion.request_id for completion in found] == [f"r{i}" for i in range(16)]
        assert d.up() == [d.proxies[1].url]
        (away,) = d.events.named("server.away")
        assert away["server"] == d.proxies[0].url
        assert "no reply within 1 s" in away["why"]
        await until(lambda: d.servers[0].running == 0)  # what it was asked is no longer wanted
        d.servers[0].thaw()
        await until(lambda: len(d.up()) == 2)
        before = sum(d.servers[0].finished.values())
        await d.ask_all([request(100 + i) for i in range(4)])
        assert sum(d.servers[0].finished.values()) > before

    run(use, tmp_path, probe_timeout_s=1.0)


def test_requests_without_an_answer_are_told_once_and_go_elsewhere_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "SILENCE_S", 0.3)

    async def use(d: Drill) -> None:
        await d.publish(0)
        await d.break_generation(default=Fault("hang"), only=0)
        asked = [asyncio.create_task(d.ask(request(i))) for i in range(8)]

        def told() -> list[dict[str, Any]]:  # of the other server too, on a machine that is busy for so long
            return [event for event in d.events.named("server.silent") if event["server"] == d.proxies[0].url]

        await until(lambda: bool(told()))
        probes = d.servers[0].calls["/pvg/info"]
        await until(lambda: d.servers[0].calls["/pvg/info"] > probes + 3)
        assert [silent["requests"] for silent in told()] == [4]
        d.proxies[0].default = Fault()
        d.proxies[0].reset_all()
        await asyncio.gather(*asked)

    run(use, tmp_path)


def test_a_killed_server_that_comes_back_with_old_weights_is_caught_up_before_it_is_used(tmp_path: Path) -> None:
    """Restarted on the same port it has its first weights, under the label "default": none of their tokens may pass."""

    async def use(d: Drill) -> None:
        for version in (0, 1):
            await d.publish(version)
        asked = [request(i, 40) for i in range(16)]
        tasks = [asyncio.create_task(d.ask(wanted)) for wanted in asked]
        await until(lambda: d.running() == 16)
        await d.servers[0].kill()
        more = [request(100 + i, 40) for i in range(64)]
        tasks += [asyncio.create_task(d.ask(wanted)) for wanted in more]
        await d.servers[0].restart()
        for completion in await asyncio.gather(*tasks):
            assert completion.spans == (VersionSpan(0, 1),)
        await until(lambda: len(d.up()) == 2)
        assert d.servers[0].fingerprint() == fingerprint(1)
        last = d.events.named("server.delivered")[-1]
        assert (last["server"], last["version"]) == (d.proxies[0].url, 1)

    run(use, tmp_path, token_ms=4.0)


def test_128_requests_over_two_servers_of_which_one_dies_are_all_delivered_once(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        asked = [request(i, 12) for i in range(128)]
        tasks = [asyncio.create_task(d.ask(wanted)) for wanted in asked]
        await until(lambda: d.received() == 128)
        assert [sum(server.received.values()) for server in d.servers] == [64, 64]
        await until(lambda: sum(d.servers[0].finished.values()) > 0)  # some are done, the others in the middle
        await d.proxies[0].refuse()
        d.proxies[0].reset_all()
        found = await asyncio.gather(*tasks)
        assert Counter(completion.request_id for completion in found) == Counter(wanted.id for wanted in asked)
        assert d.up() == [d.proxies[1].url]
        assert sum(d.servers[0].aborted.values()) > 0
        # The engine was told of exactly what was delivered: no request was counted twice.
        assert d.engine.stats.tokens == sum(len(completion.token_ids) for completion in found)
        finished = d.servers[0].finished + d.servers[1].finished
        assert finished.keys() == {wanted.id for wanted in asked}
        # A reply may have been written and not read: asked for again. Nothing else is sampled twice.
        assert sum(finished.values()) - len(asked) <= sum(d.servers[0].finished.values())
        assert max(d.servers[1].received.values()) == 1
        await until(lambda: d.running() == 0)

    run(use, tmp_path, token_ms=40.0)


def test_when_all_servers_are_dead_the_error_names_each_of_them(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        tasks = [asyncio.create_task(d.engine.generate(request(i, 400, stops=False))) for i in range(4)]
        await until(lambda: d.running() == 4)
        for proxy in d.proxies:
            await proxy.refuse()
            proxy.reset_all()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, ServerUnavailableError)
            assert "No server has been up for 0.3 s" in outcome.message
            assert all(proxy.url in outcome.message for proxy in d.proxies)
            assert "pvg serve" in outcome.remedy
        for proxy in d.proxies:
            await proxy.accept()
        await until(lambda: len(d.up()) == 2)
        await d.ask(request(1))

    run(use, tmp_path, unavailable_s=0.3)


def test_a_run_does_not_begin_without_servers_or_with_the_wrong_key(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        foreign = engine_over([proxy.url for proxy in d.proxies], tmp_path / "other", d.events, key="wrong")
        with pytest.raises(ConfigurationError, match="refuses the control key"):
            await foreign.ready()
        await foreign.close()
        for proxy in d.proxies:
            await proxy.refuse()
        alone = engine_over([proxy.url for proxy in d.proxies], tmp_path / "third", d.events)
        with pytest.raises(ServerUnavailableError, match="No server answers") as caught:
            await alone.ready()
        assert all(proxy.url in caught.value.message for proxy in d.proxies)
        await alone.close()

    run(use, tmp_path)


def test_a_server_of_another_model_is_refused_before_it_is_sent_weights(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        url, told = d.proxies[0].url, r"serves 'fake' \(4 layers of 64, 320 tokens\), but models\.prover has 2 layers"
        other = engine_over([url], tmp_path / "other", d.events, shape="2 layers of 64, 320 tokens")
        with pytest.raises(ConfigurationError, match=told):
            await other.ready()
        await other.close()
        fitting = engine_over([url], tmp_path / "third", d.events, shape="4 layers of 64, 320 tokens")
        await fitting.ready()
        await fitting.close()
        assert d.servers[0].calls["/pvg/weights"] == 0

    run(use, tmp_path, shape="4 layers of 64, 320 tokens")


def test_a_server_has_room_for_a_prompt_its_completion_and_what_vllm_adds_to_a_reference(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        for longest, gives, fits in ((64, False, True), (65, False, False), (63, True, True), (64, True, False)):
            of = engine_over([d.proxies[0].url], tmp_path / "other", d.events, gives_reference=gives, longest=1)
            if fits:
                await of.ready(longest)
            else:
                with pytest.raises(ConfigurationError, match="accepts 64 tokens"):
                    await of.ready(longest)
            await of.close()

    run(use, tmp_path, max_model_len=64, longest=20)


# --- callers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_abandoned_requests_leave_nothing_running(streamed: bool, tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        noted: list[int] = []
        tasks = [
            asyncio.create_task(
                d.engine.generate(request(i, 75, stops=False, on_tokens=noted.append if streamed else None))
            )
            for i in range(32)
        ]
        await until(lambda: d.running() == 32)
        for task in tasks:
            task.cancel()
        await until(lambda: d.running() == 0)
        assert sum(sum(server.aborted.values()) for server in d.servers) == 32
        assert d.events.named("retry") == []
        await d.ask(request(100))

    run(use, tmp_path, token_ms=20.0)


def test_closing_ends_the_requests_in_flight_as_an_engine_that_is_closed(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        tasks = [asyncio.create_task(d.engine.generate(request(i, 75, stops=False))) for i in range(8)]
        await until(lambda: d.running() == 8)
        await d.engine.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, StateError)
            assert "closed" in outcome.message
        await until(lambda: d.running() == 0)
        with pytest.raises(StateError, match="closed"):
            await d.engine.generate(request(1))

    run(use, tmp_path, token_ms=20.0)
