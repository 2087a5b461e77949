"""One round of the embedded game on one device, played by the command line.

The embedded models are so small that a GPU hardly gains. This shows that the whole path works: sampling, scoring,
training, weight updates, commits. The round must end, and its losses must be finite.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import SMALL, Sizes

FEW = ("training.steps=2", "verifier.steps=2", "game.mint_problems=32", "training.groups=4")
# Metrics of the round that a broken step would change.
SHOWN = ("helpful_accuracy", "base_helpful_accuracy", "sneaky_error_rate", "fooled_rate", "verifier_auc")


def measure(results: Results, sizes: Sizes, device: torch.device) -> None:
    few = FEW if sizes is SMALL else ()
    with tempfile.TemporaryDirectory() as folder:
        settings = ["cluster=none", "game.rounds=1", f"models.device={device}", *few]
        began = time.perf_counter()
        changes = [word for setting in settings for word in ("-s", setting)]
        command = [sys.executable, "-m", "pvg", "train", "modchain", "--name", "gpu", "--json", *changes]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{done.stderr}\npvg train failed with exit code {done.returncode}")
        results.figure("one round of the embedded game", time.perf_counter() - began, "s")
        metrics: dict[str, Any] = json.loads(done.stdout)["rounds"][-1]["metrics"]
        for name in sorted(SHOWN):
            results.figure(f"round 0: {name}", float(metrics[name]), "")
