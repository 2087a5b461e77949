"""Requests cut short on vLLM servers: every token that comes back has its version, as the server tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_drills import Drill, Fault, fingerprint, request, run, sampled, until

from pvg.errors import ConfigurationError
from pvg.records import VersionSpan
from pvg.rollout.engine import Completion, CutShort, GenerationRequest, PartialCompletion
from pvg.rollout.vllm_requests import SEED_BITS, joined, remainder

pytestmark = pytest.mark.slow


def live(d: Drill, name: str) -> list[Any]:
    """What the servers have sampled for a request."""
    return [made for server in d.servers if (made := server.live.get(f"generate-tokens-{name}"))]


async def cut_after(d: Drill, asked: Sequence[GenerationRequest], tokens: int) -> list[PartialCompletion]:
    """Ask, wait until all have this many tokens, cut."""
    tasks = [asyncio.create_task(d.engine.generate(one)) for one in asked]
    await until(lambda: all(any(len(made.ids) >= tokens for made in live(d, one.id)) for one in asked))
    d.engine.cut([one.id for one in asked])
    found = await asyncio.gather(*tasks, return_exceptions=True)
    begun = [short.partial for short in found if isinstance(short, CutShort)]
    assert len(begun) == len(asked)
    return [one for one in begun if one is not None]


def check_tokens(asked: GenerationRequest, first: int, found: PartialCompletion | Completion, version: int) -> None:
    """Those from `first` on are what `version` samples for a request as the server sees it."""
    seen = remainder(asked)
    stops = asked.sampling.stop_ids
    pairs = [
        sampled(fingerprint(version), seen.prompt_ids.tolist(), seen.seed & SEED_BITS, position, stops)
        for position in range(len(found.token_ids) - first)
    ]
    assert found.token_ids.tolist()[first:] == [token for token, _ in pairs]
    assert found.logprobs.tolist()[first:] == [logprob for _, logprob in pairs]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole reply", "stream"])
def test_what_was_cut_goes_on_under_the_next_version(streamed: bool, tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        note = (lambda _: None) if streamed else None
        asked = [request(i, 75, stops=False, on_tokens=note) for i in range(6)]
        begun = await cut_after(d, asked, 5)
        await until(lambda: d.running() == 0)
        assert d.events.named("retry") == []
        for one, found in zip(asked, begun, strict=True):
            assert 5 <= len(found.token_ids) < 75
            assert found.spans == (VersionSpan(0, 0),)
            assert found.timing.service_s > 0
            check_tokens(one, 0, found, 0)
        assert d.engine.stats.tokens == sum(len(found.token_ids) for found in begun)

        await d.publish(1)
        again = [replace(one, resumed_from=found) for one, found in zip(asked, begun, strict=True)]
        done = await asyncio.gather(*map(d.engine.generate, again))
        for one, found, whole in zip(again, begun, done, strict=True):
            first = len(found.token_ids)
            assert (len(whole.token_ids), whole.finish_reason, whole.request_id) == (75, "length", one.id)
            assert whole.spans == (VersionSpan(0, 0), VersionSpan(first, 1))
            np.testing.assert_array_equal(whole.token_ids[:first], found.token_ids)
            np.testing.assert_array_equal(whole.logprobs[:first], found.logprobs)
            check_tokens(one, first, whole, 1)
            assert whole.timing.service_s > found.timing.service_s
        await d.ask(request(50))

    run(use, tmp_path, token_ms=4.0)


def test_tokens_of_two_versions_are_told_apart_when_they_are_cut(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        task = asyncio.create_task(d.engine.generate(request(1, 75, stops=False)))
        await until(lambda: any(made.ids for made in live(d, "r1")))
        await d.publish(1)
        (made,) = live(d, "r1")
        await until(lambda: len(made.spans) == 2)
        d.engine.cut(["r1"])
        with pytest.raises(CutShort) as short:
            await task
        assert short.value.partial is not None
        assert short.value.partial.spans == (VersionSpan(0, 0), VersionSpan(made.spans[1]["start"], 1))
        assert short.value.partial.version == 0

    run(use, tmp_path, token_ms=60.0)


def test_a_server_that_answers_no_abort_does_not_delay_the_others(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        d.proxies[0].only = "/inference/v1/abort_requests"
        d.proxies[0].default = Fault("hang")
        asked = [request(i, 90, stops=False) for i in range(4)]
        tasks = [asyncio.create_task(d.engine.generate(one)) for one in asked]
        await until(lambda: d.running() == 4)
        ignored, abort = [], d.servers[1]._abort

        def not_the_first(names: list[str]) -> None:  # vLLM ignores aborts of requests that have not reached it
            ignored.append(names) if not ignored else abort(names)

        d.servers[1]._abort = not_the_first  # type: ignore[method-assign]
        d.engine.cut([one.id for one in asked])
        await until(lambda: sum(task.done() for task in tasks) == 2, 10.0)
        assert d.servers[0].running == 2
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(short, CutShort) for short in found) == 2

    run(use, tmp_path, token_ms=300.0, probe_timeout_s=60.0)


def test_a_server_that_refuses_to_cut_is_named(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.publish(0)
        task = asyncio.create_task(d.engine.generate(request(1, 40, stops=False)))
        await until(lambda: d.running() == 1)
        d.engine.cut(["r1"])
        with pytest.raises(ConfigurationError, match="cannot cut requests short"):
            await task

    run(use, tmp_path, token_ms=10.0, aborts=False)


def test_what_a_server_is_asked_to_go_on_with() -> None:
    asked = request(3, 12)
    assert remainder(asked) is asked
    begun = PartialCompletion(np.array([5, 6], np.int32), np.array([-1, -2], np.float32), (VersionSpan(0, 4),))
    rest = remainder(replace(asked, resumed_from=begun))
    assert rest.prompt_ids.tolist() == [*asked.prompt_ids.tolist(), 5, 6]
    assert (rest.sampling.max_tokens, rest.resumed_from, rest.id) == (10, None, asked.id)
    assert rest.seed != asked.seed
    assert rest.seed == remainder(replace(asked, resumed_from=begun)).seed
    new = PartialCompletion(
        np.array([7, 8], np.int32), np.array([-3, -4], np.float32), (VersionSpan(0, 4), VersionSpan(1, 5))
    )
    whole = joined(replace(asked, resumed_from=begun), new)
    assert whole is not None
    assert whole.token_ids.tolist() == [5, 6, 7, 8]
    assert whole.logprobs.tolist() == [-1, -2, -3, -4]
    assert whole.spans == (VersionSpan(0, 4), VersionSpan(3, 5))
    assert joined(replace(asked, resumed_from=begun), None) is begun
    assert joined(asked, new) is new
    assert joined(asked, None) is None
