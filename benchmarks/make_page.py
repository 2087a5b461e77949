"""Writes the figures of docs/benchmarks.md, between two marks, from the benchmark reports in docs/benchmarks/.

pvg bench --profile rollout --out docs/benchmarks/rollout.json    # makes a report; any file name
python -m benchmarks.make_page                                    # writes the page
python -m benchmarks.make_page --check                            # exit 1 if the page differs from its reports

The page has the profiles of ORDER. It leaves out reports of other profiles, and sweeps of a setting that went.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pvg.bench.compare import RatioInterval, beside_text, better_by, gains, headline_of, interleaved, median
from pvg.bench.planning import plan_bench
from pvg.bench.report import BenchReport, Samples, Variant, read_report
from pvg.bench.workloads import WALL, find_profile
from pvg.errors import PvgError, UsageError, in_percent
from pvg.reporting.table import markdown_lines
from pvg_cli.bench_tables import BETTER, number
from pvg_cli.compare import interval

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "python -m benchmarks.make_page"
BEGIN, END = f"<!-- reports: {COMMAND} -->", "<!-- end of the reports -->"
PEERS = "peers"
TODAY = ("rollout", "rollout-vllm", "trainer", "e2e", "verifier", "reading", "sync", "sync-vllm")
ORDER = (*TODAY, "loop", "pipeline", PEERS)
KINDS = {"bench": 0, "ablation": 1, "sweep": 2}  # the order of one profile's reports
SHOWN_PARTS = 6  # of a time budget
LEAST_PART = 0.01
OF_PEERS = ("verifier_s", "prover_s", "peak_gb", "helpful_accuracy", "flaws_accepted", "verifier_auc")
OTHERS = 4  # measures of a sweep's table beside the headline

Reports = Mapping[str, BenchReport]  # by file name


def reports_text(reports: Reports) -> str:
    """The figures of all reports, in Markdown. Raises UsageError for a report of a failed benchmark."""
    for report in reports.values():
        if report.status != "ok":
            raise UsageError(f"The report of {report.command!r} failed: {report.reason}", "Repeat it, or remove it.")
    shown = {name: report for name, report in reports.items() if report.name in ORDER and not sweeps_the_past(report)}
    machines = list(dict.fromkeys(machine_of(report) for report in shown.values()))
    lines = [f"- Machine {number}: {machine}" for number, machine in enumerate(machines, 1)]
    for profile in ORDER:
        own = {name: report for name, report in shown.items() if report.name == profile}
        if own:
            lines += ["", *profile_lines(own, machines)]
    return "\n".join(lines).rstrip("\n")


def profile_lines(reports: Reports, machines: Sequence[str]) -> Iterator[str]:
    chosen = sorted(reports.items(), key=lambda item: (KINDS[item[1].kind], bool(beside_text(item[1]))))
    first = chosen[0][1]
    about = str(first.config["profile"]["about"])
    yield from (f"## {first.name}", "", f"{about[0].upper()}{about[1:]}.")
    if first.name == PEERS:
        rows = [
            peer_row(name, report, measure)
            for name, report in chosen
            for measure in (headline_of(report), *OF_PEERS)
            if measure in report.variants[0].samples
        ]
        header = ("the work", "measure", "TRL", "pvg", "pvg is better by")
        yield from ("", *markdown_lines(header, "llrrr", rows), "")
        versions = first.config.get("peer", first.work.get("peer", {})).get("versions", {}).items()
        when = dict.fromkeys(f"{made_on(report)}, machine {number_of(report, machines)}" for _, report in chosen)
        yield f"Samples in turn, {'; '.join(when)}. Today's commands are in `benchmarks/peers/*.toml`."
        yield f"TRL's side: {', '.join(f'{package} {version}' for package, version in versions)}."
        return
    for name, report in chosen:
        yield from ("", conditions(name, report, machines), "")
        yield from report_lines(report)


def report_lines(report: BenchReport) -> Iterator[str]:
    if beside_text(report) and report.kind == "ablation":
        last = gains(report)[-1]
        yield f"{beside_text(report).capitalize()}: {ratio_text(last.whole)} in all."
    elif report.kind == "bench":
        yield from measure_lines(report.variants[0])
    elif report.kind == "ablation":
        yield from ladder_lines(report)
    else:
        yield from sweep_lines(report)


def conditions(name: str, report: BenchReport, machines: Sequence[str]) -> str:
    """The command, the report, samples, date, commit and machine."""
    command = command_of(report)
    turns = " in turn" if report.config.get("interleave") else ""
    served = f", vLLM {report.environment.vllm}" if report.environment.vllm else ""
    return (
        f"`{command}`{removed(command)} ([report](benchmarks/{name})): {report.warmup} + {report.repeats} samples"
        f"{turns}, {made_on(report)}{served}, machine {number_of(report, machines)}."
    )


def command_of(report: BenchReport) -> str:
    """Without --out."""
    return report.command.partition(" --out ")[0]


def removed(command: str, *settings: str) -> str:
    """ " (removed)" if today's pvg refuses the command, or one of these settings of its profile."""
    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("-p", "--profile")
    options.add_argument("--sweep")
    options.add_argument("-s", "--set", action="append", default=[])
    for flag in ("ablate", "interleave", "serve"):
        options.add_argument(f"--{flag}", action="store_true")
    given, _ = options.parse_known_args(shlex.split(command)[2:])  # --beside and --server change no setting's name
    try:
        find_profile(given.profile)
    except PvgError:
        return "" if settings else " (removed)"  # the profile went, which says nothing about its settings
    try:
        if settings:
            plan_bench(given.profile, settings, serve=given.serve)
        else:
            plan_bench(given.profile, given.set, sweep=given.sweep, ablate=given.ablate, serve=given.serve)
    except PvgError:
        return " (removed)"
    return ""


