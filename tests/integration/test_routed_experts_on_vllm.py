"""The experts that a real vLLM says it chose are those that transformers chooses for the same tokens."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from vllm_servers import EMBEDDED, Server, started

from pvg.models.routing import recorded_experts
from pvg.rollout.engine import GenerationRequest, Sampling
from pvg.rollout.vllm.wire import GENERATE, Generated, Stretch, generation, read_generated

pytestmark = pytest.mark.timeout(900)

SIZES = {
    "vocab_size": 19,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def mixture(folder: Path) -> MixtralForCausalLM:
    """A tiny random mixture of experts, saved with the embedded prover's tokenizer."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES)).eval()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    return model


async def ask(server: Server, request: GenerationRequest, *, streamed: bool) -> Generated:
    pool, url = server.pool(), server.url + GENERATE
    body = generation(request, salt="s", model=None, seeded=True, stream=streamed)
    try:
        if not streamed:
            return read_generated((await pool.request("POST", url, body, timeout_s=None)).json(), url)
        stretch = Stretch(url)
        async with pool.events(url, body, timeout_s=None) as events:
            async for event in events:
                stretch.feed(event)
        return stretch.finish()
    finally:
        await pool.close()


def test_vllms_experts_are_transformers_own(tmp_path: Path) -> None:
    folder = tmp_path / "mixture"
    model = mixture(folder)
    options = ("--block-size", "32", "--enable-return-routed-experts")
    with started(folder, tmp_path, *options) as server:
        for number, streamed in enumerate((False, True, False)):
            prompt = (np.arange(40, dtype=np.int32) * 5) % 17 + 2  # the third time from the prefix cache
            request = GenerationRequest(f"r{number}", prompt, Sampling(12, ()), seed=number)
            found = asyncio.run(ask(server, request, streamed=streamed))
            assert found.routed_experts is not None
            assert found.routed_experts.dtype == np.uint8
            ids = np.concatenate([prompt, found.token_ids]).astype(np.int64)
            with torch.no_grad(), recorded_experts(model) as recorder:
                model(input_ids=torch.from_numpy(ids[None, :-1]), use_cache=False)
                expected = recorder.take().numpy()
            assert found.routed_experts.shape == expected.shape == (51, 2, 2)
            agree = (np.sort(found.routed_experts, axis=2) == np.sort(expected, axis=2)).all(axis=2)
            assert agree.mean() > 0.98  # two experts may be as good as equal
