from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from bench_runs import load_profile, played, prover_rollouts, small_experiment, use

from pvg.bench.workloads import WORKLOADS
from pvg.bench.workloads.fixtures import recorded_batches, train_seconds
from pvg.config.experiment import Experiment
from pvg.errors import ConfigurationError, UsageError
from pvg.store.atomic import DamagedFileError
from pvg.store.run_directory import RunDirectory

FEW = ["workload.rollouts=24", "rollout.group_size=4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return played(tmp_path_factory.mktemp("runs"), "small", small_experiment())


def rewrite_metrics(run: RunDirectory, tmp_path: Path, change: object) -> RunDirectory:
    """A run that has the same shards, but other metrics: `change` is called with each record, None drops it."""
    other = RunDirectory(tmp_path / "changed")
    other.path.mkdir()
    for name in ("experiment.toml", "state.json", "rollouts"):
        (other.path / name).symlink_to(run.path / name)
    records = [change(orjson.loads(line)) for line in run.metrics.read_bytes().splitlines()]  # type: ignore[operator]
    other.metrics.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records if record is not None))
    return other


# --- fixed prompts -----------------------------------------------------------------------------------------------


def test_each_sample_and_each_way_of_doing_it_does_the_same_work() -> None:
    ways = [
        ([], 1),
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
    found = [use("rollout", [*FEW, f"task.seed={seed}"], lambda w, _: w.work(), samples=0) for seed in (0, 1)]
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"prompts"}


def test_another_seed_asks_for_other_completions() -> None:
    assert (
        len(
            {
                use("rollout", [*FEW, f"workload.seed={s}"], lambda w, _: w.derived()["completion_tokens"])
                for s in range(3)
            }
        )
        > 1
    )


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


def test_the_shared_part_of_the_prompts() -> None:
    def share(*overrides: str) -> float:
        return float(use("rollout", [*FEW, *overrides], lambda w, _: w.derived()["prefix_share"]))

    # The engine reads the prompt of four rows once.
    assert share() == pytest.approx(3 / 4)
    assert share("workload.engine=transformers") == 0.0


def test_cut_off_completions_are_counted() -> None:
    assert use("rollout", [*FEW, "rollout.max_tokens=5"], lambda w, _: w.derived()["truncated"]) == 1.0


def test_the_peer_samples_the_same_prompts_to_the_same_lengths() -> None:
    def look(workload: object, measured: list[dict[str, float]]) -> tuple[dict[str, object], float]:
        return workload.work(), workload.derived()["completion_length"]  # type: ignore[attr-defined]

    found = [
        use("rollout", [*FEW, "workload.fixed_length=true", "rollout.max_tokens=6", f"workload.engine={engine}"], look)
        for engine in ("pvg", "transformers")
    ]
    assert found[0] == found[1]
    assert found[0][1] == 6


def test_uneven_lengths_are_the_same_in_any_batch() -> None:
    def look(workload: object, measured: list[dict[str, float]]) -> tuple[float, float]:
        derived = workload.derived()  # type: ignore[attr-defined]
        return derived["completion_tokens"], measured[0]["engine_batch"]

    lengths = [*FEW, "workload.uneven_length=true", "rollout.max_tokens=30", "rollout.engine.max_rows=4"]
    whole, continuous = (
        use("rollout", [*lengths, f"rollout.engine.batching={batching}"], look) for batching in ("whole", "continuous")
    )
    assert whole[0] == continuous[0] < 24 * 30
    assert whole[1] < continuous[1] <= 4


def test_a_number_of_rollouts_that_is_no_number_of_groups_is_refused_before_anything_opens() -> None:
    for count in (2, 30):
        settings = load_profile("rollout", [f"workload.rollouts={count}", "rollout.group_size=4"])
        with pytest.raises(ConfigurationError, match=r"workload\.rollouts") as caught:
            WORKLOADS["rollout"](settings)
        assert str({2: 4, 30: 28}[count]) in caught.value.remedy


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"workload\.rollouts"):
        WORKLOADS["rollout"](load_profile("rollout", ["workload.rolouts=8"]))


