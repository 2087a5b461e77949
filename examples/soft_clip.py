"""A policy loss: GRPO with a smooth bound on the ratios instead of a clip."""

import torch
from torch import Tensor

from pvg.training.credit import Float64, RewardGroups
from pvg.training.losses import ObjectiveTerms, PolicyLoss, TokenBatch, mean_of_sequence_means

SCALE = 0.2  # in nats; smaller log-ratios stay nearly unchanged


def softly(tokens: TokenBatch) -> ObjectiveTerms:
    """A SCALE tanh(log r / SCALE) of each token: the gradient shrinks as the ratio moves away from 1, up or down."""
    held_BL: Tensor = SCALE * torch.tanh(tokens.log_ratios_BL / SCALE)
    return ObjectiveTerms(tokens.advantages_B1 * held_BL, tokens.log_ratios_BL.abs() > SCALE)


def bounded(groups: RewardGroups) -> Float64:
    """R minus the group's mean, clipped to [-1, 1]."""
    return groups.centred().clip(-1.0, 1.0)


soft_clip = PolicyLoss(softly, mean_of_sequence_means, credit=bounded)
