"""Updates of weights, with servers that fail at every point of them: each server has the newest weights or none of its
tokens is delivered, and the run goes on as long as one has them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from vllm_drills import Drill, Fault, canary, engine_over, fingerprint, request, run, tensors, until

from pvg.errors import ConfigurationError, ServerUnavailableError, WeightsNotArrivedError
from pvg.records import VersionSpan
from pvg.servers.publishing import PublishingSession, WeightUpdate

pytestmark = pytest.mark.slow


async def lose_the_first(d: Drill) -> None:
    """The first server goes away, and misses version 1."""
    await d.publish(0)
    await d.proxies[0].refuse()
    d.proxies[0].reset_all()
    await until(lambda: len(d.up()) == 1)
    await d.publish(1)


@pytest.mark.parametrize("streamed", [False, True])
def test_requests_in_flight_go_on_under_new_weights_and_each_token_knows_its_version(
    streamed: bool, tmp_path: Path
) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        noted: list[int] = []
        asked = [request(i, 75, stops=False, on_tokens=noted.append if streamed else None) for i in range(16)]
        tasks = [asyncio.create_task(d.ask(wanted)) for wanted in asked]
        await until(lambda: d.running() == 16)
        assert d.engine.requests_in_flight == 16
        for version in (1, 2):
            await asyncio.sleep(0.05)
            timing = await d.publish(version)
            assert timing.wall_ms >= timing.rpc_ms >= 0.0
            assert timing.canary_gap == 0.0
        found = await asyncio.gather(*tasks)
        spans = [[span.version for span in completion.spans] for completion in found]
        assert all(versions == sorted(set(versions)) for versions in spans)
        assert max(map(len, spans)) == 3
        assert d.events.named("retry") == []
        assert sum(sum(server.aborted.values()) for server in d.servers) == 0

    run(use, tmp_path, token_ms=8.0)  # 0.6 s, so that both updates find tokens to come


def test_an_update_that_fails_halfway_on_one_server_is_made_good_later(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        tasks = [asyncio.create_task(d.ask(request(i, 75, stops=False))) for i in range(16)]
        await until(lambda: d.running() == 16)
        d.servers[0].fail_loads = 1
        await d.publish(1)
        (failed,) = d.events.named("server.failed")
        assert failed["server"] == d.proxies[0].url
        assert "could not be loaded" in failed["why"]
        await asyncio.gather(*tasks)
        await until(lambda: len(d.up()) == 2)
        found = await d.ask_all([request(100 + i) for i in range(16)])
        assert {completion.spans for completion in found} == {(VersionSpan(0, 1),)}
        assert d.servers[0].fingerprint() == d.servers[1].fingerprint() == fingerprint(1)

    run(use, tmp_path, token_ms=4.0)


def test_an_update_that_every_server_refuses_ends_the_run_with_their_reasons(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        for server in d.servers:
            server.fail_loads = 100
        with pytest.raises(WeightsNotArrivedError, match="No server took version 1 of the prover") as caught:
            await d.publish(1)
        assert all(proxy.url in caught.value.message for proxy in d.proxies)
        assert "the tests want it so" in caught.value.message

    run(use, tmp_path)


@pytest.mark.parametrize("label", ["0", "another trainer's"])
def test_tokens_of_older_or_foreign_weights_are_not_delivered(label: str, tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        old = d.servers[0].label
        await d.publish(1)
        d.servers[0].label = old if label == "0" else "18f-aa/1"  # pvg does not know of this yet
        found = await d.ask_all([request(i) for i in range(4)])
        assert {completion.spans for completion in found} == {(VersionSpan(0, 1),)}
        told = {retry["server"] for retry in d.events.named("retry") if "its tokens come from weights" in retry["why"]}
        assert told == {d.proxies[0].url}

    run(use, tmp_path, probe_every_s=60.0)


def test_a_server_that_dies_while_it_loads_is_left_behind_and_caught_up(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)

        async def die() -> None:
            await d.proxies[0].refuse()
            d.proxies[0].reset_all()

        d.servers[0].before_load = die
        await d.publish(1)
        await d.ask_all([request(i) for i in range(8)])
        assert d.up() == [d.proxies[1].url]
        d.servers[0].before_load = None
        await d.servers[0].restart()
        await d.proxies[0].accept()
        await until(lambda: len(d.up()) == 2)
        assert d.servers[0].fingerprint() == fingerprint(1)

    run(use, tmp_path)


def test_an_update_whose_reply_is_lost_is_found_to_have_arrived(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        d.proxies[0].only = "/pvg/weights"
        d.proxies[0].plan(Fault("reset", after=0))
        await d.publish(1)
        assert len(d.up()) == 2
        assert d.servers[0].calls["/pvg/weights"] == 2  # one for each version
        assert d.events.named("server.failed") == []

    run(use, tmp_path)


def test_an_update_while_all_servers_are_away_waits_for_the_first_that_comes_back(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        for proxy in d.proxies:
            await proxy.refuse()
            proxy.reset_all()
        await until(lambda: not d.up())
        publishing = asyncio.create_task(d.publish(1))
        await asyncio.sleep(0.1)
        assert not publishing.done()
        await d.proxies[1].accept()
        timing = await publishing
        assert (timing.version, timing.parts["load_ms"] > 0.0) == (1, True)
        found = await d.ask(request(1))
        assert found.spans == (VersionSpan(0, 1),)

    run(use, tmp_path)


def test_a_server_with_other_weights_than_it_says_ends_the_run_by_name_and_version(tmp_path: Path) -> None:
    """It loads nothing and says that it did: only the canary can tell."""

    async def use(d: Drill) -> None:
        await d.publish(0)
        d.servers[1].scorer = lambda _, ids: [-1.0] * (len(ids) - 1)
        with pytest.raises(WeightsNotArrivedError, match="does not have version 1 of the weights") as caught:
            await d.publish(1)
        assert d.proxies[1].url in caught.value.message
        assert d.proxies[0].url not in caught.value.message

    run(use, tmp_path)


def test_no_activation_of_an_old_version_serves_a_new_one(tmp_path: Path) -> None:
    """Also where a server keeps its prefix cache across updates: every version has a different salt."""

    async def use(d: Drill) -> None:
        for version in range(3):
            await d.publish(version)
            for _ in range(2):  # the same prompts again and again
                await d.ask_all([request(number, 4, prompt=50) for number in range(4)])
        stats = d.engine.stats
        assert 0 < stats.prompt_tokens_computed < stats.prompt_tokens
        assert [server.stale_hits for server in d.servers] == [0, 0]

    run(use, tmp_path, keeps_cache=True)


def test_a_prompt_sent_during_an_update_finds_and_leaves_no_activation_for_others(tmp_path: Path) -> None:
    """Before the update is proven, it is unknown whether old or new weights compute it."""

    async def use(d: Drill) -> None:
        await d.publish(0)
        asked = [request(number, 4, prompt=50) for number in range(4)]
        await d.ask_all(asked)
        load, loading = asyncio.Event(), asyncio.Semaphore(0)

        async def hold() -> None:
            loading.release()
            await load.wait()

        for server in d.servers:
            server.before_load = hold
        publishing = asyncio.create_task(d.publish(1))
        for _ in d.servers:
            await loading.acquire()
        received = d.received()
        answers = asyncio.create_task(d.ask_all(asked))
        await until(lambda: d.received() == received + len(asked))
        load.set()
        await asyncio.gather(publishing, answers)
        await d.ask_all(asked)
        assert [server.stale_hits for server in d.servers] == [0, 0]

    run(use, tmp_path, keeps_cache=True)


def test_a_server_that_hangs_while_it_is_caught_up_does_not_keep_the_others_from_newer_weights(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await lose_the_first(d)
        hangs, goes_on = asyncio.Event(), asyncio.Event()

        async def hang() -> None:
            hangs.set()
            await goes_on.wait()

        d.servers[0].before_load = hang
        await d.proxies[0].accept()
        await hangs.wait()
        await asyncio.wait_for(d.publish(2), 8)  # without the interruption: until the load is given up
        found = await d.ask(request(1))
        assert found.spans == (VersionSpan(0, 2),)
        d.servers[0].before_load = None
        goes_on.set()
        await until(lambda: len(d.up()) == 2)
        assert all(done.spans == (VersionSpan(0, 2),) for done in await d.ask_all([request(i) for i in range(8)]))

    run(use, tmp_path)


def test_a_server_that_loads_for_longer_than_a_step_joins_with_the_second_update(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await lose_the_first(d)
        began: list[int] = []
        turns = asyncio.Semaphore(0)

        async def load() -> None:
            began.append(d.engine.served.version)
            await turns.acquire()

        d.servers[0].before_load = load
        await d.proxies[0].accept()
        await until(lambda: began == [1])
        await d.publish(2)
        turns.release()  # the server answers again only when the load is over
        await until(lambda: began == [1, 2])
        third = asyncio.create_task(d.publish(3))
        await until(lambda: d.engine.served.fleet.servers[0].interruptions == 2)
        for _ in range(2):
            turns.release()
        await third
        assert began == [1, 2, 3]
        assert len(d.up()) == 2
        assert d.servers[0].fingerprint() == fingerprint(3)

    run(use, tmp_path, timeout_s=30.0)


def test_a_trainer_that_was_believed_dead_cannot_take_the_servers_back(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        urls = [proxy.url for proxy in d.proxies]
        later = engine_over(urls, tmp_path, d.events, session=PublishingSession.begin())
        await later.ready()
        await later.load_weights(WeightUpdate(0, tensors(5)))
        with pytest.raises(ServerUnavailableError) as caught:
            await d.engine.generate(request(1))
        assert "HTTP 409" in caught.value.message
        assert {server.fingerprint() for server in d.servers} == {fingerprint(5)}
        with pytest.raises((WeightsNotArrivedError, ServerUnavailableError), match="HTTP 409"):
            await d.publish(1)
        assert {server.fingerprint() for server in d.servers} == {fingerprint(5)}
        await later.close()

    run(use, tmp_path, unavailable_s=0.5)


def test_adapters_are_not_put_upon_weights_that_another_trainer_sent(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        d.servers[0].label = "18f-aa/3"  # it was trained with whole weights before, and not restarted
        adapting = engine_over([d.proxies[0].url], tmp_path, d.events, transport="lora")
        with pytest.raises(ConfigurationError, match="has weights that a trainer sent it"):
            await adapting.ready()
        await adapting.close()

    run(use, tmp_path, max_lora_rank=16)


def test_tokens_of_adapters_upon_other_weights_are_not_delivered(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        urls = [proxy.url for proxy in d.proxies]
        lenient = canary()
        lenient.tolerance = 1e3  # the tests' own servers do not start with weights that the trainer has
        adapting = engine_over(urls, tmp_path, d.events, transport="lora", canary_=lenient, probe_every_s=60.0)
        await adapting.ready()
        await adapting.load_weights(WeightUpdate(0, tensors(0)))
        assert (await adapting.generate(request(1))).spans[0].version == 0
        d.servers[0].label = "18f-aa/3"  # another trainer uses the server too
        for number in range(8):
            await adapting.generate(request(number))
        assert d.events.named("retry")[0]["why"].endswith("sampled from weights '18f-aa/3', which another trainer sent")
        await adapting.close()

    run(use, tmp_path, max_lora_rank=16)
