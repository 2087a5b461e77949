"""Kill a run with SIGKILL at random moments of every phase, resume it each time, compare it with an uninterrupted one.

    python tests/game/kill_drill.py --kills 12            # what the test suite runs
    python tests/game/kill_drill.py --kills 500 --seed 7  # the soak
    python tests/game/kill_drill.py --kills 4 --game play # self-play with a cache of states
    python tests/game/kill_drill.py --kills 4 --game warm # with a warm start
    python tests/game/kill_drill.py --kills 6 --game own  # with the protocol of a user's file
    python tests/game/kill_drill.py --kills 4 --game read # with a reward that a frozen model reads
    python tests/game/kill_drill.py --kills 10 --slow-disk  # during training, mostly while a commit is written

Prints one JSON document. Exit code 1 when anything differs: the final weights (bit by bit), the rollouts (ids and every
field but their timing), the metrics of the finished rounds.

Children are forked from this process after everything is imported and before any torch work, so that a start costs
milliseconds; they are real processes and die of a real SIGKILL.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson

from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.game import run as game
from pvg.game.run import play
from pvg.records import Timing
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore
from pvg.tasks import open_task
from pvg.tasks.modchain import clean_trace
from pvg.telemetry.events import PhaseInfo, Progress, SilentObserver

PHASES = ("mint", "train_verifier", "train_prover", "checkpoint")


# A prover of one layer that solves chains of three terms, so that a game takes a third of the time: the recipe of
# `modchain-prover` (pvg.models.embedded_training) with TERMS = 3, width 48, 2,200 steps of 160 rows, rate 8e-3.
TINY_PROVER = f"{Path(__file__).with_name('tiny_prover')}"


def small_experiment() -> Experiment:
    """Two rounds in a second or two: every phase has several steps between its commits."""
    return build_experiment(
        {
            "name": "drill",
            "task": {"kind": "modchain", "problems": 512, "test_problems": 64, "min_terms": 3, "max_terms": 3},
            "models": {
                "threads": 1,
                "prover": {"source": TINY_PROVER},
                "verifier": {"source": "embedded:modchain-verifier-tiny"},
            },
            "rollout": {"group_size": 4, "engine": {"max_rows": 32}, "concurrency": 64, "max_tokens": 20},
            "verifier": {"steps": 7, "pairs": 4},
            "training": {"groups": 4, "steps": 7, "minibatches": 1},
            "game": {"rounds": 2, "mint_problems": 24, "mint_samples": 4, "test": {"problems": 8, "samples": 1}},
            "store": {"commit_every": 3},
        }
    )


def read_manifests(run: RunDirectory) -> list[SimpleNamespace]:
    """All manifests of a run, by round and then by time of finishing."""
    found = [SimpleNamespace(**orjson.loads(path.read_bytes())) for path in run.manifest.glob("round-*.json")]
    return sorted(found, key=lambda manifest: (manifest.round, manifest.finished))


def play_experiment() -> Experiment:
    """Two rounds of self-play, in which half of the games begin at states that earlier batches reached."""
    plain = small_experiment().plain()
    plain["task"] = {"kind": "play", "warmup": 2, "groups": "phase"}
    plain["rollout"]["max_tokens"] = 6
    return build_experiment(plain)


def warm_experiment(folder: Path) -> Experiment:
    """One round after a warm start on flawless solutions, which are written to `folder`."""
    plain = small_experiment().plain()
    task = open_task(small_experiment().task)
    rows = [{"question": p.question, "solution": clean_trace(p)} for p in list(task.problems("train"))[:64]]
    file = folder / "demonstrations.jsonl"
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    plain["warmup"] = {"path": str(file), "steps": 12, "batch": 8}
    plain["game"]["rounds"] = 1
    return build_experiment(plain)


def own_experiment() -> Experiment:
    """Two rounds with two turns of the prover, which rules in a user's file connect."""
    plain = small_experiment().plain()
    file = Path(__file__).parents[2] / "examples" / "second_look.py"
    plain["game"]["protocol"] = {"kind": f"{file}:SecondLook", "tokens": 24}
    return build_experiment(plain)


def reading_experiment() -> Experiment:
    """One round whose reward a frozen model reads."""
    plain = small_experiment().plain()
    reward = {"kind": "correctness", "sr": 0.5, "cir": 0.5, "reader": "embedded:modchain-verifier-tiny"}
    plain["game"] |= {"rounds": 1, "sneaky_share": 0.0, "reward": reward}
    return build_experiment(plain)


