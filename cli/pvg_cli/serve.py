"""`pvg serve`: start a vLLM server for an experiment, or serve the verifier of a run, until Ctrl-C."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pvg.errors import UsageError
from pvg_cli import completion
from pvg_cli.boundary import announce_loading, emit, say, stopped
from pvg_cli.options import DebugOption, JsonOption, RoundOption, RunsOption, SetOption, check_output

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment
    from pvg.servers.command import ServerSpec
    from pvg_cli.serve_display import ServeDisplay

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
        typer.Argument(
            metavar="EXPERIMENT|RUN",
            help="An experiment in ./experiments or of pvg, or a TOML file. With --player: a run.",
            autocompletion=completion.experiments_or_runs,
        ),
    ],
    overrides: SetOption = None,
    player: Annotated[
        Literal["verifier"] | None,
        typer.Option("--player", help="Serve this player of a run, with torch and without vLLM."),
    ] = None,
    round_: RoundOption = -1,
    runs: RunsOption = Path("runs"),
    purpose: Annotated[
        Literal["prover", "verifier", "reference"],
        typer.Option(
            "--for",
            help="The model to serve. prover: it samples. verifier: it scores. reference: for the implicit head.",
        ),
    ] = "prover",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port of the server. With --player, 0: any free one.")
    ] = 8000,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="The address to bind to. 0.0.0.0 opens the server to the network."
        ),
    ] = "127.0.0.1",
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="The file that vLLM's output is appended to. Default: logs/ in weights.root.",
            show_default=False,
        ),
    ] = None,
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
    from pvg.config.load import find_experiment
    from pvg.hub import pinned
    from pvg.servers.command import find_interpreter, kind_for, model_folder, served_dtype, server_spec
    from pvg.servers.process import check_port
    from pvg.store.run_players import pinned_players
    from pvg.telemetry.cpu import SYSTEM, native_bfloat16
    from pvg_cli.output import stderr
    from pvg_cli.runs import fetch, resolve
    from pvg_cli.serve_display import ServeDisplay

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
    slow = served_dtype(experiment, purpose) == "bfloat16" and native_bfloat16(SYSTEM) is False
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
    import asyncio

    from pvg.servers.process import ServerFailedError, VllmServer
    from pvg_cli.driving import cancelled_at_signals

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
    import asyncio

    from pvg.export.finished import FinishedRound
    from pvg.servers.process import check_port
    from pvg.store.run_directory import RunDirectory
    from pvg_cli.driving import cancelled_at_signals, killed_document

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
    """The command that trains with this server."""
    switch, servers = SWITCHES[purpose]
    settings = [*overrides, switch]
    if purpose != "prover" or spec.url != DEFAULT_URL:
        settings.append(f"{servers}={spec.url}")
    return shlex.join(["pvg", "train", name, *(word for setting in settings for word in ("-s", setting))])
