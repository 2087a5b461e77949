"""What travels of a model's low-rank adapters (`pvg.models.adapters` makes them). Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRankAdapter:
    """As peft stores them: `tensors` (float32, lora_A.weight [rank, in] and lora_B.weight [out, rank]) by peft's names,
    `config` as in its adapter_config.json."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, object]
