"""Inputs: estimates and given values."""

from __future__ import annotations

from typing import Any

import pytest

from pvg.config.load import build_experiment
from pvg.errors import UsageError
from pvg.planning.memory import ModelShape
from pvg.planning.plan import MACHINES, Inputs, bounds_of, not_modelled, work_of, workers_of

BILLION = ModelShape("one", 10, 1000, 500, 1000, 10**9, 40_000)
SERVED: dict[str, Any] = {"name": "served", "rollout": {"engine": "vllm", "concurrency": 512, "max_tokens": 1000}}


def assumed(data: dict[str, object] = SERVED, gpus: int = 1) -> Inputs:
    return Inputs.assumed(build_experiment(data), BILLION, BILLION, MACHINES["h100"], gpus=gpus)


def test_estimates_from_sizes_and_data_sheets() -> None:
    found = assumed()
    assert found["token_s"] == pytest.approx(4e9 / (3.35e12 / 2))  # float32 weights, half of the bandwidth
    assert found["row_s"] == pytest.approx(2 * 10 * 500 * 4 * (256 + 250) / (3.35e12 / 2))
    # 6 operations per weight, and 2 for the reference, on completion tokens and an eighth of the prompt's.
    tokens = 1 + 256 / 500 / 8
    assert found["train_token_s"] == pytest.approx(8e9 * tokens / (0.3 * 989e12))
    assert found["update_s"] == pytest.approx(0.5 + 8.0)


def test_adapters_and_shared_prompts_save_operations_where_they_are_computed_so() -> None:
    """Frozen weights have no gradient: 4 instead of 6, and 2 for the reference. bfloat16 scores a prompt once."""
    for precision, read_tokens in (("float32", 256 + 500), ("bfloat16", 500 + 256 / 8)):
        models = {"precision": precision, "device": "cuda"}
        data = {**SERVED, "models": models, "training": {"adapters": {"rank": 8}}}
        found = assumed(data)
        assert found["train_token_s"] == pytest.approx(6e9 * (1 + 256 / 500 / 8) / (0.3 * 989e12))
        scores = 2 * 2e9 * build_experiment(data).rollouts_per_batch * read_tokens  # also under the initial weights
        assert found["other_s"] == pytest.approx(scores / (0.3 * 989e12))


def test_servers_with_adapters_compute_the_reference_in_place_of_the_trainer() -> None:
    """2 operations per weight, for every token of prompt and completion: a server reads each prompt again."""
    data = {"models": {"device": "cuda"}, "training": {"adapters": {"rank": 8}}, "weights": {"transport": "lora"}}
    rows = [{**SERVED, **data, "rollout": {**SERVED["rollout"], "temperature": t}} for t in (1.0, 0.9)]
    served, own = (assumed(row, gpus=2) for row in rows)
    assert own["train_token_s"] == pytest.approx(6e9 * (1 + 256 / 500 / 8) / (0.3 * 989e12))
    assert served["train_token_s"] == pytest.approx(4e9 * (1 + 256 / 500 / 8) / (0.3 * 989e12))
    assert served["row_s"] - own["row_s"] == pytest.approx(2e9 * (1 + 256 / 500) / (0.3 * 989e12))
    # A server on the only GPU rests while the trainer works, and leaves the reference to it.
    assert assumed(rows[0]).values == own.values
    ahead = {**rows[0], "rollout": {**SERVED["rollout"], "prefetch": "fresh"}}
    assert assumed(ahead)["row_s"] == served["row_s"]


@pytest.mark.parametrize(("weights", "tokens", "written"), [({"sr": 1.0}, 500, 8), ({"cir": 1.0}, 256 + 9 * 500, 0)])
def test_a_reader_of_the_reward_takes_time(weights: dict[str, float], tokens: int, written: int) -> None:
    """SR: each solution, and an answer of 8 tokens for 32 solutions at once. CIR: also an answer after each prefix."""
    reward = {"kind": "correctness", "reader": "hf:a/b", **weights}
    data = {**SERVED, "models": {"device": "cuda"}, "game": {"reward": reward, "sneaky_share": 0.5}}
    experiment = build_experiment(data)
    texts = experiment.rollouts_per_batch // 2
    found = Inputs.assumed(experiment, BILLION, BILLION, MACHINES["h100"], BILLION)
    read_s = texts * 2e9 * tokens / (0.3 * 989e12) + written * texts / 32 * 2e9 / (3.35e12 / 2)
    assert found["read_s"] == pytest.approx(read_s)
    without = Inputs.assumed(experiment, BILLION, BILLION, MACHINES["h100"])
    trainer_s = [bounds_of(work_of(experiment, inputs)).trainer_s for inputs in (found, without)]
    assert trainer_s[0] - trainer_s[1] == pytest.approx(read_s)


def test_a_given_value_replaces_an_estimate_and_says_so() -> None:
    found = assumed()
    found.assign(["token_s=0.02", "update_s=0.1"])
    assert (found["token_s"], found.values["token_s"].source) == (0.02, "given")


@pytest.mark.parametrize("word", ["token_s", "token_s=fast", "token_s=0"])
def test_a_value_that_is_no_number_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="token_s"):
        assumed().assign([word])