def sweeps_the_past(report: BenchReport) -> bool:
    """Whether it is a sweep of a setting that today's pvg does not take."""
    command, first = command_of(report), report.variants[0].label
    return report.kind == "sweep" and report.name != PEERS and bool(removed(command, first))


def made_on(report: BenchReport) -> str:
    """Date and commit."""
    dirty = ", **with uncommitted changes**" if report.environment.git_dirty else ""
    return f"{report.created[:10]}, {(report.environment.git_commit or 'unknown commit')[:8]}{dirty}"


def number_of(report: BenchReport, machines: Sequence[str]) -> int:
    return machines.index(machine_of(report)) + 1


def machine_of(report: BenchReport) -> str:
    environment = report.environment
    parts = [environment.cpu, f"{environment.cores} cores", f"{environment.memory_gb:g} GB of memory"]
    if environment.gpu:
        parts.append(f"{environment.gpu} (driver {environment.driver})")
    packages = {"Python": environment.python, "torch": environment.torch, "transformers": environment.transformers}
    versions = [f"{name} {found}" for name, found in packages.items() if found]
    return f"{', '.join(parts)}; {', '.join(versions)}; {environment.event_loop}."


def measure_lines(variant: Variant) -> Iterator[str]:
    rows = [
        (with_unit(name, samples.unit), number(median(samples.values)), f"{number(min(samples.values))}–{number(most)}")
        for name, samples in variant.samples.items()
        if not (
            name.startswith(("idle_", "loaded_")) and name.endswith(("_p50_ms", "_p99_ms"))
        )  # of the times of an update the 95th percentile suffices
        for most in [max(samples.values)]
    ]
    yield from markdown_lines(("measure", "median", "range"), "lrr", rows)
    if variant.budget is not None and variant.budget.wall_s > 0:
        shares = {part: seconds / variant.budget.wall_s for part, seconds in variant.budget.exposed.items()}
        largest = sorted(shares.items(), key=lambda entry: -entry[1])[:SHOWN_PARTS]
        parts = [f"{part.replace('_', ' ')} {100 * value:.0f} %" for part, value in largest if value >= LEAST_PART]
        yield from ("", f"Time by part: {', '.join(parts)}.")
    if "hardware_mfu" in variant.derived:
        useful, hardware = (in_percent(variant.derived[name]) for name in ("mfu", "hardware_mfu"))
        yield from ("", f"Of the rate of this machine's matrix products: useful MFU {useful}, hardware MFU {hardware}.")


