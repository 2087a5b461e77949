"""Tiny random policies, requests for them, and an independent reference for what they should sample."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pvg.config.rollout import Rollouts
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer
from pvg.records import Problem, Role
from pvg.rollout import EngineSetup
from pvg.rollout.dispatcher import GroupOrder
from pvg.rollout.engine import Completion, GenerationRequest, Sampling
from pvg.rollout.torch_engine import TorchEngine
from pvg.telemetry.events import SilentEvents

VOCABULARY = 20
PATIENCE_S = 30.0
TOKENIZER = Tokenizer(modchain_tokenizer())
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,  # far from uniform: a wrong distribution shows
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def tiny_llama(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def tiny_model(seed: int = 0, module: PreTrainedModel | None = None) -> LanguageModel:
    return LanguageModel(module or tiny_llama(seed), Tokenizer(modchain_tokenizer()), "tiny")


def prompts(count: int, shortest: int = 1, longest: int = 9, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    lengths = random.integers(shortest, longest + 1, count)
    return [random.integers(2, VOCABULARY, length).astype(np.int32) for length in lengths]


def requests(prompts_: Sequence[np.ndarray], sampling: Sampling, seed: int = 100) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{i}", prompt, sampling, seed + i) for i, prompt in enumerate(prompts_)]


def orders(sizes: Sequence[int]) -> list[GroupOrder]:
    """Groups of these sizes, numbered from 0, of the roles in turn."""
    return [
        GroupOrder(Problem(f"p{i}", f"{i}+1?", f"{i + 1}"), tuple(Role)[i % 2], TOKENIZER.encode(f"H{i}+1?"), i, size)
        for i, size in enumerate(sizes)
    ]


class Gate:
    """Holds the decoding thread where it calls `hold` until it is opened."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()
        self.rows: list[int] = []  # of every step

    def hold(self) -> None:
        self._reached.set()
        assert self._opened.wait(PATIENCE_S), "the gate stays closed: the event loop does not run"

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, PATIENCE_S), "decoding never came so far"

    def open(self) -> None:
        self._opened.set()


def with_engine(
    use: Callable[[TorchEngine], Awaitable[Any]],
    *,
    model: LanguageModel | None = None,
    max_rows: int = 64,
    max_in_flight: int = 4096,
    **switches: bool,
) -> Any:
    """Run `use(engine)` on a new event loop, and close the engine."""

    async def run() -> Any:
        engine = TorchEngine(
            model or tiny_model(), max_rows=max_rows, max_in_flight=max_in_flight, executor=executor, **switches
        )
        try:
            return await use(engine)
        finally:
            await engine.close()

    with ThreadPoolExecutor(1) as executor:
        return asyncio.run(run())


def generate(requests_: Sequence[GenerationRequest], **options: Any) -> list[Completion]:
    async def use(engine: TorchEngine) -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, requests_))

    return list(with_engine(use, **options))


def teacher_forced(module: torch.nn.Module, prompt: np.ndarray, completion: np.ndarray, how: Sampling) -> np.ndarray:
    """Log-probs of the completion from one plain forward pass: no cache, no padding, no batch."""
    ids = np.concatenate([prompt, completion]).astype(np.int64)
    with torch.no_grad():
        logits_LV = module(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].double().numpy()
    found = []
    for position in range(len(prompt), len(ids)):
        logits = logits_LV[position - 1] / how.temperature
        weights = np.exp(logits - logits.max())
        found.append(np.log(weights[ids[position]] / weights.sum()))
    return np.asarray(found)


def setting(section: Rollouts, model: LanguageModel, executor: ThreadPoolExecutor) -> EngineSetup:
    """What `open_engine` takes, with this `[rollout]` section."""
    return EngineSetup(section, model, executor, SilentEvents())
