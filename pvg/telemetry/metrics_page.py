"""The page of all metrics, from pvg.telemetry.catalogue. docs/site.py adds it to the documentation site.

python -m pvg.telemetry.metrics_page      # prints it
"""

from __future__ import annotations

from collections.abc import Iterable

from pvg.telemetry.catalogue import (
    KINDS,
    METRICS,
    NEITHER,
    PROVER,
    ROUND,
    SAMPLE,
    UNITS,
    VERIFIER,
    WARMUP,
    Metric,
    exposed_name,
)

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
