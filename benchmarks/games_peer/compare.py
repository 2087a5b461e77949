"""pvg's Diplomacy engine beside the package `diplomacy`: the same random games, every phase compared, and timed.

    make games-peer          # once: .venv-games-peer with the package
    .venv/bin/python -m benchmarks.games_peer.compare --out docs/games-peer.json

Both sides execute the same orders in the same position. After a difference the package continues from pvg's position.
Orders are drawn from all legal ones, with a preference for supports and convoys of moves that are ordered. Times are
process CPU time, of both sides in turn in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.games_peer.variants import RULES, variants
from pvg.bench.busy import busy_processes
from pvg.bench.report import git_state
from pvg.games.diplomacy.game import long_order
from pvg.games.diplomacy.legal import Legality
from pvg.games.diplomacy.movement import Movement, adjudicate
from pvg.games.diplomacy.orders import Order, write
from pvg.games.diplomacy.phases import deciders, step
from pvg.games.diplomacy.position import NOBODY, Position, Unit
from pvg.games.diplomacy.standard import standard_board
from pvg.telemetry.processor import processor

BOARD = standard_board()
ROOT = Path(__file__).parents[2]
PEER = Path(".venv-games-peer/bin/python")
TIMED_PHASES, ROUNDS = 300, 3
OTHER_RULES = {
    "free-retreat-after-a-convoyed-attack": "In the package a unit that a convoyed army dislodged may retreat to "
    "occupied and contested provinces.",
    "civil-disorder-counts-from-home": "In the package missing disbands take the units farthest from the home centres. "
    "Here they take those farthest from the centres that the power owns (edition of 2023).",
}
Orders = Mapping[int, list[Order]]


class Peer:
    """The other side: a process with the package."""

    def __init__(self, python: Path) -> None:
        command = [str(python), str(Path(__file__).with_name("peer_process.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, do: str, **request: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps({"do": do, **request}), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline()
        if not reply:
            raise SystemExit(f"The process with the package ended with code {self._process.wait()} on {do!r}.")
        return json.loads(reply)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def drawn(draw: random.Random, position: Position) -> dict[int, list[Order]]:
    """Orders of all powers for a phase. In winter a power leaves out some of its disbands now and then."""
    legality = Legality(BOARD, position)
    options = {power: legality.orders_of(power) for power in deciders(BOARD, position)}
    if position.stage == "A":
        return {power: adjustments(draw, legality, power, listed) for power, listed in options.items()}
    plans = [draw.choice(orders) for listed in options.values() for orders in listed.values()]
    moves = {(order.place, BOARD.province_of[order.target]) for order in plans if order.act == "move"}
    return {power: [chosen(draw, orders, moves) for orders in listed.values()] for power, listed in options.items()}


def chosen(draw: random.Random, orders: tuple[Order, ...], moves: set[tuple[int, int]]) -> Order:
    if draw.random() < 0.8:  # most moves by convoy to an adjacent province have no convoy and fail by rule
        orders = tuple(order for order in orders if not order.via)
    fitting = [
        order
        for order in orders
        if (order.act == "move" and (order.place, BOARD.province_of[order.target]) in moves)
        or (order.act in ("support", "convoy") and (order.origin, order.target) in moves)
    ]
    return draw.choice(fitting if fitting and draw.random() < 0.6 else orders)


def adjustments(draw: random.Random, legality: Legality, power: int, listed: Mapping[int, Any]) -> list[Order]:
    change = legality.adjustment(power)
    count = min(abs(change), len(listed)) - (change < 0 and draw.random() < 0.2)
    return [draw.choice(listed[place]) for place in draw.sample(sorted(listed), count)]


# Both sides' forms of a position


def peer_orders(position: Position, orders: Orders) -> dict[str, list[str]]:
    """The orders in the package's notation."""
    return {
        BOARD.powers[power].upper(): [long_order(BOARD, position, order) for order in given]
        for power, given in orders.items()
    }


def peer_state(position: Position) -> dict[str, Any]:
    """A position in the package's form."""
    legality = Legality(BOARD, position)
    units: dict[str, list[str]] = {power.upper(): [] for power in BOARD.powers}
    retreats: dict[str, dict[str, list[str]]] = {power.upper(): {} for power in BOARD.powers}
    centers: dict[str, list[str]] = {power.upper(): [] for power in BOARD.powers}
    for unit in position.unit_list():
        units[BOARD.powers[unit.power].upper()].append(name_of(unit))
    for gone in position.dislodged_list():
        places = sorted(BOARD.places[place].upper() for place in legality.retreats(gone))
        retreats[BOARD.powers[gone.unit.power].upper()][name_of(gone.unit)] = places
    for centre, owner in zip(BOARD.centres, position.owners, strict=True):
        if owner != NOBODY:
            centers[BOARD.powers[owner].upper()].append(BOARD.provinces[centre].upper())
    units = {power: sorted(listed) for power, listed in units.items()}
    return {"phase": position.phase, "units": units, "centers": centers, "retreats": retreats}


