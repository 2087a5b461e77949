"""The discrete-event model against numbers worked out by hand, and its properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import of_lengths, world

from pvg.errors import ConfigurationError
from pvg.planning.bounds import bounds_of
from pvg.planning.simulation import simulate
from pvg.planning.world import AheadLimits, Cut, World, lognormal_lengths
from pvg.records import Role


def with_lengths(given_world: World, *lengths: int) -> World:
    return replace(given_world, lengths=of_lengths(*lengths))


def with_cut(given_world: World, cut: Cut) -> World:
    return replace(given_world, cut=cut)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_in_turns_a_batch_is_sampling_plus_training_plus_the_rest() -> None:
    found = simulate(world(other_s=2.0, update_s=3.0))
    assert found.batch_s == pytest.approx(10 + 5 + 2 + 3)
    assert (found.waiting_s, found.training_s) == (pytest.approx(10), pytest.approx(5))
    assert found.idle == pytest.approx(15 / 20)
    assert found.tokens_per_s == pytest.approx(10 / 20)
    assert (found.staleness, found.dropped) == (0, 0)
    assert found.engine_busy == pytest.approx(0.5)


def test_four_rows_of_one_worker_sample_four_rollouts_in_the_time_of_one() -> None:
    assert simulate(world(group_size=4, slots=4, concurrency=4)).batch_s == pytest.approx(10 + 4 * 5)
    assert simulate(world(group_size=4, slots=2, concurrency=4)).batch_s == pytest.approx(20 + 4 * 5)
    assert simulate(world(group_size=4, slots=4, concurrency=1)).batch_s == pytest.approx(40 + 4 * 5)
    assert simulate(world(group_size=4, workers=2, concurrency=4)).batch_s == pytest.approx(20 + 4 * 5)


def test_a_row_slows_the_others_down_while_it_is_there() -> None:
    # Two rows of 10 tokens at 1 + 2 x 0.5 = 2 s per token.
    assert simulate(world(group_size=2, slots=2, concurrency=2, row_s=0.5)).batch_s == pytest.approx(20 + 10)
    # Of 4 and 10 tokens, drawn in this order by one seed: 4 x 2 s together, then 6 x 1.5 s alone.
    apart = world(group_size=2, slots=2, concurrency=2, row_s=0.5, train_token_s=0.0)
    found = {simulate(with_lengths(apart, 4, 10), batches=1, seed=seed, fill=0).batch_s for seed in range(12)}
    assert {round(seconds, 6) for seconds in found} == {8.0, 17.0, 20.0}


def test_a_request_takes_its_own_seconds_before_its_tokens() -> None:
    assert simulate(world(request_s=7.0)).batch_s == pytest.approx(7 + 10 + 5)


def test_ahead_of_a_slow_trainer_sampling_costs_nothing() -> None:
    found = simulate(world(train_token_s=3.0, ahead=AheadLimits(1, 2, "old")))
    assert found.batch_s == pytest.approx(30)
    assert found.waiting == 0
    assert found.staleness == 2  # begun when the batch before the one before began to train
    assert found.dropped == 0


def test_ahead_of_a_fast_trainer_a_batch_takes_its_sampling() -> None:
    found = simulate(world(train_token_s=0.1, update_s=2.0, pause_s=1.0, ahead=AheadLimits(1, 2)))
    assert found.batch_s == pytest.approx(10 + 1)  # the row decodes all the time but for the pause
    assert found.idle == pytest.approx(10 / 11)


def test_what_is_too_old_is_dropped_and_sampled_again() -> None:
    """Training takes 3 rollouts' time. With one batch ahead, freshest first and a budget of 0, the rollout that ends in
    the first third of a step is stale when the step ends."""
    found = simulate(world(train_token_s=3.0, ahead=AheadLimits(1, 0)))
    assert found.staleness == 0
    assert found.waiting_s == pytest.approx(10)  # nothing that began before the update may be used
    assert found.dropped > 0.4


def test_a_deadline_leaves_the_long_rollouts_out() -> None:
    slow = with_lengths(world(group_size=8, slots=8, concurrency=8, train_token_s=0.0), 5, 100)
    whole, cut = simulate(slow), simulate(with_cut(slow, Cut(20.0, 1)))
    assert whole.batch_s == pytest.approx(100, rel=0.05)
    assert cut.batch_s == pytest.approx(20, rel=0.2)
    assert cut.rollouts == pytest.approx(4, rel=0.2)
    assert cut.tokens / cut.rollouts == pytest.approx(5)


def test_a_deadline_of_the_whole_batch_counts_its_rollouts() -> None:
    slow = with_lengths(world(groups=8, slots=8, concurrency=8, train_token_s=0.0), 5, 100)
    found = simulate(with_cut(slow, Cut(20.0, 8, whole_batch=True)))
    assert found.batch_s == pytest.approx(100, rel=0.05)  # all eight are the least
    found = simulate(with_cut(slow, Cut(20.0, 1, whole_batch=True)))
    assert found.batch_s < 25


def test_failures_cost_the_work_of_their_workers() -> None:
    whole = simulate(world(group_size=8, workers=8, concurrency=8), batches=200)
    failing = simulate(world(group_size=8, workers=8, concurrency=8, mtbf_s=100.0, restart_s=20.0), batches=200)
    assert failing.failures == pytest.approx(8 * failing.batch_s / 120, rel=0.15)
    assert failing.batch_s > 1.1 * whole.batch_s
    assert failing.rollouts == whole.rollouts  # nothing is lost


def test_a_world_whose_rollouts_never_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="mtbf_s"):
        simulate(world(mtbf_s=0.5, restart_s=0.1))


@pytest.mark.parametrize("change", [{}, {"whole_batch": True}, {"ahead": AheadLimits(1, 2)}])
def test_cancelled_requests_give_their_places_back_while_no_worker_is_up(change: dict[str, Any]) -> None:
    """A batch has 16 rollouts, so more places than that change nothing. Lost places would."""
    ahead, cut = change.get("ahead"), Cut(3.0, 1, change.get("whole_batch", False))
    lengths = {role: lognormal_lengths(100, 0.6, 400) for role in Role}
    made = world(groups=4, group_size=4, slots=16, lengths=lengths, token_s=0.01, train_token_s=1e-4, cut=cut)
    failing = replace(made, mtbf_s=20.0, restart_s=10.0, ahead=ahead)
    enough = replace(failing, concurrency=failing.room)
    assert simulate(enough, batches=200) == simulate(replace(enough, concurrency=10**6), batches=200)


@pytest.mark.parametrize(
    "change",
    [
        {"workers": 0},
        {"token_s": 0.0},
        {"train_token_s": -1.0},
        {"update_s": float("inf")},
        {"pause_s": 1.0},
        {"sneaky_share": 1.5},
        {"lengths": {Role.HELPFUL: []}},
    ],
)
def test_impossible_worlds_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        world(**change)


def test_lognormal_lengths_have_their_mean_after_the_cut() -> None:
    pool = lognormal_lengths(500.0, 1.2, 2048)
    assert pool.mean() == pytest.approx(500, abs=0.5)
    assert pool.max() == 2048
    assert set(lognormal_lengths(30.0, 0.0, 100)) == {30}
    with pytest.raises(ConfigurationError, match="mean length"):
        lognormal_lengths(500.0, 1.0, 400)


# --- properties ------------------------------------------------------------------------------------------------------

aheads = st.none() | st.builds(AheadLimits, st.integers(1, 2), st.integers(1, 3), st.sampled_from(("fresh", "old")))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    update_s = draw(st.sampled_from((0.0, 1.0, 10.0)))
    workers, slots = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return world(
        groups=draw(st.integers(1, 6)),
        group_size=draw(st.integers(1, 4)),
        lengths={role: lognormal_lengths(draw(st.floats(5, 40)), draw(st.floats(0, 1.2)), 100) for role in Role},
        workers=workers,
        slots=slots,
        concurrency=draw(st.integers(1, 3 * workers * slots)),
        row_s=draw(st.sampled_from((0.0, 0.1, 1.0))),
        request_s=draw(st.sampled_from((0.0, 50.0))),
        train_token_s=draw(st.floats(0.0, 1.0)),
        sneaky_share=draw(st.floats(0.0, 1.0)),
        update_s=update_s,
        pause_s=draw(st.sampled_from((0.0, update_s))),
        score_s=draw(st.sampled_from((0.0, 3.0, 300.0))),
        mtbf_s=draw(st.sampled_from((float("inf"), 2000.0))),
        restart_s=50.0,
        ahead=draw(aheads),
        cut=draw(st.none() | st.builds(Cut, st.floats(5, 60), st.just(1), st.just(False))),
    )


@given(worlds(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_shares_are_shares_and_no_time_is_lost(made: World, seed: int) -> None:
    found = simulate(made, batches=6, seed=seed, fill=1)
    for share in (found.idle, found.waiting, found.dropped, found.engine_busy):
        assert -1e-9 <= share <= 1 + 1e-9
    parts = found.waiting_s + found.training_s + found.other_s + found.update_s
    assert found.batch_s == pytest.approx(parts)
    assert found.on_arrival + found.in_queue + found.cancelled == pytest.approx(found.dropped)
    assert found.staleness <= found.staleness_max <= (made.ahead.budget if made.ahead else 0)
    if made.cut is None:
        assert found.rollouts == pytest.approx(made.rollouts)  # groups are whole, and none is used twice
    assert simulate(made, batches=6, seed=seed, fill=1) == found


@given(worlds(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_in_turns_more_workers_are_never_slower(made: World, seed: int) -> None:
    turns = replace(made, ahead=None, cut=None, mtbf_s=float("inf"), row_s=0.0, concurrency=1000)
    times = [simulate(replace(turns, workers=n), batches=4, seed=seed, fill=0).batch_s for n in (1, 2, 4, 8)]
    for fewer, more in pairwise(times):
        assert more <= fewer * (1 + 1e-9)


@given(st.integers(0, 9), st.sampled_from(("fresh", "old")))
@settings(max_examples=15, deadline=None)
def test_in_a_pipeline_more_workers_are_hardly_ever_slower(seed: int, prefer: str) -> None:
    """A pipeline that is less busy may take other groups, whose lengths differ: training has the same time here."""
    times = []
    for workers in (1, 2, 4, 8):
        made = world(
            groups=8,
            group_size=4,
            lengths={role: lognormal_lengths(30, 0.8, 200) for role in Role},
            workers=workers,
            slots=4,
            concurrency=4 * workers,
            train_token_s=0.0,
            other_s=60.0,
            ahead=AheadLimits(1, 2, prefer),  # type: ignore[arg-type]
        )
        times.append(simulate(made, batches=30, seed=seed).batch_s)
    for fewer, more in pairwise(times):
        assert more <= 1.02 * fewer


def spread(made: World) -> float:
    """The standard deviation of a rollout's length, divided by its mean."""
    shares = {Role.HELPFUL: 1.0 - made.sneaky_share, Role.SNEAKY: made.sneaky_share}
    mean = sum(share * float(made.lengths[role].mean()) for role, share in shares.items())
    squares = sum(share * float((made.lengths[role].astype(float) ** 2).mean()) for role, share in shares.items())
    return max(0.0, squares - mean**2) ** 0.5 / mean


