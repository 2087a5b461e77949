"""`pvg bench`: repeat a profile's work, and write down how long it took."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.boundary import EXIT_STOPPED, DebugOption, JsonOption, emit, emit_error, guarded, say
from cli.options import RunsOption, SetOption

if TYPE_CHECKING:
    from pvg.bench.report import BenchReport
    from pvg.bench.runner import OnSample, SampleTaken
    from pvg.bench.servers import OnServer
    from pvg.bench.variants import BenchPlan

REPORTS = Path("bench")  # where reports go without --out
PROBE_BYTES = 1 << 20  # many times what a report takes
MOST_READ = 20  # earlier reports that are looked at for one to compare with


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


@guarded
def bench(
    *,
    profile: Annotated[
        str | None,
        typer.Option("--profile", "-p", metavar="NAME|FILE", help="A profile of ./profiles or of pvg, or a TOML file."),
    ] = None,
    overrides: SetOption = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="KEY=A,B,C", help="Measure once for each value of a setting.")
    ] = None,
    ablate: Annotated[
        bool,
        typer.Option("--ablate", help="Climb the profile's ladder: all switches slow, then one after another fast."),
    ] = False,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Find the profile's batch sizes for this machine, and write them to a TOML file."),
    ] = False,
    interleave: Annotated[
        bool | None,
        typer.Option(
            "--interleave/--one-by-one",
            help="Take the variants' samples in turn, or finish one variant before the next. "
            "In turn, a machine whose speed drifts is no reason for a difference; all are in memory at once.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option("--replay", metavar="RUN", help="Take the work from a recorded run (rollout, trainer)."),
    ] = None,
    runs: RunsOption = Path("runs"),
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="Measure on the vLLM server at URL; repeatable."),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Measure on a vLLM server started for it; on one for each variant if need be."),
    ] = False,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="Samples per variant.")] = None,
    warmup: Annotated[int | None, typer.Option("--warmup", min=0, help="Samples before them, not kept.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where to write the report; else bench/NAME-TIME.json."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure a profile: the same work again and again, after a warm-up. Without --profile: list the profiles.

    Exit code 1, 2 or 3 when a variant failed; the report then says why.
    """
    from cli.output import stdout
    from pvg.bench.report import write_report
    from pvg.bench.variants import plan_bench, run_plan
    from pvg.errors import UsageError
    from pvg.store.run_directory import RunDirectory

    if profile is None:
        if overrides or sweep or ablate or tune or replay or out or server or serve:
            raise UsageError("There is no --profile to measure.", "List them with: pvg bench")
        _list_profiles(as_json)
        return
    given = list(overrides or [])
    given += [f"{key}={value}" for key, value in (("repeats", repeats), ("warmup", warmup)) if value is not None]
    if tune:
        from cli.bench_tune import run_tune

        if sweep or ablate or replay or server or serve or interleave is not None:
            raise UsageError("--tune chooses its own variants.", "Give it --set, --repeats, --warmup and --out alone.")
        run_tune(profile, given, out, as_json)
        return
    recorded = RunDirectory.open(replay, runs) if replay is not None else None
    urls = [url for given_url in server or [] for url in given_url.split(",")]
    plan = plan_bench(
        profile,
        given,
        sweep=sweep,
        ablate=ablate,
        interleave=interleave,
        replay=recorded,
        server_urls=urls,
        serve=serve,
    )
    path = _output(out, plan)
    on_servers = [word for url in urls for word in ("--server", url)] + (["--serve"] if serve else [])
    command = _command(profile, given, sweep, ablate, interleave, replay, runs, on_servers, out)
    try:
        with _progress(plan) as (on_sample, on_server):
            result = run_plan(plan, command=command, on_sample=on_sample, on_server=on_server)
        write_report(_made(path), result.report)
    except KeyboardInterrupt:
        say("Stopped. No report was written.")
        if as_json:
            emit_error("Stopped", "Stopped. No report was written.", "", EXIT_STOPPED)
        raise typer.Exit(EXIT_STOPPED) from None
    if as_json:
        emit(result.report.plain())
        say(f"Written to {path}.")
    else:
        from cli.bench_tables import report_text

        stdout().print(report_text(result.report, path, _next_commands(path, result.report)))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _list_profiles(as_json: bool) -> None:
    from cli.bench_tables import profiles_table
    from cli.output import stdout
    from pvg.bench.profile import known_profiles, read_profile

    paths = known_profiles()
    profiles = {name: read_profile(path) for name, path in paths.items()}
    if as_json:
        emit(
            {
                "profiles": [
                    {"name": name, "workload": found.profile, "about": found.about, "path": str(paths[name])}
                    for name, found in profiles.items()
                ]
            }
        )
    else:
        stdout().print(profiles_table(profiles))


