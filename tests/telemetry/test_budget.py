from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.telemetry.budget import UNACCOUNTED, StepBudget


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_nested_part_is_charged_to_itself_alone():
    clock = Clock()
    budget = StepBudget(clock)
    clock.now += 1  # nobody's
    with budget.part("rollout"):
        clock.now += 2
        with budget.part("grade"):
            clock.now += 4
        clock.now += 8
    assert budget.close() == {"rollout": 10.0, "grade": 4.0, UNACCOUNTED: 1.0}
    spans = budget.take_spans()
    assert [(s.name, s.start_s, s.end_s, s.depth) for s in spans] == [("grade", 3, 7, 1), ("rollout", 1, 15, 0)]


def test_time_measured_elsewhere_is_moved_and_not_added():
    clock = Clock()
    budget = StepBudget(clock)
    with budget.part("wait"):
        clock.now += 5
        budget.charge({"optimizer": 1.5, "forward_backward": 3.0})
    assert budget.close() == {"wait": 0.5, "optimizer": 1.5, "forward_backward": 3.0, UNACCOUNTED: 0.0}


def test_misuse_is_refused():
    budget = StepBudget()
    with pytest.raises(RuntimeError, match="open part"):
        budget.charge({"x": 1.0})
    with pytest.raises(RuntimeError, match="'a'"), budget.part("a"):
        budget.close()


def test_an_exception_inside_a_part_still_charges_it():
    clock = Clock()
    budget = StepBudget(clock)

    def fail():
        with budget.part("a"):
            clock.now += 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert budget.close() == {"a": 3.0, UNACCOUNTED: 0.0}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()), max_size=30))
def test_the_budget_closes_whatever_nests(steps):
    """Invariant 6: the parts and `unaccounted` sum to the wall time."""
    clock = Clock()
    budget = StepBudget(clock)
    began = clock.now

    def run(rest):
        while rest:
            name, seconds, inside = rest.pop(0)
            clock.now += 1
            with budget.part(name):
                clock.now += seconds
                if inside:
                    run(rest)

    run(list(steps))
    assert sum(budget.close().values()) == pytest.approx(clock.now - began)
