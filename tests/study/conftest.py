"""Every test of studies runs in a new, empty folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "reporting"))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pvg.study.playing.POLL_S", 0.01)
    monkeypatch.setattr("pvg.study.playing.LOOK_S", 0.05)
    return tmp_path
