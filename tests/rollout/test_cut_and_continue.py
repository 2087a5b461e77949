"""A completion that is cut short and continued is the one that was never cut, and each token keeps its own version."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_continuous_batching import StepGate
from test_torch_engine import ModuleGate, turns
from tiny_policies import generate, prompts, requests, teacher_forced, tiny_llama, tiny_model, with_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_experts import tiny_experts

from pvg.records import VersionSpan
from pvg.rollout.engine import Completion, CutShort, PartialCompletion, Sampling
from pvg.rollout.torch_engine import TorchEngine
from pvg.servers.publishing import WeightUpdate

pytestmark = pytest.mark.slow

LONG = Sampling(24, (1,))
WAYS = {"lean, continuous": {}, "lean, whole batches": {"continuous": False}, "module": {"lean": False}}


def begun_of(completion: Completion, tokens: int) -> PartialCompletion:
    return PartialCompletion(completion.token_ids[:tokens], completion.logprobs[:tokens], completion.spans)


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
        assert (one.request_id, one.finish_reason) == (other.request_id, other.finish_reason)


@pytest.mark.parametrize("switches", WAYS.values(), ids=WAYS)
def test_what_is_continued_from_anywhere_is_what_was_never_cut(switches: dict[str, bool]) -> None:
    # Prompts of many lengths, cut after 1 token to all but the last; every third goes on beside rows that are whole.
    wanted = requests(prompts(40), LONG)
    whole = generate(wanted, **switches)
    assert {completion.finish_reason for completion in whole} == {"stop", "length"}
    random = np.random.default_rng(0)
    again = [
        request
        if number % 3 == 0 or len(completion.token_ids) == 1
        else replace(request, resumed_from=begun_of(completion, int(random.integers(1, len(completion.token_ids)))))
        for number, (request, completion) in enumerate(zip(wanted, whole, strict=True))
    ]
    same(generate(again, max_rows=16, **switches), whole)


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "module"])
def test_a_cut_hands_back_what_there_is_and_it_goes_on_under_the_next_weights(
    lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests(prompts(6), Sampling(12, ()))
    # Two rows are cut in the middle and one in the queue; the others do not notice.
    cut = {"r1", "r4", "r5"}
    undisturbed = {completion.request_id: completion for completion in generate(wanted, lean=lean)}
    model, newer = tiny_model(), tiny_llama(seed=9)
    gate = StepGate(monkeypatch, hold=5) if lean else ModuleGate(model.module, step=5)

    async def use(engine: TorchEngine) -> None:
        tasks = {r.id: asyncio.create_task(engine.generate(r)) for r in wanted}
        await gate.reached()
        engine.cut(cut)
        with pytest.raises(CutShort) as waited:
            await tasks["r5"]
        assert waited.value.partial is None
        await turns()
        gate.open()
        begun: dict[str, PartialCompletion] = {}
        for name in ("r1", "r4"):
            with pytest.raises(CutShort) as short:
                await tasks[name]
            assert short.value.partial is not None
            begun[name] = short.value.partial
        same([await tasks[name] for name in ("r0", "r2", "r3")], [undisturbed[n] for n in ("r0", "r2", "r3")])
        for name, found in begun.items():
            assert len(found.token_ids) == 5
            np.testing.assert_array_equal(found.token_ids, undisturbed[name].token_ids[:5])
            np.testing.assert_allclose(found.logprobs, undisturbed[name].logprobs[:5], atol=2e-5)
            assert found.spans == (VersionSpan(0, 0),)
            assert found.version == 0
            assert found.timing.service_s > 0
        assert engine.stats.tokens == 3 * 12 + 2 * 5
        engine.cut(["r1", "nobody"])  # neither is there

        await engine.load_weights(WeightUpdate(1, dict(newer.state_dict()), "t"))
        request = replace(wanted[1], resumed_from=begun["r1"])
        completion = await engine.generate(request)
        assert completion.spans == (VersionSpan(0, 0), VersionSpan(5, 1))
        np.testing.assert_array_equal(completion.logprobs[:5], begun["r1"].logprobs)  # as they were sampled
        assert len(completion.token_ids) == 12
        expected = teacher_forced(newer, request.prompt_ids, completion.token_ids, request.sampling)
        np.testing.assert_allclose(completion.logprobs[5:], expected[5:], atol=1e-4)
        assert engine.stats.tokens == 3 * 12 + 2 * 5 + 7
        assert completion.timing.service_s > begun["r1"].timing.service_s
        third = replace(
            wanted[4], resumed_from=PartialCompletion(begun["r4"].token_ids, begun["r4"].logprobs, begun["r4"].spans)
        )
        assert (await engine.generate(third)).spans == (VersionSpan(0, 0), VersionSpan(5, 1))

    with_engine(use, model=model, lean=lean, max_rows=5)


def test_a_cut_hands_back_the_experts_too() -> None:
    model = tiny_model(module=tiny_experts())
    (request,) = requests(prompts(1, shortest=3), Sampling(12, ()))
    gate = ModuleGate(model.module, step=5)

    async def use(engine: TorchEngine) -> None:
        task = asyncio.create_task(engine.generate(request))
        await gate.reached()
        engine.cut([request.id])
        await turns()
        gate.open()
        with pytest.raises(CutShort) as short:
            await task
        begun = short.value.partial
        assert begun is not None
        assert begun.routed_experts is not None
        assert len(begun.routed_experts) == len(request.prompt_ids) + len(begun.token_ids) - 1
        completion = await engine.generate(replace(request, resumed_from=begun))
        assert completion.routed_experts is not None
        assert len(completion.routed_experts) == len(request.prompt_ids) + 12 - 1

    with_engine(use, model=model, lean=False, routed_experts=True)
