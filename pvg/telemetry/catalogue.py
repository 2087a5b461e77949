"""Every metric that a run emits, from catalogue.toml: its full name, unit, meaning, and better direction.

    METRICS["train_prover/helpful_accuracy"].meaning
    python -m pvg.telemetry.catalogue             # prints the page of all metrics

Sinks use the full name, `place/name`. In metrics.jsonl the same value is under `name`, in a record whose kind the
place determines (`KINDS`). Numbered names (gpu0_power_w) are listed once, as gpu{i}_power_w.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Better = Literal["higher", "lower", "neither"]
NEITHER: Better = "neither"

_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS: dict[str, str] = _DATA["kinds"]  # place -> when its metrics are recorded
LABELS: dict[str, str] = _DATA["labels"]  # name -> label on terminals and pages, for names that say too little
REMEDIES: dict[str, str] = _DATA["remedies"]  # kind of alert -> what to do first
UNITS: dict[str, list[str]] = _DATA["units"]  # unit -> explanation, ending of names, Prometheus's suffix


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


def _table() -> dict[str, Metric]:
    """The first field of a row of `metrics` names places, or groups of them."""
    found = [
        Metric(f"{place}/{name}", unit, meaning, better or NEITHER)
        for where, name, unit, better, meaning in _DATA["metrics"]
        for group in where.split()
        for place in _DATA["groups"].get(group, (group,))
    ]
    table = {metric.name: metric for metric in found}
    if len(table) != len(found):
        raise ValueError("the catalogue lists a metric twice")
    return table


METRICS: dict[str, Metric] = _table()


def metric(name: str) -> Metric | None:
    """The catalogue's entry for a full name; gpu0_power_w matches gpu{i}_power_w."""
    return METRICS.get(re.sub(r"^(device/gpu|workers/w)\d+_", r"\1{i}_", name))


TIMES = ("budget", "busy")  # seconds by part; the phase and the part are labels
PLACES_IN_NAMES = ("round", "device", "loop", "workers")  # they are part of the name; a phase is a label


def exposed_name(name: str) -> str:
    """`train_prover/latency_p50_s` -> `pvg_latency_p50_seconds`; the phase, part, GPU or worker becomes a label."""
    place, _, short = name.partition("/")
    if place in TIMES:
        return f"pvg_{place}_seconds"
    entry = metric(name)
    _, ending, suffix = UNITS[entry.unit] if entry is not None else ("", "", "")
    short = re.sub(r"^w(\d+|\{i\})_", "worker_", re.sub(r"^gpu(\d+|\{i\})_", "gpu_", short))
    own_place = f"{place}_" if place in PLACES_IN_NAMES else ""
    return re.sub(r"\W", "_", f"pvg_{own_place}{short.removesuffix(ending)}{suffix}")


def page() -> str:
    """The page `metrics.md` of the documentation site (docs/site.py)."""
    text = [_DATA["page"]["introduction"], "| unit | |", "|---|---|"]
    text += [f"| {unit} | {explained} |" for unit, (explained, _, _) in UNITS.items() if explained]
    for title, where, about in _DATA["page"]["sections"]:
        places = where.split()
        emitted = "; ".join(f"`{place}/` {KINDS[place]}" for place in places)
        text += ["", f"## {title}", "", f"{about} Emitted: {emitted}.".strip(), ""]
        text += ["| name | unit | better | meaning | Prometheus |", "|---|---|---|---|---|"]
        rows: dict[tuple[str, ...], list[Metric]] = {}  # equal metrics in several places share a row
        for entry in (entry for entry in METRICS.values() if entry.where in places):
            rows.setdefault((entry.short, entry.unit, entry.meaning, entry.better), []).append(entry)
        for group in rows.values():
            first = group[0]
            names = f"`{first.name}`" + "".join(f", `{metric.where}/…`" for metric in group[1:])
            exposed = ", ".join(dict.fromkeys(f"`{exposed_name(metric.name)}`" for metric in group))
            better = "–" if first.better == NEITHER else first.better
            text.append(f"| {names} | {first.unit} | {better} | {first.meaning} | {exposed} |")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    print(page(), end="")