def name_of(unit: Unit) -> str:
    return f"{'AF'[unit.fleet]} {BOARD.places[unit.place].upper()}"


def settable(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the package's set_state takes."""
    units = {
        power: [*listed, *(f"*{unit}" for unit in state["retreats"][power])] for power, listed in state["units"].items()
    }
    return {"name": state["phase"], "units": units, "centers": state["centers"], "retreats": state["retreats"]}


# Differences and their explanations


def explanation(position: Position, orders: Orders, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The rules that explain a difference; [] if none does."""
    if position.stage == "A":
        return ["civil-disorder-counts-from-home"] if short_of_disbands(position, orders) else []
    if position.stage == "R":
        return []
    chosen_orders = by_province(orders)
    unchanged: tuple[list[str], Movement] = ([], adjudicate(BOARD, position, chosen_orders))
    for rules, movement in (unchanged, *variants(BOARD, position, chosen_orders)):
        if units_of(movement.units) == theirs["units"]:
            more = retreat_rules(position, movement, theirs["retreats"])
            if more is not None:
                return [*rules, *more]
    return []


def by_province(orders: Orders) -> dict[int, Order]:
    return {BOARD.province_of[order.place]: order for given in orders.values() for order in given}


def units_of(units: bytes) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {power.upper(): [] for power in BOARD.powers}
    for unit in Position(1901, "S", "M", units, b"").unit_list():
        found[BOARD.powers[unit.power].upper()].append(name_of(unit))
    return {power: sorted(listed) for power, listed in found.items()}


def short_of_disbands(position: Position, orders: Orders) -> bool:
    legality = Legality(BOARD, position)
    return any(-legality.adjustment(power) > len(given) for power, given in orders.items())


def retreat_rules(position: Position, movement: Movement, theirs: Mapping[str, Mapping[str, Any]]) -> list[str] | None:
    """The rules that explain the package's list of retreats after a movement; None if it has other differences."""
    after = replace(
        position, stage="R", units=movement.units, dislodged=movement.dislodged, contested=movement.contested
    )
    ours = peer_state(after)["retreats"]
    by_convoy = {name_of(gone.unit) for gone in after.dislodged_list() if gone.barred < 0}
    differing = {
        unit
        for power in ours
        for unit in {*ours[power], *theirs[power]}
        if ours[power].get(unit, []) != theirs[power].get(unit, [])
    }
    if differing <= by_convoy:
        return ["free-retreat-after-a-convoyed-attack"] if differing else []
    return None


# The run


class Tally:
    """What the games showed."""

    def __init__(self) -> None:
        self.phases: Counter[str] = Counter()
        self.differences: list[dict[str, Any]] = []
        self.timed: list[tuple[Position, dict[int, list[Order]]]] = []  # the movement phases to time


def play(peer: Peer, seed: int, last_year: int, tally: Tally) -> None:
    draw, position = random.Random(seed), BOARD.start
    peer.ask("new")
    while position.year <= last_year and deciders(BOARD, position):
        orders = drawn(draw, position)
        written = peer_orders(position, orders)
        after = step(BOARD, position, orders).position
        theirs = peer.ask("step", orders=written)
        tally.phases[position.stage] += 1
        if position.stage == "M" and tally.phases["M"] % 23 == 0 and len(tally.timed) < TIMED_PHASES:
            tally.timed.append((position, orders))
        if BOARD.winner(after) is not None:
            return
        ours = peer_state(after)
        if any(ours[key] != theirs[key] for key in ours):
            tally.differences.append(
                {
                    "game": seed,
                    "phase": position.phase,
                    "rules": explanation(position, orders, ours, theirs),
                    "orders": {BOARD.powers[p]: [write(BOARD, o) for o in given] for p, given in orders.items()},
                    "pvg": changed(ours, theirs),
                    "package": changed(theirs, ours),
                }
            )
            peer.ask("set", state=settable(ours))
        position = after


def changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a state in which it differs."""
    found: dict[str, Any] = {} if one["phase"] == other["phase"] else {"phase": one["phase"]}
    for key in ("units", "centers", "retreats"):
        parts = {power: value for power, value in one[key].items() if value != other[key][power]}
        found |= {key: parts} if parts else {}
    return found


def copy_times(peer: Peer, count: int) -> dict[str, Any]:
    """An independent copy of a state: dump and load here, a deep copy there, after a short game."""
    draw, position = random.Random(0), BOARD.start
    peer.ask("new")
    while position.year < 1904:
        orders = drawn(draw, position)
        peer.ask("step", orders=peer_orders(position, orders))
        position = step(BOARD, position, orders).position
    started = time.process_time()
    for _ in range(100_000):
        Position.load(position.dump())
    ours = (time.process_time() - started) / 100_000
    theirs = peer.ask("copy", count=count)
    seconds = median(theirs["copy_s"])
    return {
        "pvg_s": ours,
        "package_s": seconds,
        "ratio": seconds / ours,
        "pvg_bytes": len(position.dump()),
        "package_bytes": theirs["bytes"],
    }


def phase_times(peer: Peer, timed: list[tuple[Position, dict[int, list[Order]]]]) -> dict[str, Any]:
    """Processor seconds per movement phase, without those of the communication: mean over the phases of the fastest of
    some rounds, in which the sides take turns. The intervals are those of the mean over drawn phases (bootstrap)."""
    asked = [{"state": settable(peer_state(p)), "orders": peer_orders(p, orders)} for p, orders in timed]
    rounds: dict[str, list[list[float]]] = {"step": [], "adjudicate": [], "package_check": [], "package_process": []}
    for _ in range(ROUNDS):
        for name, seconds in {**peer.ask("time", phases=asked), **own_times(timed)}.items():
            rounds[name].append(seconds)
    best = {name: np.min(seconds, axis=0) for name, seconds in rounds.items()}
    return {
        "phases": len(timed),
        "units": mean(len(position.units) // 2 for position, _ in timed),
        "mean_s": {name: float(seconds_P.mean()) for name, seconds_P in best.items()},
        "adjudicating_ratio": ratio(best["package_process"], best["adjudicate"]),
        "whole_phase_ratio": ratio(best["package_check"] + best["package_process"], best["step"]),
    }


def ratio(slow_P: NDArray[np.float64], fast_P: NDArray[np.float64]) -> dict[str, float]:
    """The ratio of the means over P phases, with a 95 % interval."""
    drawn_SP = np.random.default_rng(0).integers(len(slow_P), size=(2000, len(slow_P)))
    low, high = np.quantile(slow_P[drawn_SP].mean(axis=1) / fast_P[drawn_SP].mean(axis=1), [0.025, 0.975])
    return {"ratio": float(slow_P.mean() / fast_P.mean()), "low": float(low), "high": float(high)}


def own_times(timed: list[tuple[Position, dict[int, list[Order]]]]) -> dict[str, list[float]]:
    """`adjudicate`: the decisions for legal orders. `step`: also the check of every order and the next position."""
    found: dict[str, list[float]] = {"step": [], "adjudicate": []}
    for position, orders in timed:
        chosen_orders = by_province(orders)
        started = time.process_time()
        adjudicate(BOARD, position, chosen_orders)
        middle = time.process_time()
        step(BOARD, position, orders)
        found["adjudicate"].append(middle - started)
        found["step"].append(time.process_time() - middle)
    return found


def report(
    tally: Tally, times: Mapping[str, Any], busy: Mapping[str, Any], copies: Mapping[str, Any], games: int
) -> dict[str, Any]:
    commit, changes = git_state(ROOT)
    examples: dict[str, list[dict[str, Any]]] = {}
    for difference in tally.differences:
        examples.setdefault(" + ".join(difference["rules"]) or "unexplained", []).append(difference)
    return {
        "commit": commit,
        "uncommitted_changes": changes,
        "processor": processor(),
        "package": "diplomacy 1.1.2",
        "games": games,
        "phases": dict(tally.phases),
        "differences": len(tally.differences),
        "unexplained": sum(not difference["rules"] for difference in tally.differences),
        "by_rule": {rules: len(found) for rules, found in examples.items()},
        "rules": RULES | OTHER_RULES,
        "movement_phase": dict(times),
        "movement_phase_beside_busy_processes": dict(busy),
        "copy": dict(copies),
        "listed": [f"{d['game']} {d['phase']} {' + '.join(d['rules']) or 'unexplained'}" for d in tally.differences],
        "examples": {rules: found[: 2 if rules != "unexplained" else None] for rules, found in examples.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--games", type=int, default=500)
    parser.add_argument("--last-year", type=int, default=1907)
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--python", type=Path, default=PEER, help="of the environment with the package")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not given.python.exists():
        print(f"{given.python} is missing. Run `make games-peer`.", file=sys.stderr)
        return 3
    peer, tally = Peer(given.python), Tally()
    for seed in range(given.games):
        play(peer, seed, given.last_year, tally)
    times = phase_times(peer, tally.timed)
    with busy_processes(os.cpu_count() or 1):
        busy = phase_times(peer, tally.timed)
    found = report(tally, times, busy, copy_times(peer, given.copies), given.games)
    peer.close()
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        json.dumps({key: value for key, value in found.items() if key not in ("listed", "rules", "examples")}, indent=1)
    )
    return int(found["unexplained"] > 0)


if __name__ == "__main__":
    sys.exit(main())
