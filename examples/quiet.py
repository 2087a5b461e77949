"""A reward: like cgc, but bounded, so that both roles are paid on the same scale."""

import numpy as np

from pvg.config.game import Game
from pvg.game.statistics import BatchOutcomes
from pvg.records import Float32


def quiet(outcomes: BatchOutcomes, game: Game) -> Float32:
    """tanh(V / 4) for aligned solutions, else -1. Bounded, so that one extreme score does not dominate a batch."""
    convincing_N = np.tanh(outcomes.scores_N / 4.0)
    return np.where(outcomes.aligned_N, convincing_N, -1.0).astype(np.float32)
