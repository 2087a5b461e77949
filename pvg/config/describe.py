"""What each setting means: `pvg config show`, `pvg config explain` and the reference page, from one source.

The text is the `description` of each field in the modules of pvg.config, and the docstring of each section.

    python -m pvg.config.describe        # prints the reference page, which docs/site.py adds to the site
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import orjson
import tomli_w
from pydantic import BaseModel

from pvg.config.base import kinds_of
from pvg.config.experiment import TABLES, Experiment, fields_of, is_section
from pvg.config.load import nearest_key, read_settings, shipped_directories
from pvg.config.sections import value_of
from pvg.errors import UsageError

KIND = "Choice. It decides which settings the table has."
UNLIMITED = 10**12  # a limit of this size only guards against numbers that no machine can count


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting. `kinds` are the kinds of its table that have it; () outside of tagged tables. `range` is empty if the
    type alone decides what is allowed."""

    key: str
    type: str
    default: Any
    meaning: str
    range: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The key with the kinds in short: `task (gsm8k).path`."""
        table, _, leaf = self.key.rpartition(".")
        more = ", ..." if len(self.kinds) > 1 else ""
        return f"{table} ({self.kinds[0]}{more}).{leaf}" if self.kinds else self.key


def settings() -> Iterator[Setting]:
    """Every setting; those of a tagged table once per section of it."""
    defaults = Experiment()
    for key, section, info in fields_of(Experiment):
        name = key.rpartition(".")[2]
        if (table := TABLES.get(key)) is not None:
            choices = " or ".join(f'"{kind}"' for kind in table.kinds())
            yield Setting(f"{key}.kind", choices, table.default, KIND)
        elif name != "kind" and not is_section(info.annotation):
            kinds = kinds_of(section) if "kind" in section.model_fields else ()
            default = info.get_default(call_default_factory=True) if kinds else value_of(defaults, key)
            allowed = range_text(_properties(section)[name])
            yield Setting(key, type_text(info.annotation), default, info.description or "", allowed, kinds)


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
    if is_section(annotation):
        return "table"
    names = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", dict: "table"}
    return names.get(origin or annotation, str(annotation))


@cache
def _properties(section: type[BaseModel]) -> dict[str, Any]:
    """The JSON schemas of a section's settings."""
    return dict(section.model_json_schema()["properties"])


def range_text(schema: Mapping[str, Any]) -> str:
    """The allowed values of a setting, from its JSON schema: `1 to 64`, `above 0`; empty without limits."""
    for choice in schema.get("anyOf", [schema]):
        low, high = choice.get("minimum"), choice.get("maximum", choice.get("exclusiveMaximum"))
        above = choice.get("exclusiveMinimum")
        if high is not None and high >= UNLIMITED:
            high = None
        lower = f"above {_number(above)}" if above is not None else "" if low is None else f"at least {_number(low)}"
        below = "below" if "exclusiveMaximum" in choice else "at most"
        upper = "" if high is None else f"{below} {_number(high)}"
        if low is not None and high is not None and "maximum" in choice:
            return f"{_number(low)} to {_number(high)}"
        if lower or upper:
            return " and ".join(filter(None, (lower, upper)))
    return ""


def _number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:g}"


