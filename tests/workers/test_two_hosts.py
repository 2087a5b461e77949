"""Runs on two hosts, which are network namespaces with an address and a name each: the walks of docs/scaling.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rank_runs import GAME, played, train, trains, weights
from two_hosts import Host, missing, two_hosts

PATIENCE_S = 400.0
PYTHON = sys.executable
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token"}

pytestmark = pytest.mark.drill


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    if why := missing():
        pytest.skip(f"needs two hosts on one machine, which {why}")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path / "hosts") as found:
        yield found


def torchrun(host: Host, options: list[str], *words: str) -> subprocess.Popen[str]:
    """Start torchrun on a host; its run is in the folder of the host."""
    command = [PYTHON, "-m", "torch.distributed.run", "--nnodes", "2", *options, "-m", "pvg"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return host.start([*command, *train(host.folder, *words)], env=ENVIRONMENT, **pipes)


def ended(agents: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    told = [agent.communicate(timeout=PATIENCE_S)[1] for agent in agents]
    return [agent.returncode for agent in agents], "".join(told)


def test_torchrun_meets_by_names_of_hosts_and_trains_the_bits_of_local_ranks(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """The name of the first host stands for 127.0.1.1 there, which the second host cannot reach."""
    first, second = hosts
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29500", "--max-restarts", "1"]
    agents = [torchrun(host, options, "--name", "run") for host in hosts]
    trains(first.folder / "run")
    (rank,) = [child for child in psutil.Process(agents[1].pid).children(True) if child.environ().get("RANK") == "1"]
    rank.kill()
    codes, told = ended(agents)
    assert codes == [0, 0], told
    assert weights(first.folder / "run") == played(tmp_path / "local") != {}
    assert not (second.folder / "run").exists()


def test_ray_joins_two_hosts_whose_workers_train_the_bits_of_local_ones(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    first, second = hosts
    settings = [text for text in GAME if not text.startswith("cluster")] + ["cluster.workers=2"]
    bin_ = Path(PYTHON).parent

    def called(host: Host, *command: str) -> str:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = host.start([str(bin_ / command[0]), *command[1:]], env=ENVIRONMENT, **pipes)
        told = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 0, told
        return str(told)

    called(first, "ray", "get-auth-token", "--generate")
    shutil.copytree(first.folder / ".ray", second.folder / ".ray")
    assert f"{first.address}:6379" in called(first, "ray", "start", "--head", "--num-cpus", "2")
    called(second, "ray", "start", f"--address={first.address}:6379", "--num-cpus", "2")
    command = train(first.folder, "--name", "run", "--cluster", f"{first.address}:6379", settings=settings)
    called(first, "pvg", *command)
    log = (first.folder / "run" / "events.log").read_text()
    assert {first.address, second.address} <= set(re.findall(r"node=(\S+)", log))
    alone = [PYTHON, "-m", "pvg", *train(tmp_path, "--name", "local", "--cluster", "local", settings=settings)]
    subprocess.run(alone, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert weights(first.folder / "run") == weights(tmp_path / "local") != {}
