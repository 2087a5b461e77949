"""What cannot work together of what the prover's trainer learns from, the nearest that does, and what is odd."""

from __future__ import annotations

from typing import Any

import pytest

from pvg.config.experiment import Experiment, build_experiment
from pvg.errors import ConfigurationError

SAFE = {"game": {"reward": "cgc"}}


def built(training: dict[str, Any], **rollout: Any) -> Experiment:
    return build_experiment({**SAFE, "training": training, "rollout": rollout})


IMPOSSIBLE = [
    ({"dynamic_sampling": True, "loss": "rae"}, {}, "training.loss = 'rae' has no groups"),
    ({"dynamic_sampling": True, "loss": "spo"}, {}, "training.loss = 'spo' has no groups"),
    ({"dynamic_sampling": True}, {"prefetch": 1, "engine": "vllm"}, "set rollout.prefetch to 0"),
    ({"dynamic_sampling": True}, {"partial": True, "group_deadline_s": 9.0}, "leaves groups to later batches"),
    ({"importance": "masked"}, {"logprobs": "recomputed"}, "training.importance = 'masked' compares the policy"),
    ({"importance": "masked", "importance_low": 6.0}, {}, "is not below training.importance_high = 5.0"),
    ({"importance": "masked", "importance_low": 1.5}, {}, "whose ratio is 1"),
    ({"importance": "masked", "importance_high": 0.9}, {}, "whose ratio is 1"),
    ({"kl_target": 0.1, "kl": 0.0}, {}, "multiplying training.kl, which is 0"),
    ({"kl_target": 0.1, "loss": "dapo"}, {}, "'dapo' has no KL term"),
    ({"entropy_target": 0.1, "entropy_bonus": 0.5}, {}, "begins above training.entropy_bonus_max = 0.01"),
    ({"curriculum_edges": [0.8, 0.2]}, {}, "must rise"),
    ({"curriculum_edges": [0.5]}, {}, "1 training.curriculum_edges make 2 buckets"),
    ({"curriculum_shares": [0.5, 0.5, 0.5]}, {}, "sum to 1.5, not to 1"),
    ({"curriculum_edges": [0.0, 0.5]}, {}, "training.curriculum_edges.0"),
    ({"loss": "rae"}, {"prefetch": 1, "engine": "vllm", "group_deadline_s": 9.0}, "training.loss = 'rae', and rollout"),
]
POSSIBLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dynamic_sampling": True}, {"group_deadline_s": 9.0}),
    ({"dynamic_sampling": True, "loss": "dapo", "curriculum": "buckets"}, {}),
    ({"importance": "none"}, {"logprobs": "recomputed"}),
    ({"importance": "masked", "importance_low": 1.0}, {}),
    ({"importance": "truncated", "importance_high": 0.9}, {}),
    ({"kl_target": 0.1}, {}),
    ({"entropy_bonus": 0.5}, {}),
    ({"curriculum": "buckets", "curriculum_edges": [0.5], "curriculum_shares": [0.0, 1.0]}, {}),
    ({"loss": "rae"}, {"group_size": 1, "prefetch": 1, "engine": "vllm"}),
    ({"loss": "rae"}, {"group_size": 1, "group_deadline_s": 9.0, "partial": True}),
]


@pytest.mark.parametrize(("training", "rollout", "says"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_refused(training: dict[str, Any], rollout: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        built(training, **rollout)
    assert says in caught.value.message


@pytest.mark.parametrize(("training", "rollout"), POSSIBLE, ids=lambda value: str(value)[:40])
def test_what_just_works_is_taken(training: dict[str, Any], rollout: dict[str, Any]) -> None:
    assert built(training, **rollout).warnings() == []


def test_a_group_of_one_has_no_signal_to_look_for() -> None:
    with pytest.raises(ConfigurationError, match=r"rollout\.group_size = 1"):
        built({"dynamic_sampling": True}, group_size=1)


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"dynamic_sampling_rounds": 2}, "training.dynamic_sampling_rounds has no effect on training.dynamic_sampling"),
        ({"curriculum_half_life": 9.0}, "training.curriculum_half_life has no effect on training.curriculum = 'none'"),
        ({"curriculum_edges": [0.1, 0.9]}, "training.curriculum_edges has no effect on training.curriculum = 'none'"),
        (
            {"curriculum": "prioritised", "curriculum_shares": [0.2, 0.6, 0.2]},
            "training.curriculum_shares has no effect on training.curriculum = 'prioritised'",
        ),
        ({"kl_horizon": 3.0}, "training.kl_horizon has no effect on training.kl_target, which is not set"),
        ({"kl": 0.0, "kl_estimator": "k2"}, "training.kl_estimator has no effect on training.kl = 0"),
        ({"entropy_step": 0.1}, "training.entropy_step has no effect on training.entropy_target, which is not set"),
        ({"importance_low": 0.1}, "training.importance_low has no effect on training.off_policy = 'sampled'"),
        ({"importance": "none", "importance_high": 2.0}, "has no effect on training.importance = 'none'"),
        ({"importance": "truncated", "importance_low": 0.1}, "has no effect on truncated weights"),
        (
            {"importance": "masked", "off_policy": "decoupled"},
            "training.off_policy = 'decoupled' has no effect on training.importance = 'masked'",
        ),
        ({"loss": "rae", "spo_half_life": 3.0}, "training.spo_half_life has no effect on training.loss = 'rae'"),
    ],
)
def test_what_has_no_effect_is_said(training: dict[str, Any], says: str) -> None:
    (found,) = built(training).warnings()
    assert says in found
