"""Kill and stop the workers, the nodes and the driver of a run at random moments, and compare its end with that of an
undisturbed run.

    python tests/game/soak.py --kills 100                     # two local workers
    python tests/game/soak.py --kills 30 --cluster ray        # two workers on simulated nodes
    python tests/game/soak.py --kills 100 --out report.json

Prints one JSON document. Exit code 1 if the end of any run differs from the undisturbed run's: its weights (bit by
bit), its rollouts (ids and every field but their timing), its metrics. Also if a kill is not recovered from, or if a
process stays behind.

A run has *recovered* when every worker that was lost has a successor with its models and weights; after a kill of the
driver, when the resumed run begins its first phase. Ranks have recovered when all of them have started again, and have
repeated the steps since the last commit. The next kill comes at a random moment after that. Without a time:
the run ended first.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import select
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson
import psutil
from kill_drill import children_of, differences, fingerprint, finish, small_experiment, start, was_killed

from pvg.bench.report import git_state
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from tests.workers.simulated_nodes import simulated_nodes

ROOT = Path(__file__).parents[2]
# What is killed, with its weight among the random choices. "stopped" gets SIGSTOP, everything else SIGKILL.
LOCAL = {"worker": 6, "two workers": 3, "stopped worker": 2, "all of them and their parent": 1, "driver": 2}
ON_NODES = {"worker": 4, "two workers": 2, "stopped worker": 1, "node": 2, "stopped node": 2, "driver": 2}
WORKER = "ray::WorkerActor"
RECOVERY_S = 300.0  # more is a defect
END_S = 60.0  # for processes to end after their driver
LINE = re.compile(r"\[workers\] t=(\S+) event=(lost|replaced) worker=(\d+)")


def worker_experiment(cluster: dict[str, Any]) -> Experiment:
    """The small experiment, with everything else that workers compute."""
    plain = small_experiment().plain()
    plain["cluster"] = cluster
    plain["training"] |= {"minibatches": 2, "steps": 8, "kl": {"target": 0.001}}
    return build_experiment(plain)


# --- processes --------------------------------------------------------------------------------------------------------


class LocalMachine:
    """Where the workers of a driver run: in processes that it starts."""

    kinds = LOCAL

    def __init__(self, workers: int) -> None:
        self.experiment = worker_experiment({"kind": "local", "workers": workers})

    def workers(self, driver: int) -> list[int]:
        return [worker for parent in children_of(driver) for worker in children_of(parent)]

    def hurt(self, what: str, driver: int, _dice: random.Random) -> list[int]:
        """Kill or stop something; returns the workers that this costs."""
        assert what == "all of them and their parent"
        lost = self.workers(driver)
        for parent in children_of(driver):
            send(parent, signal.SIGKILL)
        return lost

    def tidy(self) -> None:
        """Kill what has been stopped."""


class SimulatedNodes:
    """Where the workers of a driver run: on simulated nodes of a Ray cluster, whose head has no worker. Another process
    starts the nodes, because this one forks the drivers."""

    kinds = ON_NODES

    def __init__(self, workers: int, pipe: Connection) -> None:
        self._pipe = pipe
        address, environment, self._raylets = pipe.recv()
        self._stopped: list[psutil.Process] = []
        os.environ.update(environment)
        self.experiment = worker_experiment({"kind": "ray", "address": address, "workers": workers})

    def workers(self, _driver: int) -> list[int]:
        return [worker for raylet in self._raylets for worker in self._on(raylet)]

    def _on(self, raylet: int) -> list[int]:
        return [pid for pid in children_of(raylet) if title(pid).startswith(WORKER)]

    def hurt(self, what: str, _driver: int, dice: random.Random) -> list[int]:
        raylet = dice.choice([raylet for raylet in self._raylets if self._on(raylet)])
        lost, node = self._on(raylet), psutil.Process(raylet)
        processes = [node, *node.children(recursive=True)]
        for process in processes:
            send(process.pid, signal.SIGSTOP if what == "stopped node" else signal.SIGKILL)
        self._stopped += processes if what == "stopped node" else []
        self._pipe.send("add")
        self._raylets[self._raylets.index(raylet)] = self._pipe.recv()
        return lost

    def tidy(self) -> None:
        """Kill what has been stopped."""
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._stopped.clear()


def keep_nodes(workers: int, pipe: Connection) -> None:
    """Start a head and a node for each worker, and another node on request, until the other side closes."""

    def raylet(node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    with simulated_nodes([0] + [1] * workers) as nodes:
        pipe.send((nodes.address, nodes.environment, [raylet(node) for node in nodes.cluster.worker_nodes]))
        with contextlib.suppress(EOFError):
            while pipe.recv():
                pipe.send(raylet(nodes.add(1)))


@contextmanager
def machine(cluster: str, workers: int) -> Iterator[LocalMachine | SimulatedNodes]:
    if cluster == "local":
        yield LocalMachine(workers)
        return
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    keeper = spawning.Process(target=keep_nodes, args=(workers, theirs))
    keeper.start()
    theirs.close()
    try:
        yield SimulatedNodes(workers, ours)
    finally:
        ours.close()
        keeper.join()


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Witness:
    """Remembers processes that must not outlive the runs."""

    def __init__(self) -> None:
        self._seen: set[psutil.Process] = set()

    def see(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.add(psutil.Process(pid))

    def left(self) -> list[str]:
        _, alive = psutil.wait_procs([p for p in self._seen if p.is_running()], timeout=END_S)
        return [f"process {process.pid} stays behind" for process in alive if process.status() != psutil.STATUS_ZOMBIE]


# --- one run ----------------------------------------------------------------------------------------------------------


class Driver:
    """A process that plays a run, or resumes it."""

    def __init__(self, experiment: Experiment, root: Path) -> None:
        self._log = root / "drill" / "events.log"
        self.pid, self._pipe = start(experiment, root, resume=(root / "drill").exists())
        os.set_blocking(self._pipe, False)

    def wait(self, seconds: float) -> int | None:
        """Wait for events of the game for at most so long; returns their number, or None once the driver has ended."""
        if not select.select([self._pipe], [], [], seconds)[0]:
            return 0
        found = os.read(self._pipe, 1 << 16)
        return found.count(b"\n") if found else None

    def changes(self, since: float) -> dict[str, dict[int, float]]:
        """By event ("lost", "replaced"): the workers and the latest time of it after `since` (`time.monotonic`)."""
        changes: dict[str, dict[int, float]] = {"lost": {}, "replaced": {}}
        for at, event, worker in LINE.findall(self._log.read_text()):
            if float(at) > since:
                changes[event][int(worker)] = float(at)
        return changes

    def recovered(self, lost: int, since: float) -> float | None:
        """Seconds from `since` until `lost` workers were replaced; None if the run ends before that. Raises
        TimeoutError."""
        while time.monotonic() < since + RECOVERY_S:
            at = self._workers_back(lost, since)
            if at is not None:
                return at - since
            if self.wait(0.05) is None:
                return None
        raise TimeoutError

    def _workers_back(self, lost: int, since: float) -> float | None:
        found = self.changes(since)
        gone, back = found["lost"], found["replaced"]
        replaced = all(back.get(worker, 0.0) > at for worker, at in gone.items())
        return max(back.values()) if len(gone) >= lost and replaced else None

    def kill(self) -> None:
        send(self.pid, signal.SIGKILL)
        self.ended()

    def ended(self) -> bool:
        """Wait for the process. True if it has completed the run. Raises SystemExit if it failed."""
        killed = was_killed(self.pid)
        os.close(self._pipe)
        return not killed


class Soak:
    """Counts the kills of all runs, and the times to recover."""

    def __init__(self, place: LocalMachine | SimulatedNodes, kills: int, seed: int) -> None:
        self.place = place
        self.kills = kills
        self.counted: Counter[str] = Counter()
        self.recovery_s: defaultdict[str, list[float]] = defaultdict(list)
        self.problems: list[str] = []
        self.witness = Witness()
        self._dice = random.Random(seed)

    @property
    def done(self) -> bool:
        return self.counted.total() >= self.kills

    def play(self, root: Path) -> None:
        """Play a run to its end, and hurt it again and again."""
        driver = Driver(self.place.experiment, root)
        killed_at: float | None = None
        to_wait = 1
        while (events := driver.wait(1.0)) is not None:
            if events and killed_at is not None:
                self._recovered("driver", time.monotonic() - killed_at)
                killed_at = None
            to_wait -= events
            if to_wait > 0 or self.done:
                continue
            to_wait = self._dice.randint(1, 6)
            time.sleep(self._dice.random() * 0.08)  # not a wait for anything: a random moment between two events
            now = time.monotonic()
            if self._hurt(driver) == "driver":
                killed_at = now
                driver = Driver(self.place.experiment, root)
        if not driver.ended():
            raise SystemExit("the driver was killed by something else")

    def _hurt(self, driver: Driver) -> str | None:
        """Kill or stop something, and wait for the recovery, but for the driver's. None if there is nothing to hurt."""
        self.place.tidy()
        workers = self.place.workers(driver.pid)
        if len(workers) < 2:
            return None
        self.witness.see([driver.pid, *workers])
        kinds, left = self.place.kinds, self.kills - self.counted.total()
        missing = [kind for kind in kinds if kind not in self.counted]
        if len(missing) >= left:  # the last kills are of the kinds that chance has left out
            kinds = dict.fromkeys(missing[-left:], 1)
        what = self._dice.choices(list(kinds), list(kinds.values()))[0]
        self.counted[what] += 1
        print(f"{self.counted.total()}/{self.kills} {what}", file=sys.stderr)
        since = time.monotonic()
        if what == "driver":
            driver.kill()
            return what
        if "worker" in what:
            lost = self._dice.sample(workers, 2 if what == "two workers" else 1)
            for worker in lost:
                send(worker, signal.SIGSTOP if what == "stopped worker" else signal.SIGKILL)
        else:
            lost = self.place.hurt(what, driver.pid, self._dice)
        try:
            seconds = driver.recovered(len(lost), since)
        except TimeoutError:
            self.problems.append(f"kill {self.counted.total()} ({what}): not recovered in {RECOVERY_S:g} s")
            self.kills = 0
        else:
            if seconds is not None:
                self._recovered(what, seconds)
        return what

    def _recovered(self, what: str, seconds: float) -> None:
        self.recovery_s[what].append(seconds)
        print(f"    recovered in {seconds:.2f} s", file=sys.stderr)


