"""An ensemble of verifiers that scores like one verifier.

    ensemble = VerifierEnsemble(members, "min", ScoreScales.none(len(members)))
    scores_B = ensemble(*rectangle, ensemble.reference(*rectangle))

A solution's score is the mean, median or minimum of its members' scores (arXiv 2310.02743, where "min" is worst-case
optimization; arXiv 2312.09244). Median and minimum require a common scale. A Bradley-Terry loss sees only differences:
V + c has the same loss as V for any c, so the offsets of members are arbitrary, and the minimum would be the member
with the lowest offset. The slope of scores depends on how long a member trained, not on what it learned. So each
member's scores are mapped to a common location and spread, V -> slope V + offset (pvg.verifier.calibration).

Invariants: if the members' scores of a row do not depend on its batch, neither does the ensemble's, bit for bit,
because they are combined elementwise in float64. An ensemble of equal members scores exactly like one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pvg.models.heads import VerifierModel
from pvg.models.tokenizer import Tokenizer


def mean(scores_KN: Tensor) -> Tensor:
    """Sums in a fixed order. A torch reduction may sum in another order for another N."""
    total_N = scores_KN[0]
    for scores_N in scores_KN[1:]:
        total_N = total_N + scores_N
    return total_N / len(scores_KN)


def median(scores_KN: Tensor) -> Tensor:
    """For an even number of members, the mean of the two in the middle."""
    sorted_KN, middle = scores_KN.sort(dim=0).values, len(scores_KN) // 2
    return sorted_KN[middle] if len(scores_KN) % 2 else (sorted_KN[middle - 1] + sorted_KN[middle]) / 2


def minimum(scores_KN: Tensor) -> Tensor:
    return scores_KN.amin(dim=0)


# Kinds of `verifier.ensemble`: float64 [K, N] scores of K members -> [N].
AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": mean, "median": median, "min": minimum}


@dataclass(frozen=True, slots=True, eq=False)
class ScoreScales:
    """Maps the scores of K members to a common scale: slope x score + offset, both float64 [K]."""

    slopes_K: NDArray[np.float64]
    offsets_K: NDArray[np.float64]

    @classmethod
    def none(cls, members: int) -> ScoreScales:
        return cls(np.ones(members), np.zeros(members))

    def applied(self, scores_KN: Tensor) -> Tensor:
        """float64 [K, N]."""
        slopes_K1, offsets_K1 = (
            torch.from_numpy(values_K).to(scores_KN.device)[:, None] for values_K in (self.slopes_K, self.offsets_K)
        )
        return scores_KN.double() * slopes_K1 + offsets_K1


class VerifierEnsemble:
    """Scores like a VerifierModel. Owns its members, which share tokenizer, head and initial weights; `close` frees
    them."""

    def __init__(self, members: Sequence[VerifierModel], aggregation: str, scales: ScoreScales) -> None:
        """`aggregation` is a key of AGGREGATIONS. Raises ValueError if the numbers of members and scales differ."""
        if not members or len(members) != len(scales.slopes_K) or len(members) != len(scales.offsets_K):
            raise ValueError(f"{len(members)} members, but scales for {len(scales.slopes_K)}")
        self.members = tuple(members)
        self.aggregation = aggregation
        self.scales = scales
        self.needs_reference = members[0].needs_reference
        self.reads = members[0].reads

    @property
    def tokenizer(self) -> Tokenizer:
        return self.members[0].tokenizer

    @property
    def max_length(self) -> int:
        """Most tokens of problem plus solution."""
        return self.members[0].max_length

    @property
    def device(self) -> torch.device:
        return self.members[0].device

    def __call__(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None = None
    ) -> Tensor:
        """scores_B float32, as `VerifierModel.forward` but without a gradient."""
        scores_KB = self.member_scores(input_ids_BL, lengths_B, prompt_lengths_B, reference_B)
        return self.aggregated(scores_KB)

    def aggregated(self, scores_KN: Tensor) -> Tensor:
        """Scores float32 [N] from the members' unscaled scores [K, N]."""
        return AGGREGATIONS[self.aggregation](self.scales.applied(scores_KN)).float()

    @torch.no_grad()
    def member_scores(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None = None
    ) -> Tensor:
        """Unscaled scores float32 [K, B] of each member. The reference is the same for all and computed once."""
        if reference_B is None and self.needs_reference:
            reference_B = self.reference(input_ids_BL, lengths_B, prompt_lengths_B)
        return torch.stack([m(input_ids_BL, lengths_B, prompt_lengths_B, reference_B) for m in self.members])

    def reference(self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor:
        """As `VerifierModel.reference`. Members share their initial weights, so the first one's is valid for all."""
        return self.members[0].reference(input_ids_BL, lengths_B, prompt_lengths_B)

    def version(self) -> str:
        """A digest of the members' versions in order, their scales and the aggregation."""
        digest = hashlib.blake2b(self.aggregation.encode(), digest_size=16)
        for member in self.members:
            digest.update(f" {member.version()}".encode())
        for values_K in (self.scales.slopes_K, self.scales.offsets_K):
            digest.update(np.ascontiguousarray(values_K, dtype="<f8").tobytes())
        return digest.hexdigest()

    def trainable_state(self) -> dict[str, Tensor]:
        """The ensemble's own tensors, without those of its members: the scales."""
        return {
            "slopes_K": torch.from_numpy(self.scales.slopes_K),
            "offsets_K": torch.from_numpy(self.scales.offsets_K),
        }

    @property
    def closed(self) -> bool:
        return self.members[0].closed

    def close(self) -> None:
        """Free all members. A second call does nothing; any other use afterwards raises ModelClosedError."""
        for member in self.members:
            member.close()
