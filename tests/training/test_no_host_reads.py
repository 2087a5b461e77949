"""A GPU waits whenever the host reads from it. Tensors on "meta" have no data, so any reading of one raises, and so
does any operation that mixes them with tensors of the host."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from benchmarks.gpu.sizes import SMALL, random_model, random_rows
from pvg.models import logprobs, shared_prompts
from pvg.models.logprobs import shared_prompt_outputs

META = torch.device("meta")


@pytest.mark.parametrize("fused_layers", [True, False])
@pytest.mark.parametrize("entropies", [True, False])
def test_packed_rows_read_nothing_forward_and_backward(
    fused_layers: bool, entropies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled, autocast = torch.is_autocast_enabled, torch.autocast
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind != "meta" and enabled(kind))
    monkeypatch.setattr(
        torch, "autocast", lambda kind, **how: nullcontext() if kind == "meta" else autocast(kind, **how)
    )
    with random_model(SMALL.whole, META, torch.float32) as model:
        module = model.module.requires_grad_(True)
        module.__dict__[logprobs._CHECKED] = True  # the checks read, once per model
        module.__dict__[shared_prompts._CHECKED] = {fused_layers}
        sequences, prompt_lengths = random_rows(SMALL, SMALL.whole.vocabulary)
        found = shared_prompt_outputs(
            module, sequences, prompt_lengths, fused_layers=fused_layers, entropies=entropies, logits_chunk=5000
        )
        loss = found.logprobs_BL.sum() + (found.entropies_BL.sum() if found.entropies_BL is not None else 0.0)
        loss.backward()
        assert all(weight.grad is not None and weight.grad.device == META for weight in module.parameters())
