"""One finished run, played once for all tests of exports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from game.kill_drill import small_experiment

import pvg


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small.toml and the run `mine` of one round, in runs/."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "small.toml").write_text(small_experiment().to_toml())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pvg.play("small.toml", {"game.rounds": 1}, name="mine")
    return folder


@pytest.fixture(scope="module")
def folder(played: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy for the tests of one module, which is the current folder."""
    made = tmp_path_factory.mktemp("copy") / "of"
    shutil.copytree(played, made)
    before = os.getcwd()
    os.chdir(made)
    yield made
    os.chdir(before)
