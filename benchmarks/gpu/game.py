"""One round of the embedded game on one device, played by the command line.

    python -m benchmarks.gpu.game --out game.json
    python -m benchmarks.gpu.game --device cpu --small --out game.json           # tests this script

The embedded models are so small that a GPU hardly gains. This shows that the whole path works: sampling, scoring,
training, weight updates, commits. The round must end, and its losses must be finite.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import SMALL, PartArguments

ROOT = Path(__file__).parent.parent.parent
FEW = ("training.steps=2", "verifier.steps=2", "game.mint_problems=32", "training.groups=4")
SHOWN = ("helpful_accuracy", "base_helpful_accuracy", "sneaky_error_rate", "fooled_rate", "verifier_auc")


def main() -> int:
    arguments = PartArguments.parsed("Play one round of the embedded game on one device.")
    results, device = Results("embedded game"), arguments.device
    few = FEW if arguments.sizes is SMALL else ()
    with tempfile.TemporaryDirectory() as folder:
        settings = ["cluster=none", "game.rounds=1", f"models.device={device}", *few]
        began = time.perf_counter()
        played = _pvg(folder, "train", "modchain", "--name", "gpu", "--json", *_set(settings))
        results.figure("one round of the embedded game", time.perf_counter() - began, "s")
        for name, value in sorted(_numbers(played).items()):
            results.figure(name, value, "")
    return results.write(arguments.out, device)


def _set(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("-s", setting)]


def _pvg(folder: str, *words: str) -> dict[str, Any]:
    """Call the command in `folder`, and return its JSON document. Ends this process with its message if it fails."""
    command = [sys.executable, "-m", "pvg", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr}\npvg {words[0]} failed with exit code {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _numbers(played: dict[str, Any]) -> dict[str, float]:
    """Numbers of the last round that a broken step would change."""
    found = played["rounds"][-1]["metrics"]
    return {f"round 0: {name}": float(found[name]) for name in SHOWN}


if __name__ == "__main__":
    sys.exit(main())
