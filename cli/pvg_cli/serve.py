"""`pvg serve`: start a vLLM server for an experiment, or serve the verifier of a run, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import typer
from rich.console import Console, RenderableType
from rich.spinner import Spinner
from rich.text import Text
from typer import Argument, Option

from pvg.config.load import find_experiment
from pvg.errors import UsageError, shortened
from pvg.hub import pinned
from pvg.reporting.formats import duration
from pvg.servers.command import ServerSpec, find_interpreter, kind_for, model_folder, served_dtype, server_spec
from pvg.servers.process import ServerFailedError, VllmServer, check_port
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import pinned_players
from pvg_cli import completion
from pvg_cli.boundary import announce_loading, emit, say, stopped
from pvg_cli.display import Display
from pvg_cli.driving import cancelled_at_signals, killed_document
from pvg_cli.options import DebugOption, JsonOption, RoundOption, RunsOption, SetOption, check_output
from pvg_cli.output import QUIET, stderr, stdout
from pvg_cli.runs import fetch, resolve

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment

DEFAULT_URL = "http://127.0.0.1:8000"
# The settings with which a trainer uses a server of each purpose.
SWITCHES = {
    "prover": ("rollout.engine=vllm", "serving.servers"),
    "verifier": ("verifier.engine=vllm", "serving.verifier_servers"),
    "reference": ("verifier.engine=vllm", "serving.reference_servers"),
}
LOGS = "logs"  # below weights.root


def serve(
    *,
    name: Annotated[
        str,
        Argument(
            metavar="EXPERIMENT|RUN",
            help="An experiment in ./experiments or of pvg, or a TOML file. With --player: a run.",
            autocompletion=completion.experiments_or_runs,
        ),
    ],
    overrides: SetOption = None,
    player: Annotated[Literal["verifier"] | None, Option(help="Serve this player of a run, without vLLM.")] = None,
    round_: RoundOption = -1,
    runs: RunsOption = Path("runs"),
    purpose: Annotated[
        Literal["prover", "verifier", "reference"],
        Option("--for", help="prover: it samples. verifier: it scores. reference: of the implicit head."),
    ] = "prover",
    port: Annotated[int, Option(min=0, max=65535, help="With --player, 0: any free one.")] = 8000,
    host: Annotated[str, Option(metavar="ADDRESS", help="0.0.0.0 opens it to the network.")] = "127.0.0.1",
    log: Annotated[Path | None, Option(metavar="FILE", help="Of vLLM. Default: logs/ in weights.root.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Start a vLLM server for an experiment, and run it until Ctrl-C. Ctrl-C ends all of its processes.

    With --player verifier, serve the verifier of a run on 127.0.0.1: routes /health, /score and /get_reward.
    With --json, the document is printed when the server is ready. The server keeps running.
    """
    if player is not None:
        if overrides or log is not None or purpose != "prover" or host != "127.0.0.1":
            raise UsageError(
                "--set, --for, --log and --host belong to vLLM servers, and --player serves a run.",
                f"pvg serve {shlex.quote(name)} --player verifier --port {port}",
            )
        _serve_verifier(name, runs, round_, port, as_json)
        return
    if port == 0:
        raise UsageError("--port 0 needs --player.", "Give the port of the vLLM server.")
    from pvg.installation import native_bfloat16

    role: Literal["prover", "verifier"] = "prover" if purpose == "prover" else "verifier"
    key = f"models.{role}.source"
    try:
        find_experiment(name)
    except UsageError:
        if not (runs / name).is_dir():
            raise
        command = f"pvg serve {shlex.quote(name)} --player verifier"
        raise UsageError(f"There is no experiment {name!r}, but a run.", f"To serve its verifier: {command}") from None
    experiment = resolve(name, overrides or [])
    experiment = experiment.with_sources(pinned_players(pinned(experiment.sources(), say, (key,)), (key,)))
    kind_for(experiment, purpose)
    check_port(host, port)
    check_output("--log", log, b"")  # it appends
    interpreter = find_interpreter()
    slow = served_dtype(experiment, purpose) == "bfloat16" and native_bfloat16() is False
    if interpreter.device == "cpu" and slow:
        models = experiment.models
        keys = [key for key, value in (("dtype", models.dtype), ("precision", models.precision)) if value == "bfloat16"]
        instead = " ".join(f"-s models.{key}=float32" for key in keys)
        say(
            "warning: the server computes in bfloat16, for which this CPU has no instructions, so it is 10 to 100 "
            f"times slower than in float32; give this to pvg serve and to pvg train: {instead}."
        )
    place = log or experiment.weights.root / LOGS / f"{purpose}-{port}.log"
    fetch(experiment.sources(), (key,))
    folder = model_folder(experiment, purpose)
    spec = server_spec(experiment, purpose, interpreter, folder, log=place, port=port, host=host)
    if spec.open_to_network:
        say(
            f"warning: {host} is open to the network. All routes except /health and /ping require the control key, "
            "which is sent unencrypted.",
            typer.colors.YELLOW,
        )
    command = next_command(name, overrides or [], purpose, spec)
    _run(spec, experiment, purpose, ServeDisplay(spec, place, command, stderr(), as_json), as_json)


