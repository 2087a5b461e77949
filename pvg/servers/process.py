"""`VllmServer`: a vLLM server that this process started, and that ends with it.

    async with VllmServer.start(spec, on_progress=print) as server:
        ...  # server.url answers, and has answered a first request
        await server.ended()  # raises ServerFailedError when the server ends by itself

The progress of the start is the newest line of vLLM's log. A server is ready when it answers.

Invariants: no process of the server outlives the block, or this process if it is killed (pvg.servers.supervisor). The
key of the control routes is in the server's environment, never on a command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, cast

from aiohttp import web
from aiohttp.http import HttpProcessingError

from pvg.errors import (
    ConfigurationError,
    MissingRequirementError,
    PvgError,
    ServerUnavailableError,
    UsageError,
    one_line,
    reason,
    shortened,
    system_module,
    user_paths,
)
from pvg.inputs import LOOPBACK, names_this_machine
from pvg.servers import supervisor
from pvg.servers.command import ServerSpec
from pvg.servers.control import ARRAYS, KEY_VARIABLE
from pvg.servers.pool import HttpPool, RefusedRequest, ServerFault

LAST_LINES = 20  # shown for a server that failed
# The prefix of vLLM's log lines: (EngineCore pid=12) INFO 11-21 14:08:34 [core.py:133]
PREFIX = re.compile(r"^(\([^)]*\) )?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
ERROR = re.compile(r"^(\([^)]*\) )?(ERROR|CRITICAL) \d\d-\d\d ")
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

STARTING, FIRST_REQUEST = "importing vLLM", "answering a first request"


class LogTail:
    """Reads what is appended to a server's log from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = path.stat().st_size if path.exists() else 0
        self._began = self._place
        self._rest = b""

    def newest(self) -> str:
        """The newest line since the last call, without vLLM's prefix; "" if there is none."""
        return next((text for line in reversed(self._new_lines()) if (text := without_prefix(line).strip())), "")

    def new_errors(self) -> list[str]:
        """The lines of errors since the last call, without vLLM's prefix. Use it or `newest`: they share the place
        in the log."""
        return [without_prefix(line) for line in self._new_lines() if ERROR.match(line)]

    def last_lines(self) -> list[str]:
        """The last non-empty lines without colors. If there is a traceback, the lines up to the end of the first one,
        because later ones only report that a process failed."""
        with self.path.open("rb") as file:
            file.seek(self._began)
            lines = [_plain(line) for line in file.read().decode(errors="replace").splitlines()]
        nonempty = [line for line in lines if line.strip()]
        for place, line in enumerate(nonempty):
            if ROOT_CAUSE.search(PREFIX.sub("", line)):
                return nonempty[max(0, place + 1 - LAST_LINES) : place + 1]
        return list(deque(nonempty, maxlen=LAST_LINES))

    def _new_lines(self) -> list[str]:
        with self.path.open("rb") as file:
            file.seek(self._place)
            data = file.read()
        self._place += len(data)
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        return [_plain(line.decode(errors="replace")) for line in lines]


# The last line of a traceback: the exception at the start of the text.
ROOT_CAUSE = re.compile(r"^(\w+\.)*\w*(Error|Exception|Exit)\b.*:|error: ")


def _plain(line: str) -> str:
    return ESCAPES.sub("", line).rstrip()


def without_prefix(line: str) -> str:
    """The line without vLLM's prefix."""
    return PREFIX.sub("", line)


# --- the server ------------------------------------------------------------------------------------------------------

GRACE_S = 20.0  # for vLLM to shut down normally
POLL_S = 0.2  # between two checks of a starting server
HEALTH_S = 5.0  # timeout of one health request
GONE_S = 40.0  # for the last process of a server to end: supervisor.KILL_S, plus the guard's check
BOOT_VARIABLE = "PVG_BOOT"  # read by pvg_vllm
TOO_OLD = "unrecognized arguments"

OnProgress = Callable[[str], None]  # gets what the server does


class ServerFailedError(ServerUnavailableError):
    """A server started by pvg that did not start, or ended by itself. `lines`: the last lines of its log."""

    def __init__(self, message: str, remedy: str = "", lines: Sequence[str] = ()) -> None:
        super().__init__(message, remedy)
        self.lines = list(lines)


