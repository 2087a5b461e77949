"""Every test of the command line runs in a new, empty folder, without COLUMNS. Synthetic runs come from
tests/reporting, a tiny benchmark from tests/bench."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for beside in ("bench", "reporting"):
    sys.path.insert(0, str(Path(__file__).parent.parent / beside))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # the width of piped output
    return tmp_path
