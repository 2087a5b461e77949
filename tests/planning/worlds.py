"""Small worlds for the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pvg.planning.world import World
from pvg.records import Role


def world(**changes: Any) -> World:
    """One worker with one row, one group of one rollout of 10 tokens, 1 s per token, training 0.5 s per token."""
    lengths = {role: np.array([10]) for role in Role}
    plain = World(
        groups=1,
        group_size=1,
        lengths=lengths,
        workers=1,
        slots=1,
        concurrency=1,
        token_s=1.0,
        train_token_s=0.5,
        sneaky_share=0.0,
    )
    return replace(plain, **changes)


def of_lengths(*lengths: int) -> dict[Role, Any]:
    return {role: np.array(lengths) for role in Role}
