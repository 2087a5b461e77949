"""Divided duties (`cluster.trainers`): some workers only train, the others only sample and score."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
import torch
from test_worker_processes import assert_same_step, one_step

from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError
from pvg.workers.pool import WorkerPool

TRAINING = {"gradient", "logprobs"}
SAMPLING = {"generate", "score"}


class Watch:
    """Records which shards get which kinds of requests. `killing`: kill the worker of each shard when it gets its first
    request of each kind of work."""

    def __init__(self, *, killing: bool) -> None:
        self.killing = killing
        self.kills = 0
        self.asked: set[tuple[int, str]] = set()
        self.pool: WorkerPool

    def __call__(self, pool: WorkerPool) -> None:
        self.pool, submit = pool, pool.submit

        def watched(shard, frame, parts=None):
            future = submit(shard, frame, parts)
            kind = f"open {frame.fields['what']}" if frame.kind == "open" else frame.kind
            first = (shard, kind) not in self.asked
            self.asked.add((shard, kind))
            if self.killing and first and kind in TRAINING | SAMPLING:
                member = pool._shards[shard].member
                if member is not None:  # one that answered before its kill arrived may not be replaced yet
                    self.kills += 1
                    os.kill(member.pid, signal.SIGKILL)
            return future

        pool.submit = watched

    def shards(self, kinds: set[str]) -> set[int]:
        return {shard for shard, kind in self.asked if kind in kinds}


def test_each_worker_does_its_duty():
    watch = Watch(killing=False)
    found = asyncio.run(one_step(2, trainers=1, watch=watch))
    assert watch.shards(TRAINING | {"open policy"}) == {1}
    assert watch.shards(SAMPLING) == {0}
    assert watch.shards({"open scorer"}) == {0, 1}  # also used when the duties are not divided
    assert watch.pool.training == watch.pool.sampling == range(2)  # together again
    assert_same_step(found, asyncio.run(one_step(0)))


@pytest.mark.drill
def test_kills_of_both_kinds_of_workers_change_no_bit():
    calm, killed = Watch(killing=False), Watch(killing=True)
    found = asyncio.run(one_step(3, trainers=2, watch=calm))
    again = asyncio.run(one_step(3, trainers=2, watch=killed))
    assert (calm.pool.restarts, killed.pool.restarts) == (0, killed.kills)
    assert killed.kills >= 5  # two kinds of work in each of three shards; see `watched`
    for watch in (calm, killed):
        assert (watch.shards(TRAINING), watch.shards(SAMPLING)) == ({1, 2}, {0})
    assert again["texts"] == found["texts"]
    np.testing.assert_array_equal(again["scores"], found["scores"])
    np.testing.assert_array_equal(again["reference"], found["reference"])
    for name, weight in found["weights"].items():
        assert torch.equal(again["weights"][name], weight), name


@pytest.mark.parametrize(
    ("cluster", "prefetch", "complaint"),
    [
        ({"workers": 2, "trainers": 2}, "fresh", r"set cluster\.workers to 3 or more"),
        ({"workers": 1, "trainers": 2}, "fresh", r"set cluster\.workers to 3 or more"),
        ({"trainers": 1}, "old", r"set cluster\.workers to 2 or more"),
        ({"workers": 2, "trainers": 1}, "none", "only while pvg samples ahead"),
        ({"workers": 2, "trainers": 0}, "fresh", "greater than or equal to 1"),
    ],
)
def test_a_division_that_makes_no_sense_is_refused(cluster, prefetch, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        build_experiment({"cluster": {"kind": "local", **cluster}, "rollout": {"prefetch": prefetch}})


@pytest.mark.parametrize("prefetch", ["fresh", "old"])
def test_a_division_that_makes_sense_is_accepted(prefetch):
    cluster = {"kind": "local", "workers": 4, "trainers": 3}
    assert build_experiment({"cluster": cluster, "rollout": {"prefetch": prefetch}}).plain()["cluster"] == cluster
