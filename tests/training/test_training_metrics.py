"""Metrics merge as if gathered in one."""

from pvg.telemetry.metrics import Metrics


def test_merging_weighs_means_by_their_counts():
    first, second = Metrics(), Metrics()
    first.add_mean("kl", total=6.0, weight=2.0)
    second.add_mean("kl", total=1.0, weight=8.0)
    first.add_sum("loss", 0.25)
    second.add_sum("loss", -1.0)
    first.add_max("ratio_max", -3.0)
    second.add_max("ratio_max", -5.0)
    first.merge(second)
    assert first.result() == {"kl": 0.7, "loss": -0.75, "ratio_max": -3.0}


def test_a_mean_over_nothing_has_no_value():
    metrics = Metrics()
    metrics.add_mean("kl", 0.0, 0.0)
    assert metrics.result() == {}
