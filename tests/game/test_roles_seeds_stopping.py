from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pvg.game import prover_phase
from pvg.game.prover_phase import StopRule
from pvg.game.roles import assign_roles
from pvg.records import Role
from pvg.seeds import draw_cyclic, generator_for, seed_for
from pvg.telemetry.alerts import Alerts


@given(st.integers(1, 64), st.floats(0, 1), st.integers(0, 99))
def test_roles_are_shared_out_to_within_one(count, share, seed):
    roles = assign_roles(count, share, np.random.default_rng(seed))
    assert len(roles) == count
    assert abs(roles.count(Role.SNEAKY) - count * share) < 1


def test_roles_come_in_random_order():
    first = [assign_roles(2, 0.5, np.random.default_rng(seed))[0] for seed in range(200)]
    assert 60 < first.count(Role.SNEAKY) < 140


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


def test_a_stop_rule_of_fixed_steps_never_stops_early_and_resumes_exactly():
    rule = StopRule("steps")
    assert not any(rule.observe({"verifier_mcc": mcc}) for mcc in (*[0.9] * 20, *[0.0] * 30))
    again = StopRule("steps")
    again.load_state(rule.state())
    assert again == rule


def test_judge_decay_stops_below_the_verifiers_best_and_a_policy_on_the_way_is_not_honest(monkeypatch):
    monkeypatch.setattr(prover_phase, "MIN_STEPS", 2)
    rule = StopRule("judge_decay", decay=0.5)
    found = []
    for mcc in (0.6, 0.6, 0.3, math.nan, 0.4, 0.4, 0.3):  # EMA: 0.6, 0.6, 0.45, 0.45, 0.425, 0.4125, 0.35625
        stops = rule.observe({"verifier_mcc": mcc})
        again = StopRule("judge_decay", decay=0.5)
        again.load_state(json.loads(json.dumps(rule.state())))
        assert again == rule
        found.append((stops, rule.honest))
    assert found == [*[(False, True)] * 2, *[(False, False)] * 4, (True, False)]
    assert StopRule("steps").honest


def test_one_lucky_batch_is_no_best_of_a_verifier():
    rule, alerts = StopRule("judge_decay"), Alerts(two_roles=True)
    for mcc in (0.95, *[0.45] * 60):
        assert not rule.observe({"verifier_mcc": mcc})
        assert rule.honest
        assert alerts.check({"verifier_mcc": mcc}) == []
    assert any(rule.observe({"verifier_mcc": 0.1}) for _ in range(20))
    assert [alert.name for _ in range(20) for alert in alerts.check({"verifier_mcc": 0.1})] == ["judge_decay"]
