"""Lean decoding against the module whose weights it uses: the same logits, the same completions, for its kinds only."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policies import SIZES, generate, prompts, requests, teacher_forced, tiny_llama, tiny_model, with_engine
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pvg.rollout import lean_rows
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.lean import CommonPrefix, KernelAttention, LeanCache, LeanDecoder, NotLeanError, SparseAttention
from pvg.rollout.lean_rows import LEAST_SHARED, MOST_SHARED, SharedPart, shared_parts
from pvg.rollout.torch_engine import TorchEngine
from pvg.telemetry.events import SilentEvents

pytestmark = pytest.mark.slow

ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def with_biases() -> PreTrainedModel:
    module = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    for name, weight in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    return module


def scaled_rotary() -> PreTrainedModel:
    rope = {**ROPE, "original_max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


def tied() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=True))


def mistral(window: int | None = None) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))


KINDS = [tiny_llama, with_biases, scaled_rotary, tied, mistral, qwen2, qwen3]


def varied(count: int = 24) -> list[GenerationRequest]:
    """Groups of four on one prompt, of 1 to 9 tokens; some stop early, limits differ."""
    shared = [prompt for prompt in prompts(count // 4) for _ in range(4)]
    return [
        GenerationRequest(f"r{i}", prompt, Sampling(6 + 3 * (i % 5), (1, 2) if i % 3 else ()), seed=100 + i)
        for i, prompt in enumerate(shared)
    ]


def grouped(groups: int = 6, size: int = 8, seed: int = 3) -> list[GenerationRequest]:
    """Prompts of 20 to 30 tokens, as long ones are worth sharing; some rows stop early."""
    shared = [prompt for prompt in prompts(groups, 20, 30, seed) for _ in range(size)]
    return [
        GenerationRequest(f"r{i}", prompt, Sampling(24, (1, 2) if i % 3 else ()), seed=500 + i)
        for i, prompt in enumerate(shared)
    ]


class StepsSeen:
    """The number of rows of each step, and the prefix that it got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.prefixes: list[CommonPrefix | None] = []
        step = LeanDecoder.step

        def watched(self_: LeanDecoder, token_R: Tensor, *arguments: Any, prefix: CommonPrefix | None = None) -> Tensor:
            if len(arguments) > 3:
                prefix = arguments[3]
            self.rows.append(len(token_R))
            self.prefixes.append(prefix)
            return step(self_, token_R, *arguments)

        monkeypatch.setattr(LeanDecoder, "step", watched)


