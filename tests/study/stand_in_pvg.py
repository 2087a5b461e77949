"""A `pvg` that plays nothing: it makes the run, commits a complete game, and tells what the real one tells. For the
tests of who starts it. `behaviour.json` in the current folder says what a cell does instead: {"NAME": "crash"}.

  crash: an error document and exit code 1       die: SIGKILL of itself       defect: a traceback, exit code 70
  wait: commits, waits for a signal, and says when it is there; at SIGINT it commits and ends with 130
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from pvg.experiment import load_experiment
from pvg.store import FileStateStore, RunDirectory


def main() -> None:
    word, target, *options = sys.argv[1:]
    if word == "evaluate":
        evaluate(Path(target), options)
        return
    assert word == "train"
    experiment = load_experiment(Path(target))
    if options[0] == "--resume":
        run = RunDirectory(Path(options[1]))
    else:
        run = RunDirectory.create(experiment.store.root, options[1], experiment)
    with run.lock():
        play(run, behaviour_of(run.name), experiment.seed)


def behaviour_of(name: str) -> str:
    file = Path("behaviour.json")
    return json.loads(file.read_text()).get(name, "") if file.is_file() else ""


def play(run: RunDirectory, behaviour: str, seed: int) -> None:
    with open("played.txt", "a") as told:
        told.write(f"{run.name} {os.getpid()}\n")
    if behaviour == "crash":
        print(json.dumps({"error": {"type": "UsageError", "message": "It broke.", "remedy": "", "exit_code": 1}}))
        sys.exit(1)
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "defect":
        print("Traceback (most recent call last):\nZeroDivisionError: of all things", file=sys.stderr)
        sys.exit(70)
    if behaviour == "wait":
        signal.signal(signal.SIGINT, lambda *_: stop(run))
        commit(run, "train_prover", round=1, step=2, rounds=[{"helpful_accuracy": 0.5}])
        while True:
            time.sleep(0.05)
    rounds = [{"helpful_accuracy": 0.5 + 0.1 * seed}, {"helpful_accuracy": 0.6 + 0.1 * seed, "fooled_rate": 0.25}]
    commit(run, "complete", rounds=rounds)
    print(json.dumps({"status": "complete"}))


def stop(run: RunDirectory) -> None:
    commit(run, "train_prover", round=1, step=3, rounds=[{"helpful_accuracy": 0.5}])
    sys.exit(130)


def evaluate(run: Path, options: list[str]) -> None:
    with open("evaluated.txt", "a") as told:
        told.write(f"{run.name} {' '.join(options)}\n")
    if behaviour_of(run.name) == "unevaluable":
        sys.exit(3)
    (run / "evaluation").mkdir(exist_ok=True)
    (run / "evaluation" / "evaluation.json").write_text(json.dumps(EVALUATION))


def attack(status: str, steps: int | None) -> dict[str, object]:
    return {"kind": "src", "status": status, "limit": 200, "steps": steps}


# As pvg.evaluation.report has it, as far as measures read it.
EVALUATION = {
    "rounds": [
        {"round": 0, "exploit": [attack("found", 40)], "detection": {"completeness": {"value": 0.5}}},
        {"round": 1, "exploit": [attack("censored", 200)], "detection": None},
    ]
}


def commit(run: RunDirectory, phase: str, **state: object) -> None:
    plain = {"phase": phase, "round": 0, "step": 0, "shards": [], "rounds": [], "code_version": "x", "machine": "y"}
    FileStateStore(run.state).save({**plain, **state})


main()
