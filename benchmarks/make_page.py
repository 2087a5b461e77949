"""Writes the figures of docs/benchmarks.md, between two marks, from the benchmark reports in docs/benchmarks/.

pvg bench --profile rollout --out docs/benchmarks/rollout.json    # makes a report; any file name
python -m benchmarks.make_page                                    # writes the page
python -m benchmarks.make_page --check                            # exit 1 if the page differs from its reports
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pvg.bench.compare import VariantGain, beside_text, better_by, gains, headline_of
from pvg.bench.report import BenchReport, MachineInfo, Samples, Variant, read_report
from pvg.bench.statistics import RatioInterval, median
from pvg.bench.workloads import WALL
from pvg.errors import PvgError, UsageError
from pvg.reporting.table import markdown_lines
from pvg_cli.bench_tables import client_of, cost_cells, has_updates, notes, number, update_cells
from pvg_cli.compare_table import interval

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "python -m benchmarks.make_page"
BEGIN, END = f"<!-- reports: {COMMAND} -->", "<!-- end of the reports -->"
ORDER = ("rollout", "rollout-vllm", "trainer", "e2e", "verifier", "sync", "sync-vllm", "loop", "stragglers")
KINDS = {"bench": 0, "ablation": 1, "sweep": 2}  # the order of one profile's reports
OTHER_LAYOUT = "scaling"  # the page has their tables as text: their workload is no longer in the repository
PEERS = "peers"
SHOWN_PARTS = 6  # of a time budget
LEAST_PART = 0.01


def reports_text(reports: Sequence[BenchReport]) -> str:
    """The figures of all reports, in Markdown. Raises UsageError for a report of a failed benchmark."""
    for report in reports:
        if report.status != "ok":
            raise UsageError(f"The report of {report.command!r} failed: {report.reason}", "Repeat it, or remove it.")
    shown = [report for report in reports if report.profile != OTHER_LAYOUT]
    names = {report.name for report in shown}
    ordered = [*(name for name in ORDER if name in names), *sorted(names - set(ORDER))]
    return "\n".join(line for name in ordered for line in profile_lines(shown, name)).rstrip("\n")


def profile_lines(reports: Sequence[BenchReport], name: str) -> Iterator[str]:
    chosen = [report for report in reports if report.name == name]
    about = str(chosen[0].config["profile"]["about"])
    yield from (f"## {name}", "", f"{about[0].upper()}{about[1:]}.", "")
    if name == PEERS:
        yield from peer_lines(sorted(chosen, key=lambda report: report.created))
        return
    for report in sorted(chosen, key=lambda report: KINDS[report.kind]):
        yield from report_lines(report)


def report_lines(report: BenchReport) -> Iterator[str]:
    yield from (f"### {title(report)}", "", f"    {report.command}", "", conditions(report), "")
    if report.environment.git_dirty:
        yield from (f"**Measured with uncommitted changes. Repeat `{report.command}`.**", "")
    if servers := report.config.get("servers"):
        described = ", ".join(f"{key} {value}" for key, value in servers.items() if key != "count")
        yield from (f"{servers['count']} server{'s' if int(servers['count']) > 1 else ''}: {described}.", "")
    if has_updates(report):
        yield from update_lines(report)
    if report.kind == "bench":
        yield from measure_lines(report.variants[0])
    elif report.kind == "ablation":
        yield from ladder_lines(report)
    else:
        yield from sweep_lines(report)
    yield ""


def title(report: BenchReport) -> str:
    swept = report.variants[0].label.partition("=")[0]
    what = {"bench": "Measures", "ablation": "Gain of each switch"}.get(report.kind, f"By {swept}")
    return ", ".join(part for part in (what, beside_text(report)) if part)


def conditions(report: BenchReport) -> str:
    """Samples, date, versions and machine."""
    environment = report.environment
    turns = " taken in turn" if report.config.get("interleave") else ""
    commit = (environment.git_commit or "unknown commit")[:10]
    code = f"pvg {environment.pvg} ({commit}{', with uncommitted changes' if environment.git_dirty else ''})"
    served = f", vLLM {environment.vllm}" if environment.vllm else ""
    samples = f"{report.warmup} + {report.repeats} samples{turns}"
    return f"{samples}, {report.created[:10]}, {code}{served}. {machine_of(environment)}"


def machine_of(environment: MachineInfo) -> str:
    parts = [environment.cpu, f"{environment.cores} cores", f"{environment.memory_gb:g} GB of memory"]
    if environment.gpu:
        parts.append(f"{environment.gpu} (driver {environment.driver})")
    packages = {"torch": environment.torch, "transformers": environment.transformers}
    versions = [f"Python {environment.python}", *(f"{name} {found}" for name, found in packages.items() if found)]
    return f"{', '.join(parts)}; {', '.join(versions)}; {environment.event_loop}."


def update_lines(report: BenchReport) -> Iterator[str]:
    """The weight updates of a `sync` benchmark on servers."""
    for what, cells in (("An update, in ms", update_cells(report)), ("Tokens/s, and ms", cost_cells(report))):
        yield from (f"{what}:", "")
        yield from markdown_lines(cells.header, "l" + "r" * (len(cells.header) - 1), cells.rows)
        yield ""
    yield from (" ".join(notes(report)), "")


def measure_lines(variant: Variant) -> Iterator[str]:
    rows = [
        (
            name,
            number(median(samples.values)),
            f"{number(min(samples.values))} – {number(max(samples.values))}",
            "" if samples.unit == "1" else samples.unit,
            samples.better,
        )
        for name, samples in variant.samples.items()
    ]
    yield from markdown_lines(("measure", "median", "lowest – highest", "unit", "better"), "lrrll", rows)
    if variant.budget is not None and variant.budget.wall_s > 0:
        shares = {part: seconds / variant.budget.wall_s for part, seconds in variant.budget.exposed.items()}
        largest = sorted(shares.items(), key=lambda entry: -entry[1])[:SHOWN_PARTS]
        parts = [
            f"{part.replace('_', ' ')} {100 * value:.0f} %"
            for part, value in largest
            if value >= LEAST_PART and part != "unaccounted"
        ]
        unaccounted = f"{100 * shares.get('unaccounted', 0.0):.1f} %"
        yield from ("", f"Time by part: {', '.join(parts)}; unaccounted: {unaccounted}.")
    if variant.derived:
        yield ""
        yield from markdown_lines(
            ("derived", "value"), "lr", [(name, number(value)) for name, value in variant.derived.items()]
        )


def ladder_lines(report: BenchReport) -> Iterator[str]:
    headline, found = headline_of(report), gains(report)
    yield f"All optimizations off, then each one turned on in turn: `{headline}`{unit_of(report, headline)}."
    yield ""
    rows = [
        (
            label_of(gain),
            gain.says,
            figure_of(gain, headline),
            ratio_text(gain.step, marked=True),
            ratio_text(gain.whole),
        )
        for gain in found
    ]
    yield from markdown_lines(("switch", "what it does", "median", "gain", "gain in all"), "llrrr", rows)
    yield from ("", significance_text(found))


def significance_text(found: Sequence[VariantGain]) -> str:
    """Names the switches that are slower than the one before, and those that do not differ significantly from it."""
    steps = [(label_of(gain), gain.step) for gain in found if gain.step is not None]
    unclear = [label for label, ratio in steps if not excludes_one(ratio)]
    slower = [label for label, ratio in steps if ratio.high < 1]
    text = "Intervals are at 95 %."
    if len(unclear) < len(steps):
        text += " In bold: a gain whose interval excludes 1."
    if slower:
        text += f" Slower than the row above: {', '.join(slower)}."
    if unclear:
        text += f" No significant difference in this report ({len(unclear)} of {len(steps)}): {', '.join(unclear)}."
    return text


def sweep_lines(report: BenchReport) -> Iterator[str]:
    headline = headline_of(report)
    others = [] if has_updates(report) else [name for name in report.variants[0].samples if name != headline]
    then = ", then medians of the other measures" if others else ""
    yield f"`{headline}`{unit_of(report, headline)} against the first value{then}."
    yield ""
    rows = [
        (
            client_of(report, gain.variant),
            figure_of(gain, headline),
            ratio_text(gain.whole),
            *(number(median(found[name].values)) if name in found else "" for name in others),
        )
        for gain in gains(report)
        for found in [gain.variant.samples]
    ]
    header = (report.variants[0].label.partition("=")[0] or "variant", headline, "against the first", *others)
    yield from markdown_lines(header, "l" + "r" * (len(header) - 1), rows)


def unit_of(report: BenchReport, metric: str) -> str:
    samples = report.variants[0].samples[metric]
    return f"{'' if samples.unit == '1' else f' in {samples.unit}'} ({samples.better} is better)"


def figure_of(gain: VariantGain, headline: str) -> str:
    return number(median(gain.variant.samples[headline].values))


def label_of(gain: VariantGain) -> str:
    return f"`{gain.variant.label}`" if "=" in gain.variant.label else gain.variant.label


def excludes_one(ratio: RatioInterval) -> bool:
    return not ratio.low <= 1.0 <= ratio.high


def ratio_text(ratio: RatioInterval | None, *, marked: bool = False) -> str:
    """A ratio with its interval. `marked`: in bold if the interval excludes 1."""
    if ratio is None:
        return ""
    times = f"{ratio.ratio:.2f}x"
    return f"{f'**{times}**' if marked and excludes_one(ratio) else times} ({interval(ratio)})"


# --- beside other trainers (`make bench-peers`) ----------------------------------------------------------------------


def peer_lines(reports: Sequence[BenchReport]) -> Iterator[str]:
    """One table of all reports, then the command and the conditions of each."""
    header = ("the work", "measure", "TRL", "pvg", "pvg is better by")
    yield from markdown_lines(header, "llrrr", [row for report in reports for row in peer_rows(report)])
    yield ""
    for report in reports:
        versions = report.config["peer"]["versions"].items()
        packages = ", ".join(f"{package} {version}" for package, version in versions)
        yield f"- `{report.command}`: {conditions(report)} TRL's side: {packages}."
    yield ""


def peer_rows(report: BenchReport) -> Iterator[tuple[str, ...]]:
    """The rows of one report, its headline first. Only the first row names the work: the options of the command."""
    theirs, ours = report.variants
    headline = str(report.config["profile"]["headline"])
    work = f"`{report.command.partition('compare.py ')[2].partition(' --out')[0]}`"
    for name in sorted(theirs.samples.keys() - {WALL}, key=lambda name: (name != headline, name)):
        found = better_by(theirs.samples[name], ours.samples[name])
        yield work, f"`{name}`", median_text(theirs.samples[name]), median_text(ours.samples[name]), ratio_text(found)
        work = ""


def median_text(samples: Samples) -> str:
    return f"{number(median(samples.values))} {samples.unit}"


# --- the page --------------------------------------------------------------------------------------------------------


def with_reports(page: str, reports: Sequence[BenchReport]) -> str:
    """`page` with the figures of `reports` between its two marks. Raises UsageError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"The page lacks {END if begin else BEGIN!r}.")
    return f"{before}{begin}\n\n{reports_text(reports)}\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, default=DOCS / "benchmarks", help="the folder with the reports")
    parser.add_argument("--page", type=Path, default=DOCS / "benchmarks.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page differs")
    options = parser.parse_args(arguments)
    found = options.page.read_text(encoding="utf-8")
    try:
        made = with_reports(found, [read_report(path) for path in sorted(options.reports.glob("*.json"))])
    except PvgError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if not options.check:
        options.page.write_text(made, encoding="utf-8")
    elif made != found:
        sys.stderr.writelines(
            difflib.unified_diff(found.splitlines(True), made.splitlines(True), "page", "reports", n=1)
        )
        print(f"Write the page with: {COMMAND}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