@pytest.mark.parametrize("build", KINDS)
def test_rows_with_equal_tokens_are_computed_once(
    build: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = build().eval()
    wanted = grouped()
    columns = min(len(request.prompt_ids) for request in wanted) - 1
    seen = StepsSeen(monkeypatch)
    found = generate(wanted, model=tiny_model(module=module))
    rows = [(request.prompt_ids.tolist(), one.token_ids.tolist()) for request, one in zip(wanted, found, strict=True)]
    distinct = [
        len({(*prompt, *tokens[:number]) for prompt, tokens in rows if len(tokens) > number}) for number in range(24)
    ]
    assert seen.rows[1:] == distinct  # the first step is that of the comparison
    assert distinct[0] == 6
    owned = [prefix for prefix in seen.prefixes if prefix is not None]
    assert owned
    for prefix in owned:  # an owner owns itself
        assert prefix.columns >= columns
        assert torch.equal(prefix.owner_R[prefix.owner_R], prefix.owner_R)
    for request, one in zip(wanted, found, strict=True):
        reference = teacher_forced(module, request.prompt_ids, one.token_ids, request.sampling)
        np.testing.assert_allclose(one.logprobs, reference, atol=1e-4)


def test_newcomers_change_no_completion() -> None:
    # 44 rows hold five groups and a half. Later others take the places of those who finished.
    wanted = grouped(groups=9)
    for one, other in zip(generate(wanted, max_rows=44), generate(wanted), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_large_cache_grows_with_its_rows_and_is_freed_when_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Players that train next need its memory."""
    caches, sizes, make = list[weakref.ref[Tensor]](), list[int](), LeanDecoder.new_cache

    def remembered(*arguments: Any) -> LeanCache:
        cache = make(*arguments)
        caches.append(weakref.ref(cache.kv[0]))
        sizes.append(cache.nbytes)
        return cache

    async def use(engine: TorchEngine) -> list[list[Any]]:
        found = [[c.token_ids.tolist() for c in await asyncio.gather(*map(engine.generate, wanted))] for _ in "12"]
        assert (caches[-1]() is None) == freed
        return found

    wanted, freed = grouped(groups=2), False
    monkeypatch.setattr(LeanDecoder, "new_cache", remembered)
    kept, whole = with_engine(use), max(sizes)
    sizes.clear()
    for name, value in {"KEPT_BYTES": 0, "COLUMNS": 2, "GROWTH": 0}.items():
        monkeypatch.setattr(lean_rows, name, value)
    freed = True
    assert with_engine(use) == kept
    assert len(sizes) > 10
    assert max(sizes) < whole


@pytest.mark.parametrize("build", KINDS)
def test_completions_are_those_of_the_module(build: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    module = build().eval()
    LeanDecoder.over(module)  # or it would be the module against itself
    wanted = varied()
    slow = generate(wanted, model=tiny_model(module=module), lean=False)
    fast = generate(wanted, model=tiny_model(module=module), max_rows=10)
    for request, one, other in zip(wanted, slow, fast, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert one.finish_reason == other.finish_reason
        reference = teacher_forced(module, request.prompt_ids, other.token_ids, request.sampling)
        np.testing.assert_allclose(other.logprobs, reference, atol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_both_ways_of_attention_agree(heads: int, kv_heads: int) -> None:
    rows, columns, width = 6, 11, 8
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(rows, heads, width, generator=generator)
    kv = torch.randn(2, rows, columns, kv_heads, width, generator=generator)
    kv[:, 1::2, :4] = kv[:, ::2, :4]
    new = torch.randn(2, rows, kv_heads, width, generator=generator)
    position = torch.tensor([4, 9, 6, 4, 7, 8])
    ways = KernelAttention(rows, columns, kv_heads, width), SparseAttention(rows, columns, heads, kv_heads, width)
    caches = [way.buffer(torch.zeros).copy_(kv) for way in ways]
    for used in (rows, 4):  # twice: what a call leaves behind must not reach the next
        for prefix in (None, CommonPrefix(torch.arange(used) // 2 * 2, 4)):
            found = []
            for way, cache in zip(ways, caches, strict=True):
                way.prepare(position[:used], 10, prefix)
                for buffer, token in zip(cache, new, strict=True):
                    way.write(buffer, token[:used])
                found.append(way.attend(query[:used], cache[0], cache[1]))
            assert torch.equal(caches[0], caches[1])
            torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=96))


def activated() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu"))


class Doubling(LlamaForCausalLM):
    """A Llama by its configuration, and something else in its forward pass."""

    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


def doubling() -> PreTrainedModel:
    return Doubling(LlamaConfig(**SIZES))


@pytest.mark.parametrize(
    ("build", "reason"),
    [(gpt2, "'gpt2'"), (lambda: mistral(4), "window"), (activated, "gelu"), (doubling, "logits differ")],
)
def test_another_model_is_decoded_by_its_module_and_that_is_said(
    build: Callable[[], PreTrainedModel], reason: str
) -> None:
    torch.manual_seed(0)
    module = build().eval()
    with pytest.raises(NotLeanError, match=reason):
        LeanDecoder.over(module)
    wanted = requests(prompts(6), Sampling(8, (1,)))
    said: list[dict[str, object]] = []

    class Heard(SilentEvents):
        def event(self, tag: str, **fields: object) -> None:
            said.append({"tag": tag, **fields})

    async def run(executor: ThreadPoolExecutor) -> None:
        engine = TorchEngine(tiny_model(module=module), max_rows=4, max_in_flight=99, executor=executor, events=Heard())
        for request, completion in zip(wanted, await asyncio.gather(*map(engine.generate, wanted)), strict=True):
            reference = teacher_forced(module, request.prompt_ids, completion.token_ids, request.sampling)
            np.testing.assert_allclose(completion.logprobs, reference, atol=1e-4)
        assert engine.decoding == "module"
        await engine.close()

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(run(executor))
    (decoder,) = [fields for fields in said if fields.get("event") == "decoder"]
    assert decoder["decoding"] == "module"
    assert reason in str(decoder["reason"])


def test_weights_are_held_once_and_loads_reach_the_decoder() -> None:
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.weights().items()}
    decoder = LeanDecoder.over(model.module)
    for name, tensor in model.weights().items():
        assert torch.equal(tensor, before[name])
    attention = model.module.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    model.load_weights(tiny_model(seed=5).weights())
    decoder._compare(model.module)  # raises if a stale copy of any weight were used


def tokens(*pieces: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """`count` times `token`, piece by piece."""
    return np.concatenate([np.full(count, token, dtype=np.int32) for token, count in pieces])


def test_what_prompts_begin_with_is_a_part_of_the_first_level() -> None:
    rules, board = (7, 40), (300, 50)
    prompts = [tokens(rules, board, (1, 5)), tokens((9, 60)), tokens(rules, board, (2, 6)), tokens(rules, (3, 4))]
    assert shared_parts(prompts) == [
        [SharedPart((0, 2, 3), 0, 40), SharedPart((1,), 0, 60)],
        [SharedPart((0, 2), 40, 90), SharedPart((3,), 40, 44)],
        [SharedPart((0,), 90, 95), SharedPart((2,), 90, 96)],
    ]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 20, 32, 33, 70])), min_size=1, max_size=4),
        max_size=12,
    )
)
def test_the_parts_of_a_prompt_cover_each_token_once(pieces: list[list[tuple[int, int]]]) -> None:
    prompts = list({(ids := tokens(*each)).tobytes(): ids for each in pieces}.values())
    done = [0] * len(prompts)
    levels = shared_parts(prompts)
    assert len(levels) <= MOST_SHARED + 1
    for level in levels:
        assert level == sorted(level, key=lambda part: part.prompts[0])
        for part in level:
            assert part.end > part.start
            if len(part.prompts) > 1:
                assert part.length >= LEAST_SHARED
            for number in part.prompts:
                assert done[number] == part.start, "the tokens before a part belong to earlier levels"
                first = prompts[part.prompts[0]]
                assert np.array_equal(prompts[number][: part.end], first[: part.end])
                done[number] = part.end
    assert done == [len(prompt) for prompt in prompts]


def branching() -> list[GenerationRequest]:
    """Prompts of 9 to 29 tokens: common instructions, three positions, and two endings of each."""
    generator = np.random.default_rng(1)

    def drawn(count: int) -> list[int]:
        return generator.integers(3, 20, count).tolist()

    rules, found = drawn(8), [drawn(9)]
    for _ in range(3):
        position = drawn(12)
        found += [rules + position + drawn(1 + 8 * last) for last in range(2)]
    return [
        GenerationRequest(f"r{i}", np.asarray(ids, dtype=np.int32), Sampling(8, ()), seed=i)
        for i, ids in enumerate(found)
    ]


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("build", [tiny_llama, qwen3])
def test_shared_parts_change_no_completion(
    build: Callable[[], PreTrainedModel], sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = build().eval()
    computed: list[int] = []
    begin, prefill = LeanDecoder.__init__, LeanDecoder.prefill

    def chosen(self: LeanDecoder, module: Any) -> None:
        begin(self, module)
        self._sparse = sparse

    def watched(self: LeanDecoder, ids_BL: Tensor, *arguments: Any) -> None:
        computed.append(ids_BL.numel())
        prefill(self, ids_BL, *arguments)

    monkeypatch.setattr(LeanDecoder, "__init__", chosen)
    monkeypatch.setattr(LeanDecoder, "prefill", watched)
    apart = generate(branching(), model=tiny_model(module=module))
    alone = sum(computed)
    computed.clear()
    monkeypatch.setattr(lean_rows, "LEAST_SHARED", 4)
    together = generate(branching(), model=tiny_model(module=module))
    assert sum(computed) < alone
    for one, other in zip(apart, together, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
