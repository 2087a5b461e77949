"""Parts and time left of an evaluation: what is counted, from when on there is an estimate, and what it is made of."""

from __future__ import annotations

import pytest

from pvg.evaluation.progress import PartsObserver, PlannedPart
from pvg.telemetry.observer import PhaseInfo, Progress, SilentObserver, TimeLeft


class Recorded(SilentObserver):
    def __init__(self) -> None:
        self.started: list[PhaseInfo] = []
        self.left: list[TimeLeft | None] = []

    def phase_started(self, info: PhaseInfo) -> None:
        self.started.append(info)

    def progressed(self, progress: Progress) -> None:
        self.left.append(progress.left)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Evaluation:
    """Reports of an evaluation whose phases take the seconds that a test says."""

    def __init__(self, *parts: PlannedPart) -> None:
        self.seen, self.clock = Recorded(), Clock()
        self.observer = PartsObserver(self.seen, parts, self.clock)

    def phase(self, phase: str, unit: str, total: int, *progress: tuple[int, float], done: int = 0) -> None:
        info = PhaseInfo(0, 1, phase, unit, total, done)
        self.observer.phase_started(info)
        for reached, seconds in progress:
            self.clock.now += seconds
            self.observer.progressed(Progress(reached))
        self.observer.phase_finished(info, {})

    @property
    def left(self) -> TimeLeft | None:
        return self.observer.left()


SAMPLES = PlannedPart("samples of round 0", {"samples": 100})
ATTACKS = PlannedPart("attacks on round 0", {"attack": 20, "samples": 50}, {"attack": 8.0})
MEASURES = PlannedPart("measures of round 0", {"measures": 4})


def test_phases_say_their_part_and_all_parts() -> None:
    made = Evaluation(SAMPLES, ATTACKS)
    with made.observer.part(0):
        made.phase("samples", "rollouts", 100, (100, 10.0))
    with made.observer.part(1):
        made.phase("attack", "steps of src", 20, (20, 40.0))
        made.phase("samples", "rollouts", 50, (50, 5.0))
    places = [(info.part, info.parts, info.label) for info in made.seen.started]
    assert places == [(1, 2, "samples of round 0"), *[(2, 2, "attacks on round 0")] * 2]


def test_there_is_no_estimate_before_anything_was_measured() -> None:
    made = Evaluation(SAMPLES)
    assert made.left is None
    with made.observer.part(0):
        assert made.left is None
        made.observer.phase_started(PhaseInfo(0, 1, "samples", "rollouts", 100))
        made.clock.now += 3.0
        assert made.left is None


def test_the_estimate_is_the_rate_of_each_kind_of_work() -> None:
    made = Evaluation(SAMPLES, ATTACKS)
    with made.observer.part(0):
        made.phase("samples", "rollouts", 100, (50, 5.0), (100, 5.0))
    assert made.seen.left[0] == TimeLeft(pytest.approx(100 * 0.1), at_least=True)  # 50 here, 50 of the attacks
    with made.observer.part(1):
        made.phase("attack", "steps of src", 20, (5, 10.0), (20, 30.0))
        made.phase("samples", "rollouts", 50, (50, 5.0))
    assert made.seen.left[2] == TimeLeft(pytest.approx(15 * 2.0 + 50 * 0.1))
    assert made.seen.left[-1] == made.left == TimeLeft(0.0)  # not the estimate before the last unit


def test_work_that_has_not_begun_makes_it_a_lower_bound() -> None:
    made = Evaluation(SAMPLES, MEASURES)
    with made.observer.part(0):
        made.phase("samples", "rollouts", 100, (25, 5.0), (100, 15.0))
    assert made.seen.left[0] == TimeLeft(pytest.approx(75 * 0.2), at_least=True)
    with made.observer.part(1):
        made.phase("measures", "parts", 4, (1, 2.0), (4, 6.0))
    assert made.seen.left[2] == TimeLeft(pytest.approx(3 * 2.0))


def test_the_steps_of_the_baseline_tell_how_long_those_of_attacks_take() -> None:
    baseline = PlannedPart("correctness baseline", {"baseline": 10}, {"baseline": 16.0})
    made = Evaluation(baseline, PlannedPart("attacks on round 0", {"attack": 20}, {"attack": 8.0}))
    with made.observer.part(0):
        made.phase("baseline", "steps", 5, (5, 20.0))
        assert made.left == TimeLeft(pytest.approx(5 * 4.0 + 20 * 2.0))
        made.phase("baseline", "steps", 10, (10, 20.0), done=5)  # goes on after a saved policy
        assert made.left == TimeLeft(pytest.approx(20 * 2.0))


def test_an_attack_that_ends_early_leaves_nothing_to_do() -> None:
    made = Evaluation(ATTACKS, SAMPLES)
    with made.observer.part(0):
        made.phase("attack", "steps of src", 20, (4, 8.0))
        assert made.left is None  # only samples are left, which were not measured
        made.phase("samples", "rollouts", 50, (50, 5.0))
        assert made.left == TimeLeft(pytest.approx((8.0 + 5.0) / 13.0 * 100 * 0.1))


def test_what_an_earlier_call_has_done_does_not_count() -> None:
    """A call that goes on at 80 of 100 rollouts measured only its own 20."""
    made = Evaluation(SAMPLES)
    with made.observer.part(0):
        made.phase("samples", "rollouts", 100, (90, 5.0), done=80)
    assert made.seen.left == [TimeLeft(pytest.approx(10 * 0.5))]
    stored = Evaluation(PlannedPart("samples of round 0", {"samples": 0}), SAMPLES)
    with stored.observer.part(0):
        pass
    with stored.observer.part(1):
        stored.phase("samples", "rollouts", 100, (50, 5.0))
    assert stored.seen.left == [TimeLeft(pytest.approx(5.0))]


def test_time_between_phases_counts() -> None:
    """Scoring has no phase. Here it takes as long as sampling, so the rest takes twice the time of its phases."""
    made = Evaluation(SAMPLES, SAMPLES)
    with made.observer.part(0):
        made.phase("samples", "rollouts", 100, (100, 10.0))
        made.clock.now += 10.0
    with made.observer.part(1):
        assert made.left == TimeLeft(pytest.approx(20.0))
