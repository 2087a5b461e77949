"""`[warmup]`: what the prover learns from given solutions before the game begins."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pvg.config.base import ByKind, Count, Folder, Positive, Section


class NoWarmup(Section):
    """The game begins with models.prover as it is."""

    kind: Literal["none"] = "none"


class DemonstrationWarmup(Section):
    """Before round 0 the prover learns to write the solutions of a file. The result is the base prover of the game. The
    file has the columns `question` and `solution`, and may have `role`: "helpful" (the default) or "sneaky"."""

    kind: Literal["demonstrations"] = "demonstrations"
    path: Folder | None = Field(None, description="File .jsonl, .csv or .parquet with questions and their solutions.")
    steps: Count = Field(100, description="Optimizer steps. Too many of them make the prover repeat the file.")
    batch: Count = Field(32, description="Solutions per step. More of them make steadier, slower steps.")
    learning_rate: Positive = Field(
        1e-4, description="Learning rate of AdamW, which falls to 0. Higher values learn faster, and may diverge."
    )


Warmup = Annotated[NoWarmup | DemonstrationWarmup, ByKind("none")]
