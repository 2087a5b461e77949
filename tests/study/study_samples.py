"""Studies for the tests: files as a user writes them, cells that are complete without having been played, and a `pvg`
that plays in a second what the real one plays in a minute."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from evaluation_samples import attack, document, round_of

from pvg.evaluation.report import REPORT_FILE
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore, JsonLines
from pvg.study.plan import Cell, StudyPlan, load_study
from pvg.study.playing import StudyFolder

SMALL = """
name = "small"
about = "Two rewards."
seeds = 2
measures = ["helpful_accuracy", "fooled_rate", "seconds"]
reference = "cgc"
threads = 1

[common]
game.rounds = 2
game.growing = false
verifier.steps = 3
training.steps = 5
evaluate.attacks = ["src", "cgc", "goodhart"]

[[arm]]
name = "cgc"
set = { game.reward = "cgc" }

[[arm]]
name = "src"
set = { game.reward = "src" }
"""

# Plays like `pvg train`: SETTINGS --name NAME or --resume RUN. What a cell does stands in a file beside the study.
STAND_IN = Path(__file__).with_name("stand_in_pvg.py")
PVG = [sys.executable, str(STAND_IN)]


def small(text: str = SMALL, *, runs: Path = Path("runs"), **options: Any) -> StudyPlan:
    """The plan of a study written to small.toml in the current folder."""
    Path("small.toml").write_text(text, encoding="utf-8")
    plan = load_study("small.toml", runs=runs, **options)
    Path("hashes.json").write_text(json.dumps({cell.name: cell.experiment.hash() for cell in plan.cells}))
    return plan


def evaluate(cell: Cell, *rounds: dict[str, Any], **changed: Any) -> Path:
    """What `pvg evaluate` leaves of a cell that it was asked for as the study asks; its document."""
    assert cell.evaluated is not None
    settings = cell.evaluated.evaluate.model_dump(mode="json")
    attacks = [attack(kind, 200, found=False) for kind in settings["attacks"]]
    rows = [{**round_of(number, *attacks), **row} for number, row in enumerate(rounds)]
    file = cell.run.evaluation / REPORT_FILE
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document(cell.experiment.hash(), settings, rows) | changed))
    return file


def finish(cell: Cell, *rounds: dict[str, float | None], phase: str = "complete", **state: Any) -> RunDirectory:
    """A cell's run, complete (or in another phase) with these rounds, although it was not played."""
    run = RunDirectory.create(cell.experiment.store.root, cell.name, cell.experiment)
    with JsonLines(run.metrics) as lines:
        for number, metrics in enumerate(rounds):
            place = {"round": number, "phase": "train_prover"}
            step = {"kind": "step", **place, "step": 1, "of": 1, "time": 1.0, "metrics": {"kl": 0.5 + number}}
            lines.append({**step, "budget": {"rollout": 2.0}})
            lines.append({"kind": "phase", **place, "seconds": 2.0, "metrics": {}})
            lines.append({"kind": "round", "round": number, "metrics": metrics})
    plain = {"phase": phase, "round": max(0, len(rounds) - 1), "step": 0, "shards": [], "rounds": list(rounds)}
    FileStateStore(run.state).save({**plain, "code_version": "0.1.0", "machine": "test", **state})
    return run


def folder_of(plan: StudyPlan) -> StudyFolder:
    folder = StudyFolder(plan.folder)
    folder.cells.mkdir(parents=True, exist_ok=True)
    return folder
