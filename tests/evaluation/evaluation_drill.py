"""Kill `evaluate` with SIGKILL at random moments, call it again each time, compare its end with an uninterrupted one's.

    python tests/evaluation/evaluation_drill.py --kills 7            # what the test suite runs
    python tests/evaluation/evaluation_drill.py --kills 100 --seed 7  # a soak

Prints one JSON document. Exit code 1 when anything differs: the report (but for its date and pvg's version), the
weights of attackers and baseline bit by bit, the samples; or when a file of the run itself has changed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).parent.parent / "game"))
from kill_drill import finish, forked, small_experiment, was_killed
from kill_drill import start as start_game

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.evaluation.report import REPORT_FILE
from pvg.evaluation.runner import evaluate
from pvg.records import Timing
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver

NAME = "drill"  # of the run, as kill_drill has it


def evaluated_experiment() -> Experiment:
    """One round, and an evaluation of a few seconds with every part in it."""
    plain = small_experiment().plain()
    plain["game"]["rounds"] = 1
    plain["training"]["steps"] = 3
    plain["store"] |= {"commit_every": 2}
    plain["evaluate"] = {
        "problems": 8,
        "samples": 4,
        "attacks": ["src", "cgc"],
        "attack_steps": 5,
        "attack_window": 2,
        "baseline_probes": 2,
    }
    return build_experiment(plain)


class Reporting(SilentObserver):
    """Writes a byte per event to a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def phase_started(self, info: PhaseInfo) -> None:
        os.write(self._pipe, f"{info.phase}\n".encode())

    def progressed(self, progress: Progress) -> None:
        os.write(self._pipe, b"\n")


def start(experiment: Experiment, root: Path) -> tuple[int, int]:
    """Fork a child that evaluates the run in `root`; returns its pid and the pipe that its events come from."""

    def work(writer: int) -> bool:
        run = RunDirectory.open(NAME, root)
        with run.lock():
            outcome = asyncio.run(evaluate(experiment, run, observer=Reporting(writer), stop=asyncio.Event()))
        return outcome.status == outcome.report.status == "complete"

    return forked(work)


def kill_after(pid: int, pipe: int, events: int, dice: random.Random, within: str = "") -> str | None:
    """Kill the child after `events` events, or as soon as it is `within` a phase; the phase it died in, or None if it
    finished before."""
    phase = "start"
    with os.fdopen(pipe, "rb") as lines:
        for line in lines:
            phase = line.decode().strip() or phase
            events -= 1
            if phase == within or (events <= 0 and not within):
                break
        time.sleep(dice.random() * 0.08)  # not a wait for anything: a random moment between two events
        os.kill(pid, signal.SIGKILL)
        return phase if was_killed(pid) else None


def fingerprint(root: Path) -> dict[str, Any]:
    """Everything of a finished evaluation that must not depend on interruptions, and the run's own files."""
    run = RunDirectory.open(NAME, root)
    folder = run.evaluation
    report = orjson.loads((folder / REPORT_FILE).read_bytes())
    for key in ("created", "code_version"):
        del report[key]
    weights = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*/**/weights/*/tensors.safetensors"))
    }
    samples = {}
    for path in sorted((folder / "samples").glob("*.json")):
        infos = [ShardInfo.from_plain(plain) for plain in orjson.loads(path.read_bytes())["result"]]
        rollouts = [rollout for info in infos for rollout in RolloutShards(folder).read(info)]
        samples[path.name] = [repr(replace(rollout, timing=Timing())) for rollout in rollouts]
    shards = len(list(folder.glob("rollouts/*/*.arrow")))
    return {"report": report, "weights": weights, "samples": samples, "shards": shards, "run": own_files(run)}


def own_files(run: RunDirectory) -> dict[str, str]:
    """Checksums of the run's files without the evaluation and the lock."""
    return {
        str(path.relative_to(run.path)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.path.rglob("*"))
        if path.is_file() and run.evaluation not in path.parents and path != run.lock_file
    }


def drill(kills: int, seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    experiment = evaluated_experiment()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        finish(*start_game(experiment, whole, resume=False))
        before = own_files(RunDirectory.open(NAME, whole))
        shutil.copytree(whole, killed)
        finish(*start(experiment, whole))
        expected = fingerprint(whole)
        died: Counter[str] = Counter()
        while sum(died.values()) < kills:
            # The second one in an attack, wherever chance would put it.
            within = "attack" if sum(died.values()) == 1 else ""
            phase = kill_after(*start(experiment, killed), dice.randint(3, 10), dice, within)
            if phase is None:
                break
            died[phase] += 1
            print(f"kill {sum(died.values())}/{kills} in {phase}", file=sys.stderr)
        finish(*start(experiment, killed))
        found = fingerprint(killed)
    problems = [key for key in expected if found[key] != expected[key]]
    problems += ["the run's own files"] * (found["run"] != before)
    return {"kills": dict(died), "policies": len(expected["weights"]), "problems": problems}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = drill(options.kills, options.seed)
    sys.stdout.write(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n")
    raise SystemExit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
