"""Learning: curves by step and by round, and the verifier's scores of the prover's solutions."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from pvg.reporting.charts import (
    PROVER,
    VERIFIER,
    WINDOW,
    ChartLine,
    HistogramKind,
    ReferenceLine,
    StepAxis,
    line_chart,
    mirrored_histogram,
    round_axis,
)
from pvg.reporting.formats import NumberStyle, metric_display, percent
from pvg.reporting.run_summary import RunSummary, base_metrics
from pvg.reporting.solutions import RoundScores
from pvg.reporting.table import LegendKey, PageSection, chart, elements
from pvg.reporting.terminal import outcome, rounds_table

HELPFUL, SNEAKY, VERIFIER_STYLE, INK = "helpful", "sneaky", "verifier", "ink"
WARMUP = "warmup"
BINS = 32
# Metrics that other sections show, or that are the same in every step.
ELSEWHERE = frozenset(
    {
        "tokens_per_s",
        "prompt_tokens_per_s",
        "latency_p50_s",
        "latency_p90_s",
        "latency_p99_s",
        "engine_batch",
        "prefix_share",
        "padding",
        "staleness",
        "staleness_max",
        "staleness_in_flight",
        "staleness_in_queue",
        "groups_in_flight",
        "groups_waiting",
        "dropped_stale",
        "stale_cancelled",
        "stale_on_arrival",
        "stale_waiting",
        "stale_tokens",
        "trainer_idle",
        "cache_hits",
        "cache_misses",
        "cache_evictions",
        "cache_hit_rate",
        "pairs_per_s",
    }
)
SHOWN_HERE = frozenset(
    {
        "helpful_accuracy",
        "sneaky_error_rate",
        "fooled_rate",
        "accepted_helpful",
        "score_gap",
        "reward_mean",
        "kl",
        "malformed",
        "truncated",
        "zero_signal",
        "grad_norm",
        "score_helpful_correct",
        "score_helpful_incorrect",
        "score_sneaky_correct",
        "score_sneaky_incorrect",
        "pair_accuracy",
    }
)


# --- rounds ------------------------------------------------------------------------------------------------------


def rounds_section(summary: RunSummary) -> PageSection:
    """The table of rounds, and its metrics as charts."""
    lead = " ".join(
        ("At the end of each round: fresh samples on problems that no model trained on.", *outcome(summary.rounds))
    )
    body = [rounds_table(summary.rounds), _round_charts(summary)] if summary.rounds else []
    return PageSection("rounds", "Rounds", body, lead)


def _round_charts(summary: RunSummary) -> Markup:
    """Points by round. Empty for a single round."""
    numbers = sorted(summary.rounds)
    if len(numbers) < 2:
        return Markup()
    base = base_metrics(summary.rounds)
    x, with_base = round_axis(numbers), round_axis(numbers, base=bool(base))
    first = numbers[0] - 1

    def line(metric: str, name: str, style: str, dash: str = "") -> ChartLine:
        points = [(float(n), summary.rounds[n][metric]) for n in numbers if metric in summary.rounds[n]]
        if metric in base:
            points.insert(0, (float(first), base[metric]))
        return ChartLine(name, [points] if points else [], style, dash, dots=True)

    held_out = {
        p.round: p.metrics["verifier_auc"]
        for p in summary.phases
        if p.phase == VERIFIER and "verifier_auc" in p.metrics
    }
    on_mint = ChartLine(
        "held-out minted",
        [[(float(n), held_out[n]) for n in numbers if n in held_out]],
        VERIFIER_STYLE,
        "dotted",
        dots=True,
    )
    return elements.grid(
        [
            line_chart(
                "Both roles by round",
                [
                    line("helpful_accuracy", "helpful accuracy", HELPFUL),
                    line("sneaky_error_rate", "sneaky error rate", SNEAKY, "dashed"),
                ],
                with_base,
                "share",
                unit="share of a role's solutions",
            ),
            line_chart(
                "Fooled rates by round",
                [
                    line("fooled_rate", "by its own flaws", SNEAKY),
                    line("fooled_rate_at_90", "by its own flaws, at 90% acceptance", SNEAKY, "dotted"),
                    line("fooled_rate_previous", "by the previous round's", SNEAKY, "dashed"),
                    line("fooled_rate_base", "by the base prover's", INK, "dotted"),
                ],
                x,
                "share",
                unit="share of flaws accepted",
                zero=True,
                whole=False,  # after training, all of them are often below 5 %
            ),
            line_chart(
                "Verifier AUC by round",
                [
                    line("verifier_auc", "fresh samples", VERIFIER_STYLE),
                    line("verifier_auc_previous", "previous flaws", INK, "dashed"),
                    on_mint,
                ],
                x,
                "auc",
                references=[ReferenceLine(0.5, "chance")],
                unit="correct against incorrect",
            ),
        ]
    )


# --- steps -------------------------------------------------------------------------------------------------------


def learning_section(summary: RunSummary) -> PageSection:
    prover, verifier = StepAxis(summary.steps, PROVER), StepAxis(summary.steps, VERIFIER)
    warmup = StepAxis(summary.steps, WARMUP)
    charts = [*_prover_charts(summary, prover), *_verifier_charts(verifier), *_warmup_charts(summary, warmup)]
    others = [_other_charts(prover), _other_charts(verifier)]
    body = [elements.grid(charts), elements.details("All other metrics of the steps", others)]
    lead = "By optimizer step, on training problems."
    if prover.smoothed or verifier.smoothed or warmup.smoothed:
        lead += f" Faint: each point. Strong: the mean over {WINDOW} points."
    return PageSection("learning", "Learning", body, lead if any(charts) else "")


def _prover_charts(summary: RunSummary, steps: StepAxis) -> list[Markup]:
    if not steps:
        return []
    x = steps.across()
    thresholds = {p.round: p.metrics["threshold"] for p in summary.phases if "threshold" in p.metrics}
    scores = [
        steps.line("score_helpful_correct", "helpful correct", HELPFUL),
        steps.line("score_helpful_incorrect", "helpful wrong", HELPFUL, "dashed"),
        steps.line("score_sneaky_incorrect", "sneaky flaw", SNEAKY),
        steps.line("score_sneaky_correct", "sneaky correct", SNEAKY, "dashed"),
        steps.level(thresholds, "threshold", VERIFIER_STYLE),
    ]
    return [
        line_chart(
            "Both roles",
            [
                steps.line("helpful_accuracy", "helpful accuracy", HELPFUL),
                steps.line("sneaky_error_rate", "sneaky error rate", SNEAKY, "dashed"),
            ],
            x,
            "share",
            unit="share of a role's solutions",
        ),
        line_chart(
            "Accepted solutions",
            [
                steps.line("accepted_helpful", "helpful solutions", HELPFUL),
                steps.line("fooled_rate", "flaws (fooled rate)", SNEAKY, "dashed"),
            ],
            x,
            "share",
            unit="share above the threshold",
        ),
        line_chart("Scores by kind", scores, x, "score", unit="mean score"),
        line_chart(
            "Score gap",
            [steps.line("score_gap", "gap", INK)],
            x,
            "score",
            unit="helpful correct − sneaky flaw",
            references=[ReferenceLine(0.0, "")],
        ),
        line_chart("Reward", [steps.line("reward_mean", "reward", INK)], x, "number", unit="mean over both roles"),
        line_chart("KL to the start", [steps.line("kl", "KL", INK)], x, "number", unit="KL, nats per token", zero=True),
        line_chart(
            "Malformed, truncated, no signal",
            [
                steps.line("malformed", "malformed", "trouble-0"),
                steps.line("truncated", "truncated", "trouble-1", "dashed"),
                steps.line("zero_signal", "groups without signal", "trouble-2", "dotted"),
            ],
            x,
            "share",
            unit="share",
        ),
        line_chart(
            "Prover's gradient norm",
            [steps.line("grad_norm", "norm", INK)],
            x,
            "number",
            unit="before clipping",
            zero=True,
        ),
    ]


def _verifier_charts(steps: StepAxis) -> list[Markup]:
    if not steps:
        return []
    x = steps.across()
    return [
        line_chart(
            "Verifier: pair accuracy",
            [steps.line("pair_accuracy", "pair accuracy", VERIFIER_STYLE)],
            x,
            "share",
            unit="share of pairs in order",
            references=[ReferenceLine(0.5, "chance")],
        ),
        line_chart(
            "Verifier: score gap",
            [steps.line("score_gap", "gap", VERIFIER_STYLE)],
            x,
            "score",
            unit="correct − incorrect",
            zero=True,
        ),
    ]


def _warmup_charts(summary: RunSummary, steps: StepAxis) -> list[Markup]:
    """The loss of the warm start by step, and the losses of held-out demonstrations before and after it."""
    if not steps:
        return []
    measured = next((phase.metrics for phase in summary.phases if phase.phase == WARMUP), {})
    ends = ((0.0, "held_out_loss_before"), (float(steps.total), "held_out_loss_after"))
    held_out = [(x, measured[name]) for x, name in ends if name in measured]
    return [
        line_chart(
            "Warm start: loss of the demonstrations",
            [
                steps.line("loss", "batch", HELPFUL),
                ChartLine("held out, before and after", [[point] for point in held_out], INK, "dotted", dots=True),
            ],
            steps.across(),
            "number",
            unit="nats per token",
            zero=True,
        )
    ]


def _other_charts(steps: StepAxis) -> Markup:
    """One chart for each remaining metric of the steps."""
    here = SHOWN_HERE if steps.phase == PROVER else frozenset({"pair_accuracy", "score_gap"})
    names = {name for found in steps.rounds.values() for step in found for name in step.metrics}
    style = INK if steps.phase == PROVER else VERIFIER_STYLE
    charts = [
        line_chart(
            metric_display(name).label,
            [steps.line(name, metric_display(name).label, style)],
            steps.across(),
            _axis_style(metric_display(name).style),
            unit="prover" if steps.phase == PROVER else "verifier",
        )
        for name in sorted(names - here - ELSEWHERE)
    ]
    return elements.grid(charts)


def _axis_style(style: NumberStyle) -> NumberStyle:
    return "number" if style == "auc" else style


# --- scores ------------------------------------------------------------------------------------------------------


def scores_section(scores: list[RoundScores], why_empty: str) -> PageSection:
    """One histogram per round, all with the same range of scores and of counts."""
    if not scores:
        return PageSection("scores", "Scores", [elements.empty(why_empty)] if why_empty else [])
    everything = np.concatenate([kind for found in scores for kind in found.kinds.values()])
    low, high = (float(edge) for edge in np.percentile(everything, [1.0, 99.5]))
    pad = 0.05 * ((high - low) or 1.0)
    thresholds = [found.threshold for found in scores if found.threshold is not None]
    low, high = min([low - pad, *(t - pad for t in thresholds)]), max([high + pad, *(t + pad for t in thresholds)])
    edges = np.linspace(low, high, BINS + 1)
    counted = [_kinds(found, edges) for found in scores]
    most = max(_tallest(kinds) for kinds in counted)
    charts = [
        mirrored_histogram(
            f"Round {found.round}",
            [float(e) for e in edges],
            kinds,
            threshold=found.threshold,
            most=most,
            note=_accepted(found),
        )
        for found, kinds in zip(scores, counted, strict=True)
    ]
    beyond = int(((everything < low) | (everything > high)).sum())
    keys = chart.legend([LegendKey(kind.name, kind.style, shape="box") for kind in counted[0]])
    lead = (
        "Scores of each round's verifier for its prover's solutions. It accepts scores to the right of the line. "
        + (
            "From the evaluation's fresh samples."
            if all(found.fresh for found in scores)
            else "Unfinished rounds: from training."
        )
        + (f" Of {len(everything)} scores, {beyond} outside the range are in the outermost bars." if beyond else "")
    )
    return PageSection("scores", "Scores", [keys, elements.grid(charts)], lead)


def _kinds(found: RoundScores, edges: np.ndarray) -> list[HistogramKind]:
    look = {
        "helpful correct": (HELPFUL, True),
        "helpful wrong": (f"{HELPFUL} light", True),
        "sneaky flaw": (SNEAKY, False),
        "sneaky correct": (f"{SNEAKY} light", False),
    }
    return [
        HistogramKind(
            name,
            style,
            [int(n) for n in np.histogram(np.clip(found.kinds[name], edges[0], edges[-1]), edges)[0]],
            above,
        )
        for name, (style, above) in look.items()
    ]


def _tallest(kinds: list[HistogramKind]) -> int:
    """The highest stack, rounded up to two digits."""
    stacks = [
        sum(counts)
        for side in (True, False)
        for counts in zip(*(k.counts for k in kinds if k.above is side), strict=True)
    ]
    most: int = max(stacks)
    unit = int(10 ** max(0, len(str(most)) - 2))
    return -(-most // unit) * unit


def _accepted(found: RoundScores) -> str:
    """The accepted shares of correct helpful solutions and of flaws."""
    words = []
    for kind, verb in (("helpful correct", "correct helpful solutions"), ("sneaky flaw", "flaws")):
        share = found.accepted(kind)
        if share is not None:
            words.append(f"{percent(share)} of {len(found.kinds[kind])} {verb}")
    return f"Accepted: {', '.join(words)}." if words else ""
