"""`pvg profile [EXPERIMENT] --stage STAGE` profiles a stage. `pvg profile --run RUN` exports the timeline of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pvg.errors import UsageError, counted
from pvg_cli import completion
from pvg_cli.boundary import announce_loading, emit, say, stopped
from pvg_cli.options import DebugOption, ExperimentOrDefault, JsonOption, RunsOption, SetOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pvg.bench.profiling import ProfileResult

DEFAULT_STAGE = "e2e"
DEFAULT_STEPS = 3


def profile(
    *,
    experiment: ExperimentOrDefault = None,
    stage: Annotated[str | None, Option(metavar="STAGE", help="rollout, trainer or e2e. Default: e2e.")] = None,
    overrides: SetOption = None,
    steps: Annotated[int, Option(min=1, help="The number of steps under each profiler.")] = DEFAULT_STEPS,
    run: Annotated[
        str | None, Option(metavar="RUN", help="Only export the timeline of a run.", autocompletion=completion.runs)
    ] = None,
    runs: RunsOption = Path("runs"),
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="FOLDER", help="A new one. Default: profile-NAME-STAGE.")
    ] = None,
    no_py_spy: Annotated[bool, Option("--no-py-spy", help="Do not run py-spy, even if it is installed.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Profile a stage with pvg's spans, the torch profiler and py-spy, and write the results to one folder.

    Prints the ten costliest operators of torch. Each profiler slows the work down, and the tables show by how much.
    """
    if run is not None:
        if experiment or stage or overrides or no_py_spy:
            raise UsageError(
                "--run exports a finished timeline, so it takes no experiment, stage or settings.", "Leave them out."
            )
        from pvg.bench.profiling import profile_run
        from pvg.store.run_directory import RunDirectory, free_name

        directory = RunDirectory.open(run, runs)
        made = profile_run(directory, out or Path(free_name(Path(), f"profile-{directory.name}")))
    else:
        try:
            made = _of_stage(experiment, stage or DEFAULT_STAGE, overrides or [], steps, out, not no_py_spy)
        except KeyboardInterrupt:
            raise stopped("Stopped. The folder contains the finished results.", document=as_json) from None
    if as_json:
        emit(made.plain())
    else:
        _show(made)


def _of_stage(
    experiment: str | None, stage: str, overrides: list[str], steps: int, out: Path | None, py_spy: bool
) -> ProfileResult:
    announce_loading()
    from pvg.bench.profiling import profile_stage, stage_settings
    from pvg.store.run_directory import free_name
    from pvg_cli.runs import DEFAULT_EXPERIMENT

    settings = stage_settings(stage, experiment or DEFAULT_EXPERIMENT, overrides)
    folder = out or Path(free_name(Path(), f"profile-{settings.experiment.name}-{stage}"))
    return profile_stage(settings, stage, folder, steps=steps, py_spy=py_spy, on_pass=lambda text: say(f"{text} ..."))


def _show(made: ProfileResult) -> None:
    from rich.console import Group
    from rich.text import Text

    from pvg.bench.profiling import slowdowns
    from pvg.reporting.formats import sample_seconds
    from pvg.reporting.table import Column, Table, TableCell
    from pvg.reporting.terminal import section
    from pvg_cli.output import stdout

    parts: list[RenderableType] = [Text(made.title, style="bold")]
    if made.operators:
        table = Table([Column("share", "right", wrap=False), Column(style="verifier", wrap=False), Column("operator")])
        most = max(operator.share for operator in made.operators) or 1.0
        for operator in made.operators:
            table.add(f"{100 * operator.share:.1f} %", TableCell(bar=operator.share / most), operator.name)
        parts += section("Costliest operators of torch, by self time", table)
    if made.passes:
        table = Table([Column() for _ in range(4)])
        slower = {name: f"{100 * share:+.0f} %" for name, share in slowdowns(made.passes).items()}
        for each in made.passes:
            steps = counted(len(each.walls_s), "step")
            table.add(each.name, sample_seconds(each.fastest_s), slower.get(each.name, ""), steps)
        parts += section("Fastest step per pass; profilers slow the work down", table)
    table = Table([Column(wrap=False), Column(style="quiet")], narrow=True)
    for file in made.files:
        table.add(file.name, f"{file.what} {file.how}".strip())
    parts += section(f"Files in {made.folder}", table)
    parts += [Text(f"\nMissing: {tool}. {why}", style="yellow") for tool, why in made.missing.items()]
    stdout().print(Group(*parts))
