"""Mixtures: the share of the verifier's data that comes from the base prover and from each earlier round's prover.

With "equal", the sources base and round-000 give {"base": 0.5, "round-000": 0.5}. Sources are ordered oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pvg.config.game import Game
from pvg.records import BASE_SOURCE, source_of_round

Weights = NDArray[np.float64]
DECAY = 0.5  # of a source's share, per round of its age
WINDOW = 2


def sources_for_round(round_: int) -> list[str]:
    """The sources that exist when `round_` mints, oldest first."""
    return [BASE_SOURCE, *(source_of_round(earlier) for earlier in range(round_))]


def source_weights(game: Game, sources: Sequence[str]) -> dict[str, float]:
    """Shares by source, summing to 1; sources with share 0 are left out."""
    raw_S = MIXTURES[game.mixture](len(sources))
    shares_S = raw_S / raw_S.sum()
    return {source: float(share) for source, share in zip(sources, shares_S, strict=True) if share > 0}


def apportion(total: int, shares: dict[str, float]) -> dict[str, int]:
    """Split `total` into whole numbers by `shares`: largest remainder first, older sources first on a tie."""
    exact = {source: total * share for source, share in shares.items()}
    counts = {source: int(amount) for source, amount in exact.items()}
    by_remainder = sorted(exact, key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: total - sum(counts.values())]:
        counts[source] += 1
    return counts


def _ages(count: int) -> NDArray[np.int64]:
    return np.arange(count - 1, -1, -1)


def equal(count: int) -> Weights:
    """All sources equally."""
    return np.ones(count)


def exponential(count: int) -> Weights:
    """DECAY ** age: the newest source has weight 1, each older one DECAY times the next newer."""
    return np.power(DECAY, _ages(count).astype(np.float64))


def geometric(count: int) -> Weights:
    """Stick-breaking: the newest source takes 1 - DECAY, each older one the same share of the rest, the oldest the
    remainder."""
    ages_S = _ages(count)
    shares_S = (1.0 - DECAY) * np.power(DECAY, ages_S.astype(np.float64))
    shares_S[0] = DECAY ** (count - 1)
    return shares_S


def window(count: int) -> Weights:
    """The newest WINDOW sources, equally."""
    return np.asarray(_ages(count) < WINDOW, dtype=np.float64)


def latest(count: int) -> Weights:
    """The newest source only."""
    return np.asarray(_ages(count) == 0, dtype=np.float64)


def base(count: int) -> Weights:
    """The base prover only: the control for what the provers' solutions teach the verifier."""
    return np.asarray(np.arange(count) == 0, dtype=np.float64)


MIXTURES: dict[str, Callable[[int], Weights]] = {
    "equal": equal,
    "exponential": exponential,
    "geometric": geometric,
    "window": window,
    "latest": latest,
    "base": base,
}
