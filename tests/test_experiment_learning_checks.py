"""What cannot work together of what the prover's trainer learns from, the nearest that does, and what is odd."""

from __future__ import annotations

from typing import Any

import pytest

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError

SAFE = {"game": {"reward": "cgc"}}


def built(training: dict[str, Any], **rollout: Any) -> Experiment:
    return build_experiment({**SAFE, "training": training, "rollout": rollout})


IMPOSSIBLE = [
    ({"dynamic_sampling": 4, "loss": "spo"}, {}, "training.loss = 'spo' uses none"),
    ({"dynamic_sampling": 4}, {"prefetch": "fresh", "engine": "vllm"}, "rollout.prefetch samples before"),
    ({"dynamic_sampling": 4}, {"deadline": "continue"}, "leaves groups to later batches"),
    (
        {"importance": "masked"},
        {"logprobs": "recomputed"},
        "training.importance = 'masked' needs the sampler's log-probs",
    ),
    ({"loss": "rae"}, {"prefetch": "fresh", "engine": "vllm", "deadline": "cut"}, "so a batch has no deadline"),
    ({"dynamic_sampling": 4}, {"group_size": 1}, "rollout.group_size = 1"),
]
POSSIBLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"importance": "decoupled"}, {"deadline": "continue"}),
    ({"loss": "rloo", "importance": "decoupled"}, {"deadline": "continue"}),
    ({"dynamic_sampling": 4}, {"deadline": "cut"}),
    ({"dynamic_sampling": 4, "loss": "dapo", "curriculum": "prioritised"}, {}),
    ({"importance": "none"}, {"logprobs": "recomputed"}),
    ({"kl": {"target": 0.05}}, {}),
    ({"entropy_bonus": 0.5}, {}),
    ({"loss": "rae"}, {"group_size": 1, "prefetch": "fresh", "engine": "vllm"}),
    ({"loss": "rae"}, {"group_size": 1, "deadline": "continue"}),
]


@pytest.mark.parametrize(("training", "rollout", "says"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_refused(training: dict[str, Any], rollout: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        built(training, **rollout)
    assert says in caught.value.message


@pytest.mark.parametrize(("training", "rollout"), POSSIBLE, ids=lambda value: str(value)[:40])
def test_what_just_works_is_taken(training: dict[str, Any], rollout: dict[str, Any]) -> None:
    assert built(training, **rollout).warnings() == []
