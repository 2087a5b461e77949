"""A game whose server is a real vLLM that pvg starts on a Ray cluster: it is killed, and the game does not notice."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from served_games import events, steps, train, wait_for_step
from test_game_on_vllm import ROLLOUTS, SERVER, VLLM, ids_of
from vllm_servers import vllm_python

pytest.importorskip("ray", reason="`make install`")


def started(folder: Path) -> list[dict[str, str]]:
    return [line for line in events(folder, "clustered", "workers") if line["event"] == "server started"]


def test_a_game_on_a_server_of_a_cluster_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVG_VLLM_PYTHON", vllm_python())
    game = train(tmp_path, "clustered", VLLM, *SERVER, "cluster.kind=ray", "cluster.workers=1")
    wait_for_step(tmp_path, "clustered", game, 1)
    (first,) = started(tmp_path)
    os.kill(int(first["pid"]), signal.SIGKILL)
    out, err = game.communicate(timeout=900)
    assert game.returncode == 0, err[-3000:]
    assert json.loads(out)["status"] == "complete"
    first, second = started(tmp_path)
    assert first["boot"] != second["boot"]
    assert f"{first['server']} is unavailable" in err
    lost = [line for line in events(tmp_path, "clustered", "workers") if line["event"] == "server lost"]
    assert "SIGKILL" in lost[0]["why"]
    ids = ids_of(tmp_path, "clustered")
    assert len(ids) == len(set(ids)) == ROLLOUTS
    assert all(0 <= metrics["canary_gap"] < 1e-3 for metrics in steps(tmp_path, "clustered"))
    until = time.monotonic() + 60.0
    while psutil.pid_exists(int(second["pid"])) and time.monotonic() < until:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(second["pid"]))
