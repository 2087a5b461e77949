"""`[evaluate]`, `[telemetry]` and `[store]`: sections that change nothing that a run computes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
)

from pvg.config.base import Count, Folder, Fraction, NotEmpty, Positive, Section, _names


class Evaluate(Section):
    """What `pvg evaluate` measures in the finished rounds of a run, and with how much effort. These settings do not
    change the run, so you can set them for a complete run."""

    problems: Annotated[int, Field(ge=2)] = Field(
        128, description="Number of test problems. More of them make intervals narrower, and take longer."
    )
    samples: Annotated[int, Field(ge=2)] = Field(
        8, description="Solutions per problem and role. More of them make intervals narrower, and take longer."
    )
    attacks: Annotated[tuple[Literal["src", "cgc", "goodhart"], ...], Field(strict=False), BeforeValidator(_names)] = (
        Field(
            ("src", "cgc", "goodhart"),
            description="Rewards of the attackers.",
        )
    )
    attack_steps: Annotated[int, Field(ge=1, le=100_000)] = Field(
        200,
        description="Optimizer steps after which an attack ends without success. With more of them, attacks are "
        "stronger.",
    )
    attack_window: Count = Field(
        10, description="Batches that the criterion of an attack is averaged over. More of them make it less noisy."
    )
    attack_error_rate: Fraction = Field(
        0.95, description="Share of well-formed wrong solutions that an exploit needs (arXiv 2407.13692)."
    )
    attack_groups: Count | None = Field(None, description="Groups per batch of attackers. Unset: training.groups.")
    baseline_probes: Annotated[int, Field(ge=1, le=90)] = Field(
        6, description="Points on the trajectory of the baseline, besides its start. More of them take longer."
    )


class Telemetry(Section):
    """What pvg monitors, and when it raises an alert. These settings do not change results."""

    event_loop: Literal["uvloop", "asyncio"] = Field("uvloop", description="The asyncio event loop that pvg uses.")
    stall_s: Positive = Field(600.0, description="Alert when no step has ended for this many seconds.")
    sinks: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False), BeforeValidator(_names)
    ] = Field((), description="Experiment trackers that also get the metrics.")
    metrics_port: Annotated[int, Field(ge=0, lt=65536)] = Field(
        0, description="Port of the Prometheus endpoint on 127.0.0.1. 0: none."
    )
    alert_command: Annotated[tuple[NotEmpty, ...], Field(strict=False)] = Field(
        (),
        description="Program to run for each alert, with its arguments. It reads the alert as JSON. Empty: none.",
    )


class Store(Section):
    """Where runs are stored, and how often they commit."""

    root: Folder = Field(Path("runs"), description="Folder of the runs.")
    commit_every: Count = Field(
        10, description="Optimizer steps between two commits. A killed run repeats at most that many."
    )
