"""When a worker is added or removed: cases by hand, and properties of every decision."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.workers.scaling import IDLE_S, MOST_BUSY, WINDOW_S, Decision, Demand, Work, decide, shards_to_take


def moment(waiting: int = 0, *, busy: tuple[int, ...] = (), training: bool = False) -> Work:
    """A shard with the number of its worker for each one that is busy, and shard 9 with so many requests, which wait
    for the first of these workers."""
    work = {worker: {worker: ["generate"]} for worker in busy}
    if waiting:
        work[busy[0]][9] = ["gradient" if training else "generate"] * waiting
    return work


def seen(moments: list[Work], trained_s: float = 0.0) -> Demand:
    """One moment per second, in each of which the trainer worked for `trained_s`."""
    demand = Demand()
    for each in moments:
        demand.add(1.0, each, [0, 1], trained_s)
    return demand


def test_what_waited_by_hand() -> None:
    moments = [moment(waiting, busy=busy) for waiting, busy in [(8, (0, 1)), (12, (0,)), (0, (0,)), (4, (0,)), (0, ())]]
    found = seen(moments, trained_s=0.5)
    assert (found.seen_s, found.waiting, found.waited, found.trainer_idle) == (5.0, 4, pytest.approx(0.6), 0.5)
    assert found.busy == {0: pytest.approx(0.8), 1: pytest.approx(0.2)}
    assert found.shards == found.busy | {9: pytest.approx(0.6)}
    assert decide(found, lowest=1, highest=3) == Decision(
        None, "4 requests waited for 60 % of the last 5 s, and the trainer was idle for 50 %"
    )


def test_a_trainer_whose_parts_wait_is_idle() -> None:
    found = seen([moment(3, busy=(0,), training=second > 2) for second in range(1, 6)], trained_s=1.0)
    assert found.trainer_idle == pytest.approx(0.6)


def test_what_is_long_ago_no_longer_counts() -> None:
    busy, idle = [moment(5, busy=(0, 1))] * 60, [moment()] * 30
    assert decide(seen(busy), lowest=1, highest=2) is None
    found = seen(busy + idle)
    assert found.waited < 0.01
    assert decide(found, lowest=1, highest=2) == Decision(1, "it had work for 4 % of about the last 30 s")
    assert decide(seen(busy + idle[:20]), lowest=1, highest=2) is None


def demand(waited: float = 0.0, idle: float = 1.0, busy: tuple[float, ...] = (1.0, 1.0), seen_s: float = 99.0):
    return Demand(seen_s, 4, waited, idle, dict(enumerate(busy)), {})


@pytest.mark.parametrize(
    ("found", "decided"),
    [
        (demand(waited=0.5, idle=0.2), "add"),
        (demand(waited=0.48, idle=0.2), None),  # work waited, but not for half of the time
        (demand(waited=0.5, idle=0.1), None),  # the trainer would not use more rollouts
        (demand(waited=1, seen_s=4.9), None),  # too early after a change
        (demand(waited=1, busy=(1.0, 1.0, 1.0)), None),  # there are as many as allowed
        (demand(busy=(0.9, 0.04)), 1),
        (demand(busy=(0.04, 0.9)), 0),
        (demand(busy=(0.0, 0.0)), 1),  # the newer one of two
        (demand(busy=(0.0, 0.01)), 1),
        (demand(busy=(0.9, 0.06)), None),
        (demand(busy=(0.9, 0.0), seen_s=29.0), None),
        (demand(busy=(0.0,)), None),  # there are as few as allowed
        (demand(waited=1, busy=(1.0, 0.0)), "add"),  # work that waits comes first
    ],
)
def test_decisions_by_hand(found: Demand, decided: object) -> None:
    decision = decide(found, lowest=1, highest=3)
    assert decided == (None if decision is None else "add" if decision.remove is None else decision.remove)


SHARES = st.floats(0.0, 1.0)
DEMANDS = st.builds(
    Demand,
    st.floats(0.0, 100.0),
    st.just(4),
    SHARES,
    SHARES,
    st.lists(SHARES, min_size=1, max_size=6).map(lambda shares: dict(enumerate(shares))),
    st.just({}),
)


@given(DEMANDS, st.integers(1, 6), st.integers(0, 5))
def test_every_decision_stays_within_the_limits_and_has_a_reason(found: Demand, lowest: int, more: int) -> None:
    decision = decide(found, lowest=lowest, highest=lowest + more)
    if decision is None:
        return
    assert found.seen_s >= (WINDOW_S if decision.remove is None else IDLE_S)
    assert " " in decision.why
    if decision.remove is None:
        assert len(found.busy) < lowest + more
    else:
        assert len(found.busy) > lowest
        assert found.busy[decision.remove] <= MOST_BUSY


LOADS = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=12)


@given(LOADS, st.integers(1, 6))
def test_under_a_constant_load_the_number_of_workers_comes_to_rest(loads: list[float], lowest: int) -> None:
    """Each shard has work for a share of the time, at random moments."""
    lowest = min(lowest, len(loads))
    served = {number: list(range(number, len(loads), lowest)) for number in range(lowest)}
    for _ in range(4 * len(loads)):
        busy, waits = {}, 0.0
        for number, shards in served.items():
            idle = math.prod(1 - loads[shard] for shard in shards)
            alone = sum(
                loads[shard] * math.prod(1 - loads[other] for other in shards if other != shard) for shard in shards
            )
            busy[number], waits = 1 - idle, max(waits, 1 - idle - alone)
        found = Demand(99.0, 4, waits, 1.0, busy, dict(enumerate(loads)))
        decision = decide(found, lowest=lowest, highest=len(loads))
        if decision is None:
            return
        if decision.remove is None:
            taken = shards_to_take(served, found.shards)
            served = {number: [shard for shard in shards if shard not in taken] for number, shards in served.items()}
            served[max(served) + 1] = taken
        else:
            for shard in served.pop(decision.remove):
                min(served.values(), key=len).append(shard)
    pytest.fail(f"it does not come to rest: {served}")


def test_places_for_a_new_worker_by_hand() -> None:
    even = dict.fromkeys(range(8), 0.5)
    assert shards_to_take({0: [*range(8)]}, even) == [1, 2, 3, 4]
    assert shards_to_take({0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}, even) == [1, 5]
    assert shards_to_take({0: [0, 1], 1: [2]}, {}) == [1]
    # Only two shards have work: the new worker gets one of them, and nothing else would help.
    assert shards_to_take({0: [0, 1, 2, 3]}, {1: 0.9, 3: 0.8})[0] == 3


@given(
    st.lists(st.lists(SHARES, min_size=1, max_size=6), min_size=1, max_size=5).filter(
        lambda s: sum(map(len, s)) > len(s)
    )
)
def test_a_new_worker_gets_a_place_and_every_other_one_keeps_one(shares: list[list[float]]) -> None:
    served, busy = {}, {}
    for worker, own in enumerate(shares):
        served[worker] = [100 * worker + index for index in range(len(own))]
        busy |= dict(zip(served[worker], own, strict=True))
    taken = shards_to_take(served, busy)
    assert taken
    assert len(set(taken)) == len(taken)
    for shards in served.values():
        assert set(shards) - set(taken)
