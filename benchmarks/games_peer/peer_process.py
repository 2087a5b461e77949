"""Plays Diplomacy with the package `diplomacy`, in an environment that has it: one JSON request and reply per line.

compare.py starts it. It imports nothing of pvg, and pvg imports nothing of the package. Requests: `new` (a game at the
start), `set` (a state), `step` (orders of each power), `time` (phases), `copy` (deep copies of the game). Seconds are
process CPU time.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import sys
import time
from typing import Any

with contextlib.redirect_stderr(None):
    Game = importlib.import_module("diplomacy").Game
cloudpickle = importlib.import_module("cloudpickle")


def state(game: Any) -> dict[str, Any]:
    found = game.get_state()
    return {
        "phase": game.current_short_phase,
        "units": {power: sorted(u for u in units if u[0] != "*") for power, units in found["units"].items()},
        "centers": {power: sorted(centers) for power, centers in found["centers"].items()},
        "retreats": {
            power: {unit: sorted(places) for unit, places in retreats.items()}
            for power, retreats in found["retreats"].items()
        },
    }


def step(game: Any, orders: dict[str, list[str]]) -> dict[str, Any]:
    started = time.process_time()
    for power, given in orders.items():
        game.set_orders(power, given)
    ordered = time.process_time()
    game.process()
    processed = time.process_time()
    return {"check_s": ordered - started, "process_s": processed - ordered, **state(game)}


def copies(game: Any, count: int) -> dict[str, Any]:
    seconds = []
    for _ in range(count):
        started = time.process_time()
        copy.deepcopy(game)
        seconds.append(time.process_time() - started)
    return {"copy_s": seconds, "bytes": len(cloudpickle.dumps(game))}


def timed(phases: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of checking the orders and of processing the phase, for each phase."""
    found: dict[str, list[float]] = {"package_check": [], "package_process": []}
    for phase in phases:
        game = Game()
        game.set_state(phase["state"])
        answer = step(game, phase["orders"])
        found["package_check"].append(answer["check_s"])
        found["package_process"].append(answer["process_s"])
    return found


def main() -> None:
    reply = sys.stdout
    sys.stdout = sys.stderr  # the package prints what it does not understand
    game = Game()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "new":
            game = Game()
            answer = state(game)
        elif request["do"] == "set":
            game = Game()
            game.set_state(request["state"])
            answer = state(game)
        elif request["do"] == "step":
            answer = step(game, request["orders"])
        elif request["do"] == "time":
            answer = timed(request["phases"])
        else:
            answer = copies(game, request["count"])
        print(json.dumps(answer), file=reply, flush=True)


if __name__ == "__main__":
    main()
