"""The slow sides of `rollout.compaction` and `rollout.shared_prefill`: more work, the same completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tiny_policies import prompts, setting, tiny_llama, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from pvg.config.sections import Rollouts
from pvg.rollout import open_engine
from pvg.rollout.decoding import DecodedRow, decode
from pvg.rollout.engine import GenerationRequest, Sampling

GROUP = 4


def grouped_requests() -> list[GenerationRequest]:
    """Ten groups of GROUP rows on one prompt each, prompts of 1 to 9 tokens; rows end early and late."""
    sampling = Sampling(24, (1, 2, 3))
    shared = [prompt for prompt in prompts(10) for _ in range(GROUP)]
    return [GenerationRequest(f"r{i}", prompt, sampling, seed=100 + i) for i, prompt in enumerate(shared)]


def decoded(
    wanted: Sequence[GenerationRequest], module: PreTrainedModel | None = None, **switches: bool
) -> tuple[list[DecodedRow], list[tuple[int, int]], list[tuple[int, int]]]:
    """The results, and the shapes [rows, tokens] of the prefills and of the decoding steps."""
    module = (module or tiny_llama()).eval()
    shapes: list[tuple[int, int]] = []
    hook = module.get_input_embeddings().register_forward_pre_hook(
        lambda _module, arguments: shapes.append(tuple(arguments[0].shape))
    )
    results = decode(module, wanted, np.zeros(len(wanted), dtype=bool), torch.device("cpu"), **switches)
    hook.remove()
    steps = max(len(result.token_ids) for result in results)
    return results, shapes[:-steps], shapes[-steps:]


def assert_same(one: Sequence[DecodedRow], other: Sequence[DecodedRow]) -> None:
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left.token_ids, right.token_ids)
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)
        assert left.finish_reason == right.finish_reason


def test_the_completions_are_the_same_on_all_sides() -> None:
    fast, _, _ = decoded(grouped_requests())
    assert len({len(result.token_ids) for result in fast}) > 5  # else there would be nothing to compact
    for switches in ({"compaction": False}, {"shared_prefill": False}, {"compaction": False, "shared_prefill": False}):
        slow, _, _ = decoded(grouped_requests(), **switches)
        assert_same(fast, slow)


def test_without_compaction_every_row_stays_to_the_end() -> None:
    wanted = grouped_requests()
    _, _, fast = decoded(wanted)
    _, _, slow = decoded(wanted, compaction=False)
    assert slow == [(len(wanted), 1)] * len(fast)
    assert fast[-1][0] < len(wanted) / 4


def test_without_shared_prefill_every_row_computes_its_prompt() -> None:
    wanted = grouped_requests()
    _, fast, _ = decoded(wanted)
    _, slow, _ = decoded(wanted, shared_prefill=False)
    long_enough = {request.prompt_ids.tobytes() for request in wanted if len(request.prompt_ids) > 1}
    assert sum(rows for rows, _ in fast) == len(long_enough)
    assert sum(rows for rows, _ in slow) == GROUP * len(long_enough)


@pytest.mark.parametrize("compaction", [True, False])
def test_a_finished_row_that_stays_does_not_run_out_of_the_context(compaction: bool) -> None:
    # GPT-2 looks its positions up in a table of 32: the long prompts end at its edge while the short ones go on. (With
    # compaction one row of 16 is too few to leave.)
    config = GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2)
    torch.manual_seed(0)
    module = GPT2LMHeadModel(config)
    long, *short = prompts(1, 30, 30) + prompts(15, 2, 4)
    wanted = [GenerationRequest("long", long, Sampling(2, ()), 1)]
    wanted += [GenerationRequest(f"{i}", prompt, Sampling(28, ()), 2 + i) for i, prompt in enumerate(short)]
    together, _, _ = decoded(wanted, module, compaction=compaction)
    for request, result in zip(wanted, together, strict=True):
        assert_same(decoded([request], module)[0], [result])


@pytest.mark.parametrize("switch", ["compaction", "shared_prefill"])
def test_the_configuration_reaches_the_decoding(switch: str) -> None:
    """Through the engine that `rollout` names: the switch's slow side pushes more tokens through the model."""

    async def tokens_computed(section: Rollouts) -> tuple[int, list[np.ndarray]]:
        model = tiny_model()
        sizes: list[int] = []
        model.module.get_input_embeddings().register_forward_pre_hook(
            lambda _module, arguments: sizes.append(arguments[0].numel())
        )
        with ThreadPoolExecutor(1) as executor:
            engine = open_engine(setting(section, model, executor))
            found = await asyncio.gather(*map(engine.generate, grouped_requests()))
            await engine.close()
        return sum(sizes), [completion.token_ids for completion in found]

    fast, fast_tokens = asyncio.run(tokens_computed(Rollouts(decoding="module")))
    slow, slow_tokens = asyncio.run(tokens_computed(Rollouts(**{"decoding": "module", switch: False})))
    assert slow > 1.2 * fast
    assert [row.tolist() for row in fast_tokens] == [row.tolist() for row in slow_tokens]


@pytest.mark.parametrize("shared_prefill", [True, False])
def test_the_prompt_tokens_told_are_those_computed(shared_prefill: bool) -> None:
    """Two groups whose prompts differ in their last token alone share everything before it."""

    async def run() -> tuple[int, int, float]:
        model = tiny_model()
        sizes: list[int] = []
        model.module.get_input_embeddings().register_forward_pre_hook(
            lambda _module, arguments: sizes.append(arguments[0].numel())
        )
        two = [np.array([5, 6, 7, last], dtype=np.int32) for last in (8, 9)]
        asked = [GenerationRequest(f"{i}", prompt, Sampling(1, ()), i) for i, prompt in enumerate(two * GROUP)]
        with ThreadPoolExecutor(1) as executor:
            engine = open_engine(setting(Rollouts(decoding="module", shared_prefill=shared_prefill), model, executor))
            await asyncio.gather(*map(engine.generate, asked))
            await engine.close()
        return sum(sizes), engine.stats.prompt_tokens_computed, engine.stats.prefix_share

    computed, told, share = asyncio.run(run())
    assert told == computed == (3 + 8 if shared_prefill else 4 * 8)
    assert share == pytest.approx(1 - computed / 32)