def soaked(place: LocalMachine | SimulatedNodes, kills: int, seed: int) -> dict[str, Any]:
    """Play runs until there are `kills` kills, and compare each with an undisturbed one."""
    soak, runs, lost, twice = Soak(place, kills, seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        finish(*start(place.experiment, Path(folder) / "whole", resume=False))
        expected = fingerprint(Path(folder) / "whole")
        while not soak.done:
            runs += 1
            root = Path(folder) / f"hurt-{runs}"
            soak.play(root)
            found = fingerprint(root)
            lost += len(set(expected["ids"]) - set(found["ids"]))
            twice += len(found["ids"]) - len(set(found["ids"]))
            soak.problems += [f"run {runs}: {what}" for what in differences(found, expected)]
        place.tidy()
    return {
        "kills": dict(soak.counted),
        "kills_in_all": soak.counted.total(),
        "runs": runs,
        "rollouts_per_run": len(expected["ids"]),
        "rollouts_lost": lost,
        "rollouts_twice": twice,
        "recovery_s": {what: summary(times) for what, times in sorted(soak.recovery_s.items())},
        "problems": soak.problems + soak.witness.left(),
    }


def summary(times: Sequence[float]) -> dict[str, float]:
    return {"measured": len(times), "median": round(statistics.median(times), 2), "worst": round(max(times), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cluster", choices=["local", "ray"], default="local")
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--out", type=Path, help="a file for the report")
    options = parser.parse_args()
    began, (commit, dirty) = time.monotonic(), git_state(ROOT)
    with machine(options.cluster, options.workers) as place:
        result = soaked(place, options.kills, options.seed)
    settings = {key: getattr(options, key) for key in ("cluster", "workers", "seed", "note")}
    now = {"date": datetime.now(UTC).date().isoformat(), "commit": commit, "dirty": dirty, "cores": os.cpu_count()}
    report = {**settings, **now, "minutes": round((time.monotonic() - began) / 60, 1), **result}
    text = orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text)
    raise SystemExit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
