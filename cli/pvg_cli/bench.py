"""`pvg bench`: measure the work of a profile repeatedly, and write the times to a report."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from pvg.errors import MissingRequirementError, UsageError
from pvg_cli import completion
from pvg_cli.boundary import announce_loading, command_line, emit, say, stopped
from pvg_cli.options import JSON_MARK, DebugOption, JsonOption, SetOption, check_output

if TYPE_CHECKING:
    from pvg.bench.planning import BenchPlan
    from pvg.bench.runner import SampleTaken

PROFILE_HELP = "A profile in ./profiles or of pvg, or a TOML file."
REPORTS = Path("bench")  # the folder for reports without --out
PROBE_BYTES = 1 << 20  # much more than a report needs


def bench(
    *,
    profile: Annotated[
        str | None,
        Option("--profile", "-p", metavar="NAME|FILE", help=PROFILE_HELP, autocompletion=completion.profiles),
    ] = None,
    overrides: SetOption = None,
    sweep: Annotated[str | None, Option(metavar="KEY=A,B,C", help="Measure each value of a setting.")] = None,
    ablate: Annotated[bool, Option("--ablate", help="Turn all optimizations off, then on one after another.")] = False,
    interleave: Annotated[
        bool | None, Option("--interleave", help="Sample the variants in turn. All are in memory.", show_default=False)
    ] = None,
    server: Annotated[list[str] | None, Option(metavar="URL", help="Measure on this vLLM server. Repeatable.")] = None,
    serve: Annotated[bool, Option("--serve", help="Start the vLLM servers that the variants need.")] = False,
    beside: Annotated[
        int | None, Option(metavar="N", min=0, max=4096, help="Processes that compete for cores.")
    ] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="FILE", help="The report. Default: bench/NAME-TIME.json.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure a profile: repeat the same work after a warm-up. Without --profile: list the profiles.

    If a variant fails, the report says why, and the exit code is 1, 2 or 3.
    """
    from pvg.bench.workloads import find_profile

    if profile is not None:
        find_profile(profile)  # before torch is loaded
        announce_loading()
    from pvg.bench.planning import plan_bench
    from pvg.bench.report import write_report
    from pvg.bench.runner import run_plan
    from pvg.telemetry.cpu import precision_warnings
    from pvg_cli.output import stdout

    if profile is None:
        if overrides or sweep or ablate or out or server or serve:
            raise UsageError("--profile is missing.", "Give --profile NAME. To list the profiles: pvg bench")
        _list_profiles(as_json)
        return
    given = [*(overrides or []), *([] if beside is None else [f"beside={beside}"])]
    urls = [url for words in server or [] for url in words.split(",")]
    plan = plan_bench(profile, given, sweep=sweep, ablate=ablate, interleave=interleave, server_urls=urls, serve=serve)
    for warning in precision_warnings(plan.base.experiment):
        say(f"warning: {warning}.")
    path = _output(out, plan)
    try:
        result = run_plan(plan, command=command_line(), on_sample=_on_sample, on_server=say)
        write_report(path, result.report)
    except KeyboardInterrupt:
        raise stopped("Stopped. No report was written.", document=as_json) from None
    if as_json:
        emit(result.report.plain())
        say(f"Written to {path}.")
    else:
        from pvg_cli.bench_tables import report_text

        this = shlex.quote(str(path))
        commands = {f"pvg report {this}": "the same numbers, with the time budget of each variant"}
        if result.report.status == "ok":
            commands[f"pvg compare OTHER {this}"] = "is this faster than before?"
        stdout().print(report_text(result.report, path, commands))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _list_profiles(as_json: bool) -> None:
    from pvg.bench.workloads import read_profile
    from pvg.config.load import known_files
    from pvg_cli.output import names_table, stdout

    paths = known_files("profiles")
    profiles = {name: read_profile(path) for name, path in paths.items()}
    about = {name: profile.about for name, profile in profiles.items()}
    if as_json:
        found = [
            {"name": name, "workload": profile.profile, "about": about[name], "path": str(paths[name])}
            for name, profile in profiles.items()
        ]
        emit({"profiles": found})
    else:
        stdout().print(names_table(about, "Run one with", "pvg bench --profile NAME"))


# --- the report's file ----------------------------------------------------------------------------------------------


def _output(out: Path | None, plan: BenchPlan) -> Path:
    """The path of the report, whose folder exists. Raises an error if the report could not be written there."""
    import tempfile
    from datetime import UTC, datetime

    from pvg.store.atomic import make_directory

    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    path = out if out is not None else REPORTS / f"{plan.base.profile.name}-{stamp}.json"
    check_output("--out", out, JSON_MARK)
    try:
        make_directory(path.parent)
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())  # some file systems allocate space only now
    except OSError as error:
        raise MissingRequirementError(
            f"No report can be written to {path.parent}: {error.strerror}.", "Choose another file: --out FILE"
        ) from error
    return path


def _on_sample(taken: SampleTaken) -> None:
    from pvg.reporting.formats import sample_seconds

    label = f"{taken.label}: " if taken.label else ""
    note = " (warm-up)" if taken.warmup else ""
    say(f"{label}sample {taken.number} of {taken.of}{note}, {sample_seconds(taken.wall_s)}")
