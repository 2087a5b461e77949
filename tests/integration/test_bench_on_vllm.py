"""`pvg bench` on a real vLLM: updates among streams, and rollouts on a server that pvg starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from served_games import PVG, serving
from vllm_servers import vllm_python

LIMIT_S = 600.0


def bench(folder: Path, *arguments: str) -> Any:
    """The report of `pvg bench`, run in `folder`, whose weights.root is the one that `serving` takes."""
    command = [str(PVG), "bench", "--json", *arguments, "-s", f"weights.root={folder / 'weights'}"]
    environment = os.environ | {"PVG_VLLM_PYTHON": vllm_python()}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return orjson.loads(done.stdout)


def test_updates_among_streams(tmp_path: Path) -> None:
    settings = ["workload.streams=12", "workload.updates=4", "repeats=1", "warmup=0"]
    with serving(tmp_path) as server:
        words = [word for setting in settings for word in ("-s", setting)]
        report = bench(tmp_path, "--profile", "sync", "--server", server.url, *words)
    assert report["environment"]["vllm"]
    assert report["config"]["servers"]["model"] == "modchain-prover"
    for variant in report["variants"]:
        derived = variant["derived"]
        assert derived["updates"] == 4
        assert derived["in_flight_min"] == 12
        assert derived["versions_served"] > 0.5  # the weights of most updates gave tokens
        assert derived["wall_p50_ms"] >= derived["rpc_p50_ms"] > derived["load_p50_ms"] > 0
        assert derived["queue_p99_ms"] >= derived["arrival_p50_ms"] >= 0


@pytest.mark.timeout(900)
def test_rollouts_on_servers_that_are_started_for_them(tmp_path: Path) -> None:
    settings = ["-s", "workload.rollouts=32", "-s", "repeats=1", "-s", "warmup=0"]
    report = bench(tmp_path, "--profile", "rollout", "--serve", *settings)
    (share,) = (variant["samples"]["prefix_share"]["values"][0] for variant in report["variants"])
    # Of 72 prompt tokens two blocks of 32, by seven of a group of eight.
    assert share == pytest.approx(64 / 72 * 7 / 8)
    for variant in report["variants"]:
        assert variant["derived"]["completion_tokens"] == 32 * 48
        assert variant["derived"]["truncated"] == 1.0
    assert report["config"]["servers"]["count"] == 1
