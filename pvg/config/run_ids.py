"""Players of other runs as models: `run:RUN[/round-N][/prover|/verifier]`, such as `run:mine/round-2/verifier`.

RUN is the name of a run in runs/, or the path of a run. When a run starts, pvg adds `@DIGEST`, the weights' checksum.
This module only checks the form. pvg.store.run_players finds the weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pvg.errors import ConfigurationError, shortened

Player = Literal["prover", "verifier"]
Stage = int | Literal["warmup"]  # a round, from 0, or the end of the warm start

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
