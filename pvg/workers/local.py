"""Supplies worker processes on this machine.

One process, the *nursery*, imports torch and pvg once and forks every worker, before it computes anything. Importing
takes seconds, a fork milliseconds, and forked workers share the memory of the libraries.

Invariant: no worker outlives the driver, however it ends. A worker ends when its connection to the driver closes; the
nursery kills its session, and so all workers, when its own connection closes; on Linux the kernel kills them if the
nursery is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import psutil

from pvg.errors import MissingRequirementError
from pvg.servers.supervisor import PR_SET_PDEATHSIG, prctl
from pvg.telemetry.events import Events, SilentEvents, patience
from pvg.workers.frames import Frame, receive, send

if TYPE_CHECKING:
    from pvg.workers.pool import Member, SharedWeights

# Threads of other libraries would compete with the one compute thread.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
START_S = 120.0  # for importing torch on a slow disk
ANSWER_S = 30.0  # for every other answer
TAIL_BYTES = 4000
# The nursery has the driver's import path, so both run the same code.
NURSERY = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from pvg.workers.local import main; main()"
NOT_A_CHILD = -errno.ECHILD  # in place of a status: an earlier nursery forked it


@dataclass(eq=False)
class LocalMember:
    """A `Member` (pvg.workers.pool): a process and the driver's connection to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def names(self) -> dict[str, Any]:
        return {"pid": self.pid}

    def send(self, frame: Frame) -> None:
        send(self.writer, frame)

    async def receive(self) -> Frame | None:
        return await receive(self.reader)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # Not the writer's `close`, which waits for the process to read what was sent, and one that hangs never does.
        self.writer.transport.abort()

    def cpu_s(self) -> float | None:
        with contextlib.suppress(psutil.Error):  # it has ended
            used = psutil.Process(self.pid).cpu_times()
            return float(used.user + used.system)
        return None


class LocalSupply:
    """Owns the nursery. One task at a time asks it. `end` it."""

    def __init__(self) -> None:
        self._messages: IO[bytes] = tempfile.TemporaryFile(prefix="pvg-workers-")  # noqa: SIM115 - `end` closes it
        self._lock = asyncio.Lock()
        self.events: Events = SilentEvents()
        self._begin()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, "-P", "-c", NURSERY, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._messages,
                stderr=self._messages,
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,  # Ctrl-C is for the driver, which commits and then closes the workers
            )
        ours.setblocking(False)
        self._control = ours
        self._patience_s = START_S
        self._broken = False

    async def start(self, successor: bool = False) -> LocalMember:
        """Fork a worker. Raises MissingRequirementError if that fails in a new nursery too."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unused:
            unused.callback(ours.close)
            pid = await self._forked(theirs)
            unused.pop_all()
        return LocalMember(pid, *await asyncio.open_unix_connection(sock=ours, limit=1 << 20))

    async def _forked(self, connection: socket.socket) -> int:
        async with self._lock:
            for again in (False, True):
                try:
                    if again or self._broken:  # the nursery was killed, or hangs: the next one tells what is wrong
                        self._end()
                        self._begin()
                    if (answer := await self._ask("fork", connection)) > 0:
                        return answer
                    why = os.strerror(-answer)
                    break  # the nursery lives, and so do its other workers
                except (OSError, TimeoutError) as error:
                    why = self._last_words() or str(error)
        why = why or f"the first process did not answer within {self._patience_s:g} s"
        raise MissingRequirementError(
            f"No worker process could be started: {why}.", "Play without workers: -s cluster=none"
        )

    async def reason(self, member: Member) -> str:
        assert isinstance(member, LocalMember)
        status = NOT_A_CHILD
        async with self._lock:
            with contextlib.suppress(OSError, TimeoutError):  # it was killed, or hangs; `start` replaces it
                status = NOT_A_CHILD if self._broken else await self._ask(f"wait {member.pid}")
        if status == NOT_A_CHILD:
            return "its parent process was killed"
        if os.WIFSIGNALED(status):
            return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        words = self._last_words()
        return f"exit code {os.WEXITSTATUS(status)}" + (f": {words}" if words else "")

    async def watch(self) -> None:
        """Does nothing: `start` replaces a nursery that has ended."""

    def weights(self) -> SharedWeights:
        """Workers on this machine map the driver's memory."""
        from pvg.workers.shared import SharedBuffers  # here, because the nursery imports torch later

        return SharedBuffers()

    def end(self) -> None:
        self._end()
        self._messages.close()

    def _end(self) -> None:
        self._control.close()
        self._nursery.kill()
        self._nursery.wait()

    async def _ask(self, question: str, connection: socket.socket | None = None) -> int:
        loop, answer = asyncio.get_running_loop(), b""
        files = [] if connection is None else [connection.fileno()]
        self._broken = True  # until the answer comes: a late one must not be taken for the next one's
        socket.send_fds(self._control, [f"{question}\n".encode()], files)
        what = f"the process that starts workers (pid {self._nursery.pid})"
        async with patience(self.events, what, self._patience_s):
            while not answer.endswith(b"\n"):
                part = await loop.sock_recv(self._control, 64)
                if not part:
                    raise ConnectionError("the process that forks workers has ended")
                answer += part
        self._patience_s, self._broken = ANSWER_S, False
        return int(answer)

    def _last_words(self) -> str:
        file = self._messages.fileno()
        start = max(0, os.fstat(file).st_size - TAIL_BYTES)
        return os.pread(file, TAIL_BYTES, start).decode(errors="replace").strip().rpartition("\n")[2]


# --- the nursery ------------------------------------------------------------------------------------------------------


def nurse(control: socket.socket) -> None:
    """Fork workers on request until the driver closes `control`. The question "fork" comes with a socket; its answer is
    the worker's process id. The answer to "wait PID" is the status of the ended process. Minus an errno: it failed."""
    gc.freeze()  # a collection in a child would copy the shared pages
    try:
        while True:
            question, files, _, _ = socket.recv_fds(control, 64, 1)
            if not question:
                return
            word, *argument = question.decode().split()
            try:
                value = _fork(control, files[0]) if word == "fork" else os.waitpid(int(argument[0]), 0)[1]
            except OSError as error:
                value = -(error.errno or errno.EAGAIN)
            control.sendall(f"{value}\n".encode())
    finally:
        os.killpg(0, signal.SIGKILL)


def _fork(control: socket.socket, file: int) -> int:
    from pvg.workers.process import work

    with socket.socket(fileno=file) as connection:
        if not (pid := os.fork()):
            control.close()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel kills this process when the nursery ends
            work(connection)
        return pid


def main() -> None:
    gc.disable()  # otherwise it scans the objects of torch again and again while they are made
    import pvg.workers.process  # noqa: F401 - now, so that every fork has it

    gc.enable()
    nurse(socket.socket(fileno=int(sys.argv[2])))
