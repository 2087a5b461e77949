"""The page's first table: the targets, and the figures of the committed reports.

lines = target_lines({"e2e-ablation.json": report, ...})     # used by make_benchmarks

A row without a report says so. A target for a ratio is reached if the ratio is beyond it. If the interval of the ratio
contains the target, the row says that it is within the noise. Other figures are medians with the lowest and the
highest sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.pages.other_ladders import spelled_out
from pvg.bench.compare import better_by, headline_of, interleaved
from pvg.bench.report import BenchReport, Samples, Variant
from pvg.bench.statistics import median
from pvg.errors import UsageError
from pvg.reporting.table import markdown_lines
from pvg_cli.bench_tables import number
from pvg_cli.compare_table import interval

HEADER = ("what", "target", "measured", "", "command", "report")
SHOWN_PARTS = 4  # of our side's time, where a target is not reached
NO_PARTS = ("unaccounted", "reset", "step", "worker")  # names of a budget that say nothing of the work


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and what is told of it: of the variant at `place` of its report. `low` and `high` are a ratio's
    interval; of any other figure, whose samples are not the value's uncertainty, they are the value."""

    value: float
    text: str
    low: float
    high: float
    place: int

    def verdict(self, target: Target) -> str:
        reached = target.holds(self.value)
        sure = target.holds(self.low) == target.holds(self.high)
        return ("reached" if reached else "**not reached**") + ("" if sure else ", within the noise")


@dataclass(frozen=True, slots=True)
class Target:
    """One row of the table. `read` gives the figure of the report `file`, or None for a report that is older than the
    figure; the target is at least `least`, or at most `most`. If it is missed, the page shows `bound`, the reason, and
    the figures of both sides named in `beside`."""

    what: str
    goal: str
    file: str
    read: Callable[[BenchReport], Figure | None]
    bound: str
    least: float | None = None
    most: float | None = None
    beside: tuple[str, ...] = ()

    def holds(self, value: float) -> bool:
        return value >= self.least if self.least is not None else self.most is not None and value <= self.most


# --- reading a report ------------------------------------------------------------------------------------------------


def times_better(measure: str = "", label: str = "", than: int = 0) -> Callable[[BenchReport], Figure]:
    """How many times better the measure (or the headline) of a variant (or the last) is than that of number `than`."""

    def read(report: BenchReport) -> Figure:
        name = measure or headline_of(report)
        place = place_of(report, label) if label else len(report.variants) - 1
        slow, fast = samples_of(report, than, name), samples_of(report, place, name)
        ratio = better_by(slow, fast, in_turn=interleaved(report))
        if ratio is None:
            raise UsageError(f"The report of {report.command!r} gives no ratio of {name}.")
        text = f"{ratio.ratio:.2f}x ({interval(ratio)})"
        return Figure(ratio.ratio, text, ratio.low, ratio.high, place)

    return read


def times_more_rollouts(label: str) -> Callable[[BenchReport], Figure]:
    """As `times_better`, of the rollouts per second of a variant that does not wait for all. It leaves out the longest
    rollouts, so the rows do not compare the same work. The figure therefore says how much shorter the kept ones are."""

    def read(report: BenchReport) -> Figure:
        figure = times_better("rollouts_per_s", label)(report)
        variant = report.variants[figure.place]
        if "length_kept" not in variant.derived:
            raise UsageError(f"The report of {report.command!r} does not say what {label!r} has kept (`length_kept`).")
        kept = f"{100 * variant.derived['length_kept']:.0f} %"
        text = f"{figure.text}, {spelled_out(label)}; the kept rollouts have {kept} of the mean length of all"
        if "tokens_per_s" in variant.samples:
            text += f"; tokens/s: {times_better('tokens_per_s', label)(report).text}"
        return replace(figure, text=text)

    return read


def plain(measure: str, unit: str, scale: float = 1.0, label: str = "") -> Callable[[BenchReport], Figure]:
    """A measure of a variant (or of the last), with its range."""

    def read(report: BenchReport) -> Figure:
        place = place_of(report, label) if label else len(report.variants) - 1
        return figure_of(report, place, measure, unit, scale)

    return read


def figure_of(report: BenchReport, place: int, measure: str, unit: str, scale: float) -> Figure:
    samples = samples_of(report, place, measure)
    value = scale * median(samples.values)
    low, high = scale * min(samples.values), scale * max(samples.values)
    return Figure(value, f"{number(value)} {unit} ({number(low)} – {number(high)})", value, value, place)


