"""Connects this process to a Ray cluster: one that pvg starts on this machine, or one that runs already.

Ray runs code that its processes send each other, so anyone who reaches a cluster can run anything on its nodes. pvg
uses only clusters with token authentication, and those that it starts listen on 127.0.0.1 alone.

This module and pvg.workers.ray_supply are the only ones that import Ray, and only when they are called.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pvg.errors import MissingRequirementError, UsageError, install_extra, one_line, shortened
from pvg.telemetry.waits import usable_cores

LONGEST_LINE = 300
REACH_S = 10.0  # to connect to the head's port
OBJECT_STORE_BYTES = 100_000_000  # pvg stores no objects; Ray takes 30 % of the memory by default
MODE = "RAY_AUTH_MODE"
TOKEN, TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# Ray's name for: nodes use 127.0.0.1. Otherwise Ray replaces a loopback address by the machine's own.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
QUIET: Mapping[str, Any] = {"log_to_driver": False, "configure_logging": False}
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class RayConnection:
    """This process as part of a cluster. `host`: the address of this machine in it. `session`: Ray's folder of a
    cluster that pvg has started."""

    ray: Any
    host: str
    session: str | None = None

    def close(self) -> None:
        """Leave the cluster; one that pvg has started ends."""
        self.ray.shutdown()
        if self.session is not None:
            end_session(self.session)


def end_session(folder: str) -> None:
    """Kill the processes of a Ray session that are left. If a head is killed, an agent tries to reach it for another
    minute."""
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if _is_of_session(process, process.info["cmdline"] or [""], folder):
                process.kill()


def _is_of_session(process: psutil.Process, command: list[str], folder: str) -> bool:
    """Agents replace their command line by a name, but their output goes to files of the session."""
    if {f"--session-dir={folder}", f"--session_dir={folder}"} & set(command):
        return True
    named = command[0].startswith("ray::")
    return named and any(file.path.startswith(f"{folder}/") for file in process.open_files())


def open_cluster(workers: int, address: str | None, said: Callable[[str], None]) -> RayConnection:
    """Connect to the cluster at `address` (HOST:PORT), or start one on this machine with room for `workers`. Takes
    seconds. The calling thread must live as long as the cluster: Ray's processes end with it. `said` gets the lines
    that Ray would print to stdout, in any thread.

    Raises MissingRequirementError if that fails, and UsageError for what is not an address.
    """
    return _start(workers, said) if address is None else _join(address, said)


def _start(workers: int, said: Callable[[str], None]) -> RayConnection:
    before = os.environ.get(TOKEN)
    # Ray's processes inherit the token, and nothing of it is left when they have ended.
    os.environ.update({**LOOPBACK_ONLY, MODE: "token", TOKEN: secrets.token_hex(32)})
    try:
        ray = _import(said)
        _init(ray, workers)
    finally:
        os.environ.pop(TOKEN)
        if before is not None:
            os.environ[TOKEN] = before
    session = importlib.import_module("ray._private.worker")._global_node.get_session_dir_path()
    connection = RayConnection(ray, ray.util.get_node_ip_address(), session)
    if connection.host not in LOOPBACK:
        connection.close()
        raise MissingRequirementError(
            f"Ray listens at {connection.host}, because this process imported it before pvg could configure it.",
            "Set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, or join a cluster that you start",
        )
    return connection


def _init(ray: Any, workers: int) -> None:
    try:
        ray.init(
            "local",
            num_cpus=max(usable_cores(), workers),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **QUIET,
            _node_name=socket.gethostname(),
            # Ray's workers have a lower priority than other programs by default.
            _system_config={"worker_niceness": 0, "prestart_worker_first_driver": False},
        )
    except Exception as error:
        raise MissingRequirementError(
            f"Ray could not start a cluster on this machine: {_cause(error)}.", "Use local workers: --cluster local"
        ) from error


def _join(address: str, said: Callable[[str], None]) -> RayConnection:
    host, port = _host_and_port(address)
    _require_token(address)
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError as error:
        raise MissingRequirementError(
            f"No Ray cluster answers at {address}: {error.strerror or error}.",
            "Start its head: RAY_AUTH_MODE=token ray start --head (it prints the address)",
        ) from None
    if host in LOOPBACK:
        os.environ.update(LOOPBACK_ONLY)
    ray = _import(said)
    try:
        ray.init(address, **QUIET)
    except Exception as error:
        raise _refusal(ray, address, error) from error
    return RayConnection(ray, ray.util.get_node_ip_address())


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise UsageError(f"{address!r} is no address of a Ray cluster.", "Give HOST:PORT, such as 10.0.0.1:6379")
    return host, int(port)


def _require_token(address: str) -> None:
    """Raises MissingRequirementError if this process has no token."""
    if os.environ.get(MODE, "token").lower() != "token":
        raise MissingRequirementError(
            f"{MODE} is {os.environ[MODE]!r}, and pvg joins only clusters with token authentication.",
            f"Start the cluster with {MODE}=token, and set it here too",
        )
    os.environ[MODE] = "token"
    if TOKEN in os.environ or TOKEN_FILE in os.environ or (Path.home() / ".ray" / "auth_token").is_file():
        return
    raise MissingRequirementError(
        f"There is no token for the Ray cluster at {address}.",
        "Make one on its head (ray get-auth-token --generate), and copy ~/.ray/auth_token from there to this machine",
    )


def _refusal(ray: Any, address: str, error: Exception) -> MissingRequirementError:
    """Why the cluster at `address` cannot be joined."""
    text = f"{error} {error.__cause__ or ''}"
    if isinstance(error, ray.exceptions.AuthenticationError) or "uthenticat" in text:
        return MissingRequirementError(
            f"The Ray cluster at {address} does not accept the token.",
            "Copy ~/.ray/auth_token from its head to this machine, or set RAY_AUTH_TOKEN_PATH",
        )
    if "node_ip_address" in text or "o node" in text:
        return MissingRequirementError(
            f"This machine is not a node of the Ray cluster at {address}: {_cause(error)}.",
            f"Join it first: RAY_AUTH_MODE=token ray start --address {address}",
        )
    return MissingRequirementError(f"The Ray cluster at {address} cannot be joined: {_cause(error)}.")


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].rstrip(".") if lines else type(error).__name__


def _import(said: Callable[[str], None]) -> Any:
    if sys.platform == "win32":
        raise MissingRequirementError("Ray workers need Linux or macOS.")
    try:
        import ray
        import ray._private.worker as printing
        import ray.exceptions
        import ray.util
    except ModuleNotFoundError as error:
        raise MissingRequirementError(
            f"Ray is not installed ({error}).", f"Install it: {install_extra('cluster')}"
        ) from None

    def say(data: dict[str, Any], *_: object, **__: object) -> None:
        for text in data["lines"]:
            said(shortened(one_line(text), LONGEST_LINE))

    # Ray has no option for this. stdout may hold a JSON document, and the display is on stderr.
    printing.print_worker_logs = say
    logging.getLogger("ray").setLevel(logging.ERROR)
    tokens = importlib.import_module("ray._raylet").AuthenticationTokenLoader
    tokens.instance().reset_cache()  # of an earlier cluster
    return ray
