"""The models and batches of `make gpu`: large ones for a GPU, small ones to test the scripts on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer
from pvg.records import Int32


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 with tied embeddings."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    context: int = 32_768


@dataclass(frozen=True, slots=True)
class Sizes:
    """`whole` is for times, `shallow` for parity. A batch has `groups` prompts of `prompt` tokens, each with `members`
    completions of up to `tokens` tokens. `lengths`: of solutions that a verifier trains on, in tokens. `ballast`: bytes
    that something else takes of the GPU meanwhile. `wide`: a large vocabulary, for one row of `long` tokens."""

    whole: Shape
    shallow: Shape
    groups: int
    members: int
    prompt: int
    tokens: int
    decoded_rows: tuple[int, ...]
    steps: int
    lengths: tuple[int, ...]
    ballast: int
    wide: Shape
    long: int

    @property
    def rows(self) -> int:
        return self.groups * self.members


# Qwen2.5-1.5B, and four of its layers; vLLM's share of an 80 GB GPU (serving.gpu_memory_utilization = 0.45); and the
# sizes of gemma-3-1b, but with heads and layers of a Qwen2.
LARGE = Sizes(
    Shape(28, 1536, 12, 2, 8960, 151_936), Shape(4, 1536, 12, 2, 8960, 151_936), 8, 8, 256, 256, (32, 128, 256), 5,
    (2048, 8192, 16_384), 38_000_000_000, Shape(26, 1152, 9, 3, 6912, 262_144), 8192
)  # fmt: skip
# As many layers, but narrow: rounding adds up over them.
DEEP = Shape(28, 128, 4, 2, 256, 2000)
SMALL = Sizes(
    Shape(2, 64, 4, 2, 96, 640), Shape(2, 64, 4, 2, 96, 640), 3, 4, 40, 24, (4, 12), 2,
    (96,), 1000, Shape(2, 64, 4, 2, 96, 1000), 96
)  # fmt: skip


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> LanguageModel:
    """A model with random weights, made on `device` in seconds. Its token ids have no text. Changes torch's global
    random state."""
    tokenizer = Tokenizer(modchain_tokenizer(), "random")
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        # Logits with a deviation of 1.5, far from uniform: a wrong one shows.
        initializer_range=1.5 / shape.width**0.5,
    )
    torch.manual_seed(seed)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return LanguageModel(module, tokenizer, f"random-{shape.layers}x{shape.width}")


def random_rows(sizes: Sizes, vocabulary: int, seed: int = 0) -> tuple[list[Int32], Int32]:
    """Sequences int32 [P + C] of all groups, with prompts and completions of different lengths, and each P."""
    random = np.random.default_rng(seed)
    sequences, lengths = list[Int32](), list[int]()
    for _ in range(sizes.groups):
        prompt = random.integers(2, vocabulary, int(random.integers(sizes.prompt // 2, sizes.prompt + 1)))
        for _ in range(sizes.members):
            own = random.integers(2, vocabulary, int(random.integers(1, sizes.tokens + 1)))
            sequences.append(np.concatenate([prompt, own]).astype(np.int32))
            lengths.append(len(prompt))
    return sequences, np.array(lengths, dtype=np.int32)
