"""Building blocks of the sections: `Section`, tagged tables (`ByKind`), ids of models, and other common types.

Invariant: a section refuses what is wrong by itself; what is wrong only together with another section is refused in
pvg.config.rules.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import core_schema

from pvg.errors import ConfigurationError, shortened
from pvg.extensions import is_reference


class StrictRecord(BaseModel):
    """A part of a JSON document of pvg. Refuses unknown fields, and numbers that JSON cannot represent."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, from_attributes=True)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return self.model_dump(mode="json")


# Ids of models and datasets of the Hugging Face hub: `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`.

WORD = r"\w(?:[\w.-]*\w)?"
HUB_ID = re.compile(rf"hf:(?P<repository>{WORD}(?:/{WORD})?)(?:@(?P<revision>{WORD}(?:/{WORD})*))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
LONGEST = 96  # characters of OWNER/NAME


@dataclass(frozen=True, slots=True)
class HubId:
    """`revision`: a branch, a tag, `refs/pr/N` or a commit; None: the newest commit of the main branch."""

    repository: str
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.repository.rpartition("/")[2]

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"hf:{self.repository}" + (f"@{self.revision}" if self.revision else "")


def is_hub_id(source: str) -> bool:
    return source.startswith("hf:")


def parse(source: str) -> HubId:
    """Raises ConfigurationError for an invalid name of a repository or a revision."""
    found = HUB_ID.fullmatch(source)
    if found is None or len(found["repository"]) > LONGEST or ".." in source or "--" in found["repository"]:
        raise ConfigurationError(
            f"{source[:LONGEST]!r} is not an id of the Hugging Face hub.",
            "Write hf:OWNER/NAME or hf:OWNER/NAME@REVISION.",
        )
    return HubId(found["repository"], found["revision"])


Player = Literal["prover", "verifier"]
Stage = int | Literal["warmup"]  # a round, from 0, or the end of the warm start

READER = "game.reward.reader"  # the setting of a third model
SCHEME = "run:"
FORM = "Write run:NAME, run:NAME/round-2 or run:NAME/round-2/verifier. NAME may also be the path of a run."
RUN_ID = re.compile(
    r"run:(?P<folder>.+?)(?:/(?P<stage>round-\d{1,6}|warmup))?(?:/(?P<player>prover|verifier))?"
    r"(?:@(?P<digest>[0-9a-f]{16}))?",
    re.ASCII,
)
RUNS = Path("runs")  # the default of store.root


@dataclass(frozen=True, slots=True)
class RunId:
    """`folder`: a name in runs/, or a path. `stage`: None for the last finished round. `player`: None for the prover.
    `digest`: the first 16 hex digits of the sha256 of the weights; None: any weights."""

    folder: str
    stage: Stage | None = None
    player: Player | None = None
    digest: str | None = None

    @property
    def path(self) -> Path:
        return Path(self.folder) if "/" in self.folder else RUNS / self.folder

    def __str__(self) -> str:
        stage = f"round-{self.stage}" if isinstance(self.stage, int) else self.stage
        parts = "/".join(part for part in (self.folder, stage, self.player) if part)
        return f"{SCHEME}{parts}" + (f"@{self.digest}" if self.digest else "")


def is_run_id(source: str) -> bool:
    return source.startswith(SCHEME)


def parse_run_id(source: str) -> RunId:
    """Raises ConfigurationError for another form."""
    found = RUN_ID.fullmatch(source)
    if found is None:
        raise ConfigurationError(f"{shortened(source)!r} does not name a player of a run.", FORM)
    stage: Stage | None = None
    if found["stage"] is not None:
        stage = "warmup" if found["stage"] == "warmup" else int(found["stage"].removeprefix("round-"))
    player: Player | None = None
    if found["player"] is not None:
        player = "verifier" if found["player"] == "verifier" else "prover"
    return RunId(found["folder"], stage, player, found["digest"])


def with_player(source: str, player: Player) -> str:
    """The source; a run's without a player gets `player`. The warm start has only a prover."""
    if not is_run_id(source) or (found := parse_run_id(source)).player is not None:
        return source
    return str(replace(found, player="prover" if found.stage == "warmup" else player))


def without_folder(source: str) -> str:
    """The source; one with a digest loses the place of its run, because the digest says which weights it means. A
    second call changes nothing."""
    if not is_run_id(source) or (found := parse_run_id(source)).digest is None:
        return source
    return str(replace(found, folder="."))


def shown_source(source: str) -> str:
    """The source for others to read: a run's has only the name of its folder."""
    if not is_run_id(source):
        return source
    found = parse_run_id(source)
    return str(replace(found, folder=found.path.name))


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NotEmpty = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0.0)]
Weight = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Folder = Annotated[Path, Field(strict=False)]  # TOML has no paths: text becomes one


class Section(BaseModel):
    """A part of the configuration: immutable, and no key is ever ignored."""

    # Strict: "30" is no number and true is no count. (An integer is a number still.)
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, strict=True)


class ByKind:
    """Marks a tagged table: a union of sections, each with a field `kind` that says which kinds it is for.

    A bare string stands for a table with that kind and its defaults. A table without `kind` has the default kind.
    """

    def __init__(self, default: str) -> None:
        self.default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        self.sections: tuple[type[Section], ...] = get_args(source)
        choices: dict[Hashable, core_schema.CoreSchema] = {
            section.__name__: handler.generate_schema(section) for section in self.sections
        }
        tagged = core_schema.tagged_union_schema(choices, discriminator=self.section_of)
        return core_schema.no_info_before_validator_function(as_table, tagged)

    def kinds(self) -> list[str]:
        return [kind for section in self.sections for kind in kinds_of(section)]

    def section_of(self, value: Any) -> str | None:
        """The name of the section that `value` is meant for; None for an unknown kind."""
        if isinstance(value, BaseModel):
            return type(value).__name__
        kind = value.get("kind", self.default) if isinstance(value, dict) else None
        named = OWN_CODE if isinstance(kind, str) and is_reference(kind) else kind
        return next((section.__name__ for section in self.sections if named in kinds_of(section)), None)


def as_table(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The kinds that the section is for; for a section for users' own code, "FILE.py:NAME"."""
    annotation = section.model_fields["kind"].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else (OWN_CODE,)


OWN_CODE = "FILE.py:NAME"


def _source(source: str) -> str:
    """A hub id or a run's player of the right form, or any other text."""
    try:
        if is_hub_id(source):
            parse(source)
        elif is_run_id(source):
            parse_run_id(source)
    except ConfigurationError as error:
        raise ValueError(f"{error.message} {error.remedy}".rstrip(".")) from None
    return source


Source = Annotated[str, AfterValidator(_source)]
DataFolder = Annotated[Path, Field(strict=False), AfterValidator(lambda path: Path(_source(str(path))))]


def _names(value: Any) -> Any:
    """Names as a list, each once."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    named = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    return tuple(dict.fromkeys(value)) if named else value
