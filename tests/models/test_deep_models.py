"""Deep models in 16 bits: rounding adds up over the layers, and the checks of the fast code know that.

With random weights this is worse than with trained ones. `make gpu` measures such models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu.sizes import DEEP, random_model
from pvg.errors import ConfigurationError
from pvg.models import shared_prompts
from pvg.models.compute import rounding_tolerance
from pvg.models.packing import PackedRows, pack_rows
from pvg.models.shared_prompts import check_packing
from pvg.rollout.lean import LeanDecoder, NotLeanError

CPU = torch.device("cpu")


def test_deep_models_pass() -> None:
    with random_model(DEEP, CPU, torch.bfloat16) as model:
        LeanDecoder.over(model.module)
        check_packing(model.module, fused_layers=True)


def test_a_wrong_position_of_one_token_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*arguments: Any) -> PackedRows:
        packed = pack_rows(*arguments)
        packed.positions_1T[0, -1] += 1
        return packed

    monkeypatch.setattr(shared_prompts, "pack_rows", spoiled)
    with random_model(DEEP, CPU, torch.bfloat16) as model, pytest.raises(ConfigurationError, match="share a prompt"):
        check_packing(model.module, fused_layers=True)


def test_a_wrong_step_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    step = LeanDecoder.step

    def late(self: LeanDecoder, token_R: torch.Tensor, position_R: torch.Tensor, *rest: Any) -> torch.Tensor:
        return step(self, token_R, (position_R - 1).clamp(min=0), *rest)

    monkeypatch.setattr(LeanDecoder, "step", late)
    with random_model(DEEP, CPU, torch.bfloat16) as model, pytest.raises(NotLeanError, match="differ"):
        LeanDecoder.over(model.module)


def test_the_tolerance_grows_with_the_root_of_the_depth_and_has_a_limit() -> None:
    assert rounding_tolerance(0.05, 1) == rounding_tolerance(0.05, 4) == 0.05
    assert rounding_tolerance(0.05, 16) == 0.1
    assert rounding_tolerance(0.05, 10_000) == 0.25
