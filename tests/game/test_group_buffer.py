"""The buffer of groups: exact role counts, nothing over the budget, nothing twice, nothing lost uncounted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from made_groups import made_group

from pvg.game.prefetch import BufferedGroup, GroupBuffer, Prefer, oldest
from pvg.records import Role


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


def test_a_group_is_as_old_as_the_oldest_token_of_its_rollouts() -> None:
    buffer = GroupBuffer(budget=2)
    buffer.put(made_group("young", [[5], [5]]), version=5)
    buffer.put(made_group("one old token", [[5], [3, 4, 5]]), version=5)
    assert names(buffer.take(helpful(1), version=5)) == ["young"]
    assert len(buffer) == 1
    assert buffer.take(helpful(1), version=6) is None
    assert (buffer.drops.on_arrival, buffer.drops.waiting, buffer.drops.tokens) == (0, 2, 8)


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
