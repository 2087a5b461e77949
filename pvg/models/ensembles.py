"""Several verifiers that score as one.

    ensemble = VerifierEnsemble(members, "min", ScoreScales.none(len(members)))
    scores_B = ensemble(*rectangle, ensemble.reference(*rectangle))

A solution's score is the mean, the median or the minimum of its members' scores (arXiv 2310.02743, whose worst-case
optimization is "min"; arXiv 2312.09244). The latter two only mean something on one scale. A Bradley-Terry loss knows
nothing but differences: V + c has the loss of V for any c, so members differ in c for no reason, and the minimum would
be that of the member whose c is lowest. And how steep scores are says how long a member learnt, not what it knows. So
each member's scores are mapped to a common location and spread, V -> slope V + offset (pvg.verifier.calibration).

Invariants: an ensemble's score of a row is the same bits whatever the row is batched with, where its members' are: what
is done to them is done element by element, in float64. Members that are equal score like any one of them, bit by bit.
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
    """One after the other: a reduction of torch's may add in another order for another N."""
    total_N = scores_KN[0]
    for scores_N in scores_KN[1:]:
        total_N = total_N + scores_N
    return total_N / len(scores_KN)


def median(scores_KN: Tensor) -> Tensor:
    """Of an even number of members, the mean of the two in the middle."""
    sorted_KN, middle = scores_KN.sort(dim=0).values, len(scores_KN) // 2
    return sorted_KN[middle] if len(scores_KN) % 2 else (sorted_KN[middle - 1] + sorted_KN[middle]) / 2


def minimum(scores_KN: Tensor) -> Tensor:
    return scores_KN.amin(dim=0)


# By `verifier.aggregation`: float64 [K, N] scores of K members -> [N].
AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {"mean": mean, "median": median, "min": minimum}


@dataclass(frozen=True, slots=True, eq=False)
class ScoreScales:
    """What brings each of K members' scores to the common scale: float64 [K], slope x score + offset."""

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
    """Scores like a VerifierModel. Owns its members, which have one tokenizer, head and start; `close` frees them."""

    def __init__(self, members: Sequence[VerifierModel], aggregation: str, scales: ScoreScales) -> None:
        """`aggregation` is one of AGGREGATIONS. Raises ValueError when the numbers of members and scales differ."""
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
        """Most tokens of problem and solution together."""
        return self.members[0].max_length

    @property
    def device(self) -> torch.device:
        return self.members[0].device

    def __call__(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None = None
    ) -> Tensor:
        """scores_B float32, as of `VerifierModel.forward`; without a gradient."""
        scores_KB = self.member_scores(input_ids_BL, lengths_B, prompt_lengths_B, reference_B)
        return self.aggregated(scores_KB)

    def aggregated(self, scores_KN: Tensor) -> Tensor:
        """float32 [N] of the members' own scores [K, N]."""
        return AGGREGATIONS[self.aggregation](self.scales.applied(scores_KN)).float()

    @torch.no_grad()
    def member_scores(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None = None
    ) -> Tensor:
        """float32 [K, B], each member's on its own scale. The reference is that of all of them, computed once."""
        if reference_B is None and self.needs_reference:
            reference_B = self.reference(input_ids_BL, lengths_B, prompt_lengths_B)
        return torch.stack([m(input_ids_BL, lengths_B, prompt_lengths_B, reference_B) for m in self.members])

    def reference(self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor:
        """As of `VerifierModel.reference`: members start from the same weights."""
        return self.members[0].reference(input_ids_BL, lengths_B, prompt_lengths_B)

    def version(self) -> str:
        """A digest of the members' versions in their order, their scales and the aggregation."""
        digest = hashlib.blake2b(self.aggregation.encode(), digest_size=16)
        for member in self.members:
            digest.update(f" {member.version()}".encode())
        for values_K in (self.scales.slopes_K, self.scales.offsets_K):
            digest.update(np.ascontiguousarray(values_K, dtype="<f8").tobytes())
        return digest.hexdigest()

    def trainable_state(self) -> dict[str, Tensor]:
        """What is the ensemble's own, and not its members': the scales."""
        return {
            "slopes_K": torch.from_numpy(self.scales.slopes_K),
            "offsets_K": torch.from_numpy(self.scales.offsets_K),
        }

    def close(self) -> None:
        """Free all members. Closing twice does nothing; any other use afterwards raises ModelClosedError."""
        for member in self.members:
            member.close()
