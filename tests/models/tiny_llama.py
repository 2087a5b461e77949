"""A Llama with 2 or more layers of width 32 and random weights, and the tokenizer of modchain."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer


def tiny_llama(seed: int = 0, name: str = "tiny", tied: bool = True, layers: int = 2, **changes: Any) -> LanguageModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=19,
        num_hidden_layers=layers,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        **(sizes | changes),
    )
    return LanguageModel(LlamaForCausalLM(config), Tokenizer(modchain_tokenizer()), name)
