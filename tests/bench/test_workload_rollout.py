from __future__ import annotations

import pytest
from bench_runs import load_profile, use

from pvg.bench.workloads import WORKLOADS
from pvg.errors import ConfigurationError

pytestmark = pytest.mark.slow

FEW = ["workload.rollouts=24", "rollout.group_size=4"]


def test_each_sample_and_each_way_of_doing_it_does_the_same_work() -> None:
    ways = [
        ([], 2),  # samples
        (["rollout.engine.max_rows=6", "rollout.concurrency=10"], 1),
        (["rollout.engine.decoding=module"], 1),
    ]
    found = [
        use("rollout", FEW + way, lambda w, _: (w.work(), w.derived()["completion_tokens"]), samples=samples)
        for way, samples in ways
    ]
    assert all(each == found[0] for each in found)
    work, tokens = found[0]
    assert work["groups"] == 6
    assert work["rollouts"] == 24
    assert work["parameters"] == 421_120
    assert work["prompt_tokens"] == 24 * 11  # the role's tag, five digits, four signs and a question mark
    assert 24 * 10 < tokens <= 24 * 48


def test_other_prompts_of_the_same_length_are_other_work() -> None:
    found = [use("rollout", [*FEW, f"workload.seed={seed}"], lambda w, _: w.work(), samples=0) for seed in (0, 1)]
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"prompts", "seed"}


def test_the_measures_agree_with_each_other() -> None:
    def look(workload: object, measured: list[dict[str, float]]) -> None:
        derived, work = workload.derived(), workload.work()  # type: ignore[attr-defined]
        for values in measured:
            seconds = derived["completion_tokens"] / values["tokens_per_s"]
            assert values["prompt_tokens_per_s"] * seconds == pytest.approx(work["prompt_tokens"])
            assert values["rollouts_per_s"] * seconds == pytest.approx(work["rollouts"])
            assert 0 < values["latency_p50_s"] <= values["latency_p90_s"] <= values["latency_p99_s"] < seconds
            assert 6.0 < values["engine_batch"] <= 8.0  # some rows end before others
        assert derived["completion_length"] == derived["completion_tokens"] / 24

    use("rollout", [*FEW, "rollout.engine.max_rows=8"], look, samples=2)


def test_a_number_of_rollouts_that_is_no_number_of_groups_is_refused_before_anything_opens() -> None:
    for count in (2, 30):
        settings = load_profile("rollout", [f"workload.rollouts={count}", "rollout.group_size=4"])
        with pytest.raises(ConfigurationError, match=r"workload\.rollouts") as caught:
            WORKLOADS["rollout"](settings)
        assert str({2: 4, 30: 28}[count]) in caught.value.remedy
