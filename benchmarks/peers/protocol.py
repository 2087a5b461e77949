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
    """From now on whatever prints to stdout goes to stderr: libraries greet, and an answer must stay one line."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def answer(self, facts: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()

    def wait(self) -> bool:
        """Block until a sample is asked for; False when no more are wanted, or when nobody is there any more."""
        return sys.stdin.readline().strip() == SAMPLE
