"""A reward: the score where role-aligned, as cgc has it, but what the two roles are paid is on one scale."""

import numpy as np

from pvg.config.sections import Game
from pvg.game.rewards import BatchOutcomes
from pvg.records import Float32


def quiet(outcomes: BatchOutcomes, game: Game) -> Float32:
    """tanh(V / 4) where aligned, else -1: bounded, so that one very sure score cannot rule a batch."""
    convincing_N = np.tanh(outcomes.scores_N / 4.0)
    return np.where(outcomes.aligned_N, convincing_N, -1.0).astype(np.float32)
