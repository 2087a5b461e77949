"""Figures of other systems. The page compares them with ours only if the work is the same.

    lines = reference_lines(reports)      # Markdown: a table, and for each figure that is not in it the reason

Each `Reference` names its source and the checks that a report of ours must pass. Used by make_benchmarks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pvg.bench.report import BenchReport, Variant
from pvg.bench.statistics import median
from pvg.reporting.table import markdown_lines
from pvg_cli.bench_tables import number

LIKE = 0.1  # relative difference below which two sizes count as the same

Check = Callable[[BenchReport], str | None]  # why the work differs; None if it is the same in this respect


@dataclass(frozen=True)
class Quantity:
    """One number of a reference, and our metric (or derived figure) that it is compared with."""

    name: str
    value: float
    unit: str
    metric: str
    better: str
    checks: tuple[Check, ...] = ()
    published_as: str = ""  # as the source writes it, unless that is the value and the unit

    def __str__(self) -> str:
        return self.published_as or f"{number(self.value)} {self.unit}"


@dataclass(frozen=True)
class Reference:
    """A published or measured figure of another system. `profile`: whose reports may stand beside it; `never`: why no
    report of ours can be of the same work."""

    work: str
    source: str
    quantities: tuple[Quantity, ...]
    profile: str
    checks: tuple[Check, ...] = ()
    never: str = ""
    differs: str = ""  # additional work of ours, if any


def cores(count: int) -> Check:
    """Absolute times are compared only for the same number of cores."""
    return lambda report: (
        None if report.environment.cores == count else f"ours is of {report.environment.cores} cores, not {count}"
    )


def near(key: str, value: float, what: str) -> Check:
    """`key` of the work within LIKE of `value`; a list must have one such value."""

    def check(report: BenchReport) -> str | None:
        found = report.work.get(key)
        values = found if isinstance(found, (list, tuple)) else [found]
        if any(isinstance(each, (int, float)) and abs(each - value) <= LIKE * value for each in values):
            return None
        listed = " / ".join(number(each) if isinstance(each, (int, float)) else "unknown" for each in values)
        return f"ours has {listed} {what}, not {number(value)}"

    return check


def named(key: str, part: str, what: str) -> Check:
    def check(report: BenchReport) -> str | None:
        found = str(report.work.get(key, "unknown"))
        return None if part.lower() in found.lower() else f"{what} is {found}"

    return check


def with_kl(wanted: bool) -> Check:
    def check(report: BenchReport) -> str | None:
        if bool(report.work.get("kl")) == wanted:
            return None
        return "ours computes no KL term" if wanted else "ours computes the KL to a reference too"

    return check


def like_derived(key: str, value: float, what: str) -> Check:
    """A figure that only the sampled work has, such as the tokens of a solution."""

    def check(report: BenchReport) -> str | None:
        variant = default_variant(report)
        found = None if variant is None else variant.derived.get(key)
        if found is not None and abs(found - value) <= LIKE * value:
            return None
        return f"ours has {'unknown' if found is None else number(found)} {what}, not {number(value)}"

    return check


def of_length(low: float, high: float) -> Check:
    """Completion tokens per rollout; a range where the source does not say whether its figure counts the prompt."""

    def check(report: BenchReport) -> str | None:
        variant = default_variant(report)
        found = 0.0 if variant is None else variant.derived.get("completion_tokens", 0.0)
        if (1 - LIKE) * low <= found <= (1 + LIKE) * high:
            return None
        return f"ours has {number(found)} completion tokens per rollout, not {low:g} to {high:g}"

    return check


def sampled_in(dtype: str) -> Check:
    def check(report: BenchReport) -> str | None:
        experiment = report.config["experiment"]
        found = experiment.get("rollout", {}).get("dtype", "unknown precision")
        found = experiment["models"]["prover"]["dtype"] if found == "model" else found
        return None if found == dtype else f"ours samples in {found}"

    return check


def smollm2(rollouts: int) -> tuple[Check, ...]:
    """The checks of a figure of SmolLM2-135M in bfloat16 on 2 cores, with this number of rollouts at once."""
    return (
        cores(2),
        named("model", "smollm2", "our model"),
        sampled_in("bfloat16"),
        near("rollouts", rollouts, "rollouts at once"),
    )


REFERENCES = (
    Reference(
        "one GRPO step: 256 rollouts (32 prompts x 8) of about 37 tokens, a Llama of 0.86M parameters, 2 CPU cores",
        "TRL 1.16, GRPOTrainer, measured on the same kind of machine",
        (
            Quantity("a step with KL to a reference", 1.24, "s", "step_s", "lower", (with_kl(True),)),
            Quantity("a step without", 1.10, "s", "step_s", "lower", (with_kl(False),), "1.10 s"),
        ),
        "e2e",
        (
            cores(2),
            near("prover_parameters", 0.86e6, "parameters"),
            near("groups", 32, "prompts"),
            near("group_size", 8, "rollouts per prompt"),
            near("steps", 1, "steps per sample"),
            of_length(26, 37),
        ),
        differs="Ours also grades every rollout, scores it with a verifier, and publishes the weights.",
    ),
    Reference(
        "reward-model training in batches of 128 pairs of about 45 tokens, a Llama of 0.86M parameters, 2 CPU cores",
        "TRL 1.16, RewardTrainer, measured on the same kind of machine",
        (Quantity("in training", 202, "pairs/s", "pairs_per_s", "higher"),),
        "verifier",
        (
            cores(2),
            near("parameters", 0.86e6, "parameters"),
            near("pairs_per_step", 128, "pairs per batch"),
            like_derived("solution_tokens", 45, "tokens per solution"),
        ),
    ),
    Reference(
        "reward-model training on 200k pairs: tokenisation before the first of them",
        "TRL 1.16, RewardTrainer, measured on the same kind of machine",
        (
            Quantity("before the first batch", 25.7, "s", "first_batch_s_200k", "lower"),
            Quantity("of memory", 1700, "MB", "peak_memory_mb_200k", "lower", published_as="1.7 GB"),
        ),
        "data",
        (cores(2), near("pairs", 200_000, "pairs"), near("mean_tokens", 45, "tokens per solution")),
    ),
    Reference(
        "500k preference pairs (1.9 GB of JSONL) up to the first batch",
        "the eager loader that the pair stream replaces, measured",
        (
            Quantity("before the first batch", 13.1, "s", "first_batch_s_500k", "lower"),
            Quantity("of memory", 2500, "MB", "peak_memory_mb_500k", "lower", published_as="2.5 GB"),
        ),
        "data",
        (cores(2), near("pairs", 500_000, "pairs"), near("mean_tokens", 450, "tokens per solution")),
        differs="Ours counts the private memory of the process, because the kernel can free the pages of mapped files.",
    ),
    Reference(
        "SmolLM2-135M, bfloat16, 2 CPU cores, 64 completions at once",
        "transformers generate, measured",
        (Quantity("in decoding", 420, "tokens/s", "tokens_per_s", "higher"),),
        "rollout",
        smollm2(64),
    ),
    Reference(
        "SmolLM2-135M, bfloat16, 2 CPU cores, 128 concurrent requests",
        "vLLM (CPU build), measured",
        (Quantity("in decoding", 650, "tokens/s", "tokens_per_s", "higher"),),
        "rollout",
        smollm2(128),
    ),
    Reference(
        "a matrix product on 2 CPU cores, float32",
        "measured",
        (Quantity("in all", 195, "GFLOP/s", "matmul_gflops", "higher"),),
        "trainer",
        (cores(2),),
        differs="It shows the speed of the machine, not of pvg. Ours is measured with one thread, and the MFU "
        "is relative to it.",
    ),
    Reference(
        "a weight update while rollouts stream",
        "prime-rl's own figures",
        (
            Quantity("through a shared client", 8580, "ms", "loaded_wall_p50_ms", "lower", published_as="8.58 s"),
            Quantity("through a dedicated one", 55, "ms", "loaded_wall_p50_ms", "lower"),
        ),
        "sync",
        never="Theirs are of another model on GPU servers behind HTTP; ours is of an embedded model in one process. "
        "Compare only the ratios within each.",
    ),
    Reference(
        "the longest stall of the event loop, 256 rollouts in flight",
        "prime-rl's own figures",
        (
            Quantity("from a fan-out that does nothing", 2050, "ms", "lag_max_ms", "lower"),
            Quantity("skipped", 11, "ms", "lag_max_ms", "lower"),
        ),
        "loop",
        never="Theirs is of one fan-out in another orchestrator; ours of sampling and committing long rollouts. "
        "Compare only the ratios within each run.",
    ),
)


def reference_lines(reports: Sequence[BenchReport]) -> list[str]:
    """The table of the figures that are compared with ours, and a line with the reason for each other figure."""
    rows, apart = [], []
    for reference in REFERENCES:
        reasons: dict[str, list[Quantity]] = {}
        for quantity in reference.quantities:
            report, why = comparable(reference, quantity, reports)
            if report is None:
                reasons.setdefault(why, []).append(quantity)
            else:
                rows.append(comparison_row(reference, quantity, report))
        for why, quantities in reasons.items():
            told = ", ".join(f"{quantity} {quantity.name}" for quantity in quantities)
            apart.append(f"- **{reference.work}**: {told} ({reference.source}). {why}")
    header = ("the work", "figure of", "theirs", "ours", "ours is better by", "our report")
    lines = markdown_lines(header, "llrrrl", rows) if rows else []
    if apart:
        lines += [*([""] if rows else []), "Not compared, because the work is not the same:", "", *apart]
    return lines


def comparison_row(reference: Reference, quantity: Quantity, report: BenchReport) -> tuple[str, ...]:
    ours = our_value(report, quantity.metric)
    assert ours is not None
    ratio = ours / quantity.value if quantity.better == "higher" else quantity.value / ours
    return (
        f"{reference.work}: {quantity.name}. {reference.differs}".strip(),
        reference.source,
        str(quantity),
        f"{number(ours)} {quantity.unit}",
        f"{ratio:.2f}x",
        f"`{report.command}`",
    )


def comparable(
    reference: Reference, quantity: Quantity, reports: Sequence[BenchReport]
) -> tuple[BenchReport | None, str]:
    """The report of the same work; otherwise the reasons why the work of the nearest report differs."""
    if reference.never:
        return None, reference.never
    nearest: list[str] | None = None
    for report in reports:
        if report.profile != reference.profile or default_variant(report) is None:
            continue
        reasons = [why for check in (*reference.checks, *quantity.checks) if (why := check(report)) is not None]
        if not reasons and our_value(report, quantity.metric) is None:
            reasons = [f"ours does not measure {quantity.metric}"]
        if not reasons:
            return report, ""
        if nearest is None or len(reasons) < len(nearest):
            nearest = reasons
    if nearest is None:
        return None, f"There is no report of the profile `{reference.profile}` yet."
    text = "; ".join(nearest)
    return None, f"{text[0].upper()}{text[1:]}."


def default_variant(report: BenchReport) -> Variant | None:
    """The variant with the default settings: the last one of an ablation; a sweep has none."""
    return None if report.kind == "sweep" else report.variants[-1]


def our_value(report: BenchReport, metric: str) -> float | None:
    variant = default_variant(report)
    if variant is None:
        return None
    if metric in variant.samples:
        return median(variant.samples[metric].values)
    return variant.derived.get(metric)
