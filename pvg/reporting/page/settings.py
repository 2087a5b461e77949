"""The configuration: what differs from the defaults first, the whole of it for those who ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from pvg.config.experiment import Experiment
from pvg.config.sections import TASKS
from pvg.reporting.page.document import Section, details
from pvg.reporting.page.markup import Html, Piece, table, tag

UNSET = "unset"


def settings_section(experiment: Experiment) -> Section:
    changed = changed_settings(experiment)
    shown = (
        table(
            ["setting", "value", "default"],
            [[tag("th", tag("code", key)), *_codes(row)] for key, row in changed.items()],
            "settings",
        )
        if changed
        else tag("p", "Nothing differs from the defaults.", class_="empty")
    )
    whole = details("The whole configuration", tag("pre", experiment.to_toml(), class_="toml"))
    return Section(
        "settings", "Settings", [shown, whole], f"What differs from the defaults. Digest {experiment.hash()}."
    )


def changed_settings(experiment: Experiment) -> dict[str, tuple[str, str]]:
    """Key -> (value, default) of all that is not as pvg has it by itself; of the task, as its kind has it."""
    task = TASKS[experiment.task.kind]()
    own, default = (
        flat(experiment.plain()),
        flat(Experiment.model_construct(**{**dict(Experiment()), "task": task}).plain()),
    )
    default["task.kind"] = value_text(Experiment().task.kind)
    keys = [key for key in sorted({*own, *default}) if own.get(key, UNSET) != default.get(key, UNSET)]
    return {key: (own.get(key, UNSET), default.get(key, UNSET)) for key in keys}


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and values as text, as they would stand in TOML."""
    found: dict[str, str] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value_text(value)
    return found


def value_text(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _codes(values: tuple[str, ...]) -> list[Piece]:
    return [_code(value) for value in values]


def _code(value: str) -> Html:
    return tag("code", value) if value != UNSET else tag("span", UNSET, class_="quiet")
