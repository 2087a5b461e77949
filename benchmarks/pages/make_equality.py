"""Plays the embedded game with all switches slow and with all switches fast, and writes docs/results/equality.md.

    python -m benchmarks.pages.make_equality                    # five seeds of each, a core per game (`make equality`)
    python -m benchmarks.pages.make_equality --jobs 1           # one game after the other, each on all cores
    python -m benchmarks.pages.make_equality --only-table       # from the runs that exist
    python -m benchmarks.pages.make_equality --side slow        # only plays that side

The switches are those of the ladder of profiles/e2e.toml. The command keeps
complete runs, resumes interrupted ones, and refuses runs of other switches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages.make_embedded_game import COLUMNS, rounds_of, run_name, run_seed, seconds_of, state_of
from benchmarks.pages.seed_statistics import Difference, difference, joint_p
from pvg.bench.profile import find_profile, read_profile
from pvg.reporting.table import markdown_lines
from pvg.store.run_directory import RunDirectory

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PROFILE = "e2e"
SIDES = ("slow", "fast")
ROUNDS = 1  # of mint, verifier and prover
SIGNIFICANT = 0.05
FIRST = 5  # seeds with a separate result if more were played

Switches = dict[str, Any]
Rounds = list[dict[str, Any]]


@dataclass(frozen=True)
class MetricRow:
    """One metric at the end of one round: the values of each side (None: the seed has none), and their difference."""

    round: str
    title: str
    slow: Sequence[float | None]
    fast: Sequence[float | None]

    @property
    def found(self) -> Difference | None:
        slow, fast = known(self.slow), known(self.fast)
        return difference(slow, fast) if min(len(slow), len(fast)) > 1 else None


def switches() -> dict[str, Switches]:
    """The switches of the ladder with their values, by side."""
    found: dict[str, Switches] = {"slow": {}, "fast": {}}
    for rung in read_profile(find_profile(PROFILE)).ladder:
        found["slow"].setdefault(rung.switch, rung.slow)
        found["fast"][rung.switch] = rung.fast
    return found


def play(sides: Sequence[str], seeds: Sequence[int], root: Path, settings: Sequence[str], jobs: int) -> None:
    """Play `jobs` games at a time, the slow ones first. If a game fails, wait for the running ones, then raise."""
    overrides = {
        side: [f"{key}={json.dumps(value)}" for key, value in values.items()] for side, values in switches().items()
    }
    with ThreadPoolExecutor(jobs) as pool:
        games = [
            pool.submit(run_seed, seed, root / side, [*overrides[side], *settings], quiet=jobs > 1)
            for side in sides
            for seed in seeds
        ]
        try:
            for game in as_completed(games):
                game.result()
        finally:
            pool.shutdown(cancel_futures=True)


def check_switches(side: str, seed: int, root: Path) -> None:
    """A run that was played with other switches says nothing about these."""
    run = RunDirectory.open(run_name(seed), root / side)
    plain = run.experiment().plain()
    for key, wanted in switches()[side].items():
        found: Any = plain
        for part in key.split("."):
            found = found[part]
        if found != wanted:
            raise SystemExit(f"{run.path} was played with {key} = {found!r}, not {wanted!r}.")


# --- the page --------------------------------------------------------------------------------------------------------


def rows_of(slow: Sequence[Rounds], fast: Sequence[Rounds]) -> list[MetricRow]:
    """Every metric of every round, without those that no seed has."""
    found = []
    for number in range(len(slow[0])):
        for name, title in COLUMNS:
            row = MetricRow(
                str(number), title, *([rounds[number].get(name) for rounds in side] for side in (slow, fast))
            )
            if known(row.slow) or known(row.fast):
                found.append(row)
    return found


def table(rows: Sequence[MetricRow]) -> list[str]:
    header = ("round", "metric", "all slow", "all fast", "fast - slow (95 %)", "p", "")
    return markdown_lines(header, "llrrrrl", [tuple(cells(row)) for row in rows])


def cells(row: MetricRow) -> Iterator[str]:
    yield from (row.round, row.title, values_text(row.slow), values_text(row.fast))
    found = row.found
    if found is None:
        yield from ("", "", "too few")
        return
    yield f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    yield f"{found.p:.3f}"
    yield "within the spread" if found.p >= SIGNIFICANT else "**beyond it**"


def values_text(values: Sequence[float | None]) -> str:
    """Mean, standard deviation, range."""
    there = known(values)
    if not there:
        return "-"
    spread = statistics.stdev(there) if len(there) > 1 else 0.0
    missing = "" if len(there) == len(values) else f", {len(there)} of {len(values)} seeds"
    return f"{statistics.fmean(there):.3f} ± {spread:.3f} ({min(there):.3f}–{max(there):.3f}{missing})"


def verdict(rows: Sequence[MetricRow]) -> str:
    """The result of all metrics together; then how many differ one by one, and how many would differ by chance."""
    (p, compared), ways = together(rows), math.comb(len(rows[0].slow) + len(rows[0].fast), len(rows[0].slow))
    same = "do not differ by more than the seeds do" if p >= SIGNIFICANT else "**differ by more than the seeds do**"
    told = (
        f"All {compared} comparisons together: the two sides {same}, p = {p:.3f} (exact, {ways} ways to assign the "
        f"seeds). {one_by_one(rows)}"
    )
    if len(rows[0].slow) <= FIRST:
        return told
    first = [MetricRow(row.round, row.title, row.slow[:FIRST], row.fast[:FIRST]) for row in rows]
    planned = "we planned only these, and added the others after we had looked at the results"
    return f"{told}\n\nThe first {FIRST} seeds alone ({planned}): p = {together(first)[0]:.3f}. {one_by_one(first)}"


def together(rows: Sequence[MetricRow]) -> tuple[float, int]:
    """The joint p, and the number of comparisons: metrics that every seed has."""
    whole = [row for row in rows if len(known(row.slow)) == len(row.slow) and len(known(row.fast)) == len(row.fast)]
    return joint_p([known(row.slow) for row in whole], [known(row.fast) for row in whole]), len(whole)


def one_by_one(rows: Sequence[MetricRow]) -> str:
    compared = [row.found.p for row in rows if row.found is not None]
    beyond = sum(each < SIGNIFICANT for each in compared)
    return (
        f"Taken one by one, {beyond} of {len(compared)} {'has' if beyond == 1 else 'have'} a p below {SIGNIFICANT:g}; "
        f"by chance alone {SIGNIFICANT * len(compared):.1f} would."
    )


def known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def switch_table() -> list[str]:
    sides = switches()
    rows = [(f"`{key}`", json.dumps(slow), json.dumps(sides["fast"][key])) for key, slow in sides["slow"].items()]
    return markdown_lines(("switch", "slow", "fast"), "lll", rows)


def page(root: Path, seeds: Sequence[int]) -> str:
    """From complete runs of both sides."""
    played = {side: [rounds_of(seed, root / side) for seed in seeds] for side in SIDES}
    if len({len(rounds) for runs in played.values() for rounds in runs}) > 1:
        raise SystemExit("The runs have different numbers of rounds: play those of one side again.")
    for side in SIDES:
        for seed in seeds:
            check_switches(side, seed, root)
    rows, count = rows_of(played["slow"], played["fast"]), len(played["slow"][0])
    seconds = {side: statistics.median(seconds_of(seed, root / side) for seed in seeds) for side in SIDES}
    template = (RESULTS / "equality.template.md").read_text(encoding="utf-8")
    return template.format(
        seeds=len(seeds),
        rounds="1 round" if count == 1 else f"{count} rounds",
        verdict=verdict(rows),
        table="\n".join(table(rows)),
        switches="\n".join(switch_table()),
        threads=threads_of(root, seeds),
        slow_s=f"{seconds['slow']:.0f}",
        fast_s=f"{seconds['fast']:.0f}",
        code=", ".join(sorted({state_of(seed, root / side)["code_version"] for side in SIDES for seed in seeds})),
    )


def threads_of(root: Path, seeds: Sequence[int]) -> str:
    """The number of threads, as a note on the seconds of a game."""
    runs = [RunDirectory.open(run_name(seed), root / side) for side in SIDES for seed in seeds]
    alone = {run.experiment().models.threads for run in runs} == {1}
    return "in one thread each, while other games ran" if alone else "one after the other"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path("runs/equality"), help="holds slow/ and fast/")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="of both")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="games at a time, a thread each")
    parser.add_argument("--side", choices=SIDES, help="only play this side, and write no page")
    parser.add_argument("--only-table", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "equality.md")
    options = parser.parse_args(arguments)
    seeds = range(options.seeds)
    settings = [f"game.rounds={ROUNDS}", *(["models.threads=1"] if options.jobs > 1 else []), *options.overrides]
    if not options.only_table:
        play([options.side] if options.side else SIDES, seeds, options.root, settings, options.jobs)
    if options.side:
        return
    made = page(options.root, seeds)
    options.out.write_text(made, encoding="utf-8")
    print(made, file=sys.stdout)


if __name__ == "__main__":
    main()
