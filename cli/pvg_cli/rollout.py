"""`pvg rollout`: sample, grade and store solutions, without a verifier and without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from pvg_cli.boundary import EXIT_STOPPED, announce_loading, emit, say
from pvg_cli.options import (
    ClusterOption,
    DebugOption,
    ExperimentArgument,
    JsonOption,
    MetricsPortOption,
    RunNameOption,
    SetOption,
    metrics_port_override,
)

if TYPE_CHECKING:
    import asyncio

    from pvg.game.run import GameOutcome
    from pvg_cli.run_display import RunDisplay


def rollout(
    experiment: ExperimentArgument = "modchain",
    overrides: SetOption = None,
    run_name: RunNameOption = None,
    problems: Annotated[int | None, Option("--problems", "-n", min=1, help="Default: all test problems.")] = None,
    role: Annotated[Literal["both", "helpful", "sneaky"], Option(help="Whose prompt the prover gets.")] = "both",
    cluster: ClusterOption = None,
    metrics_port: MetricsPortOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Sample, grade and store solutions, without a verifier and without training.

    The prover writes rollout.group_size solutions per problem and role.
    """
    from pvg.telemetry.cpu import precision_warnings
    from pvg_cli.driving import drive_run
    from pvg_cli.output import stderr
    from pvg_cli.run_display import RunDisplay
    from pvg_cli.runs import create, fetch, plan_new, resolve

    settings = [*(overrides or []), *metrics_port_override(metrics_port)]
    resolved = resolve(experiment, settings, cluster)
    plan = plan_new(resolved, run_name, suffix="-samples")
    resolved = plan.experiment
    for warning in precision_warnings(resolved):
        say(f"warning: {warning}.")
    if plan.notice:
        say(plan.notice)
    fetch(resolved.sources(), ("models.prover.source", "task.path"))
    announce_loading()
    run = create(plan)

    async def work(observer: RunDisplay, stop: asyncio.Event) -> GameOutcome:
        from pvg.game.run import sample_only

        return await sample_only(
            resolved, run, observer=observer, stop=stop, problems=problems, role=role, split="test"
        )

    display = RunDisplay(run.name, 1, stderr(), phases=("init",))
    lock = run.lock(discard=lambda: not run.has_state, waiting=say)
    again = "Call pvg rollout again."
    outcome = drive_run(work, run, display, lock, again=again, as_json=as_json)
    _print_samples(outcome, as_json)


def _print_samples(outcome: GameOutcome, as_json: bool) -> None:
    from rich.console import Group
    from rich.text import Text

    from pvg.reporting.run_summary import read_run
    from pvg.reporting.solutions import choose_examples, what_was_sampled
    from pvg.reporting.terminal import examples_list, headline, section
    from pvg.store.run_directory import RunDirectory
    from pvg_cli.output import stdout
    from pvg_cli.runs import view_command

    run = RunDirectory(outcome.run)
    if as_json:
        document = {"status": outcome.status, "run": run.name, "path": str(run.path), "seconds": outcome.seconds}
        emit({**document, "metrics": outcome.rounds[-1] if outcome.rounds else {}})
    else:
        examples = examples_list(choose_examples(run))
        said = map(Text, what_was_sampled(run))
        stdout().print(Group(headline(read_run(run)), *said, *section("Example solutions", examples)))
        say(f"\nAll solutions, time and machine: {view_command(run)}")
    if outcome.status == "interrupted":
        raise typer.Exit(EXIT_STOPPED)
