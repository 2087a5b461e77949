"""`pvg runs list|remove`: the runs of a folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from pvg.errors import UsageError, counted
from pvg_cli import completion
from pvg_cli.boundary import emit, say
from pvg_cli.options import DebugOption, JsonOption, RunsOption

if TYPE_CHECKING:
    from pvg.store.run_directory import RunDirectory

app = typer.Typer(invoke_without_command=True, help="List and remove runs. Without a command: list.")


@app.callback()
def default(
    ctx: typer.Context, runs: RunsOption = Path("runs"), as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """List and remove runs. Without a command: list."""
    if ctx.invoked_subcommand is None:
        list_(runs=runs, as_json=as_json, debug=debug)


@app.command("list")
def list_(runs: RunsOption = Path("runs"), as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the runs of a folder, the one with the newest activity first."""
    import time

    from pvg.reporting.follow import list_runs, runs_table
    from pvg.store.run_directory import half_removed, refuse_no_folder
    from pvg_cli.output import stdout

    refuse_no_folder(runs)
    if runs != Path("runs") and not runs.exists():  # the default folder appears with the first run
        raise UsageError(f"There is no folder {runs}.", "Give the folder that contains the runs: --runs FOLDER")
    found = list_runs(runs)
    if as_json:
        emit({"runs": [run.plain() for run in found]})
    elif found:
        stdout().print(runs_table(found, time.time()))
        for run in found:
            for note in run.notes:
                say(f"{run.name}: {note}")
    else:
        say(f"There is no run in {runs}. Start one with: pvg train")
    for name in half_removed(runs):
        what = f"{name} is half removed: `pvg runs remove` was killed. To finish it: pvg runs remove"
        say(f"{what} {shlex.quote(name)}{'' if runs == Path('runs') else f' --runs {shlex.quote(str(runs))}'}")


@app.command()
def remove(
    names: Annotated[
        list[str], Argument(metavar="RUN", help="Names of runs, or their folders.", autocompletion=completion.runs)
    ],
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, Option("--force", help="Also if another run starts from it (run:NAME).")] = False,
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
