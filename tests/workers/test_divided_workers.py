"""Divided duties (`cluster.trainers`): some workers only train, the others only sample and score."""

from __future__ import annotations

import asyncio

import pytest
from test_worker_processes import assert_same_step, one_step

from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError
from pvg.workers.pool import WorkerPool

pytestmark = pytest.mark.slow

TRAINING = {"gradient", "logprobs"}
SAMPLING = {"generate", "score"}


class Watch:
    """Records which shards get which kinds of requests."""

    def __init__(self) -> None:
        self.asked: set[tuple[int, str]] = set()
        self.pool: WorkerPool

    def __call__(self, pool: WorkerPool) -> None:
        self.pool, submit = pool, pool.submit

        def watched(shard, frame, parts=None):
            kind = f"open {frame.fields['what']}" if frame.kind == "open" else frame.kind
            self.asked.add((shard, kind))
            return submit(shard, frame, parts)

        pool.submit = watched

    def shards(self, kinds: set[str]) -> set[int]:
        return {shard for shard, kind in self.asked if kind in kinds}


def test_each_worker_does_its_duty():
    watch = Watch()
    found = asyncio.run(one_step(2, trainers=1, watch=watch))
    assert watch.shards(TRAINING | {"open policy"}) == {1}
    assert watch.shards(SAMPLING) == {0}
    assert watch.shards({"open scorer"}) == {0, 1}  # also used when the duties are not divided
    assert watch.pool.training == watch.pool.sampling == range(2)  # together again
    assert_same_step(found, asyncio.run(one_step(0)))


@pytest.mark.parametrize(
    ("cluster", "prefetch", "complaint"),
    [
        ({"workers": 2, "trainers": 2}, "fresh", r"set cluster\.workers to 3 or more"),
        ({"trainers": 1}, "old", r"set cluster\.workers to 2 or more"),
        ({"workers": 2, "trainers": 1}, "none", "only while pvg samples ahead"),
    ],
)
def test_a_division_that_makes_no_sense_is_refused(cluster, prefetch, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        build_experiment({"cluster": {"kind": "local", **cluster}, "rollout": {"prefetch": prefetch}})


@pytest.mark.parametrize("prefetch", ["fresh", "old"])
def test_a_division_that_makes_sense_is_accepted(prefetch):
    cluster = {"kind": "local", "workers": 4, "trainers": 3}
    assert build_experiment({"cluster": cluster, "rollout": {"prefetch": prefetch}}).plain()["cluster"] == cluster