class VllmServer:
    """One running server. `pid` is vLLM's. End it with `stop`, or by leaving the block of `start`."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.pid = 0
        self.key = spec.environment[KEY_VARIABLE]
        self.pool = HttpPool(1, key=self.key, fresh=True)
        self.boot = ""  # identifies this start of the server, as in /pvg/info
        self._log = LogTail(spec.log)
        self._process: subprocess.Popen[bytes] | None = None
        self._exit: int | None = None  # vLLM's exit code, negative for a signal

    @property
    def url(self) -> str:
        return self.spec.url

    @classmethod
    @asynccontextmanager
    async def start(cls, spec: ServerSpec, on_progress: OnProgress | None = None) -> AsyncIterator[VllmServer]:
        """Start the server, wait until it has answered a first request, and stop it at the end of the block.

        Raises PortInUseError if the port is taken, ServerFailedError if the server ends or is not ready within
        `spec.startup_s`.
        """
        check_port(spec.host, spec.port)
        server = cls(spec)
        try:
            await server._start(on_progress or (lambda doing: None))
            yield server
        finally:
            await server.stop()

    async def ended(self) -> None:
        """Wait until the server ends by itself, and then always raise ServerFailedError."""
        while self._poll() is None:  # noqa: ASYNC110  (a process that ends sets no event)
            await asyncio.sleep(POLL_S)
        raise self._failure("ended")

    def newest_line(self) -> str:
        """The newest line of its log since the last call; "" if there is none."""
        return self._log.newest()

    async def stop(self) -> None:
        """End the server and all its processes. A second call does nothing."""
        await self.pool.close()
        process = self._process
        if process is None:
            return
        self._process = None
        if process.stdin is not None:
            process.stdin.close()  # the lifeline: the server now ends even if this process is cancelled or killed
        deadline = time.monotonic() + GRACE_S + GONE_S
        while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S / 4)
        await _end_session(process.pid)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    # --- starting ----------------------------------------------------------------------------------------------------

    async def _start(self, on_progress: OnProgress) -> None:
        began = time.monotonic()
        on_progress(STARTING)
        self._process = self._spawn()
        deadline = began + self.spec.startup_s
        while not await self._healthy():
            if line := self._log.newest():
                on_progress(line)
            self._check(deadline)
            await asyncio.sleep(POLL_S)
        on_progress(FIRST_REQUEST)
        await self._watched(self._first_request(), deadline)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with user_paths():
            self.spec.log.parent.mkdir(parents=True, exist_ok=True)
            self.spec.log.touch()
        self.boot = secrets.token_hex(8)
        command = [sys.executable, "-I", supervisor.__file__, str(GRACE_S), str(self.spec.log)]
        try:
            process = subprocess.Popen(
                [*command, *self.spec.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**self.spec.environment, BOOT_VARIABLE: self.boot},
                start_new_session=True,  # Ctrl-C goes only to this process, which then ends the server
            )
        except OSError as error:
            raise MissingRequirementError(f"vLLM cannot be started: {error.strerror}.", "See `pvg doctor`.") from error
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
        return process

    async def _healthy(self) -> bool:
        """Whether our server and its engine answer. While it starts, connections are refused. Another server that took
        the port meanwhile has a different boot id."""
        with contextlib.suppress(ServerFault):
            await self.pool.request("GET", f"{self.url}/health", timeout_s=HEALTH_S)
            info = (await self.pool.request("GET", f"{self.url}/pvg/info", timeout_s=HEALTH_S)).json()
            return isinstance(info, dict) and info.get("boot") == self.boot
        return False

    async def _first_request(self) -> None:
        """Send the first requests, so that vLLM compiles now what it compiles at a first request."""
        for path, body in first_requests(self.spec):
            try:
                await self.pool.request("POST", self.url + path, body, timeout_s=None)
            except RefusedRequest as error:
                raise self._failure(f"refused its first request ({error.what[:200]})") from error
            except ServerFault as error:
                raise self._failure(f"did not answer its first request ({error.what[:200]})") from error

    async def _watched(self, work: Any, deadline: float) -> None:
        """Await `work`, but raise ServerFailedError if the server ends or the deadline passes."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._check(deadline)
                await asyncio.wait([task], timeout=POLL_S)
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _check(self, deadline: float) -> None:
        if self._poll() is not None:
            raise self._failure("ended before it was ready")
        if time.monotonic() > deadline:
            raise self._failure(f"was not ready after {self.spec.startup_s:g} s", "Look into its log.")

    # --- ending -------------------------------------------------------------------------------------------------------

    def _poll(self) -> int | None:
        """The exit code of vLLM or of its supervisor, once one of them has ended."""
        process = self._process
        if process is None:
            return 0
        ended = process.poll()
        self._listen(process.stdout)
        return ended if self._exit is None else self._exit

    def _listen(self, output: IO[bytes] | None) -> None:
        """Parse the supervisor's output: `pid N`, `exit CODE`."""
        data = (output.read() if output is not None else None) or b""
        for line in data.decode().splitlines():
            what, _, number = line.partition(" ")
            if what == "pid":
                self.pid = int(number)
            elif what == "exit":
                self._exit = int(number)

    def _failure(self, what: str, remedy: str = "") -> ServerFailedError:
        lines = self._log.last_lines() if self.spec.log.exists() else []
        how = "" if self._exit is None else f" ({_exit_text(self._exit)})"
        reason = next((f": {without_prefix(line)}" for line in reversed(lines[-1:]) if "rror" in line), "")
        if any(TOO_OLD in line for line in lines):
            remedy = f"vLLM {self.spec.interpreter.vllm} is too old (0.32 works), or serving.extra_args is wrong."
        return ServerFailedError(
            f"The server {what}{how}{reason[:300]}.", remedy or f"Its full log: {self.spec.log}", lines
        )


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")


