"""Every metric that a run emits, from catalogue.toml: its full name, unit, meaning, and better direction.

    METRICS["train_prover/helpful_accuracy"].meaning

Sinks use the full name, `place/name`. In metrics.jsonl the same value is under `name`, in a record whose kind the
place determines (`KINDS`). Numbered names (gpu0_power_w) are listed once, as gpu{i}_power_w. Labels for terminals and
pages are in pvg.reporting.formats.
"""

from __future__ import annotations

import re
import tomllib
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
