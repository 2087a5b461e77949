"""The reading workload: the same prefixes, each alone or together."""

from __future__ import annotations

import pytest
from bench_runs import use


@pytest.mark.slow
def test_both_ways_read_the_same_prefixes() -> None:
    found = [
        use("reading", ["workload.traces=2", "workload.terms=3", shared], lambda own, _: (own.work(), own.derived()))
        for shared in ("workload.shared=true", "workload.shared=false")
    ]
    assert found[0] == found[1]
    assert found[0][1] == {"prefixes_per_trace": 1 + len("3+4=7;7+5=2;")}  # two sums; the answer is in no prefix
