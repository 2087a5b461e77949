"""Llama models with random weights, for benchmarks whose work must not depend on what a model has learned.

with tempfile.TemporaryDirectory() as folder:
    source = random_llama(Path(folder), width=256, layers=3, context=1024, seed=0)    # for models.prover.source
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.models.characters import modchain_tokenizer
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer

HEAD = 32  # width of an attention head
INNER = 2  # width of the feed-forward part's hidden layer, in multiples of the model's width


def random_llama(folder: Path, *, width: int, layers: int, context: int, seed: int) -> str:
    """Write a model with modchain's tokenizer into `folder`; returns the source under which `open_model` reads it.

    `width` is a multiple of HEAD. Does not change torch's global random state.
    """
    name = f"random-llama-{width}x{layers}"
    tokenizer = Tokenizer(modchain_tokenizer(), name)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=width,
        intermediate_size=INNER * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = LlamaForCausalLM(config)
    with LanguageModel(module, tokenizer, name) as model:
        model.save(folder / name)
    return str(folder / name)
