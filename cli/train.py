"""`pvg train`: play a whole game, from the start or from where it stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from cli.boundary import EXIT_STOPPED, DebugOption, JsonOption, emit, guarded, say
from cli.options import MetricsPortOption, SetOption, metrics_port_override

if TYPE_CHECKING:
    import asyncio

    from cli.driving import Watcher
    from cli.runs import Plan
    from pvg.game.run import GameOutcome


class TrainCommand(TyperCommand):
    """Gives `--resume` its optional value: alone it means the newest unfinished run, written as ""."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        filled: list[str] = []
        for place, word in enumerate(args):
            filled.append(word)
            followed = place + 1 < len(args) and not args[place + 1].startswith("-")
            if word == "--resume" and not followed:
                filled.append("")
        return super().parse_args(ctx, filled)


def register(app: typer.Typer) -> None:
    app.command("train", cls=TrainCommand)(train)


@guarded
def train(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE]",
            help="An experiment of ./experiments or of pvg, or a TOML file. Without one: modchain.",
            show_default=False,
        ),
    ] = None,
    overrides: SetOption = None,
    run_name: Annotated[
        str | None, typer.Option("--name", metavar="RUN", help="Name the run instead of numbering it.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[RUN]",
            help="Go on with a run; without a name with the experiment's newest unfinished one.",
        ),
    ] = None,
    metrics_port: MetricsPortOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved settings and batch sizes, and play nothing.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Play a prover-verifier game. Without arguments: the embedded one, on the CPU, in a few minutes.

    Ctrl-C stops at the next commit point; pvg train --resume goes on from there.
    """
    from cli.resolve import resolve
    from cli.runs import plan_new, plan_resume
    from pvg.errors import UsageError
    from pvg.hub import fetch_all

    if resume is not None and run_name is not None:
        raise UsageError("--name and --resume contradict each other.", "Name the run to go on with after --resume.")
    settings = [*(overrides or []), *metrics_port_override(metrics_port)]
    if resume is not None:
        plan = plan_resume(name, settings, resume, clean=not dry_run)
    else:
        plan = plan_new(resolve(name, settings), run_name)
    for warning in plan.experiment.warnings():
        say(f"warning: {warning}.")
    if dry_run:
        _show_plan(plan, as_json)
        return
    if plan.notice:
        say(plan.notice)
    fetch_all(plan.experiment, say)
    _tell(_play(plan, as_json), plan, as_json)


def _show_plan(plan: Plan, as_json: bool) -> None:
    from dataclasses import asdict

    from cli.output import arithmetic_table, print_toml, stdout
    from pvg.hub import KEYS, download_of, hub_ids

    experiment = plan.experiment
    downloads = {key: download_of(source, KEYS[key]) for key, source in hub_ids(experiment)}
    if as_json:
        emit(
            {
                "experiment": experiment.plain(),
                "arithmetic": asdict(experiment.arithmetic()),
                "hash": experiment.hash(),
                "run": str(plan.run.path),
                "resume": plan.resume,
                "downloads": {key: asdict(download) for key, download in downloads.items()},
            }
        )
        return
    print_toml(experiment.to_toml())
    console = stdout()
    console.print()
    console.print(arithmetic_table(experiment))
    for key, download in downloads.items():
        console.print(f"{key}: {download}")
    console.print(f"\nThis {'continues' if plan.resume else 'would play in'} {plan.run.path}.", style="bright_black")


def _play(plan: Plan, as_json: bool) -> GameOutcome:
    """Play under the live display. A new run that fails before its first commit leaves no folder behind."""
    from cli.board import Board
    from cli.driving import drive, watcher_for
    from cli.runs import create
    from pvg.reporting.run_summary import read_run

    run = plan.run if plan.resume else create(plan)
    experiment = plan.experiment

    async def work(observer: Watcher, stop: asyncio.Event) -> GameOutcome:
        from pvg.game.run import play

        return await play(experiment, run, observer=observer, stop=stop, resume=plan.resume)

    board = Board(experiment.name, run.name, experiment.game.rounds)
    if plan.resume:
        board.recall(read_run(run))
    watcher = watcher_for(board, experiment.telemetry.refresh_per_second)
    with run.lock(discard=lambda: not plan.resume and not run.has_state):
        return drive(work, watcher, last_words(run.name, as_json), experiment.telemetry.event_loop)


def last_words(run: str, as_json: bool) -> bytes:
    """The document of a command that is ended at once."""
    import orjson

    return orjson.dumps({"status": "killed", "run": run}) + b"\n" if as_json else b""


def _tell(outcome: GameOutcome, plan: Plan, as_json: bool) -> None:
    """The table by round, what to type next, and the exit code."""
    from cli.output import stdout
    from cli.runs import report_command, resume_command
    from pvg.reporting.run_summary import read_run
    from pvg.reporting.terminal import closing

    summary = read_run(plan.run)
    stopped = outcome.status == "interrupted"
    resume = resume_command(plan.run)
    if as_json:
        emit(
            {
                "status": outcome.status,
                "run": summary.name,
                "path": str(summary.path),
                "experiment": summary.experiment,
                "seconds": outcome.seconds,
                "rounds": summary.plain()["rounds"],
                "alerts": summary.plain()["alerts"],
                "resume": resume if stopped else None,
            }
        )
    else:
        commands = {resume: "play on from here"} if stopped else {}
        commands[report_command(plan.run)] = "rounds, phases, metrics, example solutions"
        commands[f"{report_command(plan.run)} --json"] = "the same for a program"
        stdout().print(closing(summary, outcome.seconds, commands))
    if stopped:
        raise typer.Exit(EXIT_STOPPED)
