"""Two hosts on one machine: network namespaces with an address and a host name each, and a network between them.

    with two_hosts(folder) as (first, second):
        first.start(["ray", "start", "--head"])         # a process on the first host, with an empty home
        first.connected(False)                          # the network breaks

This shows what loopback hides: addresses and names that another host cannot reach, and what listens where. As on
Debian, a host's own name stands for 127.0.1.1 there. Needs root, and `ip` of the package iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("first", "second")
INTERFACE = "pvg0"
# Sets the name of the host and its /etc/hosts, which only the command sees.
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && cd "$3" && shift 3 && exec "$@"'


@dataclass(frozen=True)
class Host:
    """`folder`: its home and working folder."""

    name: str
    address: str
    namespace: str
    folder: Path

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command. `options`: of Popen; `env` is added to the environment."""
        environment = {**os.environ, "HOME": str(self.folder), **options.pop("env", {})}
        inside = ["unshare", "--uts", "sh", "-c", ENTER, "sh", self.name, f"{self.folder}.hosts", str(self.folder)]
        words = ["ip", "netns", "exec", self.namespace, *inside, *command]
        return subprocess.Popen(words, text=True, env=environment, **options)

    def connected(self, up: bool) -> None:
        """Break or restore its connection to the network."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "up" if up else "down")


def missing() -> str:
    """Why this machine cannot have two hosts; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs ip and unshare (`apt-get install iproute2 util-linux`)"
    namespace = f"pvg-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", namespace], capture_output=True, check=False).returncode:
        return "needs network namespaces"
    _ip("netns", "del", namespace)
    return ""


@contextmanager
def two_hosts(folder: Path, names: bool = True) -> Iterator[tuple[Host, Host]]:
    """`folder`: for the homes of the hosts. `names`: each knows the name of the other."""
    with ExitStack() as stack:
        hosts = []
        for number, name in enumerate(NAMES):
            host = Host(name, f"10.213.0.{number + 1}", f"pvg-{os.getpid()}-{name}", folder / name)
            host.folder.mkdir(parents=True)
            hosts.append(host)
        for host in hosts:
            others = [f"{other.address} {other.name}" for other in hosts if other is not host] if names else []
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others, ""]
            Path(f"{host.folder}.hosts").write_text("\n".join(lines))
            _ip("netns", "add", host.namespace)
            stack.callback(_remove, host)
        first, second = hosts
        ends = [word for host in hosts for word in ("name", INTERFACE, "netns", host.namespace)]
        _ip("link", "add", *ends[1:4], "type", "veth", "peer", *ends[4:])
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            host.connected(True)
            # Programs look for the way to the internet to find the address of their machine.
            _ip("-n", host.namespace, "route", "add", "default", "via", "10.213.0.254")
        yield first, second


def _remove(host: Host) -> None:
    """End the processes of a host, and the host."""
    pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True).stdout
    for pid in map(int, pids.split()):
        os.kill(pid, 9)
    _ip("netns", "del", host.namespace)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
