"""Inputs: estimates, given values, and what a run measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from pvg.config.load import build_experiment
from pvg.errors import UsageError
from pvg.planning.inputs import (
    GPU_HOURS_BETWEEN_FAILURES,
    MACHINES,
    Inputs,
    lost_to_trainer_failures,
    not_modelled,
    workers_of,
    world_of,
)
from pvg.planning.measured import measured_in
from pvg.planning.plan import plan_of
from pvg.planning.shapes import ModelShape
from pvg.records import Role, Timing
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards
from pvg.store.state import FileStateStore

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))
from made_groups import made_group

BILLION = ModelShape("one", 10, 1000, 4000, 1000, 500, 1000, 10**9, "its sizes")
SERVED = {"name": "served", "rollout": {"engine": "vllm", "concurrency": 512, "max_tokens": 1000}}


def assumed(data: dict[str, object] = SERVED) -> Inputs:
    return Inputs.assumed(build_experiment(data), BILLION, BILLION, MACHINES["h100"])


def test_estimates_from_sizes_and_data_sheets() -> None:
    found = assumed()
    assert found["token_s"] == pytest.approx(4e9 / (3.35e12 / 2))  # float32 weights, half of the bandwidth
    assert found["row_s"] == pytest.approx(2 * 10 * 500 * 4 * (256 + 250) / (3.35e12 / 2))
    # 6 operations per weight, and 2 for the reference, on completion tokens and an eighth of the prompt's.
    tokens = 1 + 256 / 500 / 8
    assert found["train_token_s"] == pytest.approx(8e9 * tokens / (0.3 * 989e12))
    assert found["update_s"] == pytest.approx(0.5 + 8.0)
    assert round(GPU_HOURS_BETWEEN_FAILURES, -2) == 50_700


def test_a_given_value_replaces_an_estimate_and_says_so() -> None:
    found = assumed()
    found.assign(["token_s=0.02", "update_s=0.1"])
    assert (found["token_s"], found.values["token_s"].source) == (0.02, "given")
    assert found["pause_s"] == 0.1  # not longer than the update


def test_a_given_length_replaces_measured_ones() -> None:
    found = assumed()
    found.lengths = {role: np.array([7]) for role in Role}
    found.assign(["mean_tokens=300"])
    world = world_of(build_experiment(SERVED), found)
    assert world.mean_length == pytest.approx(300, rel=0.01)


@pytest.mark.parametrize("word", ["token_s", "token_s=", "token_s=fast", "token_s=-1", "token_s=nan", "token_s=0"])
def test_a_value_that_is_no_number_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="token_s"):
        assumed().assign([word])


def test_an_unknown_input_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'token_s'"):
        assumed().assign(["tokens_s=1"])


def test_the_workers_of_a_cluster_are_its_processes_at_most() -> None:
    for cluster, workers in (
        ({"workers": 4}, 4),
        ({"min_workers": 1, "max_workers": 3}, 3),
        ({"workers": 4, "max_workers": 2}, 2),
        ({"workers": 4, "trainers": 1}, 3),
    ):
        experiment = build_experiment({"cluster": {"kind": "local", **cluster}, "rollout": {"prefetch": "fresh"}})
        assert workers_of(experiment)[0] == workers


def test_the_world_of_an_experiment() -> None:
    data = {
        "name": "served",
        "rollout": {
            "engine": "vllm",
            "prefetch": {"kind": "old", "batches": 2},
            "deadline": {"kind": "cut", "seconds": 30.0, "min_rollouts": 3},
            "concurrency": 64,
        },
        "serving": {"servers": ["http://127.0.0.1:1", "http://127.0.0.1:2"], "max_num_seqs": 16},
    }
    experiment = build_experiment(data)
    world = world_of(experiment, assumed(data))
    assert workers_of(experiment) == (2, 16)
    assert (world.workers, world.slots, world.concurrency) == (2, 16, 64)
    assert world.ahead is not None
    assert (world.ahead.batches, world.ahead.budget, world.ahead.prefer) == (2, 3, "old")
    assert world.cut is not None
    assert (world.cut.seconds, world.cut.least, world.cut.whole_batch) == (30.0, 3, False)


def test_the_torch_engine_overlaps_nothing_and_a_note_says_so() -> None:
    data: dict[str, object] = {"name": "here", "rollout": {"prefetch": "fresh"}}
    experiment = build_experiment(data)
    assert world_of(experiment, assumed(data)).ahead is None
    assert any("overlaps nothing" in note for note in not_modelled(experiment))


def test_the_gpus_of_a_server_divide_its_work() -> None:
    one, four = assumed(), assumed({**SERVED, "serving": {"tensor_parallel": 4}})
    for name in ("token_s", "row_s", "request_s", "mtbf_h"):
        assert four[name] == pytest.approx(one[name] / 4)
    assert four["train_token_s"] == one["train_token_s"]
    assert "4 GPUs without their exchange" in four.values["token_s"].source


@pytest.mark.parametrize(
    ("cluster", "beginnings"),
    [
        ({"kind": "none"}, []),
        ({"kind": "local", "workers": 4}, ["workers of the cluster also train"]),
        ({"kind": "local", "trainer_ranks": 8}, ["cluster.trainer_ranks = 8 is not modelled"]),
    ],
)
def test_a_note_says_that_the_plan_is_for_one_training_process(cluster: dict[str, Any], beginnings: list[str]) -> None:
    notes = not_modelled(build_experiment({"cluster": cluster}))
    assert len(notes) == len(beginnings)
    assert all(note.startswith(beginning) for note, beginning in zip(notes, beginnings, strict=True))


def test_measured_lengths_are_cut_at_the_experiments_limit() -> None:
    found = assumed()
    found.lengths = {role: np.array([700, 1500]) for role in Role}
    assert world_of(build_experiment(SERVED), found).longest == 1000


def test_failures_of_the_trainer() -> None:
    found = assumed()
    found.assign(["trainer_mtbf_h=1", "trainer_restart_s=300"])
    # Every 3,600 s of work: 300 s for the restart, and half of 10 steps of 60 s again.
    assert lost_to_trainer_failures(found, 60.0, 10) == pytest.approx(600 / 4200)


def test_a_commit_comes_after_whole_batches() -> None:
    """10 optimizer steps with 4 per batch: the first whole batch after them is the third."""
    data: dict[str, object] = {**SERVED, "training": {"minibatches": 4}, "store": {"commit_every": 10}}
    found = assumed(data)
    found.assign(["trainer_mtbf_h=1", "trainer_restart_s=0"])
    plan = plan_of(build_experiment(data), found, BILLION, BILLION)
    again_s = 3 * plan.outcome.batch_s / 2
    assert plan.trainer_loss == pytest.approx(again_s / (3600 + again_s))


# --- a run ------------------------------------------------------------------------------------------------------------


def run_with(steps: list[dict[str, float]], folder: Path, **sections: Any) -> RunDirectory:
    experiment = build_experiment({"name": "made", "rollout": {"engine": "vllm"}, **sections})
    run = RunDirectory.create(folder, "made", experiment)
    FileStateStore(run.state).save({"shards": []})
    metrics = {"rollouts": 256.0, "completion_tokens": 50.0, "staleness": 1.0, "dropped_stale": 64.0}
    metrics |= {"weights_wall_s": 0.4, "weights_queue_s": 0.1}
    with open(run.metrics, "wb") as file:
        for number, budget in enumerate(steps, 1):
            record = {"kind": "step", "time": 1.0, "round": 0, "phase": "train_prover", "step": number, "of": 9}
            file.write(orjson.dumps({**record, "metrics": metrics, "budget": budget}) + b"\n")
    return run


STEP = {"wait_for_rollouts": 2.0, "forward_backward": 3.0, "reference": 1.0, "sync": 0.5, "score": 0.3, "record": 0.2}


def test_what_a_run_measured(tmp_path: Path) -> None:
    slow = {"wait_for_rollouts": 500.0, "forward_backward": 1.0}  # the first batch fills the pipeline
    inputs, seen = measured_in(run_with([slow, STEP, STEP, STEP], tmp_path))
    assert inputs["train_token_s"] == pytest.approx(4.0 / (256 * 50))
    assert inputs["update_s"] == pytest.approx(0.5)
    assert inputs["pause_s"] == pytest.approx(0.3)  # without the update's wait
    assert inputs["other_s"] == pytest.approx(0.5)
    assert inputs.values["other_s"].source == "measured in made"
    assert seen.batch_s == pytest.approx(7.0)
    assert seen.idle == pytest.approx(3 / 7)
    assert seen.dropped == pytest.approx(64 / 320)


def test_adapters_pause_nothing_in_a_measured_run(tmp_path: Path) -> None:
    lora = {"training": {"adapters": "lora"}, "weights": {"transport": "lora"}}
    inputs, _ = measured_in(run_with([STEP, STEP, STEP, STEP], tmp_path, **lora))
    assert inputs["update_s"] == pytest.approx(0.5)
    assert (inputs["pause_s"], inputs.values["pause_s"].source) == (0.0, "adapters pause nothing")


def test_lengths_and_the_time_of_a_token_come_from_the_stored_rollouts(tmp_path: Path) -> None:
    run = run_with([STEP, STEP, STEP, STEP], tmp_path)
    rollouts = [
        replace(rollout, prompt_ids=np.zeros(20, np.int32), timing=Timing(9.0, 2.0 + 0.1 * tokens))
        for role, tokens in ((Role.HELPFUL, 10), (Role.HELPFUL, 30), (Role.SNEAKY, 50))
        for rollout in made_group(f"{role.value}-{tokens}", [[0]], tokens=tokens, role=role).rollouts
    ]
    info = RolloutShards(run.path).write(0, "train_prover-00000", rollouts)
    FileStateStore(run.state).save({"shards": [info.plain()]})
    inputs, _ = measured_in(run)
    assert {role: sorted(found) for role, found in inputs.lengths.items()} == {
        Role.HELPFUL: [10, 30],
        Role.SNEAKY: [50],
    }
    assert inputs["token_s"] == pytest.approx(0.1)  # without the time in a queue
    assert inputs["request_s"] == pytest.approx(2.0)
    assert inputs["prompt_tokens"] == 20


def test_a_run_with_few_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 2 batches"):
        measured_in(run_with([STEP, STEP, STEP], tmp_path))
