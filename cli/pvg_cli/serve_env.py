"""`pvg serve-env`: offer a game or a task to clients of OpenEnv, until Ctrl-C."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from pvg_cli.boundary import (
    EXIT_STOPPED,
    DebugOption,
    HostOption,
    JsonOption,
    SetOption,
    emit,
    emit_error,
    guarded,
    say,
)
from pvg_cli.serve import stop_serving_at_signals

if TYPE_CHECKING:
    from pvg.servers.environments import ServedEnvironment

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def register(app: typer.Typer) -> None:
    app.command("serve-env")(serve_env)


@guarded
def serve_env(
    *,
    name: Annotated[
        str,
        typer.Argument(
            metavar="GAME|EXPERIMENT",
            help="A game: negotiation, diplomacy, textarena:NAME or FILE.py:CLASS. Or an experiment, for its task.",
        ),
    ],
    overrides: SetOption = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port of the server.")] = 8010,
    host: HostOption = "127.0.0.1",
    sessions: Annotated[
        int, typer.Option("--sessions", min=1, max=10_000, help="The most sessions at once. More are refused.")
    ] = 64,
    idle: Annotated[
        float,
        typer.Option(
            "--idle", metavar="SECONDS", min=1.0, max=1e6, help="A session ends after so long without a request."
        ),
    ] = 900.0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Offer a game or a task as an OpenEnv environment, and serve it until Ctrl-C.

    With --json, the document is printed when the server is ready. The server keeps running.
    """
    import asyncio

    from pvg.servers.environment_server import EnvironmentServer

    with ExitStack() as opened:
        environment = _opened(name, overrides or [], opened)
        ready = False

        async def work() -> None:
            nonlocal ready
            stop_serving_at_signals()
            async with EnvironmentServer.start(environment, host, port, sessions, idle) as server:
                ready = True
                _announce(server.url, environment.name, host, as_json)
                await asyncio.Event().wait()

        try:
            asyncio.run(work())
        except (KeyboardInterrupt, asyncio.CancelledError):
            say("Stopped.")
            if as_json and not ready:
                emit_error("Stopped", "Stopped before the server was ready.", "", EXIT_STOPPED)
            raise typer.Exit(EXIT_STOPPED) from None


def _opened(name: str, overrides: list[str], opened: ExitStack) -> ServedEnvironment:
    """The game or the task that `name` means. A game's name comes before an experiment's."""
    from pvg.errors import UsageError
    from pvg.games import is_game, open_game
    from pvg.servers.environments import GameEnvironment, TaskEnvironment
    from pvg.tasks import open_task
    from pvg_cli.runs import resolve

    if is_game(name):
        if overrides:
            raise UsageError("--set changes an experiment, and a game has no settings.", "Leave --set out.")
        return GameEnvironment(name, open_game(name, "GAME"))
    experiment = resolve(name, overrides)
    game = getattr(experiment.task, "game", None)
    if isinstance(game, str):
        return GameEnvironment(game, open_game(game))
    task = open_task(experiment.task)
    if isinstance(task, AbstractContextManager):
        opened.enter_context(task)
    return TaskEnvironment(experiment.name, task)


def _announce(url: str, name: str, host: str, as_json: bool) -> None:
    import os

    if host not in LOOPBACK:
        say(f"warning: {host} is open to the network, and anybody who reaches it may use it.", typer.colors.YELLOW)
    if as_json:
        emit({"url": url, "environment": name, "pid": os.getpid()})
    say(f"Serving {name} at {url}. Ctrl-C stops the server.")