def share_of(
    measure: str, label: str, parts: Callable[[Mapping[str, float]], str]
) -> Callable[[BenchReport], Figure | None]:
    """A share that a variant's report derives from its samples, in percent. `parts` says what it was derived from."""

    def read(report: BenchReport) -> Figure | None:
        place = place_of(report, label)
        derived = report.variants[place].derived
        if measure not in derived:
            return None
        value = 100 * derived[measure]
        return Figure(value, f"{number(value)} % ({parts(derived)})", value, value, place)

    return read


def idle_share(report: BenchReport) -> Figure:
    """The headline of the least idle variant, and that of the first variant, which is synchronous."""
    headline = headline_of(report)
    synchronous, *ahead = (figure_of(report, place, headline, "%", 100) for place in range(len(report.variants)))
    best = min(ahead, key=lambda figure: figure.value)
    label = spelled_out(report.variants[best.place].label)
    return replace(best, text=f"{best.text}, {label}; synchronous {synchronous.text}")


def place_of(report: BenchReport, label: str) -> int:
    labels = [variant.label for variant in report.variants]
    if label not in labels:
        raise UsageError(f"The report of {report.command!r} has no variant {label!r}.")
    return labels.index(label)


def samples_of(report: BenchReport, place: int, measure: str) -> Samples:
    variants = report.variants
    if measure not in variants[place].samples:
        raise UsageError(f"The report of {report.command!r} has no {measure} in its variant {place}.")
    return variants[place].samples[measure]


# --- the targets -----------------------------------------------------------------------------------------------------

_WORKERS_BOUND = "Each part of a step waits for the slower worker, and the driver works alone between the parts."
_GRPO_BOUND = (
    "In a profile on one thread of a machine with AVX-512, matrix products take 39 % of a training step, attention "
    "12 %, and the rest is elementwise operators of torch, which both sides use. pvg computes prompts once, and "
    "log-probs never twice. These gained nothing: micro-batches of other sizes, attention by batched products, a "
    "transposed key cache, oneDNN in training and decoding, and torch.compile of the decoding step (a fifth slower)."
)