def toml_value(value: Any) -> str:
    """As it would stand in a TOML file; empty for what is left out."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return str(value) if isinstance(value, int | float | dict) else orjson.dumps(str(value)).decode()


def typed(setting: Setting) -> str:
    """Type and range: `integer, at least 1`."""
    return ", ".join(filter(None, (setting.type, setting.range)))


def about(section: type[BaseModel]) -> str:
    """What a section is, in one line."""
    return " ".join((section.__doc__ or "").split())


# --- pvg config show -------------------------------------------------------------------------------------------------


def commented_toml(experiment: Experiment) -> str:
    """The experiment as TOML, with a comment for each table and each setting. It reads back as the same experiment."""
    lines: list[str] = []
    for line in tomli_w.dumps(experiment.plain()).splitlines():
        if found := re.fullmatch(r"\[\[?([a-z_.]+)\]?\]", line):
            table = found[1]
            node: Any = experiment
            for part in table.split("."):
                node = getattr(node, part, None)
                node = node[0] if isinstance(node, tuple) and node else node
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
    """What `pvg config explain KEY` tells of a setting, a tagged table or a section, as plain data. Raises UsageError
    for an unknown key, with the nearest one."""
    if key in TABLES:
        table = TABLES[key]
        kinds = {", ".join(kinds_of(section)): about(section) for section in table.sections}
        return {
            "key": key,
            "default": table.default,
            "kinds": kinds,
            "settings": _inside(key),
            "experiments": used(key),
        }
    for place, _, info in fields_of(Experiment):
        if place == key and is_section(info.annotation):
            return {"key": key, "meaning": about(info.annotation), "settings": _inside(key)}
    found = [setting for setting in settings() if setting.key == key]
    if not found:
        hint = nearest_key(key)
        raise UsageError(
            f"There is no setting {key!r}." + (f" The nearest one is {hint!r}." if hint else ""),
            "See `pvg config show` for all settings.",
        )
    forms = [{**_told(each), "type": each.type} for each in found]
    return {"key": key, "forms": forms, "experiments": used(key)}


def _inside(key: str) -> list[dict[str, Any]]:
    """The settings of a section or a tagged table."""
    inside = [each for each in settings() if each.key.startswith(f"{key}.") and each.key != f"{key}.kind"]
    return [{"key": each.key, **_told(each)} for each in inside]


def _told(setting: Setting) -> dict[str, Any]:
    default = toml_value(setting.default)
    return {"kinds": list(setting.kinds), "meaning": setting.meaning, "range": setting.range, "default": default}


def json_schema() -> dict[str, Any]:
    schema = Experiment.model_json_schema()
    for section in [schema, *schema["$defs"].values()]:
        for name, field in section.get("properties", {}).items():
            if name == "kind":
                field.setdefault("description", KIND)
    return schema


def used(key: str) -> dict[str, str]:
    """Experiment -> the value that its file gives to `key`, of the experiments that come with pvg. A table's kind may
    stand in the table, or alone: `prompts = "chat"`."""
    if (table := key.removesuffix(".kind")) in TABLES:
        key = table
    found = {}
    for path in sorted(path for place in shipped_directories() for path in place.glob("*.toml")):
        node: Any = read_settings(path)
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node = node.get("kind", TABLES[key].default) if key in TABLES else None
        if node is not None:
            found[path.stem] = toml_value(node)
    return found


# --- the reference page ----------------------------------------------------------------------------------------------

INTRODUCTION = """# Settings

This page lists every setting of an experiment, with its type and default. `pvg config explain KEY` shows one of
them, and `pvg config show EXPERIMENT` shows an experiment with the same comments.

A choice is a table with a `kind`; the settings of a kind exist only in its table. A bare string stands for a table with
that kind and its defaults, in a file and on the command line: `-s game.reward=cgc` is `-s game.reward.kind=cgc`.
An override that changes the kind starts with the defaults of the new kind. Pass `-s` more than once to set more:
`-s game.reward=cgc -s game.reward.floor=-9`."""


def page() -> str:
    """The page `settings.md` of the documentation site."""
    lines = [INTRODUCTION, *_section_lines("", Experiment)]
    for key, _, info in fields_of(Experiment):
        if is_section(info.annotation):
            lines += _section_lines(key, info.annotation)
        elif key in TABLES:
            lines += _table_lines(key)
    return "\n".join(lines) + "\n"


def _section_lines(place: str, section: type[BaseModel]) -> list[str]:
    inside = [each for each in settings() if each.key.rpartition(".")[0] == place and not each.kinds]
    own = [each for each in inside if each.key.removesuffix(".kind") not in TABLES]
    title = f"## `[{place}]`" if place else "## Top level"
    head = ["", title, "", about(section), "", "| key | type | default | meaning |", "|---|---|---|---|"]
    return [*head, *map(_row, own)] if own else []


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
    meaning = setting.meaning.replace("][", r"]\[")  # in Markdown, [a][b] is a link
    return f"| `{setting.key}` |{kinds} {typed(setting)} | {default} | {meaning} |"


if __name__ == "__main__":
    print(page(), end="")
