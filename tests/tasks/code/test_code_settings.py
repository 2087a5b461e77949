"""Settings of the code game that cannot work together, and those without an effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pvg.config.load import build_experiment, load_experiment
from pvg.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
CODE = {"kind": "code"}


def warnings_of(game: dict[str, Any], task: dict[str, Any] = CODE) -> list[str]:
    return build_experiment({"task": task, "game": game}).warnings()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"task": CODE, "game": {"reward": {"kind": "gated", "floor": -1.0, "similarity_weight": 1.0}}},
            "game.reward.floor = -1.0",
        ),
        ({"game": {"reward": {"kind": "gated", "similarity_weight": 0.5}}}, "task.kind = 'modchain' has none"),
        ({"task": CODE, "game": {"reward": "gated", "sneaky_share": 0.0}}, "needs two roles"),
        ({"task": CODE, "game": {"reward": "gated"}, "prompts": "plain"}, "gives both the same prompt"),
    ],
)
def test_what_cannot_work(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as told:
        build_experiment(settings)
    assert said in told.value.message


def test_what_is_probably_not_meant() -> None:
    assert warnings_of({"reward": "gated"}) == []
    gated = {"kind": "gated", "similarity_weight": 0.5}
    assert warnings_of({"reward": gated}) == []
    reduced = warnings_of({"reward": "gated"}, {"kind": "code", "sandbox": "reduced"})
    assert len(reduced) == 1
    assert "task.sandbox = 'reduced'" in reduced[0]


def test_the_experiment_that_comes_with_pvg() -> None:
    experiment = load_experiment(ROOT / "experiments" / "code.toml")
    assert experiment.task.kind == "code"
    assert experiment.task.sandbox == "full"
    assert experiment.warnings() == []
