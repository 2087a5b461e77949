"""A policy loss: GRPO with ratios that are held back smoothly instead of being clipped."""

import torch
from torch import Tensor

from pvg.training.credit import Float64, RewardGroups
from pvg.training.losses import ObjectiveTerms, PolicyLoss, TokenBatch, mean_of_sequence_means

SCALE = 0.2  # of log-ratios, in nats: within it a ratio acts nearly as it is


def softly(tokens: TokenBatch) -> ObjectiveTerms:
    """A SCALE tanh(log r / SCALE) of each token: its gradient fades as the ratio leaves 1, on either side."""
    held_BL: Tensor = SCALE * torch.tanh(tokens.log_ratios_BL / SCALE)
    return ObjectiveTerms(tokens.advantages_B1 * held_BL, tokens.log_ratios_BL.abs() > SCALE)


def bounded(groups: RewardGroups) -> Float64:
    """R - mean of the group, within -1 and 1."""
    return groups.centred().clip(-1.0, 1.0)


soft_clip = PolicyLoss(softly, mean_of_sequence_means, credit=bounded)