# The games of the drill, with the phases in which they are killed.
GAMES: dict[str, tuple[Callable[[Path], Experiment], tuple[str, ...]]] = {
    "small": (lambda _: small_experiment(), PHASES),
    "play": (lambda _: play_experiment(), ("train_prover", "checkpoint")),
    "warm": (warm_experiment, ("warmup", "train_prover")),
    "own": (lambda _: own_experiment(), ("mint", "train_prover", "checkpoint")),
    "read": (lambda _: reading_experiment(), ("train_prover",)),
}


class Reporting(SilentObserver):
    """Writes one line per event to a pipe: the phase's name."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._phase = ""

    def phase_started(self, info: PhaseInfo) -> None:
        self._phase = info.phase
        self._tell()

    def progressed(self, progress: Progress) -> None:
        self._tell()

    def _tell(self) -> None:
        os.write(self._pipe, f"{self._phase}\n".encode())


def start(experiment: Experiment, root: Path, *, resume: bool) -> tuple[int, int]:
    """Fork a child that plays the run in `root`; returns its pid and the pipe that its events come from."""

    def work(writer: int) -> bool:
        run = RunDirectory.open("drill", root) if resume else RunDirectory.create(root, "drill", experiment)
        with run.lock():
            outcome = asyncio.run(
                play(experiment, run, observer=Reporting(writer), stop=asyncio.Event(), resume=resume)
            )
        return outcome.status == "complete"

    return forked(work)


def forked(work: Callable[[int], bool]) -> tuple[int, int]:
    """Fork a child that calls `work` with the writing end of a pipe, and exits with 0 if `work` returns True. Returns
    its pid and the reading end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    code = 70
    try:
        code = 0 if work(writer) else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


def killed_before_its_first_commit(experiment: Experiment, root: Path) -> None:
    """Create the run, and kill its process while it checks the models, after its first records."""

    def work(_: int) -> bool:
        game.check_models = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        with RunDirectory.create(root, "drill", experiment).lock() as run:
            asyncio.run(play(experiment, run, observer=SilentObserver(), stop=asyncio.Event(), resume=False))
        return False

    pid, pipe = forked(work)
    os.close(pipe)
    assert was_killed(pid)


def was_killed(pid: int) -> bool:
    """Wait for a child: True if a signal ended it, False if it finished. Raises SystemExit if it failed."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"the child failed with exit code {os.WEXITSTATUS(status)}")
    return False


def kill_somewhere(pid: int, pipe: int, wanted: str, dice: random.Random) -> str | None:
    """Kill the child at a random moment of phase `wanted`; the phase it died in, or None when it finished before."""
    events = os.fdopen(pipe, "rb")
    to_wait = dice.randint(1, 8)
    phase = ""
    for line in events:
        phase = line.decode().strip()
        if phase == wanted:
            to_wait -= 1
        if to_wait == 0:
            break
    time.sleep(dice.random() * 0.08)  # not a wait for anything: a random moment between two events
    os.kill(pid, signal.SIGKILL)
    killed = was_killed(pid)
    events.close()
    return phase if killed else None


def finish(pid: int, pipe: int) -> None:
    with os.fdopen(pipe, "rb") as events:
        events.read()
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise SystemExit(f"the child failed with status {status}")


def slow_disk() -> None:
    """Make the fsyncs of commits so slow that the game makes several steps meanwhile."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread().name.startswith("pvg-disk"):
            time.sleep(0.04)
        fsync(descriptor)

    os.fsync = slow


def in_flight(run: Path) -> bool:
    """Whether a killed run has a checkpoint that no commit names."""
    named = {commit["checkpoint"] for commit in FileStateStore(run / "state.json").commits()}
    return any(path.name not in named for path in run.glob("checkpoints/*"))


def children_of(pid: int) -> list[int]:
    try:
        found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for children in found for child in children]


