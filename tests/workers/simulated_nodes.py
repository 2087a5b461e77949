"""A Ray cluster whose nodes all run on this machine, on 127.0.0.1: to try a cluster, to test it and to measure it.

    python tests/workers/simulated_nodes.py 1 1     # two nodes with one CPU each, until Ctrl-C

Each node is a Ray node with its own name, processes and CPUs. The CPUs are only numbers, which Ray counts; the cores of
the machine are shared. Needs the extra `cluster`.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from pvg.workers.ray_cluster import forget_token

NAMES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
LOOPBACK = "127.0.0.1"


@dataclass
class SimulatedNodes:
    """The running cluster. `token_file`: processes need it to join."""

    cluster: Any
    token_file: str
    added: int = 0

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to join."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token_file}

    def add(self, cpus: int, **options: object) -> Any:
        """Start a node and wait until it is part of the cluster. Only the main thread may call this."""
        name = NAMES[self.added] if self.added < len(NAMES) else f"node-{self.added + 1}"
        self.added += 1
        return self.cluster.add_node(num_cpus=cpus, node_ip_address=LOOPBACK, node_name=name, **options)

    def kill(self, node: Any) -> None:
        """Kill all processes of a node at once, as a power cut does."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def simulated_nodes(
    cpus: Sequence[int], settings: Mapping[str, object] | None = None, gpus: int = 0
) -> Iterator[SimulatedNodes]:
    """A cluster with a node for each number of CPUs; the first one is the head, and says that it has `gpus`.
    `settings`: Ray's `_system_config`. Only the main thread may call this."""
    with tempfile.NamedTemporaryFile("w", prefix="pvg-ray-token-") as token:
        token.write(secrets.token_hex(32))
        token.flush()
        needed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token.name, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        before = {name: os.environ.get(name) for name in [*needed, "RAY_AUTH_TOKEN"]}
        handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ.update(needed)
        from ray.cluster_utils import Cluster

        forget_token()
        nodes = SimulatedNodes(Cluster(), token.name)
        try:
            head = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False, "num_gpus": gpus}
            # Otherwise Ray's workers have a low priority, and start only after minutes on a busy machine.
            nodes.add(cpus[0], **head, _system_config={"worker_niceness": 0, **(settings or {})})
            for number in cpus[1:]:
                nodes.add(number)
            yield nodes
        finally:
            nodes.cluster.shutdown()
            signal.signal(signal.SIGTERM, handler)
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def main() -> None:
    with simulated_nodes([int(word) for word in sys.argv[1:]] or [1, 1]) as nodes:
        for name, value in nodes.environment.items():
            print(f"export {name}={value}")
        print(f"pvg train --cluster {nodes.address} -s cluster.workers=2", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
