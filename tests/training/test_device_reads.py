"""A micro-batch waits for its device only where its loss and metrics are read, once per step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.config.load import build_experiment
from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.models import logprobs
from pvg.models.heads import build_verifier
from pvg.models.language_model import LanguageModel
from pvg.models.shared_prompts import trust_packing
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import PairObjective

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}


@pytest.mark.parametrize("player", ["prover", "implicit", "scalar"])
def test_a_packed_micro_batch_reads_nothing_from_the_device(player: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on "meta" have no data, so that any reading of one raises. It has no autocast."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=None: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with torch.device("meta"):
        module: Any = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, vocab_size=50)).eval()
    logprobs.trust(module)
    trust_packing(module)
    sequences = [np.arange(11 + row % 5, dtype=np.int32) for row in range(8)]
    starts_N, zeros_N = np.full(8, 4, np.int32), np.zeros(8, np.float32)
    if player == "prover":
        objective: Any = PolicyObjective(Training(kl={"coefficient": 0.1}), Rollouts(), 0)
        sampled = [np.full(len(ids) - 4, -2.0, np.float32) for ids in sequences]
        ids_N = np.arange(8, dtype=np.int32)
        numbers = {"advantages_N": zeros_N + 1, "role_ids_N": zeros_N.astype(np.int8), "group_ids_N": ids_N // 4}
        batch: Any = PolicyBatch(sequences, starts_N, sampled, sampled, **numbers, versions_N=0 * ids_N)
    else:
        section = build_experiment({"verifier": {"head": player}}).verifier
        module = build_verifier(section, LanguageModel(module, cast(Any, None), "meta")).to("meta")
        objective = PairObjective(section, 0, longest_packed=module.longest_packed)
        pairs_M2 = np.array([[row, 7 - row] for row in range(4)], np.int32)
        batch = VerifierBatch(sequences, starts_N, pairs_M2, zeros_N)
    (part,) = objective.split(objective.prepare(batch))
    loss, _ = objective(module, part)
    loss.backward()
    assert any(weight.grad is not None for weight in module.parameters())