@given(worlds(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_the_closed_form_bounds_hold_on_average(made: World, seed: int) -> None:
    """Only without drops, deadlines and failures: they change which rollouts are trained on."""
    plain = replace(made, cut=None, mtbf_s=float("inf"), ahead=None)
    bounds, found = bounds_of(plain), simulate(plain, batches=40, seed=seed, fill=0)
    # A group has one role, so its lengths are not independent: groups count, not rollouts.
    noise = 1 + 4 * max(1.0, spread(plain)) / (40 * plain.groups) ** 0.5
    assert bounds.least_s <= found.batch_s * noise
    assert bounds.most_s is not None
    assert found.batch_s <= bounds.most_s * noise


@pytest.mark.parametrize(
    "change",
    [
        {"score_s": 30.0},  # longer than sampling
        {"request_s": 20.0, "row_s": 1.0, "slots": 4, "concurrency": 4, "group_size": 7},
        # Five rows in four workers: at most one worker has two.
        {"workers": 4, "slots": 2, "concurrency": 5, "row_s": 10.0, "group_size": 50},
        # 27 requests in flight for 15 rows: one worker gets seven of the 28, so its three rows have three turns.
        {"workers": 5, "slots": 3, "concurrency": 27, "groups": 7, "group_size": 4},
    ],
)
def test_the_closed_form_bounds_hold_for_rollouts_of_one_length(change: dict[str, Any]) -> None:
    made = world(train_token_s=0.0, **change)
    bounds = bounds_of(made)
    assert bounds.most_s is not None
    assert bounds.least_s * (1 - 1e-9) <= simulate(made).batch_s <= bounds.most_s * (1 + 1e-9)
