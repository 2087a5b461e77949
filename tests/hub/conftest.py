"""A hub on loopback for the tests of this folder. They call the command line as tests/cli does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from loopback_hub import Hub, start

from pvg import hub as pvg_hub
from pvg.config.load import EMBEDDED

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))

VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE")


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    server = start(made)
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process uses the hub on loopback and an empty cache, which is returned. huggingface_hub reads its
    environment when it is imported, so its constants are changed."""
    for variable in (*VARIABLES, "HF_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    cache = tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    pvg_hub._commit.cache_clear()
    return cache


@pytest.fixture
def environment(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same for processes that the test starts."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "hub"


@pytest.fixture
def model() -> dict[str, bytes]:
    """The files of the embedded prover, and some that must not be downloaded."""
    files = {path.name: path.read_bytes() for path in (EMBEDDED / "modchain-prover").iterdir()}
    return files | {
        "pytorch_model.bin": b"a pickle",
        "modeling_evil.py": b"raise SystemExit",
        "original/model.safetensors": b"the same again",
        "README.md": b"# A model",
    }
