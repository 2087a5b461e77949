"""A study on disk: its folder, and how far each of its cells is.

    runs/STUDY/
      ARM-seed-000/            an ordinary run
      cells/ARM-seed-000.toml  the settings it is played with; .log, what it said; .json, its last document;
                               .failed, why it failed last
      study.json  study.html   the results

Invariant: what is true of a cell is read from its run, never from what the study remembers; only the reason of a
failure is kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pvg.errors import PvgError, StateError, UsageError
from pvg.experiment import differences
from pvg.reporting.run_summary import status_of
from pvg.store.atomic import make_directory, remove_temporaries, write_atomic
from pvg.store.lock import exclusive
from pvg.study.evaluated import lacking
from pvg.study.plan import Cell, Evaluate

# "played": the game is complete and its evaluation is not; "damaged": its files cannot be read.
Status = Literal["new", "unfinished", "played", "complete", "damaged"]
MOST_TOLD = 6  # cells with other settings that an error names


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a cell is. `done` counts optimizer steps, `rounds` are the metrics of its finished rounds; `reason` is
    why it failed the last time, or cannot be read."""

    status: Status
    round: int = 0
    phase: str = ""
    done: int = 0
    rounds: tuple[dict[str, float], ...] = ()
    reason: str = ""
    code_version: str = ""
    machine: str = ""


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """The paths of a study. Making one touches no disk."""

    path: Path

    @property
    def results(self) -> Path:
        return self.path / "study.json"

    @property
    def page(self) -> Path:
        return self.path / "study.html"

    @property
    def cells(self) -> Path:
        return self.path / "cells"

    def settings(self, cell: Cell) -> Path:
        return self.cells / f"{cell.name}.toml"

    def log(self, cell: Cell) -> Path:
        return self.cells / f"{cell.name}.log"

    def document(self, cell: Cell) -> Path:
        return self.cells / f"{cell.name}.json"

    def failure(self, cell: Cell) -> Path:
        return self.cells / f"{cell.name}.failed"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one process that plays this study; makes its folder. Raises UsageError with the other one's id."""
        if (self.path / "experiment.toml").exists():
            raise UsageError(f"{self.path} is a run, not a study.", "Choose another folder with --runs FOLDER.")
        make_directory(self.cells)
        with exclusive(self.path / "lock", self._played_elsewhere):
            for folder in (self.path, self.cells):
                remove_temporaries(folder)
            yield

    def _played_elsewhere(self, owner: str) -> UsageError:
        return UsageError(
            f"The study {self.path.name!r} is being played by {owner}.",
            "Wait until it is done, or stop it with Ctrl-C (its cells commit first).",
        )


def standing(cell: Cell, folder: StudyFolder, evaluate: Evaluate | None) -> Standing:
    """What the cell's files say."""
    reason = _failure(folder.failure(cell))
    if not cell.run.experiment_file.is_file():
        return Standing("new", reason=reason)
    try:
        state = cell.run.load_state().state or {}
    except PvgError as error:
        return Standing("damaged", reason=str(error))
    rounds = tuple({k: v for k, v in row.items() if v is not None} for row in state.get("rounds", ()))
    told: dict[str, Any] = {
        "round": state.get("round", 0),
        "phase": state.get("phase", ""),
        "rounds": rounds,
        "reason": reason,
        "code_version": str(state.get("code_version", "")),
        "machine": str(state.get("machine", "")),
    }
    if status_of(state) != "complete":
        return Standing("unfinished", done=steps_done(cell, state), **told)
    over = evaluate is None or not unevaluated(cell, evaluate, len(rounds))
    return Standing("complete" if over else "played", done=cell.steps, **told)


def steps_done(cell: Cell, state: dict[str, Any]) -> int:
    """Optimizer steps of the game as of its last commit."""
    verifier, prover = cell.experiment.verifier.steps, cell.experiment.training.steps
    done = int(state.get("round", 0)) * (verifier + prover)
    match state.get("phase"):
        case "train_verifier":
            done += int(state.get("step", 0))
        case "train_prover":
            done += verifier + int(state.get("step", 0))
        case "checkpoint":
            done += verifier + prover
    return done


def refuse_other_settings(cells: Sequence[Cell]) -> None:
    """Raises StateError naming every cell that is there with other settings, and the settings."""
    found = {}
    for cell in cells:
        if cell.run.experiment_file.is_file():
            changed = differences(cell.run.experiment().hashed(), cell.experiment.hashed())
            if changed:
                found[cell.name] = changed
    if not found:
        return
    by_change: dict[str, list[str]] = {}
    for name, changed in found.items():
        by_change.setdefault("; ".join(changed), []).append(name)
    told = [
        f"{', '.join(names[:MOST_TOLD])}{' and others' if len(names) > MOST_TOLD else ''}: {what}"
        for what, names in by_change.items()
    ]
    raise StateError(
        f"{len(found)} cells were played with other settings. {' | '.join(told)}.",
        "Give the changed study another name, move its folder away, or take the change back.",
    )


def write_settings(cell: Cell, folder: StudyFolder) -> None:
    write_atomic(folder.settings(cell), cell.experiment.to_toml().encode())


def note_failure(cell: Cell, folder: StudyFolder, reason: str) -> None:
    write_atomic(folder.failure(cell), f"{reason}\n".encode())


def forget_failure(cell: Cell, folder: StudyFolder) -> None:
    folder.failure(cell).unlink(missing_ok=True)


def unevaluated(cell: Cell, evaluate: Evaluate, rounds: int) -> str:
    """What the cell's evaluation has not of what the study asks for, in one line; "" where it has everything."""
    assert cell.evaluated is not None, "a study with [evaluate] has its settings for every cell"
    return lacking(cell.run, cell.evaluated, evaluate.parts, evaluate.numbers(rounds))


def _failure(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
