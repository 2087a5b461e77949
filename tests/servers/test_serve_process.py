"""Starting and ending a server's tree of processes: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import serve_stand_in

from pvg.errors import ConfigurationError
from pvg.servers import supervisor
from pvg.servers.command import Interpreter, ServerSpec
from pvg.servers.control import KEY_VARIABLE
from pvg.servers.process import (
    FIRST_REQUEST,
    LAST_LINES,
    STARTING,
    LogTail,
    PortInUseError,
    ServerFailedError,
    VllmServer,
    check_port,
)

pytestmark = pytest.mark.slow

LIMIT_S = 60.0  # for what takes a second on a quiet machine
TREE = 3  # processes of the stand-in

OWNER = """
import asyncio, sys
from pathlib import Path
from test_serve_process import spec_of
from pvg.servers.process import VllmServer

async def main():
    async with VllmServer.start(spec_of(int(sys.argv[1]), "serve", Path(sys.argv[2]))) as server:
        print(server._process.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spec_of(port: int, mode: str, folder: Path, startup_s: float = LIMIT_S) -> ServerSpec:
    return ServerSpec(
        command=(sys.executable, serve_stand_in.__file__, str(port), mode),
        environment={**os.environ, KEY_VARIABLE: "secret"},
        host="127.0.0.1",
        port=port,
        model="tiny",
        runner="generate",
        interpreter=Interpreter(Path(sys.executable), "0.32.0", "cpu", "a test"),
        log=folder / "logs" / "server.log",
        startup_s=startup_s,
    )


def tree_of(session: int) -> set[int]:
    """The living processes of a supervised server, without its supervisor and the guard."""
    return {pid for pid in supervisor.members(session) - {session} if not _is_guard(pid)}


def _is_guard(pid: int) -> bool:
    return b"supervisor.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


def wait_until_gone(session: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while left := supervisor.members(session):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def test_a_server_is_followed_to_its_first_request_and_ended_whole(tmp_path: Path) -> None:
    told: list[str] = []

    async def drive() -> int:
        async with VllmServer.start(spec_of(free_port(), "stubborn", tmp_path), told.append) as server:
            assert server._process is not None
            session = server._process.pid
            assert server.pid in tree_of(session)
            assert len(tree_of(session)) == TREE
        return session

    session = asyncio.run(drive())
    assert not supervisor.members(session)
    assert (told[0], told[-1]) == (STARTING, FIRST_REQUEST)


def test_a_server_that_refuses_its_first_request_shows_its_last_lines(tmp_path: Path) -> None:
    async def drive() -> None:
        async with VllmServer.start(spec_of(free_port(), "refuse", tmp_path)):
            pytest.fail("it is no server")

    with pytest.raises(ServerFailedError, match=r"refused its first request .*no kernel for this") as caught:
        asyncio.run(drive())
    assert any("Starting to load model" in line for line in caught.value.lines)


def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    """Its answers are as good as ours would be; it was started at the same moment, and was faster."""
    port = free_port()

    async def drive() -> None:
        starting = VllmServer(spec_of(port, "hang", tmp_path, startup_s=0.6))
        other = asyncio.create_task(_serving(spec_of(port, "serve", tmp_path / "other"), there := asyncio.Event()))
        await there.wait()
        try:
            with pytest.raises(ServerFailedError, match="was not ready after"):
                await starting._start(lambda stage: None)
        finally:
            await starting.stop()
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

    asyncio.run(drive())


async def _serving(spec: ServerSpec, there: asyncio.Event) -> None:
    async with VllmServer.start(spec):
        there.set()
        await asyncio.sleep(600)


def test_nothing_outlives_a_killed_owner(tmp_path: Path) -> None:
    with _owner(tmp_path) as (owner, session):
        assert len(tree_of(session)) == TREE
        owner.kill()
        owner.wait(LIMIT_S)
    wait_until_gone(session)


def test_nothing_outlives_a_killed_supervisor_even_without_its_owner(tmp_path: Path) -> None:
    """The owner is stopped, so that it cannot help: the guard alone ends the tree."""
    with _owner(tmp_path) as (owner, session):
        assert len(tree_of(session)) == TREE
        owner.send_signal(signal.SIGSTOP)
        os.kill(session, signal.SIGKILL)
        wait_until_gone(session)


def test_a_cancelled_start_ends_the_server(tmp_path: Path) -> None:
    async def drive() -> None:
        async with VllmServer.start(spec_of(free_port(), "hang", tmp_path)):
            pytest.fail("it is no server")

    async def cancelled() -> set[psutil.Process]:
        before = set(psutil.Process().children())
        task = asyncio.ensure_future(drive())
        while not set(psutil.Process().children()) - before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return set(psutil.Process().children()) - before

    assert not asyncio.run(cancelled())


def test_a_port_in_use_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"Port {port} of .* cannot be used"):
            check_port("127.0.0.1", port)
    for host in ("192.0.2.77", "..", "", "a" * 300, "127.0.0.1:80", " "):
        with pytest.raises(ConfigurationError, match="is not an address of this machine"):
            check_port(host, 8000)


@contextmanager
def _owner(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has started a server, and the server's session."""
    command = [sys.executable, "-c", OWNER, str(free_port()), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as owner:
        try:
            assert owner.stdout is not None
            yield owner, int(owner.stdout.readline())
        finally:
            owner.kill()


HEAD = "(EngineCore pid=1360) INFO 11-21 14:08:34 [core.py:133] "


def test_the_newest_line_is_told_once_and_without_its_head(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f"{HEAD}of the server before\n")
    log = LogTail(path)
    assert log.newest() == ""
    with path.open("a") as file:
        file.write(f"{HEAD}Resolved architecture: LlamaForCausalLM\n\x1b[36m(APIServer pid=1)\x1b[0m loading 0%\rloa")
        file.flush()
        assert log.newest() == "loading 0%"
        file.write("ding 50%\n\n")
        file.flush()
        assert log.newest() == "loading 50%"
    assert log.newest() == ""


def test_the_last_lines_are_those_of_the_process_that_failed_first(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("ValueError: of the server before\n")
    log = LogTail(path)
    with path.open("a") as file:
        file.writelines(f"{HEAD}line {number}\n" for number in range(50))
        file.write("(Worker pid=7) ERROR 11-21 14:17:25 [multiproc_executor.py:1063] RuntimeError: no kernel\n")
        file.writelines(f"{HEAD}Traceback of those who waited {number}\n" for number in range(50))
        file.write("RuntimeError: Engine core initialization failed. See root cause above.\n")
    lines = log.last_lines()
    assert len(lines) == LAST_LINES
    assert lines[-1].endswith("RuntimeError: no kernel")


def test_errors_are_found_among_other_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("")
    log = LogTail(path)
    with path.open("a") as file:
        file.write(f"{HEAD}Loading weights took 0.01 seconds\n{HEAD.replace('INFO', 'ERROR')}the pump is dry\n")
        file.write("ERROR 11-21 14:08:34 [launcher.py:1] \x1b[31mthe well too\x1b[0m\nan ERROR is no level here\n")
        file.flush()
        assert log.new_errors() == ["the pump is dry", "the well too"]
    assert log.new_errors() == []
