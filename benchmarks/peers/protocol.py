"""The worker's end of a comparison: orders come as lines on stdin, answers go as JSON lines to what was stdout.

    orders = Orders()
    orders.answer({"parameters": 860_032})      # ready
    while orders.wait():
        orders.answer({"step_s": one_step()})

A worker is a process of one side (see sides.py). Standard library only: the other trainer's environment has no pvg.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

SAMPLE, STOP = "sample", "stop"


class Orders:
    """Redirects stdout to stderr, because libraries print, and stdout must contain only answers, one per line."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def answer(self, facts: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()

    def wait(self) -> bool:
        """Block until the next order. True for a sample, False for a stop or if the other process has ended."""
        return sys.stdin.readline().strip() == SAMPLE
