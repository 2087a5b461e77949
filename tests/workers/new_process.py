"""Runs a test in a new interpreter, because Ray keeps state of a cluster in the process that was connected to it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INSIDE = "PVG_TEST_IN_NEW_PROCESS"


def in_new_process(test: Callable[..., None]) -> Callable[..., None]:
    """Ray ends a process with exit code 1 a minute after the head of a cluster that it knew has ended. With several
    clusters in one process, that would end the process of the tests."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        if INSIDE in os.environ:
            test(**fixtures)
            return
        node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node]
        done = subprocess.run(
            command, cwd=ROOT, env=environment | {INSIDE: "1"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run