TARGETS = (
    Target(
        "whole GRPO steps of the embedded game, all switches fast against all slow",
        ">= 3x",
        "e2e-ablation.json",
        times_better("step_s"),
        "The ladder below has the gain of each optimization. The remaining time is arithmetic.",
        least=3.0,
    ),
    Target(
        "the same beside one busy process",
        ">= 3x",
        "e2e-busy-ablation.json",
        times_better("step_s"),
        "The busy process can slow down both sides.",
        least=3.0,
    ),
    Target(
        "one GRPO step with two worker processes against TRL's GRPOTrainer with two threads, on a machine with AVX-512",
        ">= 2.3x",
        "peers-grpo.json",
        times_better("step_s"),
        _GRPO_BOUND,
        least=2.3,
        beside=("rollout_s", "train_s"),
    ),
    Target(
        "the same step against TRL's GRPOTrainer in two processes of one thread each",
        ">= 2.3x",
        "peers-grpo-processes.json",
        times_better("step_s"),
        _GRPO_BOUND,
        least=2.3,
        beside=("rollout_s", "train_s"),
    ),
    Target(
        "least arithmetic of the same step at the machine's matmul rate, as a share of pvg's step",
        ">= 60 %",
        "peers-grpo.json",
        share_of(
            "arithmetic_share",
            "trainer=pvg",
            lambda derived: f"{number(derived['gflop'])} GFLOP at {number(derived['matmul_gflops'])} GFLOP/s",
        ),
        "The rate is that of large matrices. In a profile on one thread, matrix products take 39 % of a training step "
        "and 29 % of sampling. The rest is attention and elementwise operators, and the driver works alone between the "
        "parts of a step.",
        least=60.0,
    ),
    Target(
        "verifier pairs/s against TRL's RewardTrainer, pairs drawn independently",
        ">= 3x",
        "peers-verifier.json",
        times_better("pairs_per_s"),
        "Both sides compute nearly two solutions per pair. pvg computes a solution of several pairs once.",
        least=3.0,
        beside=("solutions_forwarded", "first_batch_s"),
    ),
    Target(
        "verifier pairs/s against TRL's RewardTrainer, all pairs of whole problems",
        ">= 4x",
        "peers-verifier-by-problem.json",
        times_better("pairs_per_s"),
        "pvg computes a solution once for all of its pairs. The remaining time is the passes themselves.",
        least=4.0,
        beside=("solutions_forwarded", "first_batch_s"),
    ),
    Target(
        "tokens/s of the torch engine against transformers' generate, embedded model",
        ">= 2.5x",
        "rollout-peer-ablation.json",
        times_better("tokens_per_s"),
        "At this size a decoding step is matrix products of 256 rows and the reading of keys and values, which cost "
        "both sides the same.",
        least=2.5,
    ),
    Target(
        "tokens/s of the torch engine against transformers' generate, SmolLM2-135M",
        ">= 1.3x",
        "rollout-peer-smollm2-ablation.json",
        times_better("tokens_per_s"),
        "Both sides read the same weights in every decoding step, which takes most of it.",
        least=1.3,
    ),
    Target(
        "500k pairs, end of the mint and whole verifier phase: growth of private memory",
        "<= 300 MB",
        "data-game.json",
        plain("peak_memory_mb_500k", "MB"),
        "The report also has resident memory, with the mapped pages of the shards. The kernel can free those pages.",
        most=300.0,
        beside=("peak_resident_mb_500k",),
    ),
    Target(
        "500k pairs, pair stream alone: growth of the process's peak memory",
        "<= 200 MB",
        "data.json",
        plain("peak_memory_mb_500k", "MB"),
        "What is held per pair is in the report's `memory_bytes_per_pair`.",
        most=200.0,
    ),
    Target(
        "500k pairs: first batch",
        "< 1 s",
        "data.json",
        plain("first_batch_s_500k", "s"),
        "Every shard is opened and its columns of labels are read before the first draw.",
        most=1.0,
    ),
    Target(
        "500k pairs: memory against the eager loader",
        ">= 10x less",
        "data-ablation.json",
        times_better("peak_memory_mb_500k"),
        "What is held per pair is in the report's `memory_bytes_per_pair`.",
        least=10.0,
    ),
    Target(
        "trainer's idle share (1 - useful work / wall time) with prefetch, compared with the synchronous share",
        "< 20 %",
        "pipeline.json",
        idle_share,
        "Useful work is the time that the training of the same steps takes synchronously. All other time counts as "
        "idle: waiting, scores, recomputation, and slower training during overlap (`idle_*` in the report).",
        most=20.0,
    ),
    Target(
        "throughput with one other busy process, as a share of the idle throughput, with the default threads",
        ">= 50 %",
        "contention.json",
        plain("kept_1", "%", 100, "threads=default"),
        "With more busy processes than free cores, each program gets only its share of the cores.",
        least=50.0,
        beside=("step_s", "step_1_s"),
    ),
    *(
        Target(
            f"a step with a worker process per core, compared with one process that has a thread per core, {where}",
            f">= {least:g}x",
            "contention.json",
            times_better(measure, "cluster.kind=local"),
            bound,
            least=least,
            beside=("step_s", "step_1_s", "step_2_s"),
        )
        for measure, where, least, bound in (
            (
                "step_s",
                "on an idle machine",
                1.5,
                "Two workers can at best halve the step of one thread (`threads=default` in the report). Two threads "
                "take 0.74 to 0.88 of it in our reports, so no more than 1.5x to 1.8x is possible.",
            ),
            ("step_1_s", "beside one busy process", 4.0, _WORKERS_BOUND),
            (
                "step_2_s",
                "beside two busy processes",
                4.0,
                "The two busy processes have half of the machine. Two threads lose less beside two busy processes than "
                "beside one, so there is less to gain. " + _WORKERS_BOUND,
            ),
        )
    ),
    Target(
        "exchange with a worker process per core (packing, sending, waiting for the event loop, weights), as a share "
        "of a step on an idle machine, an upper bound",
        "< 5 %",
        "contention.json",
        share_of("exchange_share", "cluster.kind=local", lambda derived: f"{derived['workers']:.0f} workers"),
        "The driver's event loop also samples, grades and scores, and an answer waits while it is busy.",
        most=5.0,
    ),
    Target(
        "a step with a worker on each of two simulated Ray nodes, compared with two local workers",
        ">= 0.85x",
        "cluster.json",
        times_better("step_s"),
        "The driver sends rollouts and gradients over TCP.",
        least=0.85,
    ),
    Target(
        "rollouts per second of the driver's processor time, 1,000 stub workers against 10",
        ">= 0.9x",
        "fleet.json",
        times_better("driver_us", "workload.workers=1000"),
        "With 1,000 workers the driver holds 32,000 rollouts at once, which do not fit into the processor's cache.",
        least=0.9,
    ),
    Target(
        "event-loop lag p99 of the driver with 1,000 stub workers",
        "< 50 ms",
        "fleet.json",
        plain("lag_p99_ms", "ms", 1, "workload.workers=1000"),
        "The loop stalls when 32,000 rollouts are submitted, and when their groups are built at the end."
        " A limit on the answers per turn of the loop made it worse on an idle machine.",
        most=50.0,
    ),
    Target(
        "whole games of Diplomacy per minute, all switches fast against all slow, embedded model",
        ">= 10x",
        "games-ablation.json",
        times_better("games_per_min"),
        "The remaining time is the model's: it reads each prompt once and writes 24 tokens.",
        least=10.0,
    ),
    Target(
        "event-loop lag p99 in the loop profile",
        "< 50 ms",
        "loop.json",
        plain("lag_p99_ms", "ms"),
        "Python work in any thread holds the interpreter lock, so the loop waits for it.",
        most=50.0,
    ),
    Target(
        "the same with a verifier of another vocabulary, so that all solutions are tokenized again",
        "< 50 ms",
        "loop-retokenize.json",
        plain("lag_p99_ms", "ms"),
        "Python work in any thread holds the interpreter lock, so the loop waits for it.",
        most=50.0,
    ),
    Target(
        "event-loop lag p99 against the same work done on the loop",
        ">= 20x less",
        "loop-ablation.json",
        # From the second rung on. The first encodes records as JSON, which no version of pvg did.
        times_better("lag_p99_ms", than=1),
        "Python work in any thread holds the interpreter lock, so the loop waits for it.",
        least=20.0,
    ),
    Target(
        "rollouts/s with a deadline against wait-for-all, heavy-tailed latency",
        ">= 2x",
        "stragglers.json",
        times_more_rollouts("rollout.deadline=0.25"),
        "A shorter deadline would cut more of the long rollouts (`length_kept`).",
        least=2.0,
    ),
    Target(
        "rollouts/s with spo against wait-for-all, heavy-tailed latency",
        ">= 2x",
        "stragglers.json",
        times_more_rollouts("rollout.deadline=0.2, loss spo, cut rollouts continue"),
        "With a shorter deadline more rollouts would continue in later batches, with more versions (`staleness`).",
        least=2.0,
    ),
    *(
        Target(
            f"{what} against its loop, 4,096 rollouts, 16 environments",
            ">= 10x",
            "credit-ablation.json",
            times_better(measure),
            "The remaining time is the losses of the pairs and their scatter-add, which the loop computes too. A "
            "gradient in closed form and the variance in one call gained nothing.",
            least=10.0,
        )
        for what, measure in (("vectorised credit", "credit_ms"), ("V-REx by scatter", "vrex_ms"), ("IRM", "irm_ms"))
    ),
    Target(
        "telemetry overhead",
        "< 1 %",
        "telemetry.json",
        plain("overhead", "%", 100),
        "Every span costs some microseconds, and a step of such a small model is short.",
        most=1.0,
    ),
)


