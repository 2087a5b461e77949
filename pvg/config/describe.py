"""What each setting means: `pvg config show`, `pvg config explain` and the reference page, from one source.

The text is the `description` of each field in the modules of pvg.config, and the docstring of each section.

    python -m pvg.config.describe        # writes docs/settings.md
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel

from pvg.config.base import kinds_of
from pvg.config.experiment import TABLES, Experiment
from pvg.config.load import nearest_key, read_toml, shipped_directories
from pvg.errors import UsageError

PAGE = Path("docs") / "settings.md"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting. `kinds` are the kinds of its table that have it; () outside of tagged tables."""

    key: str
    type: str
    default: Any
    meaning: str
    kinds: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The key with the kinds in short: `task (gsm8k).path`."""
        table, _, leaf = self.key.rpartition(".")
        return f"{table} ({kinds_text(self.kinds)}).{leaf}" if self.kinds else self.key


def settings() -> list[Setting]:
    """Every setting; those of a tagged table once per section of it."""
    return list(_settings(Experiment, Experiment(), ""))


def _settings(
    section: type[BaseModel], defaults: BaseModel | None, place: str, kinds: tuple[str, ...] = ()
) -> Iterator[Setting]:
    for name, info in section.model_fields.items():
        key = f"{place}{name}"
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _settings(info.annotation, getattr(defaults, name), f"{key}.")
        elif (table := TABLES.get(key)) is not None:
            choices = " or ".join(f'"{kind}"' for kind in table.kinds())
            yield Setting(f"{key}.kind", choices, table.default, "Choice. It decides which settings the table has.")
            for choice in table.sections:
                yield from _settings(choice, None, f"{key}.", kinds_of(choice))
        elif name != "kind":
            plain = info.get_default(call_default_factory=True)
            default = getattr(defaults, name, plain)
            yield Setting(key, type_text(info.annotation), default, info.description or "", kinds)


def kinds_text(kinds: tuple[str, ...]) -> str:
    """The kinds in short."""
    return f"{kinds[0]}, ..." if len(kinds) > 1 else kinds[0]


def type_text(annotation: Any) -> str:
    """A type as a user reads it: `integer`, `"a" or "b"`, `number, or left out`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_text(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        parts = [type_text(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(parts) + (", or left out" if type(None) in get_args(annotation) else "")
    if origin is tuple:
        return f"list of {type_text(get_args(annotation)[0])}"
    names = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", dict: "table"}
    return names.get(origin or annotation, str(annotation))


def toml_value(value: Any) -> str:
    """As it would stand in a TOML file; empty for what is left out."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return str(value) if isinstance(value, int | float | dict) else f'"{value}"'


def about(section: type[BaseModel]) -> str:
    """What a section is, in one line."""
    return " ".join((section.__doc__ or "").split())


# --- pvg config show -------------------------------------------------------------------------------------------------


def commented_toml(experiment: Experiment) -> str:
    """The experiment as TOML, with a comment for each table and each setting. It reads back as the same experiment."""
    lines: list[str] = []
    for line in tomli_w.dumps(experiment.plain()).splitlines():
        if found := re.fullmatch(r"\[([a-z_.]+)\]", line):
            table = found[1]
            node: Any = experiment
            for part in table.split("."):
                node = getattr(node, part, None)
            lines += [f"# {about(type(node)).split('. ')[0].rstrip('.')}."] if isinstance(node, BaseModel) else []
            meanings = _meanings(node)
        elif not lines:
            meanings = _meanings(experiment)
        key = line.split(" = ")[0]
        comment = meanings.get(key, "")
        if comment and line.endswith(("[", "{")):  # the value continues on the next lines
            lines.append(f"# {comment}")
            comment = ""
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def _meanings(section: Any) -> Mapping[str, str]:
    fields = type(section).model_fields if isinstance(section, BaseModel) else {}
    return {name: info.description or "" for name, info in fields.items()}


# --- pvg config explain ----------------------------------------------------------------------------------------------


def explained(key: str) -> dict[str, Any]:
    """What `pvg config explain KEY` tells of a setting or a tagged table, as plain data.

    Raises UsageError for an unknown key, with the nearest one.
    """
    if key in TABLES:
        table = TABLES[key]
        kinds = {", ".join(kinds_of(section)): about(section) for section in table.sections}
        return {"key": key, "default": table.default, "kinds": kinds, "experiments": used(key)}
    found = [setting for setting in settings() if setting.key == key]
    if not found:
        hint = nearest_key(key)
        raise UsageError(
            f"There is no setting {key!r}." + (f" The nearest one is {hint!r}." if hint else ""),
            "See `pvg config schema` for all settings.",
        )
    forms = [
        {"kinds": list(each.kinds), "meaning": each.meaning, "type": each.type, "default": toml_value(each.default)}
        for each in found
    ]
    return {"key": key, "forms": forms, "experiments": used(key)}


def used(key: str) -> dict[str, str]:
    """Experiment -> the value that its file gives to `key`, of the experiments that come with pvg."""
    found = {}
    for path in sorted(path for place in shipped_directories() for path in place.glob("*.toml")):
        node: Any = read_toml(path, "experiment")
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node = node.get("kind", TABLES[key].default) if key in TABLES else None
        if node is not None:
            found[path.stem] = toml_value(node)
    return found


# --- the reference page ----------------------------------------------------------------------------------------------

INTRODUCTION = """# Settings

<!-- Written by `python -m pvg.config.describe`: change the texts in pvg/config/. -->

This page lists every setting of an experiment, with its type and default. `pvg config explain KEY` shows one of
them, and `pvg config show EXPERIMENT` shows an experiment with the same comments.

A choice is a table with a `kind`; the settings of a kind exist only in its table. A bare string stands for a table with
that kind and its defaults, in a file and on the command line: `-s training.loss=dapo` is `-s training.loss.kind=dapo`.
An override that changes the kind starts with the defaults of the new kind. Pass `-s` more than once to set more:
`-s training.kl=adaptive -s training.kl.target=0.1`."""


def page() -> str:
    """docs/settings.md."""
    text = [INTRODUCTION]
    text += _section_lines(Experiment, "")
    return "\n".join(text) + "\n"


def _section_lines(section: type[BaseModel], place: str) -> list[str]:
    lines: list[str] = []
    inner: list[str] = []
    own = [
        setting for setting in settings() if setting.key.rpartition(".")[0] == place.rstrip(".") and not setting.kinds
    ]
    own = [setting for setting in own if setting.key.removesuffix(".kind") not in TABLES]
    if own:
        title = f"## `[{place.rstrip('.')}]`" if place else "## Top level"
        lines += ["", title, "", about(section), "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(setting) for setting in own]
    for name, info in section.model_fields.items():
        key = f"{place}{name}"
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            inner += _section_lines(info.annotation, f"{key}.")
        elif key in TABLES:
            inner += _table_lines(key)
    return [*lines, *inner]


def _table_lines(key: str) -> list[str]:
    table = TABLES[key]
    lines = ["", f"### `[{key}]`", "", f"Default: `{table.default}`.", "", "| kind | what it is |", "|---|---|"]
    lines += [f"| {_code_list(kinds_of(section))} | {about(section)} |" for section in table.sections]
    own = [setting for setting in settings() if setting.kinds and setting.key.rpartition(".")[0] == key]
    if own:
        lines += ["", "| key | kinds | type | default | meaning |", "|---|---|---|---|---|"]
        lines += [_row(setting, f" {_code_list(setting.kinds)} |") for setting in own]
    return lines


def _code_list(kinds: tuple[str, ...]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _row(setting: Setting, kinds: str = "") -> str:
    default = f"`{value}`" if (value := toml_value(setting.default)) else "unset"
    return f"| `{setting.key}` |{kinds} {setting.type} | {default} | {setting.meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len({setting.key for setting in settings()})} settings")