def _run(spec: ServerSpec, experiment: Experiment, purpose: str, shown: ServeDisplay, as_json: bool) -> None:
    """Serve until Ctrl-C (exit code 130), or until the server ends by itself (exit code 3)."""

    async def work(attach: Callable[[], None]) -> None:
        attach()
        try:
            async with VllmServer.start(spec, shown.progressed) as server:
                shown.ready(server)
                if as_json:
                    emit(
                        {
                            "url": server.url,
                            "pid": os.getpid(),  # end this one to stop the server
                            "server_pid": server.pid,
                            "experiment": experiment.name,
                            "for": purpose,
                            "model": spec.model,
                            "runner": spec.runner,
                            "log": str(spec.log),
                            "weights_root": str(experiment.weights.root.absolute()),
                            "python": str(spec.interpreter.python),
                            "vllm": spec.interpreter.vllm,
                            "device": spec.interpreter.device,
                        }
                    )
                await shown.watch(server)
        except asyncio.CancelledError:
            shown.stopped()
            raise

    try:
        with shown, cancelled_at_signals(None) as attach:
            asyncio.run(work(attach))
    except ServerFailedError as error:
        for line in error.lines:
            say(f"  {line}", typer.colors.BRIGHT_BLACK)
        if not (as_json and shown.is_ready):
            raise
        say(f"error: {error.message}", typer.colors.RED)  # stdout has the one document already
        say(error.remedy)
        raise typer.Exit(error.exit_code) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise stopped("Stopped. No process of the server is left.", document=as_json and not shown.is_ready) from None


def _serve_verifier(name: str, runs: Path, round_: int, port: int, as_json: bool) -> None:
    """Serve the verifier of a finished round on 127.0.0.1. Ends with exit code 130 at Ctrl-C, at once at the second."""
    from pvg.export.finished import FinishedRound

    finished = FinishedRound.open(RunDirectory.open(name, runs), round_)
    finished.verifier_name  # noqa: B018 - raises for a run without a verifier
    check_port("127.0.0.1", port)  # before torch and the model are loaded
    ready = False
    killed = killed_document(finished.run.name, "Call pvg serve again.", as_json)

    async def work(attach: Callable[[], None]) -> None:
        nonlocal ready
        announce_loading()
        from pvg.export.reward_server import RewardServer

        attach()
        async with RewardServer.start(finished, port) as server:
            ready = True
            if as_json:
                emit({"url": server.url, "run": finished.run.name, "round": finished.round})
            say(f"Serving the verifier of {finished.run.name}, round {finished.round}: {server.url}")
            say("Routes: GET /health, POST /score, POST /get_reward (OpenRLHF). Ctrl-C ends the server.")
            await asyncio.Event().wait()

    try:
        # The one document is that of the server, once it is ready.
        with cancelled_at_signals(lambda: b"" if ready else killed) as attach:
            asyncio.run(work(attach))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise stopped("Stopped. The run is not affected.", document=as_json and not ready) from None


def next_command(name: str, overrides: list[str], purpose: str, spec: ServerSpec) -> str:
    switch, servers = SWITCHES[purpose]
    settings = [*overrides, switch]
    if purpose != "prover" or spec.url != DEFAULT_URL:
        settings.append(f"{servers}={spec.url}")
    return shlex.join(["pvg", "train", name, *(word for setting in settings for word in ("-s", setting))])


LOOK_S = 2.0  # between two looks at the log
USES = {"generate": "for sampling", "pooling": "for scoring"}


class ServeDisplay(Display):
    """Shows a server's start and its end; `watch` then follows the server until it ends."""

    def __init__(self, spec: ServerSpec, log: Path, command: str, console: Console, as_json: bool) -> None:
        super().__init__(console)
        self.spec = spec
        self.is_ready = False
        self._now = "starting"
        self._shown = ""  # the last line about the server's work
        self._log, self._command = log, command
        self._on_stdout = not self.live and not as_json
        self._spinner = Spinner("dots")

    def __enter__(self) -> Self:
        found = self.spec.interpreter
        dtype = self.spec.command[self.spec.command.index("--dtype") + 1]
        for text in (
            f"{self.spec.model}, {dtype}, {USES[self.spec.runner]}, at {self.spec.url}",
            f"vLLM {found.vllm} for the {found.device.upper()}, {found.origin}: {found.python}",
            f"log: {self._log}",
        ):
            self._console.print(Text(text), soft_wrap=True)
        return super().__enter__()

    def progressed(self, line: str) -> None:
        self._now = shortened(line)
        self.tick(lambda: self._now)

    def ready(self, server: VllmServer) -> None:
        self.is_ready = True
        text = Text.assemble("\n", ("ready: ", "bold green"), server.url, (f"  after {duration(self.elapsed)}", QUIET))
        text.append("\n\nTo train with it, type in another terminal:\n", QUIET).append(
            f"  {self._command}", "bold cyan"
        )
        (stdout() if self._on_stdout else self._console).print(text, soft_wrap=True)
        self._began = time.monotonic()

    def stopped(self) -> None:
        self._now = "stopping"
        self.line("stopping")

    async def watch(self, server: VllmServer) -> None:
        """Follow the server's log until it ends by itself, which raises ServerFailedError."""
        ended = asyncio.ensure_future(server.ended())
        try:
            while not ended.done():
                if line := server.newest_line():
                    self._now = shortened(line)
                self.tick(self._change)
                await asyncio.wait([ended], timeout=LOOK_S)
            await ended
        finally:
            ended.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(ended, return_exceptions=True)

    def _change(self) -> str:
        """What the server does, if it differs from the last line."""
        text = "" if self._now == self._shown else self._now
        self._shown = self._now
        return text

    def render(self, width: int) -> RenderableType:
        limit = "" if self.is_ready else f" of at most {duration(self.spec.startup_s)}"
        self._spinner.update(
            text=Text.assemble(self._now, (f"   {duration(self.elapsed)}{limit}   Ctrl-C stops", QUIET))
        )
        return self._spinner
