"""The processes of a trainer on several ranks: started here, or by torchrun on one machine or several.

Every process gets the variables that torchrun sets. Process 0 is the driver and rank 0; the others work for it
(pvg.workers.ranks). Ranks wait for each other, so none can be replaced alone: if one is lost, the launcher ends all and
starts all again, and the driver continues its run from the last commit.

torchrun kills its processes 30 seconds after Ctrl-C, starts all again also for a wrong setting, ends with exit code 1
whatever the driver says, and its store asks for no password. So pvg has a launcher too, whose ranks meet in a file.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pvg.config.experiment import Experiment
from pvg.config.operation import ranks_of
from pvg.errors import StoppedAtStart, UsageError, WorkerLostError
from pvg.telemetry.waits import usable_cores

# The exit code of a process that has lost another rank: only then a launcher should start all again.
EXIT_LOST = 75
MOST_LOSSES = 6  # without a commit between them
POLL_S = 0.05
WATCH_S = 1.0
GRACE_S = 10.0  # for the other ranks to notice that one has ended, and to end too
OWN = "PVG_RANKS"  # what pvg's own launcher says, as JSON
# The way out for a program that has inherited the variables of torchrun, such as one that a notebook starts.
ALONE = "start pvg without torchrun's variables: env -u TORCHELASTIC_RUN_ID pvg train ..."


class RankLostError(WorkerLostError):
    """The connection to another rank has ended, or it does not answer."""

    exit_code = EXIT_LOST


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process. `number`: its rank among all `processes`; `local`: among the `here` ones
    on its machine. `host`, `port`: torchrun's store. Only pvg's own launcher says: `store`, the file in which the ranks
    meet; `run`, the folder of the run; `lost`, why the last attempt ended; `launcher`, its process id."""

    number: int
    processes: int
    local: int
    here: int
    one_machine: bool = True
    host: str = ""
    port: int = 0
    store: str = ""
    run: str = ""
    lost: str = ""
    launcher: int = 0


def launched(environment: Mapping[str, str]) -> Launch | None:
    """This process as one of several that a launcher has started; None for any other process. Children of such a
    process inherit its variables, so they are its processes too."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    try:
        launch = Launch(
            number=int(environment["RANK"]),
            processes=int(environment["WORLD_SIZE"]),
            local=int(environment["LOCAL_RANK"]),
            here=int(environment["LOCAL_WORLD_SIZE"]),
            one_machine=environment["GROUP_WORLD_SIZE"] == "1",
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            **json.loads(environment.get(OWN, "{}")),
        )
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"TORCHELASTIC_RUN_ID says that torchrun has started pvg, but one of its variables is missing or wrong: "
            f"{error}.",
            f"To play alone, {ALONE}",
        ) from None
    if launch.processes == 1:
        return None
    if not launch.store and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UsageError(
            "torchrun does not share its store with its processes, where pvg's processes meet.",
            f"Use --rdzv-backend c10d or static and leave out TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or {ALONE}",
        )
    return launch


def end_with_launcher(launch: Launch) -> None:
    """Let this process end when its launcher has ended. Call it early: to import torch takes seconds. A killed launcher
    leaves its folder to its processes."""
    launcher = launch.launcher or os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH_S)
        if launch.store:
            shutil.rmtree(Path(launch.store).parent, ignore_errors=True)
        os._exit(EXIT_LOST)

    threading.Thread(target=watch, name="pvg-launcher", daemon=True).start()


def refuse_other_counts(experiment: Experiment, launch: Launch) -> None:
    """Raises UsageError if the experiment does not have one trainer rank per process."""
    if (ranks := ranks_of(experiment.cluster)) != launch.processes:
        raise UsageError(
            f"torchrun has started {launch.processes} processes, but the experiment has {ranks or 'no'} trainer ranks.",
            f"Use -s cluster.kind=local -s cluster.trainer_ranks={launch.processes}, or as many processes as ranks "
            f"(--nnodes times --nproc-per-node), or {ALONE}",
        )


# --- the launcher of one machine --------------------------------------------------------------------------------------


def start_ranks(count: int, arguments: Sequence[str], run: Path, say: Callable[[str], None]) -> int:
    """Start `pvg` with `arguments` in `count` processes, and all again if a rank is lost. Returns the exit code of the
    driver, or of another rank that fails. `run`: the folder of the run. SIGINT and SIGTERM go to the driver. No process
    outlives the call."""
    attempts, losses, why, commit, stopping = 0, 0, "", _commit(run), False
    command = [sys.executable, "-P", "-m", "pvg", *arguments]
    size, threads = str(count), str(max(1, usable_cores() // count))
    variables = {"OMP_NUM_THREADS": threads, **os.environ, "TORCHELASTIC_RUN_ID": "pvg", "GROUP_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "", "MASTER_PORT": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    processes: list[subprocess.Popen[bytes]] = []  # the driver first

    def forward(number: int, _: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for driver in processes[:1]:
            driver.send_signal(number)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pvg-ranks-"))
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, forward))
        while True:
            attempts += 1
            own = {"store": f"{folder}/store-{attempts}", "run": str(run.absolute()), "lost": why}
            variables[OWN] = json.dumps({**own, "launcher": os.getpid()})
            try:
                for rank in range(count):
                    environment = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    # In a new session, because Ctrl-C is for the launcher, which forwards it to the driver.
                    processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
                    if stopping:  # perhaps before there was a driver to send it to
                        again = f"To resume it, use: pvg train --resume {run}" if commit else ""
                        raise StoppedAtStart(f"Stopped while the ranks of {run.name!r} started.", again)
                code, why = _watched(processes)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
                processes.clear()
            if code is not None:
                return code
            if stopping:
                raise StoppedAtStart(f"{why} after the run was asked to stop.")
            before, commit = commit, _commit(run)
            losses = losses + 1 if commit == before else 1
            if losses == MOST_LOSSES:
                raise WorkerLostError(
                    f"{why}. Ranks were lost {losses} times without a commit between them.",
                    f"Look at the memory of the machine, and continue: pvg train --resume {run}",
                )
            say(f"{why}. All {count} ranks start again from the last commit.")


def _watched(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int | None, str]:
    """Wait for the first process that ends, and then for the others: no longer than GRACE_S, but for a driver that has
    sent the others away (they end with 0) as long as it takes. Returns the exit code of all; None if a rank was lost,
    with the reason in words."""
    deadline = math.inf
    while True:
        codes = [process.poll() for process in processes]
        if codes[0] is not None and codes[0] >= 0 and codes[0] != EXIT_LOST:
            return codes[0], ""  # the driver has ended by itself
        if None not in codes or (time.monotonic() > deadline and 0 not in codes):
            break
        if any(code is not None for code in codes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)
    ended = [(number, code) for number, code in enumerate(codes) if code is not None]
    for number, code in ended:
        if code < 0:
            return None, f"Rank {number} was killed by {signal.Signals(-code).name}"
    for number, code in ended:
        if code != EXIT_LOST:
            return code or None, f"Rank {number} ended before the driver"
    if None in codes:
        return None, f"Rank {codes.index(None)} does not answer"
    return None, "The ranks lost their connections"


def _commit(run: Path) -> int:
    """When the run has made its last commit; 0 before the first."""
    try:
        return (run / "state.json").stat().st_mtime_ns
    except OSError:
        return 0
