"""The `Scorer` protocol: rollouts in, scores out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pvg.records import Float32, Rollout


class Scorer(Protocol):
    """Scores solutions with one version of a verifier at a time."""

    @property
    def version(self) -> str:
        """Names the weights that the scores come from."""
        ...

    async def score(self, rollouts: Sequence[Rollout]) -> Float32:
        """float32 [n], logits: how sure the verifier is that each rollout is correct."""
        ...
