"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ExperimentArgument = Annotated[
    str, typer.Argument(metavar="[NAME|FILE]", help="An experiment of ./experiments or of pvg, or a TOML file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Change a setting, such as training.steps=30, or those of a TOML file: @FILE; repeatable.",
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The name of a run, or the path of its folder.")]
RunsOption = Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="The folder that holds the runs.")]
MetricsPortOption = Annotated[
    int | None,
    typer.Option("--metrics-port", metavar="PORT", help="Serve the metrics to Prometheus on 127.0.0.1:PORT."),
]


def metrics_port_override(port: int | None) -> list[str]:
    """The setting that `--metrics-port` stands for, as an override."""
    return [] if port is None else [f"telemetry.metrics_port={port}"]
