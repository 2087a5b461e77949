"""Adaptive coefficients by hand: the KL's proportional controller and the entropy's target."""

import orjson
import pytest

from pvg.config.training import Training
from pvg.training.penalties import KL_RANGE, PenaltyControl, acting_entropy, adapted_entropy, adapted_kl


def test_the_kl_controller_by_hand() -> None:
    # 10 % over the target, horizon 10: 1 % more. Far over: an error of a fifth, 2 % more. Nothing at all: 2 % less.
    assert adapted_kl(0.5, kl=0.11, target=0.1, horizon=10.0) == pytest.approx(0.505)
    assert adapted_kl(0.5, kl=3.0, target=0.1, horizon=10.0) == pytest.approx(0.51)
    assert adapted_kl(0.5, kl=0.0, target=0.1, horizon=10.0) == pytest.approx(0.49)
    assert adapted_kl(0.5, kl=-1.0, target=0.1, horizon=10.0) == pytest.approx(0.49)
    assert adapted_kl(0.5, kl=0.1, target=0.1, horizon=10.0) == 0.5


def test_the_entropy_target_by_hand() -> None:
    assert adapted_entropy(0.001, entropy=0.1, target=0.2, step=0.0005, most=0.01) == pytest.approx(0.0015)
    assert adapted_entropy(0.001, entropy=0.3, target=0.2, step=0.0005, most=0.01) == pytest.approx(0.0005)
    assert adapted_entropy(0.0001, entropy=0.3, target=0.2, step=0.0005, most=0.01) == 0.0
    assert adapted_entropy(0.0099, entropy=0.1, target=0.2, step=0.0005, most=0.01) == 0.01
    assert adapted_entropy(0.003, entropy=0.2, target=0.2, step=0.0005, most=0.01) == 0.003
    assert acting_entropy(0.003, entropy=0.21, target=0.2) == 0.0
    assert acting_entropy(0.003, entropy=0.2, target=0.2) == 0.003
    assert acting_entropy(0.003, entropy=9.0, target=None) == 0.003
    assert acting_entropy(0.003, entropy=None, target=0.2) == 0.003


def test_without_targets_nothing_moves() -> None:
    control = PenaltyControl(Training(kl={"coefficient": 0.3}, entropy={"kind": "bonus", "coefficient": 0.2}))
    control.observe({"kl": 99.0, "entropy_exact": 0.0})
    assert (control.kl, control.bonus) == (0.3, 0.2)
    assert control.state() == {}


def test_a_step_sees_what_the_step_before_measured() -> None:
    section = Training(
        kl={"kind": "adaptive", "coefficient": 0.1, "target": 0.1},
        entropy={"kind": "adaptive", "target": 0.5, "coefficient": 0.002},
    )
    control = PenaltyControl(section)
    assert (control.kl, control.bonus) == (0.1, 0.002)
    control.observe({"kl": 1.0, "entropy_exact": 0.4})  # too far from the base, too little entropy
    assert control.kl == pytest.approx(0.102)
    assert control.bonus == pytest.approx(0.0021)
    control.observe({"kl": 0.0, "entropy_exact": 0.6})  # entropy enough: less of the bonus, and for now none of it
    assert control.kl == pytest.approx(0.09996)
    assert control.bonus == 0.0
    control.observe({"skipped": 1.0})  # a batch without anything to learn from measures nothing
    assert control.bonus == 0.0
    resumed = PenaltyControl(section)
    resumed.load_state(orjson.loads(orjson.dumps(control.state())))
    for each in (control, resumed):
        each.observe({"kl": 0.2, "entropy_exact": 0.5})
    assert control.state() == resumed.state()
    assert control.bonus == resumed.bonus == pytest.approx(0.002)


def test_a_long_drift_does_not_take_the_coefficient_out_of_reach() -> None:
    control = PenaltyControl(Training(kl={"kind": "adaptive", "coefficient": 0.1, "target": 0.1}))
    for _ in range(1000):
        control.observe({"kl": 0.0})
    assert control.kl == pytest.approx(0.1 / KL_RANGE)
    for _ in range(1000):
        control.observe({"kl": 9.0})
    assert control.kl == pytest.approx(0.1 * KL_RANGE)
