"""What the tab key offers: experiments, runs, profiles, studies, and settings with their values.

The shell starts `pvg` for each press of the key, so nothing here imports torch, and names of files are read from
folders. Only settings need pvg.config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import typer

import pvg

if TYPE_CHECKING:
    from pydantic import BaseModel

RUNS = Path("runs")


def experiments(incomplete: str) -> list[str]:
    return _files("experiments", incomplete)


def profiles(incomplete: str) -> list[str]:
    return _files("profiles", incomplete)


def studies(incomplete: str) -> list[str]:
    return _files("studies", incomplete)


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """The runs in the folder that `--runs` names, or in runs/."""
    folder = Path(ctx.params.get("runs") or RUNS)
    names = (path.parent.name for path in folder.glob("*/experiment.toml"))
    return sorted(name for name in names if name.startswith(incomplete))


def experiments_or_runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """For `pvg serve`, whose --player may come after the name."""
    return [*experiments(incomplete), *runs(ctx, incomplete)]


def settings(incomplete: str) -> list[str]:
    """`KEY=` for each setting, or `KEY=VALUE` for each value after the equals sign."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={choice}" for choice in values(key) if choice.startswith(value)]
    return [f"{found}=" for found in _keys() if found.startswith(incomplete)]


def keys(incomplete: str) -> list[str]:
    """Settings and sections, for `pvg config explain`."""
    from pvg.config.load import valid_keys

    found = valid_keys()
    sections = {".".join(parts[:end]) for parts in (key.split(".") for key in found) for end in range(1, len(parts))}
    return sorted(key for key in {*found, *sections} if key.startswith(incomplete))


def values(key: str) -> list[str]:
    """The values that a setting can have, if they are few: the kinds of a table, words, true and false, and the models
    that are here."""
    from pvg.config.experiment import TABLES, Experiment

    if key in ("models.prover.source", "models.verifier.source"):
        return _models()

    if (table := TABLES.get(key.removesuffix(".kind"))) is not None:
        return table.kinds()
    words = [word for annotation in _annotations(Experiment, key.split("."), "") for word in _words(annotation)]
    return list(dict.fromkeys(words))


def value_in_bash() -> list[str] | None:
    """What bash is to offer for the value of `-s KEY=VALUE`; None for any other word.

    Bash takes KEY, = and VALUE as three words, and puts what it is offered in place of the last one.
    """
    if os.environ.get("_PVG_COMPLETE") != "complete_bash":
        return None
    place = int(os.environ["COMP_CWORD"])
    *before, word = [*os.environ["COMP_WORDS"].split()[:place], *os.environ["COMP_WORDS"].split()[place : place + 1]]
    if word == "=":
        before, word = [*before, "="], ""
    if len(before) < 3 or before[-1] != "=" or before[-3] not in ("-s", "--set"):
        return None
    return [value for value in values(before[-2]) if value.startswith(word)]


def _files(kind: str, incomplete: str) -> list[str]:
    """The names of pvg's files of a kind, and of those in ./KIND."""
    package = Path(pvg.__file__).parent
    places = (Path(kind), package / f"_{kind}", package.parent / kind)
    return sorted({path.stem for place in places for path in place.glob("*.toml") if path.stem.startswith(incomplete)})


def _models() -> list[str]:
    """The models that come with pvg, and the runs in runs/."""
    from pvg.config.load import embedded_names

    runs = sorted(path.parent.name for path in RUNS.glob("*/experiment.toml"))
    return [*(f"embedded:{name}" for name in embedded_names()), *(f"run:{name}" for name in runs)]


def _keys() -> list[str]:
    """Every setting. A tagged table has the key that chooses its kind."""
    from pvg.config.experiment import TABLES
    from pvg.config.load import valid_keys

    return sorted({*TABLES, *(key for key in valid_keys() if key.removesuffix(".kind") not in TABLES)})


def _annotations(section: type[BaseModel], parts: list[str], place: str) -> Iterator[Any]:
    """The types of the setting `parts` of a section; several if kinds of its table differ in it."""
    from pvg.config.experiment import TABLES

    info = section.model_fields.get(parts[0])
    if info is None:
        return
    if len(parts) == 1:
        yield info.annotation
        return
    here = f"{place}{parts[0]}"
    inner = TABLES[here].sections if here in TABLES else (info.annotation,)
    for each in inner:
        if isinstance(each, type) and hasattr(each, "model_fields"):
            yield from _annotations(each, parts[1:], f"{here}.")


def _words(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for part in get_args(annotation):
            yield from _words(part)
