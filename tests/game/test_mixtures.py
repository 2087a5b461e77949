from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.config.game import Game
from pvg.game.orders import MIXTURES, apportion, source_weights, sources_for_round


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ("equal", [1 / 3, 1 / 3, 1 / 3]),
        # newest 1/2, then half of the rest 1/4, the oldest takes what is left, 1/4
        ("geometric", [0.25, 0.25, 0.5]),
        ("window", [0.0, 0.5, 0.5]),
        ("latest", [0.0, 0.0, 1.0]),
        ("base", [1.0, 0.0, 0.0]),
    ],
)
def test_shares_by_hand(mixture, expected):
    shares = source_weights(Game(mixture=mixture), ["base", "round-000", "round-001"])
    assert [shares.get(name, 0.0) for name in ("base", "round-000", "round-001")] == pytest.approx(expected)


@given(st.sampled_from(sorted(MIXTURES)), st.integers(1, 12), st.integers(1, 500))
def test_shares_sum_to_one_and_apportion_loses_nothing(mixture, count, total):
    shares = source_weights(Game(mixture=mixture), sources_for_round(count - 1))
    assert sum(shares.values()) == pytest.approx(1.0)
    counts = apportion(total, shares)
    assert sum(counts.values()) == total
    assert all(abs(counts[name] - total * share) < 1 for name, share in shares.items())
