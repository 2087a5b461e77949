"""What the tab key offers: experiments, runs, profiles, studies, and settings.

The shell starts `pvg` for each press of the key, so nothing here imports torch, and names of files are read from
folders. Only settings need pvg.config.
"""

from __future__ import annotations

from pathlib import Path

import typer

import pvg

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
    """`KEY=` for each setting. A tagged table has the key that chooses its kind."""
    from pvg.config.experiment import TABLES
    from pvg.config.load import valid_keys

    found = {*TABLES, *(key for key in valid_keys() if key.removesuffix(".kind") not in TABLES)}
    return sorted(f"{key}=" for key in found if key.startswith(incomplete))


def keys(incomplete: str) -> list[str]:
    """Settings and sections, for `pvg config explain`."""
    from pvg.config.load import valid_keys

    found = valid_keys()
    sections = {".".join(parts[:end]) for parts in (key.split(".") for key in found) for end in range(1, len(parts))}
    return sorted(key for key in {*found, *sections} if key.startswith(incomplete))


def _files(kind: str, incomplete: str) -> list[str]:
    """The names of pvg's files of a kind, and of those in ./KIND."""
    package = Path(pvg.__file__).parent
    places = (Path(kind), package / f"_{kind}", package.parent / kind)
    return sorted({path.stem for place in places for path in place.glob("*.toml") if path.stem.startswith(incomplete)})
