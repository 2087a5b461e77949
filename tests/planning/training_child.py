"""Trains a Llama of a given shape for two steps, and prints how much the process's peak memory grew, in bytes.

python training_child.py '{"hidden_size": 256, ...}' '{"rows": 16, "length": 128, ...}'
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer

PROMPT = 16
STATUS = Path("/proc/self/status")


def memory(kind: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(kind))
    return 1024 * int(line.split()[1])


class SameBatch:
    def __init__(self, batch: PolicyBatch) -> None:
        self.batch = batch

    async def next_batch(self) -> PolicyBatch:
        return self.batch


def batch_of(rows: int, length: int, vocabulary: int) -> PolicyBatch:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, vocabulary, length).astype(np.int32) for _ in range(rows)]
    logprobs = [np.full(length - PROMPT, -8.0, np.float32) for _ in sequences]
    return PolicyBatch(
        sequences=sequences,
        prompt_lengths=np.full(rows, PROMPT, np.int32),
        sampled_logprobs=logprobs,
        reference_logprobs=logprobs,
        advantages_N=rng.normal(size=rows).astype(np.float32),
        role_ids_N=np.zeros(rows, np.int8),
        group_ids_N=np.arange(rows, dtype=np.int32),
        versions_N=np.zeros(rows, np.int32),
    )


def train(shape: dict[str, Any], rows: int, length: int, precision: str, checkpointing: bool, steps: int) -> None:
    config = LlamaConfig(**shape, attn_implementation="sdpa")
    module = LlamaForCausalLM(config)
    module.requires_grad_(True)
    section = Training(micro_batch_tokens=rows * length, precision=precision)
    with ThreadPoolExecutor(1) as executor:
        trainer: Trainer[PolicyBatch] = Trainer(
            module,
            PolicyObjective(section, Rollouts(max_tokens=length), 0),
            OptimizerSettings(learning_rate=1e-4, total_steps=10),
            SameBatch(batch_of(rows, length, config.vocab_size)),
            executor=executor,
            precision=precision,
            gradient_checkpointing=checkpointing,
        )

        async def play() -> None:
            for _ in range(steps):
                assert await trainer.step() is not None

        asyncio.run(play())


def main() -> None:
    shape, case = (json.loads(text) for text in sys.argv[1:])
    torch.set_num_threads(1)
    tiny = {**shape, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny["num_key_value_heads"] = 1
    train(tiny, 2, 32, case["precision"], case["checkpointing"], 1)  # loads what torch loads lazily
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at the present size
    before = memory("VmRSS")
    train(shape, steps=2, **case)
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    main()
