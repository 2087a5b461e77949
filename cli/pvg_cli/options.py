"""Options and arguments that several commands share, and the files that options name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pvg.errors import UsageError, user_paths
from pvg_cli import completion
from pvg_cli.boundary import first_prints, say

NAME_HELP = "An experiment in ./experiments, an experiment that comes with pvg, or a TOML file."

SET_HELP = "Change a setting: -s training.steps=30. Load settings from a TOML file: -s @FILE. Repeatable."
JSON_HELP = "Print one JSON document on stdout. All other text goes to stderr."

JsonOption = Annotated[bool, Option("--json", help=JSON_HELP)]
JsonOfFirst = Annotated[bool, Option("--json", help=JSON_HELP, callback=first_prints)]  # under torchrun
DebugOption = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]
ExperimentArgument = Annotated[
    str, Argument(metavar="NAME|FILE", help=NAME_HELP, autocompletion=completion.experiments)
]
ExperimentOrDefault = Annotated[
    str | None,
    Argument(metavar="NAME|FILE", help=f"{NAME_HELP} Default: modchain.", autocompletion=completion.experiments),
]
SetOption = Annotated[
    list[str] | None, Option("--set", "-s", metavar="KEY=VALUE", help=SET_HELP, autocompletion=completion.settings)
]
RunArgument = Annotated[
    str, Argument(metavar="RUN", help="The name of a run, or the path of its folder.", autocompletion=completion.runs)
]
RunNameOption = Annotated[
    str | None, Option("--name", metavar="RUN", help="The name of the run. Default: the experiment's, with a number.")
]
RunsOption = Annotated[Path, Option("--runs", metavar="FOLDER", help="The folder that contains the runs.")]
RoundOption = Annotated[int, Option("--round", metavar="N", help="A finished round, counted from 0. -1: the last.")]
ClusterOption = Annotated[
    str | None, Option("--cluster", metavar="none|local|ray|HOST:PORT", help="Where workers run. ray: pvg starts one.")
]
# What files that pvg writes begin with, apart from runs (pvg.store.atomic.is_foreign).
JSON_MARK, PAGE_MARK = b'"schema_version"', b'<meta name="generator" content="pvg">'

MetricsPortOption = Annotated[
    int | None, Option("--metrics-port", metavar="PORT", help="Serve metrics for Prometheus on 127.0.0.1:PORT.")
]


def metrics_port_override(port: int | None) -> list[str]:
    return [] if port is None else [f"telemetry.metrics_port={port}"]


@user_paths()
def check_output(option: str, path: Path | None, mark: bytes, *inputs: Path) -> None:
    """Before the work: raises UsageError if `path` cannot be the file of an option, is one of the `inputs`, or is a
    file without the `mark` of what would replace it."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder.", f"Give a file: {option} FILE")
    if path.parent.is_file():
        raise UsageError(f"{path.parent} is a file, not a folder.", f"Give another file: {option} FILE")
    if not path.parent.is_dir():
        raise UsageError(f"The folder {path.parent} does not exist.", f"mkdir -p {shlex.quote(str(path.parent))}")
    if path.is_file() and any(each.exists() and path.samefile(each) for each in inputs):
        raise UsageError(f"{option} {path} would overwrite what pvg reads.", f"Give another file: {option} FILE")
    refuse_foreign(path, mark, f"Give another file: {option} FILE")


def parse_share(text: str, most: float = 100.0) -> float:
    """A share from `5%`, `5 %` or `0.05`. Raises UsageError for other text, for more than `most`, and for 5 without %,
    which is ambiguous."""
    number = text.strip()
    percent = number.endswith("%")
    try:
        value = float(number.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most or (value >= 1 and not percent):
        raise UsageError(f"--fail-above {text!r} is not a share.", "Write 5% or 0.05.")
    return value


def refuse_foreign(path: Path, mark: bytes, remedy: str) -> None:
    """Raises UsageError if pvg did not write the file at `path` (see `is_foreign`)."""
    from pvg.store.atomic import is_foreign

    if is_foreign(path, mark):
        raise UsageError(f"{path} exists, and pvg did not write it, so pvg does not replace it.", remedy)


@user_paths()
def check_folder(folder: Path, **marks: bytes) -> None:
    """Before the work: raises UsageError if the folder of --out has a file that pvg would replace, but did not write.
    `marks`: name of the file, with _ for its dot -> its mark."""
    for name, mark in marks.items():
        refuse_foreign(folder / name.replace("_", "."), mark, "Choose another folder: --out FOLDER")


@user_paths()
def write_output(path: Path, text: str) -> None:
    """Write the file of an option, whole or not at all, and say where it is."""
    from pvg.store import atomic

    atomic.write_output(path, text.encode())
    say(f"Written to {path}.")
