"""Mixed precision: weights stay float32, matrix products run in bfloat16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from pvg.errors import ConfigurationError


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context a forward pass runs in: bfloat16 autocast, or nothing for "float32".

    Autocast belongs to a thread: enter it in the thread that computes.
    """
    if precision == "float32":
        return nullcontext()
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    raise ConfigurationError(f"There is no precision {precision!r}.", "Known: float32, bfloat16.")
