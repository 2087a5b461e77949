"""`pvg bench --tune`: the settings of a profile that suit this machine, measured, and written as a file of settings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cli.boundary import emit, say

if TYPE_CHECKING:
    from pvg.bench.runner import SampleTaken
    from pvg.bench.tuning import TuningResult

FOLDER = Path("bench")  # where the file goes without --out


def run_tune(profile: str, overrides: Sequence[str], out: Path | None, as_json: bool) -> None:
    """Tune, write the file, tell. Raises what `pvg.bench.tuning.tune` raises, UsageError for a file that cannot be
    written, before anything is measured."""
    from pvg.bench.profile import find_profile, read_profile
    from pvg.bench.tuning import to_tune, tune
    from pvg.errors import UsageError
    from pvg.store.atomic import write_output

    to_tune(profile, overrides)
    name = read_profile(find_profile(profile)).name
    path = out if out is not None else FOLDER / f"{name}-tuned.toml"
    if path.suffix != ".toml" or path.is_dir():
        raise UsageError(f"{path} is no TOML file.", "Name one: --out FILE.toml")
    if out is not None and not path.parent.is_dir():
        raise UsageError(f"There is no folder {path.parent}.", f"mkdir -p {shlex.quote(str(path.parent))}")
    words = ["pvg", "bench", "--profile", profile, "--tune"]
    words += [word for override in overrides for word in ("--set", override)]
    tuned = tune(profile, overrides, command=shlex.join(words), on_sample=_line)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, tuned.to_toml().encode())
    if as_json:
        emit(
            {
                "settings": dict(tuned.choices),
                "file": str(path),
                "reports": [report.plain() for report in tuned.reports],
            }
        )
        say(f"Written to {path}.")
    else:
        _show(tuned, path)


def _show(tuned: TuningResult, path: Path) -> None:
    from cli.bench_tables import failures, sweep_table
    from cli.output import stdout

    console = stdout()
    for (key, value), report in zip(tuned.choices, tuned.reports, strict=True):
        console.print(sweep_table(report))
        for line in failures(report):
            console.print(line)
        console.print(f"{key} = {value}", style="bold", highlight=False)
        console.print()
    this = shlex.quote(f"@{path}")
    console.print(f"Written to {path}. Next:", highlight=False)
    console.print(f"  pvg train --set {this}", highlight=False, soft_wrap=True)


def _line(taken: SampleTaken) -> None:
    note = " (warm-up)" if taken.warmup else ""
    say(f"{taken.label}: sample {taken.number} of {taken.of}{note}, {taken.wall_s:.3g} s")
