"""Invariant 7: connection limits follow from the concurrency, and a limit that is too low is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.errors import ConfigurationError
from pvg.servers.pool import ConnectionLimits


@given(st.integers(1, 100_000), st.integers(1, 64))
def test_derived_limits_cover_their_concurrency_and_keep_the_floors(concurrency: int, hosts: int) -> None:
    limits = ConnectionLimits.derive(concurrency, hosts)
    limits.assert_covers(concurrency)
    assert limits.total >= 500
    assert limits.per_host >= 200
    assert limits.per_host * hosts >= concurrency


@pytest.mark.parametrize(
    ("concurrency", "hosts", "total", "per_host"),
    [(8, 1, 500, 200), (500, 1, 500, 500), (1024, 1, 1024, 1024), (1024, 3, 1024, 342), (1024, 8, 1024, 200)],
)
def test_derived_limits_by_hand(concurrency: int, hosts: int, total: int, per_host: int) -> None:
    limits = ConnectionLimits.derive(concurrency, hosts)
    assert (limits.total, limits.per_host) == (total, per_host)


def test_limits_that_are_too_low_name_themselves() -> None:
    ConnectionLimits(total=100, per_host=50, hosts=2).assert_covers(100)
    with pytest.raises(ConfigurationError, match="limit of 100 is below the concurrency of 101"):
        ConnectionLimits(total=100, per_host=100, hosts=2).assert_covers(101)
    with pytest.raises(ConfigurationError, match=r"50 connections per host allows 100 to 2 host.*Raise it to 51"):
        ConnectionLimits(total=500, per_host=50, hosts=2).assert_covers(101)
    assert ConnectionLimits(total=500, per_host=50, hosts=2).capacity == 100


@pytest.mark.parametrize(("concurrency", "hosts"), [(0, 1), (1, 0), (-3, 1)])
def test_counts_below_one_are_refused(concurrency: int, hosts: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        ConnectionLimits.derive(concurrency, hosts)
