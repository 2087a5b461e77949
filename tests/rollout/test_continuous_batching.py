"""Rows that join while others run: a full batch, the same bits every time, and no row is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tiny_policies import Gate, generate, prompts, requests, tiny_model, with_engine
from torch import Tensor

from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.lean import LeanDecoder
from pvg.rollout.torch_engine import TorchEngine
from pvg.servers.publishing import WeightUpdate

pytestmark = pytest.mark.slow


class StepGate(Gate):
    """Counts the rows of every decoding step, and holds the thread at step `hold` until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hold: int = 0) -> None:
        super().__init__()
        step, compare = LeanDecoder.step, LeanDecoder._compare
        comparing = False

        def watched(decoder: LeanDecoder, token_R: Tensor, *rest: Any) -> Tensor:
            if not comparing:
                self.rows.append(len(token_R))
                if len(self.rows) == hold:
                    self.hold()
            return step(decoder, token_R, *rest)

        def unwatched(decoder: LeanDecoder, module: Any) -> None:
            nonlocal comparing
            comparing = True
            compare(decoder, module)
            comparing = False

        monkeypatch.setattr(LeanDecoder, "step", watched)
        monkeypatch.setattr(LeanDecoder, "_compare", unwatched)


def uneven(count: int, seed: int = 0) -> list[GenerationRequest]:
    """Limits of 1 to 40 tokens, nothing else ends a row."""
    limits = np.random.default_rng(seed).integers(1, 41, count).tolist()
    found = zip(prompts(count), limits, strict=True)
    return [GenerationRequest(f"r{i}", prompt, Sampling(limit, ()), 100 + i) for i, (prompt, limit) in enumerate(found)]


def test_at_full_load_nine_of_ten_rows_are_at_work() -> None:
    async def use(engine: TorchEngine) -> float:
        wanted = uneven(600)
        completions = await asyncio.gather(*map(engine.generate, wanted))
        assert [len(c.token_ids) for c in completions] == [request.sampling.max_tokens for request in wanted]
        assert engine.stats.tokens == engine.stats.live_rows == sum(len(c.token_ids) for c in completions)
        assert (engine.stats.batches, engine.stats.rows) == (1, 600)
        return engine.stats.mean_batch

    # The end of the run, when no request waits any more, counts too: hence 600 requests.
    assert with_engine(use, max_rows=16) >= 0.9 * 16


def test_the_same_requests_give_the_same_bits_and_whole_batches_the_same_tokens() -> None:
    wanted = uneven(120)
    first, second = generate(wanted, max_rows=16), generate(wanted, max_rows=16)
    whole = generate(wanted, max_rows=16, continuous=False)
    for one, other, slow in zip(first, second, whole, strict=True):
        assert one.token_ids.tobytes() == other.token_ids.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        np.testing.assert_array_equal(one.token_ids, slow.token_ids)
        np.testing.assert_allclose(one.logprobs, slow.logprobs, atol=1e-5)


def test_finished_rows_are_handed_over_and_others_join_while_the_long_one_runs() -> None:
    async def use(engine: TorchEngine) -> None:
        long = GenerationRequest("long", prompts(1)[0], Sampling(80, ()), 1)
        running = asyncio.create_task(engine.generate(long))
        for _ in range(5):
            assert len((await engine.generate(requests(prompts(1), Sampling(2, ()))[0])).token_ids) == 2
        assert not running.done()
        await running
        assert engine.stats.batches == 1

    with_engine(use, max_rows=2)


def test_a_cancelled_row_leaves_and_the_others_do_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = requests(prompts(6), Sampling(10, ()))
    undisturbed = generate(wanted)
    gate = StepGate(monkeypatch, hold=3)

    async def use(engine: TorchEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(request)) for request in wanted]
        await gate.reached()
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        await asyncio.sleep(0)
        gate.open()
        completions = await asyncio.gather(*(task for task in tasks if task is not tasks[2]))
        for completion, expected in zip(completions, [c for c in undisturbed if c.request_id != "r2"], strict=True):
            np.testing.assert_array_equal(completion.token_ids, expected.token_ids)
        assert engine.stats.tokens == 50
        # A ticket whose first holder has left serves the next one.
        (again,) = await asyncio.gather(engine.generate(wanted[2]))
        np.testing.assert_array_equal(again.token_ids, undisturbed[2].token_ids)

    with_engine(use)
    assert gate.rows == [6] * 3 + [5] * 7 + [1] * 10


def test_new_weights_let_the_running_rows_end_and_nobody_join(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = StepGate(monkeypatch, hold=2)

    async def use(engine: TorchEngine) -> None:
        wanted = [GenerationRequest(f"{i}", p, Sampling(4 + 3 * i, ()), i) for i, p in enumerate(prompts(8))]
        running = asyncio.gather(*map(engine.generate, wanted))  # four run, four wait
        await gate.reached()
        loading = asyncio.create_task(engine.load_weights(WeightUpdate(1, tiny_model(seed=5).weights())))
        await asyncio.sleep(0)
        gate.open()
        completions = await running
        assert [[span.version for span in c.spans] for c in completions] == [[0]] * 4 + [[1]] * 4
        assert (await loading).version == 1
        assert engine.stats.batches == 2

    with_engine(use, max_rows=4)


def test_a_longer_request_finds_room_beside_those_that_run() -> None:
    short = [GenerationRequest(f"s{i}", p, Sampling(3 + i, ()), i) for i, p in enumerate(prompts(9))]
    long = [GenerationRequest(f"l{i}", p, Sampling(80, ()), 50 + i) for i, p in enumerate(prompts(2))]
    alone = [generate([request])[0] for request in [*short, *long]]
    for one, other in zip(generate([*short, *long], max_rows=3), alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
