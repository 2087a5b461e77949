"""Every metric that a run emits, from catalogue.toml: its full name, unit, meaning, and better direction.

    METRICS["train_prover/helpful_accuracy"].meaning

Sinks use the full name, `place/name`. In metrics.jsonl the same value is under `name`, in a record whose kind the
place determines (`KINDS`). Numbered names (gpu0_power_w) are listed once, as gpu{i}_power_w. Labels for terminals and
pages are in pvg.reporting.formats.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Better = Literal["higher", "lower", "neither"]
NEITHER: Better = "neither"

# Phases, as they appear in full names.
SAMPLE = ("init", "solve", "mint")  # `pvg rollout` leaves a run in its first phase, init
WARMUP = ("warmup",)
VERIFIER = ("train_verifier",)
PROVER = ("train_prover",)
ROUND = ("checkpoint", "round")  # the same values: once as a step, once as a row of the round's table

KINDS = {
    "init": "steps of `pvg rollout`",
    "warmup": "steps and end of WARMUP",
    "solve": "steps of SOLVE (the decoupled game)",
    "mint": "steps of MINT",
    "train_verifier": "steps and end of TRAIN_VERIFIER",
    "train_prover": "steps of TRAIN_PROVER",
    "checkpoint": "the step of CHECKPOINT",
    "round": "once per round",
    "budget": "every step",
    "busy": "every step",
    "device": "every 5 s",
    "loop": "every 5 s",
    "workers": "every 5 s, by runs with workers",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric; `unit` is one of UNITS."""

    name: str
    unit: str
    meaning: str
    better: Better

    @property
    def where(self) -> str:
        return self.name.partition("/")[0]

    @property
    def short(self) -> str:
        """The name within its record of metrics.jsonl."""
        return self.name.partition("/")[2]


# Unit -> its explanation on the page.
UNITS = {
    "share": "0 to 1",
    "score": "the verifier's logit",
    "reward": "what the prover receives",
    "nats": "natural units of information",
    "s": "seconds",
    "tokens": "",
    "tokens/s": "",
    "pairs/s": "",
    "rollouts": "",
    "pairs": "",
    "versions": "published weights",
    "rows": "",
    "cores": "",
    "bytes": "",
    "W": "watts",
    "count": "",
    "number": "without a unit",
}


GROUPS = {"SAMPLE": SAMPLE, "WARMUP": WARMUP, "VERIFIER": VERIFIER, "PROVER": PROVER, "ROUND": ROUND}


def _table() -> dict[str, Metric]:
    """The rows of catalogue.toml. The first field of a row names places, or GROUPS of them."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["metrics"]
    found = [
        Metric(f"{place}/{name}", unit, meaning, better or NEITHER)
        for where, name, unit, better, meaning in rows
        for group in where.split()
        for place in GROUPS.get(group, (group,))
    ]
    table = {metric.name: metric for metric in found}
    if len(table) != len(found):
        raise ValueError("the catalogue lists a metric twice")
    return table


METRICS: dict[str, Metric] = _table()


def metric(name: str) -> Metric | None:
    """The catalogue's entry for a full name; gpu0_power_w matches gpu{i}_power_w."""
    return METRICS.get(re.sub(r"^(device/gpu|workers/w)\d+_", r"\1{i}_", name))


# --- the page ---------------------------------------------------------------------------------------------------------

# Unit of the catalogue -> (how a name may end with it already, Prometheus's suffix). Base units, as Prometheus asks.
PROMETHEUS_SUFFIXES = {
    "share": ("", "_ratio"),
    "s": ("_s", "_seconds"),
    "bytes": ("_bytes", "_bytes"),
    "W": ("_w", "_watts"),
    "nats": ("", "_nats"),
    "cores": ("", "_cores"),
    "rows": ("", "_rows"),
    "versions": ("", "_versions"),
    "tokens": ("_tokens", "_tokens"),
    "tokens/s": ("_per_s", "_per_second"),
    "pairs/s": ("_per_s", "_per_second"),
}
TIMES = ("budget", "busy")  # seconds by part; the phase and the part are labels
PLACES_IN_NAMES = ("round", "device", "loop", "workers")  # they are part of the name; a phase is a label


