"""The `pvg` command. Each command imports heavy packages only when it runs, so `pvg --help` stays fast.

pvg train            play the embedded game on the CPU
pvg report RUN       show the results of a run
pvg watch RUN        follow a run in a browser while it trains
pvg study NAME       play several experiments with several seeds, and compare them
"""

from __future__ import annotations

import atexit
import gc
import os
from types import ModuleType
from typing import Annotated

import typer

from pvg import __version__
from pvg.spinning import bound_spinning
from pvg_cli import (
    bench,
    compare,
    config,
    contracts,
    diagnose,
    doctor,
    evaluate,
    export,
    init,
    plan,
    profile,
    report,
    run_folders,
    score,
    serve,
    study,
    task,
    train,
    watch,
)
from pvg_cli.boundary import Commands

# Otherwise transformers draws progress bars into the live display while it loads weights.
os.environ.setdefault("TQDM_DISABLE", "1")
bound_spinning()
# Python's are 700, 10, 10. With them, the collector scans the objects of torch and transformers again and again while
# they are loaded. These thresholds stay afterwards, because no command makes many cycles of objects.
gc.set_threshold(2_000, 10, 200)
# When Python ends, it looks for garbage once more, and not among frozen objects, such as those of torch.
atexit.register(gc.freeze)

app = typer.Typer(
    name="pvg",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Play, train and measure prover-verifier games with language models.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pvg {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Play, train and measure prover-verifier games with language models."""


# The groups of commands in `pvg --help`, in this order.
GROUPS: dict[str, tuple[ModuleType, ...]] = {
    "Play": (train, task),
    "Look": (report, watch, run_folders, diagnose),
    "Measure": (evaluate, study, bench, compare, profile, plan),
    "Share": (score, export, serve),
    "Set up": (init, config, doctor, contracts),
}


def _register(panel: str, modules: tuple[ModuleType, ...]) -> None:
    commands, groups = len(app.registered_commands), len(app.registered_groups)
    for module in modules:
        module.register(app)
    for command in app.registered_commands[commands:]:
        command.rich_help_panel = panel
    for group in app.registered_groups[groups:]:
        group.rich_help_panel = panel


for panel, modules in GROUPS.items():
    _register(panel, modules)
