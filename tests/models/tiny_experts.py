"""Tiny random mixtures of experts, of three kinds of transformers'."""

from __future__ import annotations

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LAYERS, EXPERTS, CHOSEN = 2, 5, 2
SIZES = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,
    "num_experts_per_tok": CHOSEN,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
KINDS = ["mixtral", "qwen2_moe", "qwen3_moe"]


def tiny_experts(kind: str = "mixtral", seed: int = 0, experts: int = EXPERTS, **sizes: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**{**SIZES, **sizes}, num_local_experts=experts)).eval()
    own = {**SIZES, **sizes, "num_experts": experts, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    if kind == "qwen2_moe":  # weighs its experts by their probabilities as they are
        own |= {"shared_expert_intermediate_size": 24, "norm_topk_prob": False}
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**own))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**own, head_dim=8, norm_topk_prob=True))
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):  # zeros as they are made: all experts alike
            torch.nn.init.normal_(weight, std=0.5)
    return model.eval()
