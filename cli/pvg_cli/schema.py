"""The settings of an experiment as rows: key, type, default."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from pvg.config.experiment import Experiment
from pvg.config.sections import TASKS


def setting_rows() -> list[tuple[str, str, Any]]:
    """(dotted key, type as text, default) of every setting; the task's once per kind, as `task (gsm8k).path`."""
    rows: list[tuple[str, str, Any]] = []

    def walk(section: BaseModel, prefix: str) -> None:
        for name, info in type(section).model_fields.items():
            value = getattr(section, name)
            if name == "task" and not prefix:
                for kind, task in TASKS.items():
                    walk(task(), f"task ({kind}).")
            elif isinstance(value, BaseModel):
                walk(value, f"{prefix}{name}.")
            else:
                rows.append((f"{prefix}{name}", type_text(info.annotation), value))

    walk(Experiment(), "")
    return rows


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