# --- the table -------------------------------------------------------------------------------------------------------


def target_lines(reports: Mapping[str, BenchReport]) -> list[str]:
    """`reports` by the name of their file. The table, then a line for each target that is not reached."""
    rows, short = [], []
    for target in TARGETS:
        report = reports.get(target.file)
        figure = None if report is None else target.read(report)
        if report is None or figure is None:
            rows.append((target.what, target.goal, "", "not measured", "", f"`{target.file}`"))
            continue
        rows.append(
            (
                target.what,
                target.goal,
                figure.text,
                figure.verdict(target),
                f"`{report.command}`",
                f"[{target.file}](benchmarks/{target.file})",
            )
        )
        if not target.holds(figure.value):
            short.append(f"- Not reached: {target.what}. {target.bound}{beside_it(target, report, figure)}")
    return [*markdown_lines(HEADER, "llrlll", rows), *(["", *short] if short else [])]


def beside_it(target: Target, report: BenchReport, figure: Figure) -> str:
    fast = report.variants[figure.place]
    return both_sides(target, report.variants[0], fast) + time_of(fast)


def both_sides(target: Target, *variants: Variant) -> str:
    slow, fast = ({**variant.derived, **medians(variant)} for variant in variants)
    entries = [f"`{name}` {number(fast[name])} against {number(slow[name])}" for name in target.beside]
    return f" pvg against the other: {', '.join(entries)}." if entries else ""


def medians(variant: Variant) -> dict[str, float]:
    return {name: median(samples.values) for name, samples in variant.samples.items()}


def time_of(fast: Variant) -> str:
    """The largest parts of the fast side's time; empty without a budget."""
    budget = fast.budget
    if budget is None or not budget.wall_s:
        return ""
    parts = {name: seconds for name, seconds in budget.exposed.items() if name not in NO_PARTS}
    largest = sorted(parts.items(), key=lambda entry: -entry[1])[:SHOWN_PARTS]
    entries = [f"{name.replace('_', ' ')} {100 * seconds / budget.wall_s:.0f} %" for name, seconds in largest]
    return f" pvg's time by part: {', '.join(entries)}." if entries else ""
