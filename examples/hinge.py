"""A verifier loss: a hinge on the score gap of a pair. A gap above the margin has no gradient."""

from torch import Tensor

MARGIN = 2.0  # in logits


def hinge(correct_M: Tensor, incorrect_M: Tensor) -> Tensor:
    """max(0, margin - (V_correct - V_incorrect)) of each of M pairs."""
    return (MARGIN - (correct_M - incorrect_M)).clamp_min(0.0)
