"""The page results/equality.md: exact statistics of few seeds, the ladder's switches, a page of made runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages.make_equality import main, switches
from benchmarks.pages.seed_statistics import difference, joint_p
from pvg.config.load import assign, build_experiment, find_experiment, read_toml
from pvg.store import FileStateStore, JsonLines, RunDirectory


def test_two_sides_that_do_not_overlap_by_hand() -> None:
    """Variances of 2.5: a standard error of 1 with 8 degrees of freedom, for which t is 2.306."""
    found = difference([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    assert found.value == 5
    assert (found.low, found.high) == pytest.approx((5 - 2.306, 5 + 2.306), abs=1e-3)
    assert found.p == pytest.approx(2 / 252)  # all large ones on one side, or all on the other


def test_three_against_three_by_hand() -> None:
    """Sums of side a over the 20 ways: as far from half of 21 as 1 + 2 + 4 = 7 are 6, 7, 14 and 15, one way each."""
    assert difference([1, 2, 4], [3, 5, 6]).p == pytest.approx(4 / 20)


def test_ties_and_equal_sides() -> None:
    assert difference([1, 1, 1], [1, 1, 1]) == difference([2.0] * 3, [2.0] * 3)
    same = difference([0.7, 0.7], [0.7, 0.7])
    assert (same.value, same.low, same.high, same.p) == (0, 0, 0, 1)
    assert difference([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]).p == 1.0
    with pytest.raises(ValueError, match="one value alone"):
        difference([1.0], [1.0, 2.0])


def test_together_one_of_many_metrics_must_differ_by_more() -> None:
    draw = random.Random(5)
    noise = [([draw.gauss(0, 1) for _ in range(5)], [draw.gauss(0, 1) for _ in range(5)]) for _ in range(8)]
    apart = ([1.0, 1.1, 1.2, 0.9, 1.0], [1.1, 1.3, 1.4, 1.3, 1.2])
    alone = difference(*apart).p
    together = joint_p([apart[0], *(a for a, _ in noise)], [apart[1], *(b for _, b in noise)])
    assert alone < 0.05 < together
    assert joint_p([apart[0]] * 3, [apart[1]] * 3) == pytest.approx(alone)  # the same metric three times is one
    assert joint_p([[1.0, 1.0]], [[1.0, 1.0]]) == 1.0


@pytest.mark.parametrize("values", [[], [[]]])
def test_without_a_metric_that_all_seeds_have_there_is_no_p(values: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        joint_p(values, values)


def test_the_joint_p_holds_its_rate() -> None:
    draw = random.Random(1)
    trials, found = 200, 0
    for _ in range(trials):
        sides = [[[draw.gauss(0, 1) for _ in range(4)] for _ in range(6)] for _ in range(2)]
        found += joint_p(*sides) < 0.05
    assert found / trials <= 0.10  # 5 % are allowed, up to what 200 trials scatter


def test_the_slow_switches_are_those_of_the_ladder_and_the_fast_ones_the_defaults() -> None:
    found = switches()
    assert found["slow"].keys() == found["fast"].keys()
    assert found["slow"]["rollout.logprobs"] == "recomputed"
    assert found["slow"]["rollout.engine.max_rows"] == 8
    plain = build_experiment(read_toml(find_experiment("modchain"), "experiment")).plain()
    for key, value in found["fast"].items():
        node = plain
        for part in key.split("."):
            node = node[part]
        assert node == value, key


# --- the page --------------------------------------------------------------------------------------------------------


def made_run(root: Path, side: str, seed: int, auc: float, **changes: Any) -> None:
    data = read_toml(find_experiment("modchain"), "experiment")
    for key, value in {**switches()[side], "seed": seed, **changes}.items():
        assign(data, key, value)
    run = RunDirectory.create(root / side, f"modchain-seed-{seed}", build_experiment(data))
    first = {"helpful_accuracy": 0.5 + seed / 100, "verifier_auc": auc, "fooled_rate_previous": None}
    rounds = [first, {**first, "fooled_rate_previous": 0.25 if seed else None}]
    FileStateStore(run.state).save(
        {"phase": "complete", "round": 1, "step": 0, "shards": [], "rounds": rounds, "weights": [],
         "checkpoint": None, "code_version": "0.1.0+abc"}
    )  # fmt: skip
    with JsonLines(run.metrics) as lines:
        lines.append(
            {"kind": "phase", "time": 0.0, "round": 0, "phase": "mint", "seconds": 200.0 + seed, "metrics": {}}
        )


def made(root: Path, *arguments: str) -> tuple[int, str, str]:
    """(exit code, the page, what it complains about)."""
    out, told = root / "page.md", ""
    try:
        main(["--only-table", "--root", str(root), "--out", str(out), *arguments])
    except SystemExit as error:
        told = str(error.code)
    return int(bool(told)), out.read_text() if out.exists() else "", told


def test_a_page_of_sides_that_agree_but_for_one_metric(tmp_path: Path) -> None:
    for seed in range(5):
        made_run(tmp_path, "slow", seed, 0.9 + seed / 1000)
        made_run(tmp_path, "fast", seed, 0.7 + seed / 1000)
    code, page, err = made(tmp_path)
    assert code == 0, err
    assert "| 0 | helpful accuracy | 0.520 ± 0.016 (0.500–0.540) | 0.520 ± 0.016 (0.500–0.540) |" in page
    assert "| 1.000 | within the spread |" in page
    assert "-0.200 (-0.202 to -0.198) | 0.008 | **beyond it** |" in page
    assert "| 1 | fooled by previous flaws | 0.250 ± 0.000 (0.250–0.250, 4 of 5 seeds) |" in page
    assert "| 0 | fooled by previous flaws" not in page
    assert "All 4 comparisons together: the two sides **differ by more than the seeds do**, p = 0.008" in page
    assert "2 of 5 have a p below 0.05; by chance alone 0.2 would." in page
    assert "`rollout.engine.max_rows` | 8 | 256 |" in page
    assert "5 seeds each, 2 rounds, played by pvg 0.1.0+abc." in page
    assert "202 s with all switches slow and 202 s with all fast" in page


@pytest.mark.drill
def test_of_more_seeds_the_first_five_are_told_by_themselves(tmp_path: Path) -> None:
    for seed in range(7):
        made_run(tmp_path, "slow", seed, 0.9 + seed / 1000)
        made_run(tmp_path, "fast", seed, (0.7 if seed < 5 else 0.99) + seed / 1000)
    code, page, err = made(tmp_path, "--seeds", "7")
    assert code == 0, err
    first = next(
        line for line in page.splitlines() if line.startswith("The first 5 seeds alone (we planned only these")
    )
    assert "): p = 0.008." in first
    assert "Taken one by one, 2 of 5 have a p below 0.05" in first
    assert "7 seeds each, 2 rounds" in page
    assert "the two sides do not differ by more than the seeds do" in page


def test_runs_of_other_switches_or_incomplete_ones_make_no_page(tmp_path: Path) -> None:
    for seed in range(5):
        made_run(tmp_path, "slow", seed, 0.9, **({"rollout.engine.decoding": "lean"} if seed == 3 else {}))
    code, page, err = made(tmp_path)
    assert (code, page) == (1, "")
    assert "seed 0 has not been played" in err
    for seed in range(5):
        made_run(tmp_path, "fast", seed, 0.9)
    code, page, err = made(tmp_path)
    assert (code, page) == (1, "")
    assert "was played with rollout.engine.decoding = 'lean', not 'module'" in err
