"""Runs on two hosts, which are network namespaces with an address and a name each: the walks of docs/scaling.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ray_workers import weights
from test_torchrun import GAME, expected, train, trains
from two_hosts import Host, missing, two_hosts

__all__ = ["expected"]  # a fixture

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


def static(hosts: tuple[Host, Host], number: int) -> list[str]:
    return ["--node-rank", str(number), "--master-addr", hosts[0].address, "--master-port", "29500"]


def ended(agents: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    told = [agent.communicate(timeout=PATIENCE_S)[1] for agent in agents]
    return [agent.returncode for agent in agents], "".join(told)


def listening(host: Host) -> set[str]:
    """The addresses at which processes of pvg listen on a host, and of the stores and ranks of torch in them."""
    found = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "cat", "/proc/self/net/tcp", "/proc/self/net/tcp6"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sockets = [line.split() for line in found.splitlines() if line.split()[3] == "0A"]
    return {words[1].partition(":")[0] for words in sockets}


def test_torchrun_meets_by_names_of_hosts_and_trains_the_bits_of_local_ranks(
    hosts: tuple[Host, Host], expected: dict[str, str]
) -> None:
    """The name of the first host stands for 127.0.1.1 there, which the second host cannot reach."""
    first, second = hosts
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29500"]
    agents = [torchrun(host, options, "--name", "run") for host in hosts]
    trains(first.folder / "run")
    codes, told = ended(agents)
    assert codes == [0, 0], told
    assert weights(first.folder / "run") == expected != {}
    assert not (second.folder / "run").exists()
    log = (first.folder / "run" / "events.log").read_text()
    assert 'event="ranks up" ranks=2 nodes="first/0 second/1"' in log


def test_a_broken_network_ends_the_run_on_both_hosts_which_resume_it(
    hosts: tuple[Host, Host], expected: dict[str, str]
) -> None:
    first, second = hosts
    agents = [torchrun(host, static(hosts, n), "--name", "run") for n, host in enumerate(hosts)]
    trains(first.folder / "run")
    assert "00000000" not in listening(second)  # only torchrun's store on the first host listens everywhere
    second.connected(False)
    codes, told = ended(agents)
    assert codes == [1, 1], told
    assert re.search(r"error: A process of torchrun was lost: second/1 does not answer\.", told), told
    second.connected(True)
    codes, told = ended([torchrun(host, static(hosts, n), "--resume", "run") for n, host in enumerate(hosts)])
    assert codes == [0, 0], told
    assert weights(first.folder / "run") == expected


def test_a_host_that_does_not_know_the_other_by_name_says_so_at_once(tmp_path: Path) -> None:
    with two_hosts(tmp_path / "hosts", names=False) as hosts:
        first, second = hosts
        options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29500"]
        agents = [torchrun(first, [*options, "--rdzv-conf", "is_host=true"]), torchrun(second, options)]
        told = agents[1].communicate(timeout=PATIENCE_S)[1]
        assert agents[1].returncode == 1
        assert "error: This machine cannot reach first: " in told
        assert "--master-addr ADDRESS" in told
        agents[0].kill()
        agents[0].communicate()


def test_ray_joins_two_hosts_whose_workers_and_ranks_train_the_bits_of_local_ones(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    first, second = hosts
    settings = [text for text in GAME if not text.startswith("cluster.kind")] + ["cluster.workers=2"]
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
    up = re.search(r'event="ranks up" ranks=2 nodes="(.*?)"', log)
    assert up is not None
    assert sorted(up[1].split()) == [first.address, second.address]  # Ray chooses the order
    alone = [PYTHON, "-m", "pvg", *train(tmp_path, "--name", "local", "--cluster", "local", settings=settings)]
    subprocess.run(alone, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert weights(first.folder / "run") == weights(tmp_path / "local") != {}
