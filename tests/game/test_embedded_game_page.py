"""The page results/embedded-game.md: means with intervals, and the change over the rounds, by hand."""

from __future__ import annotations

from benchmarks.pages.make_embedded_game import shown, trends


def test_a_cell_has_the_mean_its_interval_and_the_range() -> None:
    # 1..5 hundredths and 0.5: mean 0.53, sd 0.0158, t(0.975, 4) = 2.776: 0.53 +- 0.0196
    assert shown([0.51, 0.52, 0.53, 0.54, 0.55]) == "0.53 (0.51 to 0.55; 0.51-0.55)"
    assert shown([0.0, 0.0, 0.003]) == "0.00 (0.00 to 0.01; 0.00-0.00)"
    assert shown([0.5, 0.7, None]) == "0.60 (0.50-0.70)"  # two values have no interval
    assert shown([None, float("nan")]) == "-"


def test_the_change_over_the_rounds_is_by_seed() -> None:
    runs = [
        [{"helpful_accuracy": 0.5, "malformed": None}, {"helpful_accuracy": 0.6 + seed / 100, "malformed": 0.1}]
        for seed in range(5)
    ]
    # changes of 10 to 14 points: mean 0.12, sd 0.0158, the interval 0.12 +- 0.0196; all five taus are 1: 2 / 32
    assert "| helpful accuracy | +0.120 | +0.100 to +0.140 | 5\u2191 0\u2193 | 0.062 |" in trends(runs)
    assert "malformed" not in trends(runs)  # no value in the first round
    assert "5 seeds cannot show a significant trend over the rounds" in trends(runs)
    assert "cannot" not in trends([*runs, runs[0]])