def exposed_name(name: str) -> str:
    """`train_prover/latency_p50_s` -> `pvg_latency_p50_seconds`; the phase, part, GPU or worker becomes a label."""
    place, _, short = name.partition("/")
    if place in TIMES:
        return f"pvg_{place}_seconds"
    entry = metric(name)
    ending, suffix = PROMETHEUS_SUFFIXES.get(entry.unit if entry is not None else "", ("", ""))
    short = re.sub(r"^w(\d+|\{i\})_", "worker_", re.sub(r"^gpu(\d+|\{i\})_", "gpu_", short))
    own_place = f"{place}_" if place in PLACES_IN_NAMES else ""
    return re.sub(r"\W", "_", f"pvg_{own_place}{short.removesuffix(ending)}{suffix}")


# The page of all metrics, from pvg.telemetry.catalogue. docs/site.py adds it to the documentation site.


INTRODUCTION = """# Metrics

This page is for people who read or plot the metrics of a run. It lists every metric that a run emits.

TensorBoard, Weights & Biases and trackio show the full name, `place/name`. `metrics.jsonl` has the same value under
`name`, in a record whose `kind` (and `phase`, for steps) gives the place. A value that does not exist, such as a share
of nothing, is `null` there, and the sinks leave it out. The last column is the name on the Prometheus endpoint
(`telemetry.metrics_port`). There, the unit is a suffix, and the phase, round, GPU or worker is a label. The endpoint
also serves `pvg_step`, `pvg_round` and the counter `pvg_alerts_total` with the label `kind` ([runbook.md](runbook.md)
lists the kinds).

With `training.minibatches` above 1, several steps learn from one batch. Then only the record of the first of these
steps has the metrics of the batch: its rollouts, rewards and scores, and how it was sampled. Only the record of the
last has the metrics of the weight update.

"Better" is the direction in which the metric moves in a healthy experiment, other things being equal. A dash means
that there is none, or that the two players pull in opposite directions.
"""


def page() -> str:
    """The page `metrics.md` of the documentation site."""
    sections: list[tuple[str, tuple[str, ...], str]] = [
        ("Sampling", SAMPLE, "`pvg rollout` (init), the solver and the mint. There is no verifier yet."),
        (
            "Warm start",
            WARMUP,
            "Only with `[warmup]`. The losses before and after appear once, at the end of the phase.",
        ),
        ("Training the verifier", VERIFIER, "The figures of the calibration appear once, at the end of the phase."),
        ("Training the prover", PROVER, ""),
        ("Rounds", ROUND, "Fresh samples of both roles on test problems, at the end of each round."),
        (
            "Time",
            ("budget", "busy"),
            "Seconds by part. `budget` is the time that the step waited for each part: the parts sum to its wall time. "
            "`busy` is the work in all threads and tasks, overlapped work included. Parts without time are left out.",
        ),
        ("Machine", ("device",), ""),
        ("Workers", ("workers",), "Worker processes report to the driver every 2 s."),
        ("Event loop", ("loop",), "The lag is the delay of a tick. Every tick that was due during a stall counts."),
    ]
    text = [INTRODUCTION, "| unit | |", "|---|---|", *(f"| {unit} | {what} |" for unit, what in UNITS.items() if what)]
    for title, places, about in sections:
        emitted = "; ".join(f"`{place}/` {KINDS[place]}" for place in places)
        text += ["", f"## {title}", "", f"{about} Emitted: {emitted}.".strip(), ""]
        text += ["| name | unit | better | meaning | Prometheus |", "|---|---|---|---|---|"]
        for group in _same([metric for metric in METRICS.values() if metric.where in places]):
            first = group[0]
            names = f"`{first.name}`" + "".join(f", `{metric.where}/…`" for metric in group[1:])
            exposed = ", ".join(dict.fromkeys(f"`{exposed_name(metric.name)}`" for metric in group))
            better = "–" if first.better == NEITHER else first.better
            text.append(f"| {names} | {first.unit} | {better} | {first.meaning} | {exposed} |")
    return "\n".join(text) + "\n"


def _same(metrics: Iterable[Metric]) -> list[list[Metric]]:
    """Metrics with equal unit, direction and meaning in several places share a row."""
    rows: dict[tuple[str, str, str, str], list[Metric]] = {}
    for entry in metrics:
        rows.setdefault((entry.short, entry.unit, entry.meaning, entry.better), []).append(entry)
    return list(rows.values())


if __name__ == "__main__":
    print(page(), end="")
