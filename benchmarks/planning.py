"""The planner against pvg's real pipeline, against its own benchmark with real training, and against published figures.

    python -m benchmarks.planning             # all; writes docs/planning.json and the tables of docs/planning.md
    python -m benchmarks.planning --batches 40 --out FILE.json    # a quicker look

The real pipeline plays in virtual time (benchmarks.planned_worlds), so the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages.other_ladders import spelled_out
from benchmarks.planned_worlds import WORLDS, PlayedBatches, play_world
from pvg.planning.bounds import bounds_of
from pvg.planning.simulation import Outcome, simulate
from pvg.planning.world import AheadLimits, World, lognormal_lengths
from pvg.records import Role
from pvg.reporting.table import markdown_lines

BATCHES, FILL = 100, 8
PLAYED_SEED, PLANNED_SEED = 101, 0
PAGE = Path("docs") / "planning.md"
REPORT = PAGE.with_suffix(".json")


def compared(name: str, world: World, batches: int) -> dict[str, Any]:
    """One world: what the real pipeline did, and what the planner says."""
    real: PlayedBatches = play_world(world, batches, FILL, PLAYED_SEED)
    plan: Outcome = simulate(world, batches, PLANNED_SEED, FILL)
    bounds = bounds_of(world)
    planned = {name: getattr(plan, name) for name in ("batch_s", "idle", "waiting", "staleness", "dropped")}
    return {
        "world": name,
        "played": asdict(real),
        "planned": planned,
        "least_s": bounds.least_s,
        "most_s": bounds.most_s,
    }


# --- published figures ------------------------------------------------------------------------------------------------

# verl, fully asynchronous training of Qwen2.5-Math-7B with DAPO on H20 (its page "Fully Async Policy Trainer"): 512
# prompts x 16 answers of at most 28k tokens. GPUs -> (gen of the synchronous step; step and update_actor of the
# asynchronous one with half of the GPUs for each side; the rest of that step that is not gen), in seconds.
VERL = {32: (357.41, 294.77, 269.80, 3.71), 64: (150.72, 189.26, 156.98, 3.82), 128: (177.85, 150.63, 113.16, 4.33)}
VERL_IN_TURNS = (231.34, 98.77, 4.10)  # staleness 0 on 64 + 64: step, update_actor, and the rest that is not gen
VERL_GROUPS, VERL_SIZE, VERL_LONGEST = 512, 16, 28_672
VERL_MEAN, VERL_SIGMA = 3000.0, 0.9  # assumed: not published


def verl_world(gpus: int, gen_gpus: int, train_s: float, rest_s: float, ahead: AheadLimits | None) -> World:
    """The decoding speed is that with which the synchronous step of `gpus` GPUs samples in its published time."""

    def world(workers: int, token_s: float) -> World:
        pool = lognormal_lengths(VERL_MEAN, VERL_SIGMA, VERL_LONGEST)
        rollouts = VERL_GROUPS * VERL_SIZE
        return World(
            groups=VERL_GROUPS,
            group_size=VERL_SIZE,
            lengths=dict.fromkeys(Role, pool),
            workers=workers,
            slots=256,
            concurrency=2 * rollouts,
            token_s=token_s,
            row_s=token_s / 256,  # assumed: a full worker decodes at half of the speed of an empty one
            train_token_s=train_s / (rollouts * float(pool.mean())),
            other_s=rest_s,
            ahead=ahead,
        )

    alone = World(**{**_fields(world(gpus, 1.0)), "ahead": None, "train_token_s": 0.0, "other_s": 0.0})
    return world(gen_gpus, VERL[gpus][0] / simulate(alone, batches=2, fill=0).batch_s)


def _fields(world: World) -> dict[str, Any]:
    return {name: getattr(world, name) for name in World.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Published:
    """A published figure, what the planner says, and which inputs are assumed."""

    what: str
    source: str
    unit: str
    published: float
    plan: Callable[[], float]
    inputs: str


def verl_ahead(gpus: int) -> float:
    _, _, train_s, rest_s = VERL[gpus]
    world = verl_world(gpus, gpus // 2, train_s, rest_s, AheadLimits(1, 2, "old"))
    return simulate(world, batches=6, fill=3).batch_s


def verl_in_turns() -> float:
    _, train_s, rest_s = VERL_IN_TURNS
    return simulate(verl_world(128, 64, train_s, rest_s, None), batches=4, fill=0).batch_s


def prime_rl_idle() -> float:
    """prime-rl on GLM-5, 28 H200 nodes: the trainer takes 3.7 minutes, the rollouts of a step 5.0 minutes."""
    pool = lognormal_lengths(1000.0, 0.8, 8000)
    slots = 8 * 32
    token_s = 300.0 * slots / (256 * float(pool.mean()))
    world = World(
        groups=32,
        group_size=8,
        lengths=dict.fromkeys(Role, pool),
        workers=8,
        slots=32,
        concurrency=slots,
        token_s=token_s,
        train_token_s=222.0 / (256 * float(pool.mean())),
        ahead=AheadLimits(2, 8, "old"),
    )
    return simulate(world, batches=40).idle


def llama_3_effective() -> float:
    """Llama 3: 419 interruptions in 54 days. Assumed: 5 minutes for a restart, a checkpoint every 10 minutes."""
    between_s, lost_s = 54 * 86400 / 419, 300.0 + 600.0 / 2
    return between_s / (between_s + lost_s)


VERL_SOURCE = "verl"
VERL_INPUTS = (
    "verl's page: sampling time (gen) of the synchronous step, training time (update_actor) and remaining time of this "
    "step; assumed: lengths (mean 3,000, sigma 0.9), 256 rows per GPU"
)
PUBLISHED = [
    *(
        Published(
            f"asynchronous step on {gpus // 2} + {gpus // 2} GPUs",
            VERL_SOURCE,
            "s",
            VERL[gpus][1],
            lambda gpus=gpus: verl_ahead(gpus),  # type: ignore[misc]
            VERL_INPUTS,
        )
        for gpus in VERL
    ),
    Published("step with staleness 0 on 64 + 64 GPUs", VERL_SOURCE, "s", VERL_IN_TURNS[0], verl_in_turns, VERL_INPUTS),
    Published(
        "trainer idle on 28 nodes",
        "prime-rl, GLM-5",
        "share",
        1 - 3.7 / 5.0,
        prime_rl_idle,
        "published: trainer 3.7 min, rollouts 5.0 min; the idle share follows from the two; assumed: the rest",
    ),
    Published(
        "effective training time, at least",
        "Llama 3",
        "share",
        0.9,
        llama_3_effective,
        "published: 419 interruptions in 54 days; assumed: 5 min per restart, a checkpoint every 10 min",
    ),
]


# --- pvg's own benchmark with real training ---------------------------------------------------------------------------

PIPELINE = Path("docs") / "benchmarks" / "pipeline.json"
MODES = (None, AheadLimits(1, 2), AheadLimits(2, 3), AheadLimits(1, 2, "old"))  # of its variants without workers
OTHER_S = 0.05  # of a step that is neither training nor waiting: 7 to 10 % in its pipelined variants


def committed(path: Path = PIPELINE) -> list[dict[str, Any]]:
    """The committed report of `pvg bench --profile pipeline`: the trainer really trains, beside an engine in another
    process whose latencies have a heavy tail. There a latency is not a length, so training takes the same time
    whichever groups are dropped: here it is part of `other_s`."""
    rows = []
    for variant, ahead in zip(json.loads(path.read_text())["variants"][: len(MODES)], MODES, strict=True):
        derived = variant["derived"]
        mean, sigma, rows_at_once, rollouts = 1000.0, 1.0, 64, 256
        pool = lognormal_lengths(mean, sigma, int(32 * mean / math.exp(sigma**2 / 2)))
        world = World(
            groups=32,
            group_size=8,
            lengths=dict.fromkeys(Role, pool),
            workers=1,
            slots=rows_at_once,
            concurrency=rows_at_once,
            token_s=derived["engine_batch_s"] * rows_at_once / rollouts / mean,
            train_token_s=0.0,
            other_s=derived["trained_step_s"] + OTHER_S,
            ahead=ahead,
        )
        plan = simulate(world, batches=100)
        step_s = statistics.median(variant["samples"]["step_s"]["values"])
        measured = {"batch_s": step_s, "staleness": derived["staleness"], "dropped": derived["dropped_share"]}
        planned = {name: getattr(plan, name) for name in measured}
        rows.append({"variant": variant["label"], "measured": measured, "planned": planned})
    return rows


# --- the page ---------------------------------------------------------------------------------------------------------


def report(batches: int) -> dict[str, Any]:
    found = []
    for number, (name, world) in enumerate(WORLDS.items(), 1):
        found.append(compared(name, world, batches))
        print(f"{number} of {len(WORLDS)} worlds: {name}", flush=True)
    published = [
        {**{n: getattr(p, n) for n in ("what", "source", "unit", "published", "inputs")}, "planned": p.plan()}
        for p in PUBLISHED
    ]
    seeds = {"batches": batches, "fill": FILL, "played_seed": PLAYED_SEED, "planned_seed": PLANNED_SEED}
    return {**seeds, "worlds": found, "committed": committed(), "published": published}


def worlds_table(found: dict[str, Any]) -> str:
    header = ("world", "", "batch, s", "trainer idle", "staleness", "dropped", "bounds of a batch, s")
    rows = []
    for row in found["worlds"]:
        most = "" if row["most_s"] is None else f" to {row['most_s']:.1f}"
        for kind, name, bounds in (("played", row["world"], ""), ("planned", "", f"{row['least_s']:.1f}{most}")):
            v = row[kind]
            shares = (f"{100 * v['idle']:.1f} %", f"{v['staleness']:.2f}", f"{100 * v['dropped']:.1f} %")
            rows.append((name, kind, f"{v['batch_s']:.2f}", *shares, bounds))
    return "\n".join(markdown_lines(header, "llrrrrr", rows))


def committed_table(found: dict[str, Any]) -> str:
    rows = []
    for row in found["committed"]:
        for kind in ("measured", "planned"):
            v, name = row[kind], spelled_out(row["variant"]) if kind == "measured" else ""
            rows.append((name, kind, f"{v['batch_s']:.2f}", f"{v['staleness']:.2f}", f"{100 * v['dropped']:.1f} %"))
    return "\n".join(markdown_lines(("variant", "", "step, s", "staleness", "dropped"), "llrrr", rows))


def published_table(found: dict[str, Any]) -> str:
    rows = []
    for row in found["published"]:
        texts = [
            f"{100 * row[k]:.0f} %" if row["unit"] == "share" else f"{row[k]:.0f} s" for k in ("published", "planned")
        ]
        rows.append((row["what"], row["source"], *texts, row["inputs"]))
    return "\n".join(markdown_lines(("figure", "source", "published", "planned", "inputs"), "llrrl", rows))


TABLES = {"worlds": worlds_table, "committed": committed_table, "published": published_table}


def with_tables(page: str, found: dict[str, Any]) -> str:
    """The page with its tables replaced: each stands between `<!-- NAME -->` and `<!-- end -->`."""
    for name, table in TABLES.items():
        text = f"<!-- {name} -->\n{table(found)}\n<!-- end -->"
        page = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, text=text: text, page, flags=re.DOTALL)  # type: ignore[misc]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--out", type=Path, default=REPORT)
    given = parser.parse_args()
    found = report(given.batches)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.out == REPORT:
        PAGE.write_text(with_tables(PAGE.read_text(), found))
    print(*(table(found) for table in TABLES.values()), sep="\n\n")


if __name__ == "__main__":
    main()