def test_the_workers_of_a_cluster_are_its_processes_at_most() -> None:
    for cluster, workers in (
        ({"workers": 4}, 4),
        ({"min_workers": 1, "max_workers": 3}, 3),
        ({"workers": 4, "max_workers": 2}, 2),
        ({"workers": 4, "trainers": 1}, 3),
    ):
        experiment = build_experiment({"cluster": {"kind": "local", **cluster}, "rollout": {"prefetch": "fresh"}})
        assert workers_of(experiment)[0] == workers


def test_the_torch_engine_overlaps_nothing_and_a_note_says_so() -> None:
    data: dict[str, object] = {"name": "here", "rollout": {"prefetch": "fresh"}}
    experiment = build_experiment(data)
    assert work_of(experiment, assumed(data)).ahead == 0
    served = {**SERVED, "rollout": {"engine": "vllm", "prefetch": {"kind": "old", "batches": 2}, "concurrency": 64}}
    work = work_of(build_experiment(served), assumed(served), workers=8)
    assert (work.workers, work.concurrency, work.ahead, work.rows) == (8, 64, 2, 64)
    assert any("overlaps nothing" in note for note in not_modelled(experiment))


def test_the_gpus_of_a_server_divide_its_work() -> None:
    one, four = assumed(), assumed({**SERVED, "serving": {"tensor_parallel": 4}})
    for name in ("token_s", "row_s", "request_s"):
        assert four[name] == pytest.approx(one[name] / 4)
    assert four["train_token_s"] == one["train_token_s"]
    assert "4 GPUs without their exchange" in four.values["token_s"].source


@pytest.mark.parametrize(
    ("device", "cluster", "beginnings"),
    [
        ("cpu", {"kind": "none"}, []),
        ("cpu", {"kind": "local", "workers": 4}, ["workers have copies", "workers divide the cores"]),
        ("cpu", {"kind": "local", "trainer_ranks": 8}, ["cluster.trainer_ranks = 8 is not modelled on CPUs"]),
        ("cuda", {"kind": "local", "workers": 4}, []),
        ("cuda", {"kind": "local", "trainer_ranks": 8}, ["the exchange of cluster.trainer_ranks = 8"]),
    ],
)
def test_notes_say_what_several_processes_are_planned_without(
    device: str, cluster: dict[str, Any], beginnings: list[str]
) -> None:
    notes = not_modelled(build_experiment({"models": {"device": device}, "cluster": cluster}))
    assert len(notes) == len(beginnings)
    assert all(note.startswith(beginning) for note, beginning in zip(notes, beginnings, strict=True))


@pytest.mark.parametrize("settings", [{"rollout": {"logprobs": "recomputed"}}, {"training": {"minibatches": 2}}])
def test_a_driver_of_ranks_on_gpus_that_computes_on_the_cpu_is_no_surprise(settings: dict[str, Any]) -> None:
    for device, count in (("cuda", 1), ("cpu", 0)):
        cluster = {"kind": "local", "trainer_ranks": 8}
        experiment = build_experiment({"models": {"device": device}, "cluster": cluster, **settings})
        assert sum("computed on the CPU" in note for note in not_modelled(experiment)) == count


def test_gpus_divide_the_gradients_and_workers_also_references_and_scores() -> None:
    """A step's operations: 6 of the gradient, 2 of recomputed layers, 2 of the reference."""
    times = {}
    for name, kind, cluster in (
        ("one", "none", {}),
        ("workers", "local", {"workers": 4}),
        ("workers of Ray", "ray", {"workers": 4}),
        ("ahead", "local", {"workers": 4, "trainers": 1}),
        ("ranks", "local", {"trainer_ranks": 4}),
    ):
        experiment = build_experiment(
            {
                "models": {"device": "cuda"},
                "training": {"kl": {"coefficient": 0.1}, "gradient_checkpointing": True},
                "cluster": {"kind": kind, **cluster},
                "rollout": {"prefetch": "fresh" if "trainers" in cluster else "none"},
            }
        )
        times[name] = Inputs.assumed(experiment, BILLION, BILLION, MACHINES["h100"])
    one = times["one"]
    assert times["workers"]["train_token_s"] == pytest.approx(one["train_token_s"] / 4)
    assert times["workers"]["other_s"] == pytest.approx(one["other_s"] / 4)
    assert times["workers of Ray"].values == times["workers"].values
    assert times["ahead"]["train_token_s"] == pytest.approx(one["train_token_s"])
    assert times["ahead"]["other_s"] == pytest.approx(one["other_s"] / 3)
    assert times["ranks"]["train_token_s"] == pytest.approx(one["train_token_s"] * (8 / 4 + 2) / 10)
    assert times["ranks"]["other_s"] == one["other_s"]


@pytest.mark.parametrize("rank", [0, 8])
def test_workers_get_the_adapters_or_the_whole_weights_and_send_their_gradients(rank: int) -> None:
    experiment = build_experiment(
        {
            "models": {"device": "cuda"},
            "training": {"adapters": {"rank": rank}},
            "cluster": {"kind": "local", "workers": 4},
        }
    )
    trained = 4 * (BILLION.adapter_parameters(rank) if rank else BILLION.parameters)
    found = Inputs.assumed(experiment, BILLION, BILLION, MACHINES["h100"])
    assert found["update_s"] == pytest.approx(0.5 + (trained + trained * (1 + 4)) / 1e9)
