"""A verifier loss: a hinge on the gap of a pair. Pairs that are apart by the margin teach nothing more."""

from torch import Tensor

MARGIN = 2.0  # of the scores, which are logits


def hinge(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """max(0, margin - (V_correct - V_incorrect)) of each of M pairs."""
    return (MARGIN - (correct_M - incorrect_M)).clamp_min(0.0)
