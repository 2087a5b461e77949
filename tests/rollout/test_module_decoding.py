"""Decoding by the model's own forward pass: shared prompts and finished rows save work, and change no completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tiny_policies import prompts, setting, tiny_llama, tiny_model
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertGenerationConfig,
    BertGenerationDecoder,
    PreTrainedModel,
)

from pvg.config.rollout import Rollouts
from pvg.errors import ConfigurationError
from pvg.rollout import open_engine
from pvg.rollout.decoding import DecodedRow, check_decoding, decode
from pvg.rollout.engine import GenerationRequest, Sampling

GROUP = 4


def grouped_requests() -> list[GenerationRequest]:
    """Ten groups of GROUP rows on one prompt each, prompts of 1 to 9 tokens; rows end early and late."""
    sampling = Sampling(24, (1, 2, 3))
    shared = [prompt for prompt in prompts(10) for _ in range(GROUP)]
    return [GenerationRequest(f"r{i}", prompt, sampling, seed=100 + i) for i, prompt in enumerate(shared)]


def decoded(
    wanted: Sequence[GenerationRequest], module: PreTrainedModel | None = None
) -> tuple[list[DecodedRow], list[tuple[int, int]], list[tuple[int, int]]]:
    """The results, and the shapes [rows, tokens] of the prefills and of the decoding steps."""
    module = (module or tiny_llama()).eval()
    shapes: list[tuple[int, int]] = []
    hook = module.get_input_embeddings().register_forward_pre_hook(
        lambda _module, arguments: shapes.append(tuple(arguments[0].shape))
    )
    results = decode(module, wanted, np.zeros(len(wanted), dtype=bool), torch.device("cpu"))
    hook.remove()
    steps = max(len(result.token_ids) for result in results)
    return results, shapes[:-steps], shapes[-steps:]


def test_finished_rows_leave_and_a_shared_prompt_is_computed_once() -> None:
    wanted = grouped_requests()
    _, prefills, steps = decoded(wanted)
    assert steps[0] == (len(wanted), 1)
    assert steps[-1][0] < len(wanted) / 4
    assert sum(rows for rows, _ in prefills) == len(
        {request.prompt_ids.tobytes() for request in wanted if len(request.prompt_ids) > 1}
    )


def test_the_prompt_tokens_told_are_those_computed() -> None:
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
            engine = open_engine(setting(Rollouts(engine={"decoding": "module"}), model, executor))
            await asyncio.gather(*map(engine.generate, asked))
            await engine.close()
        return sum(sizes), engine.stats.prompt_tokens_computed, engine.stats.prefix_share

    computed, told, share = asyncio.run(run())
    assert told == computed == 3 + 8
    assert share == pytest.approx(1 - computed / 32)


SIZES = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bart() -> PreTrainedModel:
    """It ignores the positions that it is given."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    return BartForCausalLM(BartConfig(**SIZES, **sizes, init_std=0.3, is_decoder=True, is_encoder_decoder=False))


def bert() -> PreTrainedModel:
    """It looks ahead."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertGenerationDecoder(BertGenerationConfig(**SIZES, **sizes, initializer_range=0.3))


@pytest.mark.parametrize("make", [bart, bert])
def test_a_model_that_reads_a_prompt_otherwise_beside_a_longer_one_is_refused(
    make: Callable[[], PreTrainedModel],
) -> None:
    torch.manual_seed(0)
    check_decoding(tiny_llama(), torch.device("cpu"))
    with pytest.raises(
        ConfigurationError, match="computes other logits for a prompt when a longer prompt is in the same batch"
    ):
        check_decoding(make().eval(), torch.device("cpu"))


def test_a_model_that_fails_with_the_engines_cache_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hybrid models such as Lfm2 do, whose layers want other states than keys and values."""
    module = tiny_llama()

    def broken(*_: object, **__: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(module, "forward", broken)
    with pytest.raises(ConfigurationError, match="cannot sample with LlamaForCausalLM: list index out of range"):
        check_decoding(module, torch.device("cpu"))
