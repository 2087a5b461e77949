"""Servers with adapters also hold the base model: they give its log-probs of each completion, under the same faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_drills import AS_STARTED, Drill, Fault, canary, prompt_logprobs, request, run, tensors, until

from pvg.errors import RolloutFailedError
from pvg.models.language_model import LowRankAdapter
from pvg.rollout.engine import Completion, GenerationRequest
from pvg.servers.publishing import WeightUpdate

pytestmark = pytest.mark.slow


def asked(number: int, max_tokens: int = 12) -> GenerationRequest:
    return replace(request(number, max_tokens), reference=True)


def checked(found: Completion, of: GenerationRequest) -> Completion:
    """Each token has the base's log-prob at its place, and an adapter sampled it."""
    expected = prompt_logprobs(AS_STARTED, [*of.prompt_ids.tolist(), *found.token_ids.tolist()])
    assert found.reference_logprobs is not None
    assert found.reference_logprobs.tolist() == expected[len(of.prompt_ids) - 1 :]
    assert [span.version for span in found.spans] == [1]
    return found


def with_adapter(use: Callable[[Drill], Awaitable[None]], root: Path, **options: object) -> None:
    lenient = canary()
    lenient.tolerance = 1e3  # the tests' own servers do not start with weights that the trainer has

    async def prepared(d: Drill) -> None:
        adapter = LowRankAdapter(tensors(1), {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]})
        await d.engine.load_weights(WeightUpdate(1, tensors(1), "trace-1", adapter))
        await use(d)

    run(prepared, root, transport="lora", canary_=lenient, max_lora_rank=8, **options)


def test_each_completion_has_the_log_probs_of_the_base_whatever_breaks(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        await d.break_generation(*[Fault("reset", after=100)] * 3)
        requests = [asked(number, 2 + 5 * number) for number in range(8)]
        for found, of in zip(await asyncio.gather(*map(d.engine.generate, requests)), requests, strict=True):
            checked(found, of)
        assert d.events.named("retry")
        await d.servers[0].kill()
        checked(await d.engine.generate(asked(9)), asked(9))

    with_adapter(use, tmp_path)


def test_a_completion_whose_reference_cannot_be_computed_is_not_delivered(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        for server in d.servers:
            server.scorer = lambda _, ids: [float("nan")] * (len(ids) - 1)
        with pytest.raises(RolloutFailedError, match="reference"):
            await d.engine.generate(asked(1))

    with_adapter(use, tmp_path, retries=1)


def test_a_cut_keeps_a_completion_that_only_lacks_its_reference(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        task = asyncio.create_task(d.engine.generate(asked(1)))
        await until(lambda: sum(d.servers[0].finished.values()) == 1)
        assert not task.done()
        d.engine.cut([asked(1).id])
        checked(await task, asked(1))

    with_adapter(use, tmp_path, servers=1, token_ms=50.0)
