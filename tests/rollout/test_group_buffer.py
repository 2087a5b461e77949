"""The buffer of groups: exact role counts, nothing over the budget, nothing twice, nothing lost uncounted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_groups import made_group

from pvg.records import Group, Role
from pvg.rollout.pipeline import BufferedGroup, GroupBuffer, Prefer, oldest


def names(taken: list[BufferedGroup] | None) -> list[str] | None:
    return None if taken is None else [arrival.group.problem.id for arrival in taken]


def helpful(count: int) -> dict[Role, int]:
    return {Role.HELPFUL: count}


def test_the_freshest_are_taken_in_the_order_they_came() -> None:
    buffer = GroupBuffer(budget=3)
    for name, version in (("a", 4), ("b", 6), ("c", 5), ("d", 6)):
        buffer.put(made_group(name, [[version]]), version=6)
    assert names(buffer.take(helpful(3), version=6)) == ["b", "c", "d"]
    assert len(buffer) == 1
    assert buffer.take(helpful(2), version=6) is None
    assert names(buffer.take(helpful(1), version=7)) == ["a"]
    assert names(buffer.take(helpful(0), version=7)) == []


def test_the_oldest_are_taken_first_where_that_is_preferred() -> None:
    buffer = GroupBuffer(budget=3, prefer="old")
    for name, version in (("a", 4), ("b", 6), ("c", 2), ("d", 5), ("e", 4)):
        buffer.put(made_group(name, [[version]]), version=6)
    assert buffer.drops.on_arrival == 1  # c was over the budget when it came
    assert names(buffer.take(helpful(2), version=6)) == ["a", "e"]
    assert names(buffer.take(helpful(1), version=6)) == ["d"]


def test_of_equals_those_that_came_first_are_taken() -> None:
    buffer = GroupBuffer(budget=1)
    for name in "abcd":
        buffer.put(made_group(name, [[2], [3]]), version=3)
    assert names(buffer.take(helpful(2), version=3)) == ["a", "b"]


def test_a_group_is_as_old_as_the_oldest_token_of_its_rollouts() -> None:
    buffer = GroupBuffer(budget=2)
    buffer.put(made_group("young", [[5], [5]]), version=5)
    buffer.put(made_group("one old token", [[5], [3, 4, 5]]), version=5)
    assert names(buffer.take(helpful(1), version=5)) == ["young"]
    assert len(buffer) == 1
    assert buffer.take(helpful(1), version=6) is None
    assert (buffer.drops.on_arrival, buffer.drops.waiting, buffer.drops.tokens) == (0, 2, 8)


def test_what_comes_too_late_never_waits() -> None:
    buffer = GroupBuffer(budget=0)
    buffer.put(made_group("late", [[4], [5], [5]], tokens=7), version=5)
    assert len(buffer) == 0
    assert (buffer.drops.on_arrival, buffer.drops.waiting, buffer.drops.tokens) == (3, 0, 21)
    buffer.put(made_group("in time", [[5]]), version=5)
    assert names(buffer.take(helpful(1), version=5)) == ["in time"]


def test_any_that_are_within_the_budget_will_do() -> None:
    buffer = GroupBuffer(budget=9)
    for version in (0, 3, 9):
        buffer.put(made_group(str(version), [[version]]), version=9)
    assert names(buffer.take(helpful(3), version=9)) == ["0", "3", "9"]


def test_the_rollouts_of_a_group_are_looked_at_once_however_many_come_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Group] = []
    monkeypatch.setattr("pvg.rollout.pipeline.oldest", lambda group: looked.append(group) or oldest(group))
    buffer = GroupBuffer(budget=2)
    groups = [made_group(str(number), [[number % 2]] * 3) for number in range(50)]
    for group in groups:  # one who waits for all of them asks whenever one comes
        buffer.put(group, version=1)
        taken = buffer.take(helpful(50), version=1)
    assert names(taken) == [str(number) for number in range(50)]
    assert looked == groups


def test_a_group_without_rollouts_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        GroupBuffer(budget=1).put(made_group("none", []), version=0)


def test_a_batch_has_the_roles_that_were_asked_for_however_many_of_another_wait() -> None:
    buffer = GroupBuffer(budget=3)
    for name in "abcdef":  # the helpful role writes shorter solutions: its groups arrive first, and are the freshest
        buffer.put(made_group(name, [[9]]), version=9)
    wanted = {Role.HELPFUL: 2, Role.SNEAKY: 2}
    buffer.put(made_group("s", [[7]], role=Role.SNEAKY), version=9)
    assert buffer.take(wanted, version=9) is None
    assert buffer.by_role == {Role.HELPFUL: 6, Role.SNEAKY: 1}
    buffer.put(made_group("t", [[8]], role=Role.SNEAKY), version=9)
    assert names(buffer.take(wanted, version=9)) == ["a", "b", "s", "t"]
    assert buffer.by_role == {Role.HELPFUL: 4}


def test_a_role_whose_groups_grew_too_old_has_none() -> None:
    buffer = GroupBuffer(budget=1)
    buffer.put(made_group("a", [[5]]), version=5)
    buffer.put(made_group("s", [[4]], role=Role.SNEAKY), version=5)
    assert buffer.take({Role.HELPFUL: 1, Role.SNEAKY: 1}, version=6) is None
    assert (buffer.by_role, buffer.drops.waiting) == ({Role.HELPFUL: 1}, 1)


# What happens to a buffer: a group of a role arrives whose rollouts are some versions behind, the trainer moves on,
# a batch is asked for.
AGES = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=3)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([*Role]), AGES),
        st.tuples(st.just("move"), st.none()),
        st.tuples(st.just("take"), st.fixed_dictionaries(dict.fromkeys(Role, st.integers(0, 3)))),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(0, 4), st.sampled_from(["fresh", "old"]))
def test_whatever_happens_a_batch_is_within_the_budget_and_has_its_roles_and_every_group_has_one_fate(
    events: list[tuple[str, Any]], budget: int, prefer: Prefer
) -> None:
    buffer, version, put, taken = GroupBuffer(budget, prefer), 10, {}, []
    for number, (event, what) in enumerate(events):
        if event == "move":
            version += 1
        elif event == "take":
            batch = buffer.take(what, version)
            if batch is None:
                assert any(buffer.by_role[role] < count for role, count in what.items())
                continue
            assert Counter(arrival.group.role for arrival in batch) == Counter(what)
            for arrival in batch:
                for rollout in arrival.group.rollouts:
                    assert version - rollout.version <= budget
                assert arrival.arrived <= version
            for left in buffer._waiting:
                age = oldest(left.group)
                chosen = [oldest(arrival.group) for arrival in batch if arrival.group.role is left.group.role]
                assert all(age <= other if prefer == "fresh" else age >= other for other in chosen)
            taken += names(batch) or []
        else:
            group = made_group(str(number), [[version - age for age in ages] for ages in what], role=Role(event))
            put[str(number)] = group
            buffer.put(group, version)
    assert len(set(taken)) == len(taken)
    waiting_rollouts = sum(len(arrival.group.rollouts) for arrival in buffer._waiting)
    taken_rollouts = sum(len(put[name].rollouts) for name in taken)
    dropped = buffer.drops.on_arrival + buffer.drops.waiting
    assert taken_rollouts + waiting_rollouts + dropped == sum(len(group.rollouts) for group in put.values())