# --- replay --------------------------------------------------------------------------------------------------------


def test_a_replay_asks_for_what_the_run_asked_for(run: RunDirectory) -> None:
    recorded = prover_rollouts(run)
    assert len({r.step for r in recorded}) == 3  # six steps in two minibatches per batch

    def look(workload: object, measured: list[dict[str, float]]) -> None:
        work = workload.work()  # type: ignore[attr-defined]
        assert work["batches"] == ["0/0", "0/1", "0/2"]
        assert work["rollouts"] == len(recorded) == 48
        assert work["prompt_tokens"] == sum(len(r.prompt_ids) for r in recorded)
        assert work["max_tokens"] == 40  # the run's own, not the profile's experiment's
        asked = {
            (o.problem.id, o.role, o.prompt_ids.tobytes()): o.size
            for batch in workload._batches  # type: ignore[attr-defined]
            for o in batch.orders
        }
        assert asked == {(r.problem_id, r.role, r.prompt_ids.tobytes()): 4 for r in recorded}

    use("rollout", [], look, replay=run)


def test_a_sleeping_trainer_takes_the_time_that_the_run_recorded(run: RunDirectory, tmp_path: Path) -> None:
    def slow(record: dict[str, object]) -> dict[str, object]:
        if record.get("phase") == "train_prover" and record["kind"] == "step":
            record["budget"] = {"forward_backward": 0.03, "optimizer": 0.004, "pack": 0.001, "rollout": 9.0}
            record.pop("busy", None)
            if record["step"] == 6:  # overlapped: exposed little, worked more
                record["busy"] = {"forward_backward": 0.04, "reference": 0.06, "unaccounted": 5.0}
        return record

    changed = rewrite_metrics(run, tmp_path, slow)
    assert train_seconds(changed, recorded_batches(changed, 9)) == pytest.approx([0.07, 0.07, 0.035 + 0.1])

    def look(workload: object, measured: list[dict[str, float]]) -> None:
        (values,) = measured
        wall = 48 / values["rollouts_per_s"]
        slept = wall * (1 - values["trainer_idle"])
        assert 0.27 < slept < wall
        derived = workload.derived()  # type: ignore[attr-defined]
        assert derived["completion_tokens"] / values["tokens_per_s"] == pytest.approx(wall - slept)

    use("rollout", [], look, replay=changed)


def test_batches_are_spread_over_the_run(run: RunDirectory) -> None:
    assert [b.place for b in recorded_batches(run, 2)] == ["0/0", "0/2"]
    (first,) = recorded_batches(run, 1)
    assert [r.id for r in first.rollouts] == [r.id for r in prover_rollouts(run) if r.step == 0]


def test_a_run_without_prover_steps_is_refused(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "young", Experiment())
    for profile in ("rollout", "trainer"):
        with pytest.raises(UsageError, match="'young' has no committed step of prover training"):
            WORKLOADS[profile](load_profile(profile, replay=run))


def test_metrics_that_do_not_tell_the_trainers_time_are_named(run: RunDirectory, tmp_path: Path) -> None:
    without = rewrite_metrics(run, tmp_path, lambda record: record if record.get("step") != 4 else None)
    with pytest.raises(UsageError, match="lacks step 4 of prover training in round 0"):
        use("rollout", [], lambda w, _: None, replay=without)


def test_a_damaged_shard_is_never_replayed(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "damaged")
    other.path.mkdir()
    for name in ("experiment.toml", "state.json", "metrics.jsonl"):
        (other.path / name).symlink_to(run.path / name)
    for path in run.rollouts.glob("*/*"):
        copy = other.path / path.relative_to(run.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        copy.write_bytes(data)
    with pytest.raises(DamagedFileError):
        recorded_batches(other, 1)
