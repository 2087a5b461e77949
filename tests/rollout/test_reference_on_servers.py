"""Servers with adapters also hold the base model: they give its log-probs of each completion, under the same faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from vllm_drills import AS_STARTED, Drill, Fault, canary, prompt_logprobs, request, run, tensors

from pvg.errors import RolloutFailedError
from pvg.models.language_model import LowRankAdapter
from pvg.rollout.engine import GenerationRequest
from pvg.servers.publishing import WeightUpdate

pytestmark = pytest.mark.slow


async def checked(d: Drill, of: GenerationRequest) -> None:
    """Each token of a completion has the base's log-prob at its place, and an adapter sampled it."""
    found = await d.engine.with_reference(of, await d.engine.generate(of))
    expected = prompt_logprobs(AS_STARTED, [*of.prompt_ids.tolist(), *found.token_ids.tolist()])
    assert found.reference_logprobs is not None
    assert found.reference_logprobs.tolist() == expected[len(of.prompt_ids) - 1 :]
    assert [span.version for span in found.spans] == [1]


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
        await asyncio.gather(*(checked(d, request(number, 2 + 5 * number)) for number in range(8)))
        assert d.events.named("retry")
        await d.servers[0].kill()
        await checked(d, request(9, 12))

    with_adapter(use, tmp_path)


def test_a_completion_whose_reference_cannot_be_computed_is_not_delivered(tmp_path: Path) -> None:
    async def use(d: Drill) -> None:
        for server in d.servers:
            server.scorer = lambda _, ids: [float("nan")] * (len(ids) - 1)
        with pytest.raises(RolloutFailedError, match="reference"):
            await checked(d, request(1, 12))

    with_adapter(use, tmp_path, retries=1)
