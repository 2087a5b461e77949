from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pvg.game.roles import assign_roles
from pvg.game.seeds import draw_cyclic, generator_for, seed_for
from pvg.game.stopping import StopRule
from pvg.records import Role
from pvg.sections import Game


@given(st.integers(1, 64), st.floats(0, 1), st.integers(0, 99))
def test_roles_are_shared_out_to_within_one(count, share, seed):
    roles = assign_roles(count, share, np.random.default_rng(seed))
    assert len(roles) == count
    assert abs(roles.count(Role.SNEAKY) - count * share) < 1


def test_odd_groups_round_stochastically_to_the_right_mean():
    rng = np.random.default_rng(0)
    mean = np.mean([assign_roles(1, 0.3, rng).count(Role.SNEAKY) for _ in range(2000)])
    assert 0.25 < mean < 0.35


def test_seeds_differ_by_place_and_not_by_process():
    assert seed_for(0, 1, "mint", 2) == seed_for(0, 1, "mint", 2)
    places = {seed_for(0, round_, phase, step) for round_ in range(9) for phase in ("a", "b") for step in range(9)}
    assert len(places) == 162
    assert generator_for(1, "a").random() == generator_for(1, "a").random()


@given(st.integers(1, 50), st.integers(0, 200), st.integers(1, 120), st.integers(0, 9))
def test_the_endless_shuffle_is_stateless_and_fair(count, start, size, seed):
    whole = draw_cyclic(count, 0, start + size, seed)
    assert draw_cyclic(count, start, size, seed) == whole[start:]
    for epoch in range(len(whole) // count):
        assert sorted(whole[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_score_parity_stops_when_the_average_sneaky_score_reaches_the_helpful_one():
    rule = StopRule(Game(stop="score_parity", stop_ema=0.5, stop_min_steps=2))
    # EMA by hand, decay 0.5: sneaky 0, then 0.5*0 + 0.5*3 = 1.5; helpful 2, then 0.5*2 + 0.5*2 = 2: not yet.
    assert not rule.observe({"score_sneaky_incorrect": 0.0, "score_helpful_correct": 2.0})
    assert not rule.observe({"score_sneaky_incorrect": 3.0, "score_helpful_correct": 2.0})
    # A step without sneaky flaws leaves the average where it was.
    assert not rule.observe({"score_sneaky_incorrect": math.nan, "score_helpful_correct": 2.0})
    # 0.5*1.5 + 0.5*2.5 = 2.0 >= 2.0
    assert rule.observe({"score_sneaky_incorrect": 2.5, "score_helpful_correct": 2.0})


def test_a_stop_rule_of_fixed_steps_never_stops_early_and_resumes_exactly():
    rule = StopRule(Game(stop="steps"))
    assert not any(rule.observe({"score_sneaky_incorrect": 9.0, "score_helpful_correct": 0.0}) for _ in range(50))
    again = StopRule(Game(stop="steps"))
    again.load_state(rule.state())
    assert again == rule
