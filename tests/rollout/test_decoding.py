"""What a batch samples: the right distribution, the same for a row in any company, in fewer rows as rows finish."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tiny_policies import SIZES, generate, prompts, requests, setting, teacher_forced, tiny_llama, tiny_model
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertGenerationConfig,
    BertGenerationDecoder,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pvg.config.rollout import Rollouts
from pvg.errors import ConfigurationError, TrainingDivergedError
from pvg.rollout import decoding, open_engine
from pvg.rollout.decoding import DecodedRow, check_decoding, decode
from pvg.rollout.engine import GenerationRequest, Sampling

pytestmark = pytest.mark.slow

NO_STOP = ()


def check_logprobs(
    module: PreTrainedModel, wanted: list[GenerationRequest], atol: float = 1e-4, **options: int
) -> None:
    completions = generate(wanted, model=tiny_model(module=module), **options)
    for request, completion in zip(wanted, completions, strict=True):
        reference = teacher_forced(module, request.prompt_ids, completion.token_ids, request.sampling)
        np.testing.assert_allclose(completion.logprobs, reference, atol=atol)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 1e-4])
def test_logprobs_are_those_of_a_plain_forward_pass(temperature: float) -> None:
    sampling = Sampling(12, (1,), temperature)
    atol = 1e-4 if temperature > 0.1 else 2e-2  # rounding of the logits is divided by the temperature
    check_logprobs(tiny_llama(), requests(prompts(24), sampling), atol)


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))


def qwen3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    config = Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, sliding_window=3, layer_types=layers)
    return Qwen3ForCausalLM(config)


def gemma2() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=4, final_logit_softcapping=3.0))


def gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=96, initializer_range=0.2)
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("build", [mistral, qwen3, gemma2, gpt2])
def test_other_architectures_with_short_windows_caps_and_learned_positions(
    build: Callable[[], PreTrainedModel],
) -> None:
    torch.manual_seed(0)
    check_logprobs(build().eval(), requests(prompts(10, 1, 12), Sampling(14, (1,))))


def test_prompts_of_one_token_and_prefill_in_several_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    check_logprobs(tiny_llama(), requests(prompts(4, 1, 1), Sampling(5, NO_STOP)))
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 20)
    check_logprobs(tiny_llama(), requests(prompts(16, 1, 9), Sampling(5, NO_STOP)))


def test_a_row_samples_the_same_tokens_in_any_company() -> None:
    wanted = requests(prompts(30), Sampling(20, (1,)))
    together = generate(wanted)
    for index in (0, 7, 29):
        alone = generate([wanted[index]])[0]
        np.testing.assert_array_equal(alone.token_ids, together[index].token_ids)
        np.testing.assert_allclose(alone.logprobs, together[index].logprobs, atol=1e-5)
    backwards = generate(wanted[::-1], max_rows=7)[::-1]
    for one, other in zip(together, backwards, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_a_completion_ends_with_its_first_stop_token_or_at_its_own_limit() -> None:
    stops = (3, 5, 8)
    wanted = [
        dataclasses.replace(request, sampling=Sampling(limit, stops))
        for request, limit in zip(requests(prompts(60), Sampling(1, ())), [1, 2, 3, 7, 15, 30] * 10, strict=True)
    ]
    unstopped = generate([dataclasses.replace(r, sampling=Sampling(r.sampling.max_tokens, ())) for r in wanted])
    reasons = set()
    for request, free, completion in zip(wanted, unstopped, generate(wanted), strict=True):
        ends = np.flatnonzero(np.isin(free.token_ids, stops))
        length = int(ends[0]) + 1 if ends.size else request.sampling.max_tokens
        np.testing.assert_array_equal(completion.token_ids, free.token_ids[:length])
        assert len(completion.logprobs) == length
        assert completion.finish_reason == ("stop" if ends.size else "length")
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_logits_that_are_not_finite_are_an_error_and_not_a_sample() -> None:
    module = tiny_llama()
    with torch.no_grad():
        module.lm_head.weight.fill_(float("nan"))
    with pytest.raises(TrainingDivergedError, match="not finite"):
        generate(requests(prompts(3), Sampling(4, (1,))), model=tiny_model(module=module))


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


OWN_SIZES = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bart() -> PreTrainedModel:
    """It ignores the positions that it is given."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    return BartForCausalLM(BartConfig(**OWN_SIZES, **sizes, init_std=0.3, is_decoder=True, is_encoder_decoder=False))


def bert() -> PreTrainedModel:
    """It looks ahead."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertGenerationDecoder(BertGenerationConfig(**OWN_SIZES, **sizes, initializer_range=0.3))


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


def test_the_check_of_a_long_row_computes_no_logits_of_its_other_tokens() -> None:
    """With a vocabulary of 262,144, those of 4,096 tokens would take 4 GB."""
    module, sizes = tiny_llama(), list[int]()
    module.config.original_max_position_embeddings = 8  # so that a long row is tried
    module.get_output_embeddings().register_forward_pre_hook(
        lambda _module, arguments: sizes.append(arguments[0].numel() // module.config.hidden_size)
    )
    check_decoding(module, torch.device("cpu"), 32)
    assert max(sizes) <= 2


def test_a_model_that_fails_with_the_engines_cache_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hybrid models such as Lfm2 do, whose layers want other states than keys and values."""
    module = tiny_llama()

    def broken(*_: object, **__: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(module, "forward", broken)
    with pytest.raises(ConfigurationError, match="cannot sample with LlamaForCausalLM: list index out of range"):
        check_decoding(module, torch.device("cpu"))
