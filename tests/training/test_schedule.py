"""Schedules by hand."""

from pvg.training.trainer import OptimizerSettings, learning_rate_factor


def factors(schedule, steps, *, warmup, total_steps):
    return [learning_rate_factor(schedule, step, warmup=warmup, total_steps=total_steps) for step in steps]


def test_warmup_then_constant():
    assert factors("constant", range(6), warmup=4, total_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warmup_then_linear():
    # After two steps of warm-up, four steps fall from 1 by quarters; 0 would be reached at step 6.
    assert factors("linear", range(8), warmup=2, total_steps=6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert factors("linear", range(5), warmup=2, total_steps=3) == [0.5, 1.0, 1.0, 0.0, 0.0]
    rates = [OptimizerSettings(0.5, schedule=schedule, total_steps=4).rate(2) for schedule in ("constant", "linear")]
    assert rates == [0.5, 0.25]
