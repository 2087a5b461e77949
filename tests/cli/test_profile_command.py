"""`pvg profile` as a user calls it: a stage, a run's timeline, mistakes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from calling import pvg
from run_samples import begin, tell

from pvg.store.state import JsonLines

pytestmark = pytest.mark.slow


def with_spans(name: str = "first") -> None:
    run = begin(Path("runs"), name)
    common = {"start_s": 1e9, "end_s": 1e9 + 1, "depth": 0, "round": 0, "phase": "mint", "step": 1}
    with JsonLines(run.spans) as lines:
        lines.append({"name": "rollout", "track": "driver", **common})
        lines.append({"name": "decode", "track": "pvg-compute_0", **common})
    tell(run, {"kind": "device", "time": 1e9, "metrics": {"cpu": 0.5}})


def test_the_timeline_of_a_run() -> None:
    with_spans()
    called = pvg("profile", "--run", "first")
    assert called.code == 0
    assert "ui.perfetto.dev" in called.out
    events = json.loads(gzip.decompress(Path("profile-first/timeline.json.gz").read_bytes()))["traceEvents"]
    assert {"rollout", "decode", "round 0 mint", "device/cpu"} <= {event["name"] for event in events}
    again = pvg("profile", "--run", "first", "--json")  # an existing folder is left alone
    assert again.document["folder"] == "profile-first-2"


def test_a_stage_of_the_embedded_game() -> None:
    """Two groups of two short rollouts."""
    settings = ["training.groups=2", "rollout.group_size=2", "rollout.max_tokens=4"]
    arguments = [argument for setting in settings for argument in ("-s", setting)]
    called = pvg("profile", "--stage", "rollout", "--steps", "1", "--no-py-spy", "-o", "out", "--json", *arguments)
    assert called.code == 0, called.err
    document = called.document
    assert {path.name for path in Path("out").iterdir()} == {file["name"] for file in document["files"]}
    assert len(document["operators"]) == 10
    assert {"prefill", "decode"} <= document["budget"]["exposed"].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stage", "sampling"), "There is no stage 'sampling'"),
        (("--run", "first", "--stage", "rollout"), "--run exports a finished timeline"),
        (("--run", "fresh"), "has no spans.jsonl"),
        (("--run", "first", "--out", "runs"), "not an empty folder"),
    ],
)
def test_mistakes_are_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    with_spans()
    begin(Path("runs"), "fresh")
    called = pvg("profile", *arguments)
    assert called.code == 2
    assert message in called.err
    assert not list(Path().glob("profile-*"))
