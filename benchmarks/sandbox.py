"""What isolation costs, as ratios within one run: python benchmarks/sandbox.py [--repeats 15]

Several ways of running one program on 15 cases take turns, so that other load on the machine affects all of them:

- as pvg does it: one process for all cases, forked from an interpreter that stands behind the walls;
- a process for each case, forked likewise;
- a new interpreter for each program, with the same walls;
- like the first, with Landlock and the filter but without namespaces; and without any walls.

Prints medians of the seconds as multiples of the first way's, as one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

from pvg.sandbox import MECHANISMS, Limits, Program, Sandbox
from pvg.sandbox.isolation import WardenProcess

CASES = 15
SOURCE = (
    "def total(numbers):\n    result = 0\n    for x in numbers:\n        result += x\n    return result + {number}\n"
)
LIMITS = Limits(cpu_s=10.0)


def program(number: int, cases: Sequence[int]) -> Program:
    """One that was not run before, so that no cache knows it."""
    return Program.of_function(SOURCE.format(number=number), "total", [[list(range(case))] for case in cases])


def an_interpreter_each(one: Program) -> None:
    warden = WardenProcess(MECHANISMS)
    try:
        warden.run(one, LIMITS)
    finally:
        warden.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats: int = parser.parse_args().repeats
    everything = range(CASES)
    with (
        Sandbox("reduced", LIMITS, workers=1) as walled,
        Sandbox("reduced", LIMITS, workers=1, mechanisms={"landlock", "seccomp"}) as light,
        Sandbox("reduced", LIMITS, workers=1, mechanisms=()) as open_,
    ):

        def one_each(number: int) -> None:
            for case in everything:
                walled.run(program(number, [case]))

        ways: dict[str, Callable[[int], object]] = {
            "one process for all cases": lambda n: walled.run(program(n, everything)),
            "a process for each case": one_each,
            "an interpreter for each program": lambda n: an_interpreter_each(program(n, everything)),
            "without namespaces": lambda n: light.run(program(n, everything)),
            "without walls": lambda n: open_.run(program(n, everything)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(repeats):
            for name, way in ways.items():
                started = time.perf_counter()
                way(number)
                seconds[name].append(time.perf_counter() - started)
        first = statistics.median(seconds["one process for all cases"])
        ratios = {name: round(statistics.median(found) / first, 2) for name, found in seconds.items()}
        print(json.dumps({"isolation": walled.isolation.describe(), "repeats": repeats, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
