"""`pvg serve-env`: the command as a process, its errors, and its end."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import orjson
import pytest
from calling import ENTRY, pvg
from shipped_schemas import check_document

from pvg.games.openenv import OpenEnvClient


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_task_is_served_until_a_signal(stop: signal.Signals) -> None:
    words = ["serve-env", "modchain", "-s", "task.problems=20", "-s", "task.test_problems=5", "--json"]
    process = subprocess.Popen(
        [*ENTRY, *words, "--port", free_port()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    document = ""
    while not document.endswith("}\n"):
        line = process.stdout.readline()
        assert line, process.communicate()
        document += line
    ready = orjson.loads(document)
    check_document(("serve-env",), ready)
    assert ready["environment"] == "modchain"
    assert ready["url"].startswith("http://127.0.0.1:")
    with OpenEnvClient(ready["url"]) as client:
        question = client.reset(seed=3).observation["prompt"]
        client.reset(seed=23)
        assert client.reset(seed=23).observation["prompt"] == question, "problems are counted in a circle"
        assert client.step({"message": "A0"}).done
        process.send_signal(stop)  # while a session is open
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Ctrl-C stops the server." in err
    assert err.endswith("Stopped.\n")
    assert "Traceback" not in err


def test_names_ports_and_settings_that_cannot_be_served(tmp_path: Path) -> None:
    called = pvg("serve-env", "no-such-thing")
    assert (called.code, "There is no experiment 'no-such-thing'" in called.err) == (2, True)
    called = pvg("serve-env", "negotiation", "-s", "task.seed=1")
    assert (called.code, "a game has no settings" in called.err) == (2, True)
    called = pvg("serve-env", "openenv:nowhere", "--json")
    assert called.code == 2
    assert "is not the URL" in called.document["error"]["message"]
    called = pvg("serve-env", "textarena:No-Such-Game-v0")
    assert called.code in (2, 3), "without the extra, the environment lacks something"
    called = pvg("serve-env", f"{tmp_path}/mine.py:Game")
    assert called.code == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        called = pvg("serve-env", "negotiation", "--port", port)
    assert called.code == 2
    assert f"Port {port} of 127.0.0.1 cannot be used" in called.err
    assert pvg("serve-env", "negotiation", "--host", "no.such.host.invalid", "--port", port).code == 2
