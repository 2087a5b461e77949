"""`pvg rollout`: sample an experiment's prover and store what it writes, graded. No verifier, no training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.boundary import EXIT_STOPPED, DebugOption, JsonOption, emit, guarded, say
from cli.options import ExperimentArgument, MetricsPortOption, SetOption, metrics_port_override

if TYPE_CHECKING:
    import asyncio

    from cli.driving import Watcher
    from pvg.game.run import GameOutcome


def register(app: typer.Typer) -> None:
    app.command("rollout")(rollout)


@guarded
def rollout(
    experiment: ExperimentArgument = "modchain",
    overrides: SetOption = None,
    run_name: Annotated[
        str | None, typer.Option("--name", metavar="RUN", help="Name the run instead of numbering it.")
    ] = None,
    problems: Annotated[
        int | None, typer.Option("--problems", "-n", min=1, help="How many problems; without it, all of the split.")
    ] = None,
    role: Annotated[
        Literal["both", "helpful", "sneaky"], typer.Option("--role", help="Which role's prompt to use.")
    ] = "both",
    split: Annotated[Literal["train", "test"], typer.Option("--split", help="Which problems to use.")] = "test",
    metrics_port: MetricsPortOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Only sample and store: rollout.group_size solutions per problem and role, graded."""
    from cli.board import Board
    from cli.driving import drive, watcher_for
    from cli.resolve import resolve
    from cli.runs import create, plan_new
    from cli.train import last_words
    from pvg.hub import fetch_all

    settings = [*(overrides or []), *metrics_port_override(metrics_port)]
    plan = plan_new(resolve(experiment, settings), run_name, suffix="-samples")
    resolved = plan.experiment
    if plan.notice:
        say(plan.notice)
    fetch_all(resolved, say, ("models.prover.source", "task.path"))
    run = create(plan)

    async def work(observer: Watcher, stop: asyncio.Event) -> GameOutcome:
        from pvg.game.sample_only import sample_only

        return await sample_only(resolved, run, observer=observer, stop=stop, problems=problems, role=role, split=split)

    board = Board(resolved.name, run.name, rounds=1, phases=("init",))
    with run.lock(discard=lambda: not run.has_state):
        outcome = drive(
            work,
            watcher_for(board, resolved.telemetry.refresh_per_second),
            last_words(run.name, as_json),
            resolved.telemetry.event_loop,
        )
    _tell(outcome, as_json)


def _tell(outcome: GameOutcome, as_json: bool) -> None:
    from cli.output import stdout
    from cli.runs import report_command
    from pvg.reporting.run_summary import read_run
    from pvg.reporting.solutions import choose_examples
    from pvg.reporting.terminal import report
    from pvg.store.run_directory import RunDirectory

    run = RunDirectory(outcome.run)
    if as_json:
        document = {"status": outcome.status, "run": run.name, "path": str(run.path), "seconds": outcome.seconds}
        emit({**document, "metrics": outcome.rounds[-1] if outcome.rounds else {}})
    else:
        stdout().print(report(read_run(run), choose_examples(run)))
        say(f"\nAgain: {report_command(run)}")
    if outcome.status == "interrupted":
        raise typer.Exit(EXIT_STOPPED)
