"""The `Scorer` protocol (rollouts in, scores out), and `ScoringModel`, a model that computes scores in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from pvg.records import Float32, Scorable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pvg.models.tokenizer import Tokenizer


class Scorer(Protocol):
    """Scores solutions, with one version of a verifier at a time."""

    @property
    def version(self) -> str:
        """Identifies the weights behind the scores."""
        ...

    async def score(self, rollouts: Sequence[Scorable]) -> Float32:
        """float32 [n], logits: the verifier's confidence that each rollout is correct."""
        ...


class ScoringModel(Protocol):
    """A verifier that can only score: one model (pvg.models.heads.VerifierModel documents the members) or an ensemble
    (pvg.models.ensembles.VerifierEnsemble)."""

    needs_reference: bool
    reads: Literal["scalar", "implicit", "yes_token"]

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_length(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None = None
    ) -> Tensor: ...

    def reference(self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor: ...

    def version(self) -> str: ...

    def close(self) -> None: ...
