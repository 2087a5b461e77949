"""A few steps of a run as they ran: the spans of a window of steps, laid out in lanes.

    for window in read_windows(run.spans, choose_windows(summary.steps)): ...

spans.jsonl may hold hundreds of megabytes: it is read once, line by line, and only the spans of the chosen steps are
kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pvg.reporting.run_summary import StepRecord
from pvg.telemetry.spans import DRIVER

STEPS_SHOWN = 3
MOST_SPANS = 20_000  # kept of one window
MOST_ROWS = 12  # of one lane; spans that run beside so many others are counted instead of drawn
# Neighbours of one name are drawn as one where each, and the gap between them, is a smaller share of the window.
SHORT, CLOSE = 4e-3, 1e-3

Place = tuple[int, str]  # round and phase


@dataclass(frozen=True, slots=True)
class Choice:
    """Steps to show: neighbours in the middle of a phase."""

    round: int
    phase: str
    steps: tuple[int, ...]


@dataclass(slots=True)
class Block:
    """One span in its lane, or `count` short neighbours of one name. Seconds since the window began; `worked_s` is
    the spans' own sum."""

    name: str
    row: int
    start_s: float
    end_s: float
    worked_s: float
    count: int = 1


@dataclass(slots=True)
class Lane:
    """What ran on one track; nested and concurrent spans lie in rows below each other."""

    track: str
    rows: int = 0
    blocks: list[Block] = field(default_factory=list)
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """The spans of a choice. `starts` says when each step's first span began, in seconds since the window began."""

    choice: Choice
    seconds: float
    starts: tuple[tuple[int, float], ...]
    lanes: tuple[Lane, ...]


def choose_windows(steps: Sequence[StepRecord], count: int = STEPS_SHOWN) -> list[Choice]:
    """For every kind of phase `count` neighbouring steps from the middle of the middle one of its rounds."""
    played: dict[str, dict[int, list[int]]] = {}
    for step in steps:
        played.setdefault(step.phase, {}).setdefault(step.round, []).append(step.step)
    choices = []
    for phase, rounds in played.items():
        most = max(len(numbers) for numbers in rounds.values())
        full = [round_ for round_, numbers in rounds.items() if len(numbers) * 2 >= most]
        round_ = full[len(full) // 2]
        numbers = rounds[round_]
        first = max(0, (len(numbers) - count) // 2)
        choices.append(Choice(round_, phase, tuple(numbers[first : first + count])))
    return choices


def read_windows(path: Path, choices: Sequence[Choice]) -> tuple[list[Window], int]:
    """The windows of which the file holds spans, in the order of `choices`; and how many lines could not be read."""
    wanted = {(choice.round, choice.phase, step): choice for choice in choices for step in choice.steps}
    kept: dict[Place, list[dict[str, Any]]] = {}
    damaged = 0
    if not wanted or not path.is_file():
        return [], 0
    # Most lines are of other steps: they are passed over without being parsed.
    steps = "|".join(str(step) for step in sorted({step for _, _, step in wanted}))
    likely = re.compile(rf'"step": ?(?:{steps})\b'.encode())
    with open(path, "rb") as file:
        for line in file:
            if likely.search(line) is None:
                continue
            row = _row(line)
            if row is None:
                damaged += line.endswith(b"\n")  # a torn last line is normal
            elif (row["round"], row["phase"], row["step"]) in wanted:
                rows = kept.setdefault((row["round"], row["phase"]), [])
                if len(rows) < MOST_SPANS:
                    rows.append(row)
    found = [
        _window(choice, kept[choice.round, choice.phase]) for choice in choices if (choice.round, choice.phase) in kept
    ]
    return found, damaged


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    fields: dict[str, Any] = {
        "name": str,
        "start_s": (int, float),
        "end_s": (int, float),
        "round": int,
        "phase": str,
        "step": int,
    }
    if isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in fields.items()):
        return row
    return None


def _window(choice: Choice, rows: list[dict[str, Any]]) -> Window:
    # What began long before (a checkpoint written beside the steps) is cut off where the steps' own work begins.
    driver = [row for row in rows if row.get("track", DRIVER) == DRIVER] or rows
    begin, end = min(row["start_s"] for row in driver), max(row["end_s"] for row in driver)
    seconds = max(end - begin, 1e-9)
    starts: dict[int, float] = {}
    for row in driver:
        at = row["start_s"] - begin
        starts[row["step"]] = min(starts.get(row["step"], at), at)
    tracks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        tracks.setdefault(str(row.get("track", DRIVER)), []).append(row)
    order = sorted(tracks, key=lambda track: (track != DRIVER, track != "loop", track))
    lanes = tuple(_lane(track, tracks[track], begin, seconds) for track in order)
    return Window(choice, seconds, tuple(sorted(starts.items(), key=lambda pair: pair[1])), lanes)


def _lane(track: str, rows: Iterable[dict[str, Any]], begin: float, seconds: float) -> Lane:
    """Each span in the first row that is free: what is nested, or runs beside another, lies below it."""
    lane = Lane(track)
    free: list[float] = []  # when each row's last span ends
    last: dict[int, Block] = {}
    for row in sorted(rows, key=lambda row: (row["start_s"], -row["end_s"])):
        start, end = max(0.0, row["start_s"] - begin), min(seconds, row["end_s"] - begin)
        if end <= start and row["end_s"] > row["start_s"]:
            continue  # outside of the window
        place = next((place for place, until in enumerate(free) if until <= start + 1e-9), len(free))
        if place >= MOST_ROWS:
            lane.left_out += 1
            continue
        if place == len(free):
            free.append(end)
        free[place] = end
        before = last.get(place)
        if before is not None and _one_of_many(before, str(row["name"]), start, end, seconds):
            before.end_s, before.count, before.worked_s = end, before.count + 1, before.worked_s + end - start
        else:
            last[place] = Block(str(row["name"]), place, start, end, end - start)
            lane.blocks.append(last[place])
    lane.rows = len(free)
    return lane


def _one_of_many(before: Block, name: str, start: float, end: float, seconds: float) -> bool:
    short = before.worked_s / before.count < SHORT * seconds and end - start < SHORT * seconds
    return before.name == name and short and start - before.end_s < CLOSE * seconds
