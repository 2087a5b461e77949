"""The adaptive coefficient of the KL, by hand."""

import orjson
import pytest

from pvg.config.rollout import Rollouts
from pvg.config.training import Training
from pvg.training.losses import PolicyObjective, adapted_kl


def test_the_kl_controller_by_hand() -> None:
    # 10 % over the target, horizon 10: 1 % more. Far over: an error of a fifth, 2 % more. Nothing at all: 2 % less.
    assert adapted_kl(0.5, kl=0.11, target=0.1, horizon=10.0) == pytest.approx(0.505)
    assert adapted_kl(0.5, kl=3.0, target=0.1, horizon=10.0) == pytest.approx(0.51)
    assert adapted_kl(0.5, kl=0.0, target=0.1, horizon=10.0) == pytest.approx(0.49)
    assert adapted_kl(0.5, kl=-1.0, target=0.1, horizon=10.0) == pytest.approx(0.49)
    assert adapted_kl(0.5, kl=0.1, target=0.1, horizon=10.0) == 0.5


def test_a_step_sees_what_the_step_before_measured() -> None:
    section = Training(kl={"coefficient": 0.1, "target": 0.1})
    control = PolicyObjective(section, Rollouts(), 0)
    assert control.kl == 0.1
    control.adapt({"kl": 1.0})  # too far from the base
    assert control.kl == pytest.approx(0.102)
    control.adapt({"kl": 0.0})
    assert control.kl == pytest.approx(0.09996)
    control.adapt({"skipped": 1.0})  # a batch without anything to learn from measures nothing
    assert control.kl == pytest.approx(0.09996)
    resumed = PolicyObjective(section, Rollouts(), 0)
    resumed.load_state(orjson.loads(orjson.dumps(control.state())))
    resumed.load_state({})  # of a run without a target
    assert PolicyObjective(Training(), Rollouts(), 0).state() == {}
    for each in (control, resumed):
        each.adapt({"kl": 0.2})
    assert control.state() == resumed.state()
