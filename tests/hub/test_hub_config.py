"""The config.json of a model on the hub, without its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from loopback_hub import Hub

from pvg.errors import MissingRequirementError, UsageError
from pvg.hub import fetch_config
from pvg.planning.memory import read_shape

QUIET = [].append


def test_a_config_is_downloaded_without_the_weights(hub: Hub, here: Path, model: dict[str, bytes]) -> None:
    commit = hub.add("tiny/prover", model)
    assert fetch_config(f"hf:tiny/prover@{commit}", QUIET).read_bytes() == model["config.json"]
    assert {path.name for path in here.rglob("snapshots/*/*")} == {"config.json"}
    shape = read_shape(f"hf:tiny/prover@{commit}", QUIET)
    assert shape.counted == "its sizes"
    assert shape.parameters == read_shape("embedded:modchain-prover", QUIET).parameters
    assert set(hub.downloads()) == {"config.json"}


def test_a_model_that_is_not_there_is_refused(hub: Hub, here: Path) -> None:
    with pytest.raises((UsageError, MissingRequirementError)):
        fetch_config("hf:tiny/nowhere", QUIET)
