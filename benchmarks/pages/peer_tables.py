"""The page's part on other trainers: the results of `make bench-peers`, each row with its ratio and its command.

lines = peer_lines(reports)     # of benchmarks/peers/compare.py; used by make_benchmarks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pvg.bench.compare import better_by
from pvg.bench.report import BenchReport, MachineInfo, Samples, Variant
from pvg.bench.statistics import median
from pvg.bench.workloads import WALL
from pvg.reporting.table import markdown_lines
from pvg_cli.bench_tables import number
from pvg_cli.compare_table import interval

NAME = "peers"
HEADER = ("the work", "measure", "TRL", "pvg", "pvg is better by")


def peer_lines(reports: Sequence[BenchReport], machine: Callable[[MachineInfo], str] | None = None) -> Iterator[str]:
    """One table of all rows, then the commands and the peer's versions, which may differ. `machine` describes the
    machine of each report, unless the page names one for all."""
    reports = sorted(reports, key=lambda report: report.created)  # as `make bench-peers` takes them
    about = str(reports[0].config["profile"]["about"])
    yield f"## {NAME}"
    yield ""
    yield f"{about}."
    yield ""
    yield from markdown_lines(HEADER, "llrrr", [row for report in reports for row in rows_of(report)])
    yield ""
    for report in reports:
        yield f"- {work_of(report)}: `{report.command}`, {report.created[:10]}, {method_text(report)}" + (
            f" {machine(report.environment)}" if machine else ""
        )
    yield ""


def rows_of(report: BenchReport) -> Iterator[tuple[str, ...]]:
    """The rows of one report: the headline first. Only the first row names the work."""
    theirs, ours = report.variants
    headline = str(report.config["profile"]["headline"])
    work = work_of(report)
    for name in sorted(theirs.samples.keys() - {WALL}, key=lambda name: (name != headline, name)):
        found = better_by(theirs.samples[name], ours.samples[name])
        ratio = "" if found is None else f"{found.ratio:.2f}x ({interval(found)})"
        yield work, f"`{name}`", figure(theirs.samples[name]), figure(ours.samples[name]), ratio
        work = ""


def figure(samples: Samples) -> str:
    return f"{number(median(samples.values))} {samples.unit}"


def work_of(report: BenchReport) -> str:
    """What both sides did, in words."""
    work = report.work
    peer = report.config["peer"]["settings"]
    compiled = ", TRL's model compiled" if peer.get("torch_compile") else ""
    if (processes := report.variants[0].derived.get("processes", 1)) > 1:
        compiled += f", TRL in {processes:.0f} processes"
    model = f"a Llama of {work['parameters'] / 1e6:.2f}M parameters{compiled}"
    if report.config["row"] == "verifier":
        tokens = number(report.variants[0].derived["solution_tokens"])
        pairing = report.config["experiment"]["verifier"]["pairing"]  # a text in reports before the tagged tables
        by_problem = (pairing["kind"] if isinstance(pairing, dict) else pairing) == "problem"
        drawn = ", pvg's all of whole problems (verifier.pairing = problem)" if by_problem else ""
        return (
            f"verifier training: {number(work['pairs_formed'])} pairs of {number(work['solutions'])} solutions of "
            f"{tokens} tokens, batches of {work['pairs']} pairs{drawn}, {model}"
        )
    tokens = f"up to {work['max_tokens']}" if work["stops"] else str(work["max_tokens"])
    return (
        f"one GRPO step: {work['groups'] * work['group_size']} rollouts ({work['groups']} prompts x "
        f"{work['group_size']}) of {tokens} tokens, {'KL to a reference' if work['kl'] else 'no KL term'}, {model}"
    )


def method_text(report: BenchReport) -> str:
    """The samples, the versions, and the counts of both sides. The peer's settings are in the report."""
    theirs, ours = report.variants
    peer = report.config["peer"]
    versions = ", ".join(f"{package} {version}" for package, version in peer["versions"].items())
    counted = [counts(name, theirs, ours) for name in ("completion_tokens", "solutions_forwarded")]
    return (
        f"{report.warmup} + {report.repeats} samples of each side in turn, {_threads(report)}. "
        + "".join(filter(None, counted))
        + arithmetic(ours)
        + f"TRL's side: {versions}."
    )


def _threads(report: BenchReport) -> str:
    cluster = report.config["experiment"].get("cluster", {})
    if cluster.get("kind") == "local":
        return f"TRL with {report.environment.threads} threads, pvg with {cluster['workers']} workers of one thread"
    return f"{report.environment.threads} threads"


def counts(name: str, theirs: Variant, ours: Variant) -> str:
    if name not in theirs.derived or name not in ours.derived:
        return ""
    what = name.replace("_", " ").capitalize()
    return f"{what}: TRL {number(theirs.derived[name])}, pvg {number(ours.derived[name])}. "


def arithmetic(ours: Variant) -> str:
    """How near our step is to its least arithmetic; empty for reports that do not say it."""
    if "arithmetic_share" not in ours.derived:
        return ""
    gflop, rate, share = (ours.derived[name] for name in ("gflop", "matmul_gflops", "arithmetic_share"))
    return (
        f"pvg's step requires {number(gflop)} GFLOP, and takes {100 * share:.0f} % of its time for them at the "
        f"machine's matmul rate, {number(rate)} GFLOP/s. "
    )
