"""The tables of a `sync` benchmark on vLLM servers: what an update took by client, and what it cost the streams.

The figures are the report's derived ones, over the updates of all samples together; the terminal and the page of
benchmarks (docs/make_benchmarks.py) show the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pvg.bench.report import BenchReport, Variant
from pvg.bench.statistics import median
from pvg.reporting.terminal import QUIET, section
from pvg_cli.output import quiet_table

PROFILE = "sync"
TIMES = ("wall", "rpc", "queue")
PERCENTILES = (50, 95, 99)
RATES = {"before": "before", "during": "back to back", "stepped": "once a step", "after": "after"}
PARTS = ("stage", "arrival", "pause", "load", "resume")
ENOUGH = 100  # updates behind a 99th percentile that is more than the largest of them


@dataclass(frozen=True, slots=True)
class Cells:
    """A table in words: `header` and `rows` of as many cells, the first of which is the client's."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def has_updates(report: BenchReport) -> bool:
    """Whether this is a report that these tables can be made of."""
    return report.profile == PROFILE and any(_told(variant) for variant in report.variants)


def update_cells(report: BenchReport) -> Cells:
    """Wall, rpc and queue time of an update under load, in ms, by client."""
    header = ("client", *(f"{name} p{percentile}" for name in TIMES for percentile in PERCENTILES))
    rows = [
        (
            client_of(report, variant),
            *(_ms(variant.derived[f"{name}_p{percentile}_ms"]) for name in TIMES for percentile in PERCENTILES),
        )
        for variant in report.variants
        if _told(variant)
    ]
    return Cells(header, tuple(rows))


def cost_cells(report: BenchReport) -> Cells:
    """By client: the streams' tokens/s before the updates, with updates back to back, with one update per step, and
    after the updates; the updates per second back to back (slow updates are fewer, and cost less); the medians of an
    update's parts, in ms."""
    rates = _rates(report)
    told = (f"tokens/s {RATES[when]}" for when in rates)
    header = ("client", *told, "updates /s", *(f"{part} p50" for part in PARTS))
    rows = [
        (
            client_of(report, variant),
            *(f"{median(variant.samples[f'tokens_per_s_{when}'].values):,.0f}" for when in rates),
            f"{variant.derived['updates_per_s']:.2g}",
            *(_ms(variant.derived[f"{part}_p50_ms"]) for part in PARTS),
        )
        for variant in report.variants
        if _told(variant)
    ]
    return Cells(header, tuple(rows))


def notes(report: BenchReport) -> list[str]:
    """What must be known to read the tables, a sentence each."""
    counts = sorted({int(variant.derived["updates"]) for variant in report.variants if _told(variant)})
    listed = " or ".join(map(str, counts))
    found = [f"Percentiles over the {listed} updates of all samples of a client, under {_streams(report)} streams."]
    if counts[0] < ENOUGH:
        found.append(f"p99 of fewer than {ENOUGH} updates is hardly more than the largest of them.")
    found.append(f"Updates reduce the streams' tokens/s by {_costs(report)}.")
    found += [f"{_client(value['label'])}: {value['says']}." for value in _sweep(report) if value.get("says")]
    return found


def _rates(report: BenchReport) -> list[str]:
    """The RATES that the report has: older reports have no updates once a step."""
    samples = next(variant.samples for variant in report.variants if _told(variant))
    return [when for when in RATES if f"tokens_per_s_{when}" in samples]


def _costs(report: BenchReport) -> str:
    """The share of tokens/s that the streams lose to the last client's updates, by their frequency."""
    variant = next(variant for variant in reversed(report.variants) if _told(variant))
    rates = {when: median(variant.samples[f"tokens_per_s_{when}"].values) for when in _rates(report)}
    alone = (rates["before"] + rates["after"]) / 2
    told = [f"{100 * (1 - rates[when] / alone):.0f} % {RATES[when]}" for when in ("during", "stepped") if when in rates]
    return f"{' and '.join(told)} ({client_of(report, variant)})"


def client_of(report: BenchReport, variant: Variant) -> str:
    """A short name of the client."""
    if variant.label:
        return _client(variant.label)
    return str(report.config["experiment"]["weights"]["client"])


def update_tables(report: BenchReport) -> list[RenderableType]:
    parts = section("An update among the streams, ms", _table(update_cells(report)))
    parts += section("What it cost the streams, and its parts in ms", _table(cost_cells(report)))
    return [*parts, Text(), *(Text(f"  {note}", style=QUIET, overflow="fold") for note in notes(report))]


def _table(cells: Cells) -> Table:
    table = quiet_table()
    table.add_column(cells.header[0], no_wrap=True)
    for name in cells.header[1:]:
        heading = "\n".join(name.split(" ", 1))
        table.add_column(heading, justify="right", style="bold" if name.startswith("queue") else "", no_wrap=True)
    for row in cells.rows:
        table.add_row(*row)
    return table


def _told(variant: Variant) -> bool:
    return "queue_p99_ms" in variant.derived


def _client(label: str) -> str:
    return label.partition("=")[2] or label


def _sweep(report: BenchReport) -> Sequence[dict[str, str]]:
    """The profile's own sweep, where that is what was measured."""
    labels = {variant.label for variant in report.variants}
    return [value for value in report.config["profile"].get("sweep", []) if value["label"] in labels]


def _streams(report: BenchReport) -> str:
    return str(report.work.get("streams", "other numbers of"))


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
