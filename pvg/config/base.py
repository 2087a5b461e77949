"""Building blocks of the sections: `Section`, tagged tables (`ByKind`), and types that several sections use.

Invariant: a section refuses what is wrong by itself; what is wrong only together with another section is refused in
pvg.config.rules.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
)
from pydantic_core import core_schema

from pvg.config.hub_ids import is_hub_id, parse
from pvg.config.run_ids import is_run_id, parse_run_id
from pvg.errors import ConfigurationError
from pvg.extensions import is_reference

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
        return next((section.__name__ for section in self.sections if takes_kind(section, kind)), None)


def as_table(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The kinds that the section is for; for a section for users' own code, "FILE.py:NAME"."""
    annotation = section.model_fields["kind"].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else (OWN_CODE,)


def takes_kind(section: type[BaseModel], kind: Any) -> bool:
    kinds = kinds_of(section)
    if kinds == (OWN_CODE,):
        return isinstance(kind, str) and is_reference(kind)
    return kind in kinds


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
