"""The `pvg` command. One module per command; each imports what is heavy when it runs, so `pvg --help` stays quick.

pvg train            play the embedded game on the CPU
pvg report RUN       read what it left behind
pvg study NAME       play arms x seeds, and compare them
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from pvg import __version__
from pvg.spinning import bound_spinning
from pvg_cli import bench, compare, config, diagnose, doctor, evaluate, profile, report, serve, study, train
from pvg_cli.boundary import Commands

# transformers draws progress bars of its own while it unpacks weights, right through the live display.
os.environ.setdefault("TQDM_DISABLE", "1")
bound_spinning()

app = typer.Typer(
    name="pvg",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Prover-verifier games for language models: play, train and measure them.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pvg {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Prover-verifier games for language models: play, train and measure them."""


train.register(app)
serve.register(app)
bench.register(app)
compare.register(app)
study.register(app)
report.register(app)
evaluate.register(app)
config.register(app)
doctor.register(app)
diagnose.register(app)
profile.register(app)
