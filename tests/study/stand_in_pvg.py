"""A `pvg` that plays nothing: it makes the run, commits a complete game, and tells what the real one tells. For the
tests of who starts it; it imports no part of pvg, so it starts at once. `behaviour.json` in the current folder
says what a cell does instead: {"NAME": "crash"}.

  crash: an error document and exit code 1       die: SIGKILL of itself       defect: a traceback, exit code 70
  wait: commits, waits for a signal, and says when it is there; at SIGINT it commits and ends with 130
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import tomllib
from pathlib import Path

import orjson
from evaluation_samples import attack, document, round_of


def main() -> None:
    word, target, *options = sys.argv[1:]
    if word == "evaluate":
        evaluate(Path(target), options)
        return
    assert word == "train"
    settings = tomllib.loads(Path(target).read_text())
    if options[0] == "--resume":
        run = Path(options[1])
    else:
        run = Path(settings["store"]["root"]) / options[1]
        run.mkdir()
        shutil.copy(target, run / "experiment.toml")
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        play(run, behaviour_of(run.name), settings["seed"])


def behaviour_of(name: str) -> str:
    file = Path("behaviour.json")
    return json.loads(file.read_text()).get(name, "") if file.is_file() else ""


def play(run: Path, behaviour: str, seed: int) -> None:
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


def stop(run: Path) -> None:
    commit(run, "train_prover", round=1, step=3, rounds=[{"helpful_accuracy": 0.5}])
    sys.exit(130)


def evaluate(run: Path, options: list[str]) -> None:
    with open("evaluated.txt", "a") as told:
        told.write(f"{run.name} {' '.join(options)}\n")
    if behaviour_of(run.name) == "unevaluable":
        sys.exit(3)
    settings = dict(word.split("=", 1) for word in options if word.startswith("evaluate."))
    given = {key.removeprefix("evaluate."): json.loads(value) for key, value in settings.items()}
    hashes = json.loads(Path("hashes.json").read_text())
    asked = [0, 1]
    if "--rounds" in options:
        asked = [int(number) for number in options[options.index("--rounds") + 1].split(",")]
    rounds = [round_of(n, *(attack(kind, (40, 200)[n], found=not n) for kind in given["attacks"])) for n in asked]
    (run / "evaluation").mkdir(exist_ok=True)
    (run / "evaluation" / "evaluation.json").write_text(json.dumps(document(hashes[run.name], given, rounds)))


def commit(run: Path, phase: str, **changes: object) -> None:
    """As pvg.store.state writes it."""
    plain = {"phase": phase, "round": 0, "step": 0, "shards": [], "rounds": [], "code_version": "x", "machine": "y"}
    state = {**plain, **changes}
    checksum = hashlib.sha256(orjson.dumps([1, state], option=orjson.OPT_SORT_KEYS)).hexdigest()
    written = run / "state.json.new"
    written.write_bytes(orjson.dumps({"schema": 1, "checksum": checksum, "state": state}))
    written.rename(run / "state.json")


main()
