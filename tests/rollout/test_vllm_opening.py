"""What an experiment's engine over servers is made with."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_policies import tiny_model

from pvg.config.experiment import Experiment
from pvg.rollout.vllm_engine import open_vllm_engine
from pvg.telemetry.events import SilentEvents


@pytest.mark.parametrize("connections", [None, 1024])
def test_one_server_can_be_asked_everything_when_the_others_are_away(connections: int | None, tmp_path: Path) -> None:
    """And an update's canary waits behind no request: it would be taken for silence, and the server given up."""
    experiment = Experiment.model_validate(
        {
            "rollout": {"engine": "vllm", "concurrency": 1000},
            "serving": {"servers": "http://127.0.0.1:1,http://127.0.0.1:2", "connections": connections},
            "weights": {"root": str(tmp_path), "canary_prompts": 4},
        }
    )
    with tiny_model() as base:
        engine = open_vllm_engine(experiment, base, None, SilentEvents(), "run", lambda: [])  # type: ignore[arg-type]
        assert engine.served.connections.requests.connections >= 1008
        assert engine.max_in_flight >= 1000
