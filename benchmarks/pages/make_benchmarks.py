"""Writes docs/benchmarks.md, and the ladder in docs/measuring.md, from the benchmark reports in docs/benchmarks/.

    pvg bench --profile rollout --out docs/benchmarks/rollout.json    # makes a report; any file name
    python -m benchmarks.pages.make_benchmarks                        # writes both
    python -m benchmarks.pages.make_benchmarks --check                # exit 1 if a page differs from its reports

Reports of a ladder that their profile no longer has are named; with --check, exit 1. Reports that were measured with
uncommitted changes are named too, and marked on both pages.

Figures of other systems stand beside ours only where the work is the same (reference_figures.py); the page says in
words why it is not where it is not.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages.other_ladders import outdated, spelled_out
from benchmarks.pages.peer_tables import NAME as PEERS
from benchmarks.pages.peer_tables import peer_lines
from benchmarks.pages.readme_ladder import FILE as LADDER
from benchmarks.pages.readme_ladder import (
    dirty_text,
    excludes_one,
    label_of,
    ratio_text,
    significance_text,
    with_ladder,
)
from benchmarks.pages.reference_figures import reference_lines
from benchmarks.pages.scaling_tables import PROFILE as SCALING
from benchmarks.pages.scaling_tables import scaling_lines
from benchmarks.pages.targets import target_lines
from pvg.bench.compare import VariantGain, beside_text, gains, headline_of
from pvg.bench.report import BenchReport, MachineInfo, Samples, Variant, read_report
from pvg.bench.statistics import median
from pvg.errors import PvgError, UsageError
from pvg.reporting.table import markdown_lines
from pvg_cli.bench_tables import client_of, cost_cells, has_updates, notes, number, update_cells

DOCS = Path(__file__).parents[2] / "docs"
ORDER = (
    "rollout", "rollout-vllm", "trainer", "e2e", "contention", "verifier", "data", "data-game", "credit", "sync",
    "sync-vllm", "games", "loop", "stragglers", "fleet", "pipeline", "telemetry",
    "scaling-rollouts", "scaling-length", "scaling-model",
)  # fmt: skip
KINDS = {"bench": 0, "ablation": 1, "sweep": 2}  # the order in which a profile's reports stand
COMMAND = "python -m benchmarks.pages.make_benchmarks"
SHOWN_PARTS = 6  # of a time budget
LEAST_PART = 0.01


# --- one report ------------------------------------------------------------------------------------------------------


def report_lines(report: BenchReport, machine: str | None) -> Iterator[str]:
    """The part about one report. `machine`: its machine, unless the page names one for all reports."""
    yield f"### {title(report)}"
    yield ""
    yield "    " + report.command
    yield ""
    turns = " taken in turn" if report.config.get("interleave") else ""
    yield f"{report.warmup} + {report.repeats} samples{turns}, {report.created[:10]}, {code(report.environment)}." + (
        f" {machine}" if machine else ""
    )
    yield ""
    if report.environment.git_dirty:
        yield from (dirty_text(report), "")
    if servers := report.config.get("servers"):
        yield servers_text(servers)
        yield ""
    if has_updates(report):
        yield from update_lines(report)
    if report.kind == "bench":
        yield from measure_lines(report.variants[0])
    elif report.kind == "ablation":
        yield from ladder_lines(report)
    elif report.profile == SCALING:
        yield from scaling_lines(report)
    elif not has_updates(report):
        yield from sweep_lines(report)
    else:
        yield f"`{headline_of(report)}`{unit_of(report, headline_of(report))} of a sample, against the first client."
        yield ""
        rows = [
            (client_of(report, gain.variant), headline_figure(gain, headline_of(report)), ratio_text(gain.whole))
            for gain in gains(report)
        ]
        yield from markdown_lines(("client", headline_of(report), "against the first"), "lrr", rows)
    yield ""


def update_lines(report: BenchReport) -> Iterator[str]:
    """The updates of a `sync` benchmark on servers."""
    for what, cells in (("An update, in ms", update_cells(report)), ("Tokens/s, and ms", cost_cells(report))):
        yield f"{what}:"
        yield ""
        yield from markdown_lines(cells.header, "l" + "r" * (len(cells.header) - 1), cells.rows)
        yield ""
    yield " ".join(notes(report))
    yield ""


def servers_text(servers: dict[str, Any]) -> str:
    """What the vLLM servers of a report were."""
    count = int(servers["count"])
    told = ", ".join(f"{key} {value}" for key, value in servers.items() if key != "count")
    return f"{count} server{'s' if count > 1 else ''}: {told}."


def title(report: BenchReport) -> str:
    if report.kind == "bench":
        what = "Measures"
    elif report.kind == "ablation":
        what = "Gain of each switch"
    else:
        what = f"By {swept(report)}"
    return ", ".join(part for part in (what, beside_text(report)) if part)


def swept(report: BenchReport) -> str:
    """The first setting in which the variants of a sweep differ."""
    return report.variants[0].label.partition("=")[0]


def measure_lines(variant: Variant) -> Iterator[str]:
    yield from markdown_lines(
        ("measure", "median", "lowest – highest", "unit", "better"),
        "lrrll",
        [
            (name, *median_and_range(samples), "" if samples.unit == "1" else samples.unit, samples.better)
            for name, samples in variant.samples.items()
        ],
    )
    if variant.budget is not None and variant.budget.wall_s > 0:
        shares = {part: seconds / variant.budget.wall_s for part, seconds in variant.budget.exposed.items()}
        largest = sorted(shares.items(), key=lambda entry: -entry[1])[:SHOWN_PARTS]
        parts = [
            f"{part.replace('_', ' ')} {100 * value:.0f} %"
            for part, value in largest
            if value >= LEAST_PART and part != "unaccounted"
        ]
        unaccounted = f"{100 * shares.get('unaccounted', 0.0):.1f} %"
        yield ""
        yield f"Time by part: {', '.join(parts)}; unaccounted: {unaccounted}."
    if variant.derived:
        yield ""
        yield from markdown_lines(
            ("derived", "value"), "lr", [(name, number(value)) for name, value in variant.derived.items()]
        )


def median_and_range(samples: Samples) -> tuple[str, str]:
    """The median, and the range."""
    return number(median(samples.values)), f"{number(min(samples.values))} – {number(max(samples.values))}"


def ladder_lines(report: BenchReport) -> Iterator[str]:
    headline = headline_of(report)
    yield f"All optimizations off, then each one turned on in turn: `{headline}`{unit_of(report, headline)}."
    yield ""
    found = gains(report)
    rows = [
        (
            label_of(gain),
            gain.says,
            headline_figure(gain, headline),
            ratio_text(gain.step, excludes_one(gain)),
            ratio_text(gain.whole),
        )
        for gain in found
    ]
    yield from markdown_lines(("switch", "what it does", "median", "gain", "gain in all"), "llrrr", rows)
    yield from ("", significance_text(found))


def sweep_lines(report: BenchReport) -> Iterator[str]:
    headline = headline_of(report)
    others = [name for name in report.variants[0].samples if name != headline]
    yield f"`{headline}`{unit_of(report, headline)} against the first value, then medians of the other measures."
    yield ""
    rows = [
        (
            spelled_out(gain.variant.label, value_only=True),
            headline_figure(gain, headline),
            ratio_text(gain.whole),
            *(
                number(median(gain.variant.samples[name].values)) if name in gain.variant.samples else ""
                for name in others
            ),
        )
        for gain in gains(report)
    ]
    header = (swept(report), headline, "against the first", *others)
    yield from markdown_lines(header, "l" + "r" * (len(header) - 1), rows)


def unit_of(report: BenchReport, metric: str) -> str:
    samples = report.variants[0].samples[metric]
    unit = "" if samples.unit == "1" else f" in {samples.unit}"
    return f"{unit} ({samples.better} is better)"


def headline_figure(gain: VariantGain, headline: str) -> str:
    return number(median(gain.variant.samples[headline].values))


def code(environment: MachineInfo) -> str:
    """The versions of pvg, and of vLLM if it served."""
    commit = (environment.git_commit or "unknown commit")[:10]
    served = f", vLLM {environment.vllm}" if environment.vllm else ""
    return f"pvg {environment.pvg} ({commit}{', with uncommitted changes' if environment.git_dirty else ''}){served}"


def machine_of(environment: MachineInfo) -> str:
    parts = [environment.cpu, f"{environment.cores} cores", f"{environment.memory_gb:g} GB of memory"]
    if environment.gpu:
        parts.append(f"{environment.gpu} (driver {environment.driver})")
    packages = {"torch": environment.torch, "transformers": environment.transformers}
    versions = [f"Python {environment.python}", *(f"{name} {found}" for name, found in packages.items() if found)]
    return f"{', '.join(parts)}; {', '.join(versions)}; {environment.event_loop}."


# --- the page --------------------------------------------------------------------------------------------------------


def page(by_file: Mapping[str, BenchReport], template: str) -> str:
    """The whole page. `by_file`: reports by file name. Raises UsageError for a report of a failed benchmark."""
    reports = list(by_file.values())
    for report in reports:
        if report.status != "ok":
            raise UsageError(f"The report of {report.command!r} failed: {report.reason}", "Repeat it, or remove it.")
    machines = {machine_of(report.environment) for report in reports}
    same = machines.pop() if len(machines) == 1 else None
    if not reports:
        profiles, machine = "There are no reports yet.\n", "No machine yet."
    else:
        machine = same or "the machines differ; each report names its machine."
        profiles = "\n".join(line for name in in_order(reports) for line in profile_lines(reports, name, same is None))
    return template.format(
        machine=machine,
        targets="\n".join(target_lines(by_file)),
        profiles=profiles.rstrip("\n"),
        references="\n".join(reference_lines(reports)).rstrip("\n"),
    )


def in_order(reports: Sequence[BenchReport]) -> list[str]:
    names = {report.name for report in reports}
    return [*(name for name in ORDER if name in names), *sorted(names - set(ORDER))]


def profile_lines(reports: Sequence[BenchReport], name: str, with_machine: bool) -> Iterator[str]:
    chosen = sorted((report for report in reports if report.name == name), key=lambda report: KINDS[report.kind])
    if name == PEERS:
        yield from peer_lines(chosen, machine_of if with_machine else None)
        return
    about = str(chosen[0].config["profile"]["about"])
    yield f"## {name}"
    yield ""
    yield f"{about[0].upper()}{about[1:]}."
    yield ""
    for report in chosen:
        yield from report_lines(report, machine_of(report.environment) if with_machine else None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, default=DOCS / "benchmarks", help="the folder with the reports")
    parser.add_argument("--out", type=Path, help="the page; the guide is then left alone (docs/benchmarks.md)")
    parser.add_argument("--guide", type=Path, help="the guide to write the ladder into (docs/measuring.md)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page or a ladder is another")
    options = parser.parse_args(arguments)
    guide = options.guide or (None if options.out else DOCS / "measuring.md")
    try:
        reports = {path.name: read_report(path) for path in sorted(options.reports.glob("*.json"))}
        template = (DOCS / "benchmarks.template.md").read_text(encoding="utf-8")
        made = {options.out or DOCS / "benchmarks.md": page(reports, template)}
        if guide is not None and LADDER in reports:
            made[guide] = with_ladder(guide.read_text(encoding="utf-8"), reports[LADDER])
        others = list(outdated(reports))
    except PvgError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    told = [*others, *(f"{name}: {dirty_text(reports[name])}" for name in dirty(reports))]
    for line in told:
        print(line, file=sys.stderr)
    if options.check:
        return max([bool(others), *(differing(path, text) for path, text in made.items())])
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {len(reports)} reports")
    return 0


def dirty(reports: Mapping[str, BenchReport]) -> list[str]:
    """The files of reports that were measured with uncommitted changes."""
    return [name for name, report in reports.items() if report.environment.git_dirty]


def differing(path: Path, made: str) -> int:
    """1 if the content of the file is not `made`; prints the difference."""
    found = path.read_text(encoding="utf-8") if path.is_file() else ""
    if found == made:
        return 0
    sys.stderr.writelines(difflib.unified_diff(found.splitlines(True), made.splitlines(True), "page", "reports", n=1))
    print(
        f"{path} is not what the reports give. Write it with: {COMMAND}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
