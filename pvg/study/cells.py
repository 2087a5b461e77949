"""A study on disk: its folder, the progress of each cell, and whether a cell's evaluation matches the study.

    runs/STUDY/
      ARM-seed-000/            an ordinary run
      cells/ARM-seed-000.toml  the settings with which it is played; .log, its output; .json, its last document;
                               .failed, the reason of its last failure
      study.json  study.html   the results

Invariant: the state of a cell is read from its run, never from the study's files; only the reason of a failure is
stored beside it. An evaluation is checked from its document, because a user may have evaluated the run by hand, or
changed the study's file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from pvg.config.experiment import Experiment
from pvg.config.load import differences
from pvg.errors import PvgError, StateError, UsageError, user_paths
from pvg.evaluation.report import default_parts
from pvg.reporting.run_summary import status_of
from pvg.store.atomic import DamagedFileError, make_directory, read_stored, remove_temporaries, write_atomic
from pvg.store.run_directory import RunDirectory, exclusive, refuse_no_folder
from pvg.study.measures import EVALUATION
from pvg.study.plan import Cell, StudyEvaluation

ATTACKED = ("found", "censored")  # statuses of attacks that have left an attacker


def missing_results(run: RunDirectory, wanted: Experiment, parts: Sequence[str], rounds: Sequence[int]) -> str:
    """What the run's evaluation lacks of `parts` (empty: all) in these rounds with the settings of `wanted`, in one
    line; "" if it is complete."""
    try:
        found = orjson.loads(read_stored(run.path / EVALUATION))
    except FileNotFoundError:
        return "it is not evaluated"
    except (orjson.JSONDecodeError, DamagedFileError):
        return "its evaluation is damaged"
    if not isinstance(found, Mapping) or not isinstance(found.get("settings"), Mapping):
        return "its evaluation has no settings"
    return _setting_difference(found, wanted) or _missing(found, parts or default_parts(wanted), rounds)


def _setting_difference(found: Mapping[str, Any], wanted: Experiment) -> str:
    """The difference if the evaluation has another game or other settings; otherwise ""."""
    if found.get("config_hash") != wanted.hash():
        return "its evaluation is of another game"
    settings = {key: value for key, value in found["settings"].items() if value is not None}
    changed = differences(settings, wanted.evaluate.model_dump(mode="json", exclude_none=True), "evaluate.")
    return f"its evaluation has other settings: {'; '.join(changed)}" if changed else ""


def _missing(found: Mapping[str, Any], requested: Sequence[str], rounds: Sequence[int]) -> str:
    by_number = {row.get("round"): row for row in found.get("rounds", ())}
    baseline = found.get("baseline") or {}
    # The training of the baseline has diverged. The evaluation has stored this, so the cell is complete without a tax.
    diverged = baseline.get("points") == []
    required = [part for part in requested if not (part == "tax" and diverged)]
    for number in rounds:
        row = by_number.get(number, {})
        if part := next((part for part in required if row.get(part.replace("-", "_")) is None), None):
            return f"its evaluation has no {part} of round {number}"
        if {"exploit", "detection"} <= set(requested) and (kind := _undetected(row)):
            return f"its evaluation has no detection of the {kind} attacker of round {number}"
    return ""


def _undetected(row: Mapping[str, Any]) -> str:
    """The kind of an attacker without detection, because it was trained later; otherwise ""."""
    sources = {flaws["source"] for flaws in row["detection"].get("sources", ())}
    attacked = (attack["kind"] for attack in row["exploit"] if attack["status"] in ATTACKED)
    return next((kind for kind in attacked if f"attack-{kind}" not in sources), "")


# --- the study's folder -----------------------------------------------------------------------------------------------

# "played": the game is complete but its evaluation is not. "damaged": its files cannot be read.
Status = Literal["new", "unfinished", "played", "complete", "damaged"]
MOST_NAMED = 6  # cells with other settings in one error message


@dataclass(frozen=True, slots=True)
class CellProgress:
    """The progress of a cell. `done`: optimizer steps. `rounds`: metrics of its finished rounds. `reason`: why it
    failed last, or why it cannot be read."""

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
    """The paths of a study. The constructor does not touch the disk."""

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
        """Become the one process that plays this study; makes its folder. Raises UsageError with the other process's
        id."""
        with user_paths():
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


def progress_of(cell: Cell, folder: StudyFolder, evaluate: StudyEvaluation | None) -> CellProgress:
    reason = _failure(folder.failure(cell))
    if not cell.run.experiment_file.is_file():
        return CellProgress("new", reason=reason)
    try:
        state = cell.run.load_state().state or {}
    except PvgError as error:
        return CellProgress("damaged", reason=str(error))
    rounds = tuple({k: v for k, v in row.items() if v is not None} for row in state.get("rounds", ()))
    fields: dict[str, Any] = {
        "round": state.get("round", 0),
        "phase": state.get("phase", ""),
        "rounds": rounds,
        "reason": reason,
        "code_version": str(state.get("code_version", "")),
        "machine": str(state.get("machine", "")),
    }
    if status_of(state) != "complete":
        return CellProgress("unfinished", done=steps_done(cell, state), **fields)
    if evaluate is not None and unevaluated(cell, evaluate, len(rounds)):
        return CellProgress("played", done=cell.steps, **fields)
    # A failed game may have been completed by hand.
    return CellProgress("complete", done=cell.steps, **fields | {"reason": ""})


def steps_done(cell: Cell, state: dict[str, Any]) -> int:
    """The optimizer steps of the game up to its last commit."""
    experiment, round_ = cell.experiment, int(state.get("round", 0))
    prover = experiment.training.steps + experiment.verifier_update_steps(experiment.training.steps)
    done = sum(experiment.verifier_phase_steps(earlier) + prover for earlier in range(round_))
    verifier, step = experiment.verifier_phase_steps(round_), int(state.get("step", 0))
    match state.get("phase"):
        case "train_verifier":
            done += step
        case "train_prover":
            done += verifier + step + experiment.verifier_update_steps(step)
        case "checkpoint":
            done += verifier + prover
    return done


@user_paths()
def refuse_irregular_files(folder: StudyFolder, cells: Sequence[Cell]) -> None:
    """Raises StateError with the first path of the study that is not the file or folder that pvg makes there, and
    UsageError if its parent is no folder. A FIFO would block pvg, and a game with a dangling link for its settings
    would count as new."""
    refuse_no_folder(folder.path.parent)
    made_again = "Move it away. pvg then makes a new one."
    for path in (folder.path, folder.cells, *(cell.run.path for cell in cells)):
        if os.path.lexists(path) and not path.is_dir():
            raise StateError(f"{path} is not a folder.", made_again)
    remedies = dict.fromkeys((folder.results, folder.page), made_again)
    for cell in cells:
        own = (folder.settings(cell), folder.log(cell), folder.document(cell), folder.failure(cell))
        remedies |= dict.fromkeys((*own, cell.run.path / EVALUATION), made_again)
        remedies[cell.run.experiment_file] = (
            f"Restore the file from a copy, or move {cell.run.path} away. pvg then plays this game again."
        )
    for path, remedy in remedies.items():
        if os.path.lexists(path) and not path.is_file():
            raise StateError(f"{path} is not a regular file.", remedy)


def refuse_other_settings(cells: Sequence[Cell]) -> None:
    """Raises StateError with every existing cell that has other settings, and with these settings."""
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
    changes = [
        f"{', '.join(names[:MOST_NAMED])}{' and others' if len(names) > MOST_NAMED else ''}: {what}"
        for what, names in by_change.items()
    ]
    raise StateError(
        f"{len(found)} cells were played with other settings. {' | '.join(changes)}.",
        "Give the changed study another name, move its folder away, or undo the change.",
    )


def write_settings(cell: Cell, folder: StudyFolder) -> None:
    write_atomic(folder.settings(cell), cell.experiment.to_toml().encode())


def note_failure(cell: Cell, folder: StudyFolder, reason: str) -> None:
    write_atomic(folder.failure(cell), f"{reason}\n".encode())


def forget_failure(cell: Cell, folder: StudyFolder) -> None:
    folder.failure(cell).unlink(missing_ok=True)


def unevaluated(cell: Cell, evaluate: StudyEvaluation, rounds: int) -> str:
    """What the cell's evaluation lacks of what the study requires, in one line; "" if it is complete."""
    assert cell.evaluated is not None, "a study with [evaluate] has its settings for every cell"
    return missing_results(cell.run, cell.evaluated, evaluate.parts, evaluate.numbers(rounds))


def _failure(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
