"""Draws docs/train.svg and docs/report.png from a finished run: what `pvg train` shows, and what `pvg report` writes.

pvg train --name modchain
python -m benchmarks.pages.draw_pictures runs/modchain

docs/train.svg is the display at prover step STEP of the last round, drawn from the records of metrics.jsonl with their
times. docs/report.png is the beginning of the page in a headless Chromium, which must be installed.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from pvg.reporting.run_page import collect, run_page
from pvg.reporting.run_summary import read_run
from pvg.store.journal import read_json_lines
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.observer import PhaseInfo, Progress
from pvg_cli.run_display import RunBoard, draw

DOCS = Path(__file__).parents[2] / "docs"
STEP = 12
COLUMNS, ROWS = 118, 40  # of the terminal
WIDTH, HEIGHT = 1180, 1215  # of the page, in CSS pixels
UNITS = {"mint": "rollouts", "checkpoint": "rollouts"}  # of a phase; the others count steps


class _Clock:
    """The time of the record that is read."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def display_of(run: RunDirectory) -> str:
    """The display as SVG."""
    experiment = run.experiment()
    rounds = experiment.game.rounds
    records = list(_until(read_json_lines(run.metrics), rounds - 1))
    clock = _Clock(records[0]["time"])
    board = RunBoard(experiment.name, run.name, rounds, clock, experiment.game.effort)
    for record in records:
        clock.now = record["time"]
        _tell(board, record)
    console = Console(record=True, width=COLUMNS, height=ROWS, file=io.StringIO(), force_terminal=True)
    console.print(draw(board, COLUMNS))
    return console.export_svg(title="pvg train")


def _until(records: Iterable[Mapping[str, Any]], last: int) -> Iterator[Mapping[str, Any]]:
    for record in records:
        yield record
        place = tuple(map(record.get, ("kind", "phase", "round", "step")))
        if place == ("step", "train_prover", last, STEP):
            return
    sys.exit(f"The run has no prover step {STEP} in round {last}.")


def _tell(board: RunBoard, record: Mapping[str, Any]) -> None:
    """Show one record, as the display does when the run records it."""
    kind, metrics = record["kind"], {k: v for k, v in (record.get("metrics") or {}).items() if v is not None}
    if kind == "workers":
        board.workers = metrics
    elif kind == "round":
        board.finish_round(record["round"], metrics)
    elif kind == "alert":
        board.alert(record["name"], record["message"])
    elif kind == "step":
        info = PhaseInfo(
            record["round"], board.rounds, record["phase"], UNITS.get(record["phase"], "steps"), record["of"]
        )
        if board.info is None or (board.info.round, board.info.phase) != (info.round, info.phase):
            board.start_phase(info)
        board.progress(Progress(record["step"], metrics, record["budget"], board.workers))
    elif kind == "phase" and board.info is not None:
        board.finish_phase(board.info, metrics)
        board.phase_seconds[record["round"], record["phase"]] = record["seconds"]


def photograph(run: RunDirectory, picture: Path) -> None:
    """The beginning of the run's page as PNG."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or sys.exit("Install chromium.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = Path(folder) / "report.html"
        page.write_text(run_page(collect(run, read_run(run), 2)))
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
        quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
        where = (f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}")
        command = [program, *flags, *quiet, *where, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    run = RunDirectory.open(sys.argv[1], Path("runs"))
    (DOCS / "train.svg").write_text(display_of(run))
    photograph(run, DOCS / "report.png")


if __name__ == "__main__":
    main()