def compared_with_a_whole_run(
    experiment: Experiment, kills: int, play_one: Callable[[Path, Counter[str]], None]
) -> dict[str, Any]:
    """Play runs until there are `kills` kills, and compare each with a run that was not interrupted. `play_one` plays a
    run to its end in a folder, and counts its kills."""
    with tempfile.TemporaryDirectory() as folder:
        finish(*start(experiment, Path(folder) / "whole", resume=False))
        expected = fingerprint(Path(folder) / "whole")
        counted: Counter[str] = Counter()
        problems: list[str] = []
        runs = 0
        while sum(counted.values()) < kills:
            root = Path(folder) / f"killed-{runs}"
            play_one(root, counted)
            runs += 1
            problems += [f"run {runs}: {what}" for what in differences(fingerprint(root), expected)]
        return {"kills": dict(counted), "runs": runs, "rollouts": len(expected["ids"]), "problems": problems}


GAME_RECORDS = frozenset({"step", "phase", "round", "alert"})
# Of a machine too busy to be on time, and of updates that wait for a lost worker.
MACHINE_ALERTS = frozenset({"loop_lag_p90", "loop_lag_p99", "loop_lag_max", "stall", "weights_queue"})


def fingerprint(root: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on interruptions."""
    run = RunDirectory.open("drill", root)
    state = FileStateStore(run.state).load().state
    assert state is not None
    shards = RolloutShards(run.path)
    infos = [ShardInfo.from_plain(plain) for plain in state["shards"]]
    rollouts = [r for info in infos for r in shards.read(info)]
    weights = {name: (run.weights / name / "tensors.safetensors").read_bytes() for name in state["weights"]}
    rows = [orjson.loads(line) for line in run.metrics.read_bytes().splitlines()]
    on_disk = sorted(str(p.relative_to(run.path)) for p in run.rollouts.glob("*/*"))
    return {
        "phase": state["phase"],
        "version": state["version"],
        "weights": weights,
        "rollouts": [repr(replace(r, timing=Timing())) for r in rollouts],
        "ids": [r.id for r in rollouts],
        "rounds": state["rounds"],
        # Samples of the machine and the records of each process are one per second and per process.
        "steps": [
            (r["kind"], r["round"], r.get("phase"), r.get("step"), r.get("name"))
            for r in rows
            if r["kind"] in GAME_RECORDS and r.get("name") not in MACHINE_ALERTS
        ],
        "temporaries": sorted(str(path.relative_to(run.path)) for path in run.path.rglob(".tmp-*")),
        "shards_on_disk": on_disk == sorted(info.path for info in infos),
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    problems = [key for key in expected if found[key] != expected[key]]
    if "steps" in problems:
        lost, more = (
            (Counter(expected["steps"]) - Counter(found["steps"])),
            (Counter(found["steps"]) - Counter(expected["steps"])),
        )
        problems.append(f"records lost: {list(lost)}, and too many: {list(more)}")
    if len(set(found["ids"])) != len(found["ids"]):
        problems.append("duplicated rollouts")
    if not found["shards_on_disk"]:
        problems.append("shards on disk that no commit names, or the reverse")
    return problems


def drill(
    experiment: Experiment, kills: int, seed: int, log: Callable[[str], None], phases: tuple[str, ...] = PHASES
) -> dict[str, Any]:
    """Kill runs until there are `kills` kills, each of `phases` having its share, and compare every finished run."""
    dice = random.Random(seed)
    found = 0

    def play_one(root: Path, died: Counter[str]) -> None:
        nonlocal found
        killed_before_its_first_commit(experiment, root)
        begun = True
        while sum(died.values()) < kills:
            wanted = min(phases, key=lambda phase: (died[phase], dice.random()))
            phase = kill_somewhere(*start(experiment, root, resume=begun), wanted, dice)
            if phase is None:
                return
            died[phase or "before the first phase"] += 1
            log(f"kill {sum(died.values())}/{kills} in {phase or 'start'}")
            begun = (root / "drill").exists()
            found += begun and in_flight(root / "drill")
        finish(*start(experiment, root, resume=begun))

    return {**compared_with_a_whole_run(experiment, kills, play_one), "in_flight": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--game", choices=GAMES, default="small")
    parser.add_argument("--slow-disk", action="store_true")
    options = parser.parse_args()

    def log(line: str) -> None:
        print(line, file=sys.stderr)

    experiment, phases = GAMES[options.game]
    if options.slow_disk:
        slow_disk()
        phases = tuple(phase for phase in phases if phase.startswith("train"))
    with tempfile.TemporaryDirectory() as folder:
        result = drill(experiment(Path(folder)), options.kills, options.seed, log, phases)
    sys.stdout.write(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n")
    raise SystemExit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
