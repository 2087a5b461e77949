"""Which groups are live, how many more to sample, and which to train on: by hand and by properties."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pvg.game.groups import chosen_groups, live_groups
from pvg.records import Role

H, S = Role.HELPFUL, Role.SNEAKY


def test_live_groups_by_hand() -> None:
    rewards_N = np.array([1, 1, 0, 1, 0.3, 0.3, 0.3, 5], dtype=np.float32)
    assert live_groups(rewards_N, [2, 2, 3, 0, 1]).tolist() == [False, True, False, False, False]
    assert live_groups(rewards_N[:0], []).tolist() == []


def test_choice_by_hand() -> None:
    roles = [H, S, H, S, H, H, S]
    live = np.array([False, True, True, False, False, True, False])
    # Both live helpful ones and the first of the others; the live sneaky one and the first of the others.
    assert chosen_groups(roles, live, {H: 3, S: 2}) == [0, 1, 2, 3, 5]
    assert chosen_groups(roles, live, {H: 1, S: 1}) == [1, 2]


@settings(deadline=None)
@given(
    groups=st.lists(st.tuples(st.sampled_from([H, S]), st.booleans()), max_size=20),
    wanted=st.dictionaries(st.sampled_from([H, S]), st.integers(0, 8)),
)
def test_the_choice_keeps_shares_and_prefers_what_is_live(groups, wanted) -> None:
    roles, live = [role for role, _ in groups], np.array([is_live for _, is_live in groups], dtype=bool)
    chosen = chosen_groups(roles, live, wanted)
    assert chosen == sorted(set(chosen))
    for role, count in wanted.items():
        of_role = [place for place, of in enumerate(roles) if of is role]
        kept = [place for place in chosen if roles[place] is role]
        assert len(kept) == min(count, len(of_role))
        assert sum(live[kept]) == min(len(kept), sum(live[of_role]))
    assert set(Counter(roles[place] for place in chosen)) <= set(wanted)
