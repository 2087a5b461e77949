"""`pvg runs list|show|tag|remove`: the runs of a folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pvg.errors import UsageError, counted
from pvg_cli import completion
from pvg_cli.boundary import emit, say
from pvg_cli.options import DebugOption, JsonOption, RunArgument, RunsOption

if TYPE_CHECKING:
    from pvg.reporting.follow import RunGlance
    from pvg.reporting.table import Table
    from pvg.store.run_directory import RunDirectory

app = typer.Typer(invoke_without_command=True, help="List, show, tag and remove runs. Without a command: list.")

TagOption = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Only runs that have this tag. Repeatable.")
]


@app.callback()
def default(
    ctx: typer.Context,
    tags: TagOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List, show, tag and remove runs. Without a command: list."""
    if ctx.invoked_subcommand is None:
        list_(tags=tags, runs=runs, as_json=as_json, debug=debug)


@app.command("list")
def list_(
    tags: TagOption = None, runs: RunsOption = Path("runs"), as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List the runs of a folder, the one with the newest activity first."""
    import time

    from pvg.reporting.follow import list_runs, runs_table
    from pvg.store.run_directory import half_removed
    from pvg_cli.output import stdout

    _refuse_no_folder(runs)
    found = list_runs(runs, tags or [])
    if as_json:
        emit({"runs": [run.plain() for run in found]})
    elif found:
        stdout().print(runs_table(found, time.time()))
        for run in found:
            for note in run.notes:
                say(f"{run.name}: {note}")
    else:
        say(f"There is no run {'with these tags ' if tags else ''}in {runs}. Start one with: pvg train")
    for name in half_removed(runs):
        what = f"{name} is half removed: `pvg runs remove` was killed. To finish it: pvg runs remove"
        say(f"{what} {shlex.quote(name)}{'' if runs == Path('runs') else f' --runs {shlex.quote(str(runs))}'}")


def _refuse_no_folder(runs: Path) -> None:
    """Raises UsageError if --runs names no folder. The default folder appears with the first run."""
    from pvg.store.run_directory import refuse_no_folder

    refuse_no_folder(runs)
    if runs != Path("runs") and not runs.exists():
        raise UsageError(f"There is no folder {runs}.", "Give the folder that contains the runs: --runs FOLDER")


@app.command()
def show(
    run: RunArgument, runs: RunsOption = Path("runs"), as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Show what a run is: its settings, state, files and tags, and the commands to go on with."""
    from pvg.reporting.follow import glance_at
    from pvg.store.run_directory import RunDirectory
    from pvg_cli.output import stdout

    directory = RunDirectory.open(run, runs)
    facts, sizes = glance_at(directory), _sizes(directory)
    commands = _commands(directory, facts)
    if as_json:
        emit({**facts.plain(), "sizes": sizes, "commands": list(commands)})
        return
    console = stdout()
    console.print(_facts_table(facts, sizes))
    for note in facts.notes:
        say(note)
    console.print()
    for command, use in commands.items():
        console.print(f"{use}: {command}")


@app.command()
def tag(
    run: RunArgument,
    tags: Annotated[list[str] | None, typer.Argument(metavar="TAG", help="The tags to add.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="TAG", help="A tag to remove. Repeatable.")
    ] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Add tags to a run, or remove some. Without a tag: print its tags."""
    from pvg.config.load import did_you_mean
    from pvg.store.run_directory import RunDirectory, read_tags, write_tags

    directory = RunDirectory.open(run, runs)
    found = read_tags(directory)
    for unknown in [tag for tag in remove or [] if tag not in found]:
        raise UsageError(
            f"The run {directory.name!r} has no tag {unknown!r}.{did_you_mean(unknown, found)}",
            f"Its tags: {' '.join(found) or 'none'}.",
        )
    if tags or remove:
        found = write_tags(directory, [tag for tag in [*found, *(tags or [])] if tag not in (remove or [])])
    if as_json:
        emit({"run": directory.name, "tags": found})
    else:
        typer.echo(" ".join(found))


@app.command()
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="The names of runs, or the paths of their folders.", autocompletion=completion.runs
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete also a run that another run starts from (run:NAME).")
    ] = False,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Delete runs with all of their files. Asks first. A run that a process plays is not deleted, and one that another
    run starts from only with --force."""
    from pvg.reporting.formats import byte_size
    from pvg.store.run_directory import RunDirectory, delete_removed, folder_bytes, half_removed, remove_run

    opened, left = dict[Path, RunDirectory](), dict[Path, list[Path]]()
    for name in names:
        found = {
            folder / Path(name).name: half_removed(folder).get(Path(name).name) for folder in (runs, Path(name).parent)
        }
        try:
            run = RunDirectory.open(name, runs)
            opened[run.path] = run
        except UsageError:
            if not any(found.values()):
                raise
            left |= {path: folders for path, folders in found.items() if folders}
    directories = list(opened.values())
    if not force:
        _refuse_needed(directories)
    sizes = {run.path: folder_bytes(run.path) for run in directories}
    sizes |= {path: sum(map(folder_bytes, folders)) for path, folders in left.items()}
    if not yes:
        _ask(
            [f"{path} ({'half removed, ' if path in left else ''}{byte_size(sizes[path])})" for path in sizes], as_json
        )
    for run in directories:
        name = run.name  # that of a link's target, as long as there is one
        remove_run(run, say)
        say(f"Removed {name}: {byte_size(sizes[run.path])}.")
    for path, folders in left.items():
        for folder in folders:
            delete_removed(folder)
        say(f"Removed the rest of {path.name}: {byte_size(sizes[path])}.")
    if as_json:
        emit({"removed": list(map(str, sizes)), "bytes": sum(sizes.values())})


def _refuse_needed(directories: list[RunDirectory]) -> None:
    """Raises UsageError if a run that stays starts from a run that would be deleted."""
    from pvg.store.run_players import runs_that_start_from

    doomed = {run.path.resolve() for run in directories}
    for run in directories:
        places = {run.path.parent, Path("runs")}
        found = {other.path.resolve(): other for place in places for other in runs_that_start_from(run, place)}
        kept = sorted(other.name for path, other in found.items() if path not in doomed)
        if kept:
            start, they = ("start", "them") if len(kept) > 1 else ("starts", "it")
            raise UsageError(
                f"{', '.join(kept)} {start} from the run {run.name!r}. Without it, pvg cannot resume, evaluate or "
                f"export {they}.",
                f"Delete {they} too: pvg runs remove {' '.join([run.name, *kept])}, or add --force.",
            )


def _ask(folders: list[str], as_json: bool) -> None:
    """Ask on stderr whether to delete. Raises UsageError without a terminal, and Exit(1) for a no."""
    import sys

    if as_json or sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("pvg asks before it deletes a run, but stdin is not a terminal.", "To delete it: --yes")
    for folder in folders:
        say(folder)
    if not typer.confirm(f"Delete {counted(len(folders), 'run')} with all files?", err=True):
        say("Nothing was deleted.")
        raise typer.Exit(1)


def _sizes(run: RunDirectory) -> dict[str, int]:
    """Bytes of the parts of a run's folder; without empty parts."""
    from pvg.store.run_directory import folder_bytes

    parts = {path.name: folder_bytes(path) for path in sorted(run.path.iterdir()) if path.is_dir()}
    parts["other files"] = folder_bytes(run.path) - sum(parts.values())
    return {name: size for name, size in parts.items() if size > 0}


def _facts_table(facts: RunGlance, sizes: dict[str, int]) -> Table:
    import time

    from pvg.reporting.follow import age
    from pvg.reporting.formats import byte_size
    from pvg.reporting.run_summary import state_word
    from pvg.reporting.table import Column, Table

    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.last_activity))
    player = f" (process {facts.process} on {facts.host})" if facts.process else ""
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    rows = {
        "run": facts.name,
        "folder": str(facts.path),
        "experiment": facts.experiment,
        "task": facts.task,
        "state": f"{state_word(facts.state, facts.status, bool(facts.notes))[0]}{player}",
        "phase": facts.phase,
        "rounds": f"{facts.rounds_finished} of {facts.rounds_planned or '?'} finished",
        "last activity": f"{moment} ({age(time.time() - facts.last_activity)})",
        "size": f"{byte_size(facts.size_bytes)}: {', '.join(f'{name} {byte_size(size)}' for name, size in largest)}",
        "tags": " ".join(facts.tags),
        "pvg": facts.code_version,
    }
    columns = [Column("", style="quiet", wrap=False), Column("")]
    return Table(columns, [(label, value) for label, value in rows.items() if value], narrow=True)


def _commands(run: RunDirectory, facts: RunGlance) -> dict[str, str]:
    """Commands to go on with, and what each is for."""
    from pvg_cli.runs import report_command, resume_command

    if not facts.experiment:  # its experiment.toml is damaged
        return {}
    commands = {report_command(run): "results", f"pvg config show {shlex.quote(str(run.experiment_file))}": "settings"}
    if facts.process:
        commands[f"pvg watch {run.argument}"] = "follow"
    elif facts.status in ("empty", "unfinished"):
        commands[resume_command(run)] = "resume"
    return commands
