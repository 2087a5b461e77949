"""The record of a model's low-rank adapters (made by `pvg.models.adapters`). Importing this does not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRankAdapter:
    """Adapters in peft's format. `tensors` by peft's names: float32 lora_A.weight [rank, in] and lora_B.weight [out,
    rank]. `config`: the content of adapter_config.json."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, object]