def with_unit(name: str, unit: str) -> str:
    return name if unit == "1" or name.endswith(f"_{unit}") or "_per_" in name else f"{name}, {unit}"


def ladder_lines(report: BenchReport) -> Iterator[str]:
    headline = headline_of(report)
    rows = []
    for gain in gains(report):
        label, value = gain.variant.label, median(gain.variant.samples[headline].values)
        switch = f"`{label}`{removed(command_of(report), label)}" if "=" in label else label
        said = f"{switch}: {gain.says}" if gain.says else switch
        rows.append((said, number(value), ratio_text(gain.step, marked=True), ratio_text(gain.whole)))
    yield from markdown_lines(("switch", heading_of(report, headline), "gain", "in all"), "lrrr", rows)


def sweep_lines(report: BenchReport) -> Iterator[str]:
    headline = headline_of(report)
    others = [name for name in report.variants[0].samples if name not in (headline, WALL)][:OTHERS]
    rows = [
        (
            gain.variant.label.partition("=")[2] or gain.variant.label,
            number(median(found[headline].values)),
            ratio_text(gain.whole),
            *(number(median(found[name].values)) if name in found else "" for name in others),
        )
        for gain in gains(report)
        for found in [gain.variant.samples]
    ]
    header = (report.variants[0].label.partition("=")[0], heading_of(report, headline), "against the first", *others)
    yield from markdown_lines(header, "l" + "r" * (len(header) - 1), rows)


def heading_of(report: BenchReport, metric: str) -> str:
    samples = report.variants[0].samples[metric]
    return f"{with_unit(metric, samples.unit)} {BETTER[samples.better]}"


def ratio_text(ratio: RatioInterval | None, *, marked: bool = False) -> str:
    """A ratio with its interval. `marked`: in bold if the interval excludes 1."""
    if ratio is None:
        return ""
    times = f"{ratio.ratio:.2f}x"
    return f"{f'**{times}**' if marked and not ratio.low <= 1.0 <= ratio.high else times} ({interval(ratio)})"


def peer_row(file: str, report: BenchReport, measure: str) -> tuple[str, ...]:
    """One measure of a report of `make bench-peers`. The work: the options of the command. A report whose sides did
    other work has no ratio."""
    theirs, ours = (variant.samples[measure] for variant in report.variants)
    command = command_of(report).removeprefix("python benchmarks/peers/compare.py ")
    work = command.removeprefix("pvg bench --profile benchmarks/peers/")
    there = (DOCS.parent / "benchmarks" / PEERS / f"{work.split()[0].removesuffix('.toml')}.toml").is_file()
    work = f"[`{work}`](benchmarks/{file}){'' if there else ' (removed)'}"
    alike = "by_variant" not in report.work or "peer" in report.config  # then it was checked before the report
    ratio = ratio_text(better_by(theirs, ours, in_turn=interleaved(report)) if alike else None)
    return work, f"`{measure}`", median_text(theirs), median_text(ours), ratio


def median_text(samples: Samples) -> str:
    return f"{number(median(samples.values))} {samples.unit.removeprefix('1')}".rstrip()


# --- the page --------------------------------------------------------------------------------------------------------


def with_reports(page: str, reports: Reports) -> str:
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
        reports = {path.name: read_report(path) for path in sorted(options.reports.glob("*.json"))}
        made = with_reports(found, reports)
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
