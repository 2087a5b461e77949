"""`[models]`: where the models come from, and where they compute. `[*.adapters]`: low-rank adapters."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
)

from pvg.config.base import ByKind, Count, Positive, Section, Source
from pvg.config.run_ids import Player, with_player


class ModelSection(Section):
    """Where a model comes from.

    `source`: "embedded:NAME" (shipped with pvg), "hf:OWNER/NAME" or "hf:OWNER/NAME@REVISION" (the Hugging Face hub),
    "run:NAME" or "run:NAME/round-2/verifier" (a player of another run), "gguf:PACKAGE" (a GGUF file inside an installed
    package), or the path of a Hugging Face directory.
    """

    source: Source = Field(
        "embedded:modchain-prover",
        description='"embedded:NAME", "hf:OWNER/NAME[@REVISION]", "run:NAME[/round-N][/verifier]", "gguf:PACKAGE", or '
        "a Hugging Face directory.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Data type of the weights. bfloat16 halves their memory, and is slow on a CPU without support "
        "for it.",
    )


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise ValueError(f"models.device = {name!r} is not a device; use 'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'")
    return name


Device = Annotated[str, AfterValidator(_device)]


def _for_player(player: Player, section: ModelSection) -> ModelSection:
    """The section; a run's source that names no player means the same player."""
    source = with_player(section.source, player)
    return section if source == section.source else section.model_copy(update={"source": source})


ProverModel = Annotated[ModelSection, AfterValidator(partial(_for_player, "prover"))]
VerifierSource = Annotated[ModelSection, AfterValidator(partial(_for_player, "verifier"))]


class Models(Section):
    """The models of the two players, and where they compute."""

    prover: ProverModel = ModelSection()
    verifier: VerifierSource = ModelSection(source="embedded:modchain-verifier")
    device: Device = Field("auto", description='"auto", "cpu", "mps", "cuda" or "cuda:N". "mps" is untested.')
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="Compute threads. 0: one for models narrower than 512, else one per core."
    )


class NoAdapters(Section):
    """All weights are trained."""

    kind: Literal["none"] = "none"
    rank: ClassVar[int] = 0
    alpha: ClassVar[float] = 1.0


class LoraAdapters(Section):
    """Low-rank adapters of all linear layers are trained, and all other weights are frozen (extra `lora`)."""

    kind: Literal["lora"] = "lora"
    rank: Count = Field(16, description="Rank of the adapters. Higher ranks can learn more, and take more memory.")
    alpha: Positive = Field(
        16.0,
        description="The output of an adapter is multiplied by alpha / rank. Higher values act like a higher "
        "learning rate.",
    )


Adapters = Annotated[NoAdapters | LoraAdapters, ByKind("none")]
