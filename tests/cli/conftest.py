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


@pytest.fixture(scope="session")
def small_game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `modchain`, a complete small game. A test works on its copy."""
    from calling import SMALL, pvg

    runs = tmp_path_factory.mktemp("played") / "runs"
    trained = pvg("train", *SMALL, "-s", f"store.root={runs}", "--json")
    assert trained.code == 0, trained.err
    assert trained.document["status"] == "complete"
    assert 0.0 <= trained.document["rounds"][0]["metrics"]["helpful_accuracy"] <= 1.0
    return runs