# --- the report's file -----------------------------------------------------------------------------------------------


def _output(out: Path | None, plan: BenchPlan) -> Path:
    """The report's file. Raises where it is known already that it cannot be written."""
    import tempfile
    from datetime import UTC, datetime

    from pvg.errors import MissingRequirementError, UsageError

    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = out if out is not None else _free(REPORTS / f"{plan.base.profile.name}-{stamp}.json")
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", "Name a file: --out FILE.json")
    folder = path.parent
    if out is not None and not folder.is_dir():
        raise UsageError(
            f"There is no folder {folder} for the report.", f"Make it with: mkdir -p {shlex.quote(str(folder))}"
        )
    while not folder.exists():  # ./bench is made when there is something to put into it
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())  # some file systems find room only now
    except OSError as error:
        raise MissingRequirementError(
            f"No report can be written into {folder}: {error.strerror}.", "Write it elsewhere with --out FILE."
        ) from error
    return path


def _free(path: Path) -> Path:
    """`path`, or with -2, -3 ... where a report of the same second lies already."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free


def _made(path: Path) -> Path:
    """The path, once its folder is there."""
    from pvg.errors import MissingRequirementError
    from pvg.store.atomic import make_directory

    try:
        make_directory(path.parent)
    except OSError as error:
        raise MissingRequirementError(
            f"The folder {path.parent} cannot be made: {error.strerror}.", "Write the report elsewhere with --out FILE."
        ) from error
    return path


def _command(
    profile: str,
    overrides: list[str],
    sweep: str | None,
    ablate: bool,
    interleave: bool | None,
    replay: str | None,
    runs: Path,
    on_servers: list[str],
    out: Path | None,
) -> str:
    """What was typed, in one spelling."""
    words = ["pvg", "bench", "--profile", profile]
    words += on_servers
    for override in overrides:
        words += ["--set", override]
    if sweep is not None:
        words += ["--sweep", sweep]
    if ablate:
        words.append("--ablate")
    if interleave is not None:
        words.append("--interleave" if interleave else "--one-by-one")
    if replay is not None:
        words += ["--replay", replay, "--runs", str(runs)]
    if out is not None:
        words += ["--out", str(out)]
    return shlex.join(words)


def _next_commands(path: Path, report: BenchReport) -> dict[str, str]:
    """What to type next; with an earlier report of the same work beside it, exactly how to compare the two."""
    this = shlex.quote(str(path))
    commands = {f"pvg report {this}": "the same figures, with the time budget of every variant"}
    if report.status == "ok":
        earlier = _earlier(path, report)
        other = "OTHER" if earlier is None else shlex.quote(str(earlier))
        commands[f"pvg compare {other} {this}"] = "is it faster than before?"
    return commands


def _earlier(path: Path, report: BenchReport) -> Path | None:
    """The newest report in the same folder that `path` can be compared with."""
    from pvg.bench.report import read_report, work_of
    from pvg.errors import UsageError

    beside = [other for other in path.parent.glob(f"{report.name}-*.json") if other.resolve() != path.resolve()]
    for other in sorted(beside, key=lambda found: found.stat().st_mtime, reverse=True)[:MOST_READ]:
        try:
            found = read_report(other)
        except UsageError:  # somebody else's file, or a report of another version: nothing to suggest
            continue
        if found.status == "ok" and found.kind == report.kind and work_of(found) == work_of(report):
            return other
    return None


# --- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(plan: BenchPlan) -> Iterator[tuple[OnSample, OnServer]]:
    """A bar on a terminal, a line for each sample elsewhere, and a line for each server that is started. Drawn between
    samples only, by no thread of its own: nothing of it runs while something is measured."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from cli.output import stderr

    console = stderr()
    if not console.is_terminal or console.is_dumb_terminal:
        yield _plain_line, say
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(24),
        TextColumn("{task.completed} of {task.total} samples"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(f"{plan.base.profile.name}  opening", total=plan.samples)
        progress.refresh()

        def on_sample(taken: SampleTaken) -> None:
            stage = "warming up" if taken.warmup else "measuring"
            described = "  ".join(part for part in (plan.base.profile.name, taken.label, stage) if part)
            progress.update(task, advance=1, description=described, refresh=True)

        yield on_sample, lambda line: progress.console.print(line, highlight=False, soft_wrap=True)


def _plain_line(taken: SampleTaken) -> None:
    label = f"{taken.label}: " if taken.label else ""
    note = " (warm-up)" if taken.warmup else ""
    say(f"{label}sample {taken.number} of {taken.of}{note}, {taken.wall_s:.3g} s")