async def _end_session(session: int) -> None:
    """Kill what a killed or stuck supervisor left behind."""
    deadline = time.monotonic() + GONE_S
    while (left := supervisor.members(session) - {session}) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(session, signal.SIGKILL)


class PortInUseError(MissingRequirementError):
    """The port cannot be used. `taken`: another program listens on it."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        super().__init__(
            f"Port {port} of {host} cannot be used: {reason(error)}.",
            "Choose another port with --port, or stop the program that uses this one.",
        )
        self.taken = error.errno == errno.EADDRINUSE


def check_port(host: str, port: int) -> None:
    """Raises ConfigurationError if `host` is not an address of this machine, and PortInUseError if a server cannot
    listen there at `port`, because it is taken or not permitted."""
    try:
        if not host:
            raise OSError(errno.EADDRNOTAVAIL, "it is empty")  # it would mean all networks
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM binds: ignores TIME_WAIT
            probe.bind(address)
            probe.listen(1)
    except (OSError, UnicodeError, ValueError) as error:  # UnicodeError: an empty or long label. ValueError: a NUL
        if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):
            raise PortInUseError(host, port, error) from None
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not a host name"
        raise ConfigurationError(
            f"--host {shortened(host)!r} is not an address of this machine: {why}.",
            "Use 127.0.0.1, or 0.0.0.0 for all networks.",
        ) from None


# --- pvg's own servers ------------------------------------------------------------------------------------------------

SILENCE_S = 10.0  # for the head of a first request, and for a client that reads nothing of its answer
BODY_S = 60.0
LINGER_S = 1.0  # for the rest of a body that is not read
IDLE_S = 60.0  # until an idle connection is closed
MOST_CONNECTIONS = 1024  # and at most half of this process's open files. More clients wait until one leaves
NO_FILE_S = 0.1  # until the next attempt, if the system has no file for a connection

Answer = Callable[[str, int], web.Response]  # an error of a status
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LocalServer:
    """Serves an application of aiohttp to programs on this machine: with a limit for the number of connections, and
    limits of time for clients that are silent. A client that leaves or sends nonsense costs no line of output. Use
    `start`."""

    port: int

    def __init__(self, errors: Answer, browsers: bool) -> None:
        self._errors, self._browsers = errors, browsers
        resource = system_module("resource")
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._room = asyncio.Semaphore(max(8, min(MOST_CONNECTIONS, soft // 2 if soft > 0 else MOST_CONNECTIONS)))

    @classmethod
    @asynccontextmanager
    async def start(
        cls, routes: Sequence[web.RouteDef], port: int, errors: Answer, *, browsers: bool, most_bytes: int = 1 << 20
    ) -> AsyncIterator[LocalServer]:
        """Serve on LOOPBACK until the block ends. Port 0 is any free one. `errors` makes the answers to wrong requests.
        `browsers`: whether pages may ask. `most_bytes`: of a body. Raises PortInUseError."""
        server = cls(errors, browsers)
        app = web.Application(middlewares=[server._guard()], client_max_size=most_bytes)
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        try:
            listening = socket.create_server((LOOPBACK, port), backlog=128)
        except OSError as error:
            raise PortInUseError(LOOPBACK, port, error) from None
        with listening:
            listening.setblocking(False)
            server.port = int(listening.getsockname()[1])
            await runner.setup()
            accepting = asyncio.create_task(server._accept(listening, runner), name="connections")
            try:
                yield server
            finally:
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                await runner.cleanup()

    async def _accept(self, listening: socket.socket, runner: web.AppRunner) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                accepted, _ = await loop.sock_accept(listening)
                await loop.connect_accepted_socket(
                    lambda: _Connection(runner.server, self._room, self._errors), accepted
                )
            except OSError:  # the client has left already, or the system has no file for it: it waits
                self._room.release()
                await asyncio.sleep(NO_FILE_S)

    def _guard(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            assert isinstance(request.protocol, _Connection)
            request.protocol.asked = True
            try:
                await self._admit(request)
                return await handler(request)
            except web.HTTPException as error:  # also an unknown route, or a body that is too large
                text, status = error.reason, error.status
            except PvgError as error:
                text, status = str(error), 400 if isinstance(error, UsageError | ConfigurationError) else 500
            return self._errors(text, status)

        return guard

    async def _admit(self, request: web.Request) -> None:
        """Read the body, which the handler then has. Raises web.HTTPException for a request that must not be answered
        or cannot be read."""
        if not names_this_machine(request.headers.get("Host", "")):
            raise web.HTTPForbidden(reason="This server answers only requests to 127.0.0.1 or localhost.")
        if not self._browsers and "Origin" in request.headers:
            raise web.HTTPForbidden(reason="This server answers only programs on this machine, and no web pages.")
        try:
            async with asyncio.timeout(BODY_S):
                await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason=f"The body did not arrive within {BODY_S:g} s.") from None
        except (web.RequestPayloadError, ConnectionError) as error:
            why = one_line(str(error)).rpartition("message: ")[2]
            raise web.HTTPBadRequest(reason=f"The body cannot be read: {why}.") from None


class _Connection(web.RequestHandler):
    """A client, which takes a place of `room`. `asked`: it has sent a whole head."""

    def __init__(self, manager: Any, room: asyncio.Semaphore, errors: Answer) -> None:
        options: dict[str, Any] = {"access_log": None, "keepalive_timeout": IDLE_S, "lingering_time": LINGER_S}
        super().__init__(manager, loop=asyncio.get_running_loop(), **options)
        self._room, self._errors, self.asked = room, errors, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._look_later(cast("asyncio.Transport", transport))

    def _look_later(self, transport: asyncio.Transport, *unread: int) -> None:
        """End the connection if it sends no head, or reads nothing of its answer, for SILENCE_S. Looks twice as often,
        because this process may have been too busy to read. `unread`: bytes of the answer two looks ago, and one."""

        def look() -> None:
            left = transport.get_write_buffer_size()
            if (unread and not self.asked) or (len(unread) == 2 and 0 < unread[0] <= left):
                transport.abort()
            self._look_later(transport, *unread[-1:], left)

        self._next_look = asyncio.get_running_loop().call_later(SILENCE_S / 2, look)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._next_look.cancel()
        self._room.release()

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        answer = super().handle_error(request, status, exc, message)
        if status < 500:  # the request is not HTTP
            answer = self._errors(f"The request cannot be read: {one_line(message or str(exc))}", status)
            answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        if not isinstance(kw.get("exc_info"), HttpProcessingError | web.RequestPayloadError | ConnectionError):
            super().log_exception(*args, **kw)


def free_port(host: str) -> int:
    """A port of `host` that no program uses at the moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def first_requests(spec: ServerSpec) -> list[tuple[str, Mapping[str, Any]]]:
    """One request of each type that a run makes, as (route, body). Every vocabulary has the ids 0 to 2."""
    if spec.runner == "pooling":
        return [("/classify", {"model": spec.model, "input": [0, 1, 2]})]
    sampling: dict[str, Any] = {"max_tokens": 2, "logprobs": 0, "seed": 0, "temperature": 1.0, "ignore_eos": True}
    sampling |= {"detokenize": False, "extra_args": ARRAYS}
    body = {"model": spec.model, "token_ids": [0, 1, 2], "stream": False, "cache_salt": "first-request"}
    route = "/inference/v1/generate"
    scoring = {**sampling, "max_tokens": 1, "prompt_logprobs": 0}
    return [(route, {**body, "sampling_params": sampling}), (route, {**body, "sampling_params": scoring})]
