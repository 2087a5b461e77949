"""Machine and throughput during a run: processors, memory, GPUs, event-loop lag; tokens and pairs per second."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from markupsafe import Markup

from pvg.errors import counted
from pvg.reporting.charts import PROVER, VERIFIER, ChartLine, Point, StepAxis, XAxis, line_chart
from pvg.reporting.formats import NumberStyle, duration, peak_memory_texts, percent, short_seconds, value_text
from pvg.reporting.run_summary import RunSummary, SamplerReading, lag_summary, reading_ranges
from pvg.reporting.table import PageSection, elements
from pvg.telemetry.waits import SHARED

GPU = re.compile(r"gpu(\d+)_(.+)")
WORKER = re.compile(r"w(\d+)_busy")
MOST_LINES = 8  # of a chart; more workers are shown as a range
MOST_CHANGES = 20  # of the number of workers
LEAST_PAUSE = 60.0  # seconds; a longer silence of the sampler is a pause of the run


# --- throughput --------------------------------------------------------------------------------------------------


def throughput_section(summary: RunSummary) -> PageSection:
    prover, verifier = StepAxis(summary.steps, PROVER), StepAxis(summary.steps, VERIFIER)
    charts: list[Markup] = []
    if prover:
        x = prover.across()

        def chart(
            title: str, style: NumberStyle, unit: str, *lines: tuple[str, str, str, str], zero: bool = True
        ) -> Markup:
            return line_chart(title, [prover.line(*line) for line in lines], x, style, unit=unit, zero=zero)

        charts += [
            chart(
                "Sampling rate",
                "rate",
                "tokens per second",
                ("tokens_per_s", "written", "part-sampling-0", ""),
                ("prompt_tokens_per_s", "read (prompts)", "part-sampling-2", "dashed"),
            ),
            chart(
                "Latency of a rollout",
                "seconds",
                "queue and service",
                ("latency_p50_s", "p50", "quantile-0", ""),
                ("latency_p90_s", "p90", "quantile-1", "dashed"),
                ("latency_p99_s", "p99", "quantile-2", "dotted"),
            ),
            chart("Engine's batch", "number", "rows decoded together, mean", ("engine_batch", "rows", "ink", "")),
            chart(
                "Saved work",
                "share",
                "share",
                ("cache_hit_rate", "scores from the cache", "verifier", ""),
                ("prefix_share", "prompt tokens shared", "part-sampling-0", "dashed"),
            ),
            chart(
                "Wasted work",
                "share",
                "share",
                ("padding", "padding in micro-batches", "part-training-0", ""),
                ("trainer_idle", "trainer idle", "trouble-1", "dashed"),
            ),
            chart(
                "Score cache",
                "rate",
                "since the phase began",
                ("cache_hits", "hits", "quantile-2", ""),
                ("cache_misses", "misses", "quantile-1", "dashed"),
                ("cache_evictions", "evictions", "trouble-1", "dotted"),
            ),
            chart(
                "Staleness",
                "number",
                "policy versions behind",
                ("staleness", "mean", "ink", ""),
                ("staleness_max", "largest", "trouble-1", "dashed"),
                ("staleness_in_queue", "mean, in the queue", "quantile-1", "dotted"),
            ),
            chart(
                "Stale rollouts",
                "number",
                "per batch",
                ("dropped_stale", "dropped", "trouble-1", ""),
                ("stale_cancelled", "of them in flight", "quantile-2", "dashed"),
            ),
        ]
    if verifier:
        lines = [verifier.line("pairs_per_s", "pairs", "verifier")]
        charts.append(
            line_chart("Verifier's training", lines, verifier.across(), "rate", unit="pairs per second", zero=True)
        )
    return PageSection("throughput", "Throughput", [elements.grid(charts)])


# --- device and event loop ---------------------------------------------------------------------------------------


def machine_section(summary: RunSummary) -> PageSection:
    """Charts of the device and of event-loop lag over time. If a run recorded neither, a sentence instead."""
    if not (summary.device or summary.loop or summary.workers or summary.peak_memory):
        why = "This run has no records of its device and event loop, because an older version of pvg played it."
        return PageSection("machine", "Machine", [elements.empty(why)] if summary.steps else [])
    body: list[Markup] = []
    if summary.peak_memory:
        body.append(elements.facts(peak_memory_texts(summary.peak_memory)))
    if summary.device:
        body += [elements.facts(_device_facts(summary)), elements.grid(_device_charts(summary.device))]
    if summary.workers:
        body += [
            elements.subheading("Workers", workers_text(summary)),
            elements.grid(_workers_charts(summary)),
            *([elements.notes(_scaling_notes(summary))] if summary.scaling else []),
        ]
    if summary.loop:
        body += [elements.subheading("Event loop", _lag_text(summary.loop)), elements.grid([_lag_chart(summary.loop)])]
    return PageSection("machine", "Machine", body)


def _device_facts(summary: RunSummary) -> list[tuple[str, str]]:
    found = reading_ranges(summary.device)
    rows = [
        ("processors in use, mean", "cpu", "mean", "share"),
        ("cores used by pvg, mean", "process_cpu", "mean", "number"),
        ("largest resident memory", "rss_bytes", "max", "bytes"),
        ("memory of the machine", "memory_total_bytes", "last", "bytes"),
    ]
    facts_found = [(label, value_text(style, found[name][of])) for label, name, of, style in rows if name in found]  # type: ignore[arg-type]
    for name in found:
        match = GPU.fullmatch(name)
        if match and match[2] == "utilisation":
            facts_found.append((f"GPU {match[1]} in use, mean", percent(found[name]["mean"])))
        if match and match[2] == "memory_bytes":
            facts_found.append((f"GPU {match[1]} memory, most", value_text("bytes", found[name]["max"])))
    return facts_found


def without_gaps(times: Sequence[float], longest: float) -> tuple[list[float], list[int]]:
    """Seconds since the first of the sorted `times` without pauses above `longest`, and the index after each pause.

    A run that stopped in the evening and resumed in the morning should not show the night.
    """
    places: list[float] = []
    breaks: list[int] = []
    skipped = 0.0
    for index, time in enumerate(times):
        if index and time - times[index - 1] > longest:
            skipped += time - times[index - 1] - longest
            breaks.append(index)
        places.append(time - times[0] - skipped)
    return places, breaks


class ReadingClock:
    """The times of readings as an x axis, without the pauses between two processes."""

    def __init__(self, readings: Sequence[SamplerReading]) -> None:
        self.readings = readings
        times = [reading.time for reading in readings]
        apart = sorted(b - a for a, b in itertools.pairwise(times)) or [1.0]
        self.places, self.breaks = without_gaps(times, max(LEAST_PAUSE, 10 * apart[len(apart) // 2]))

    def across(self) -> XAxis:
        label = "since the first reading" + (", pauses left out" if self.breaks else "")
        return XAxis(0.0, self.places[-1] or 1.0, label, style="seconds")

    def line(
        self, value: Callable[[dict[str, float]], float | None], name: str, style: str, dash: str = ""
    ) -> ChartLine:
        pieces: list[list[Point]] = [[]]
        for index, (place, reading) in enumerate(zip(self.places, self.readings, strict=True)):
            if index in self.breaks:
                pieces.append([])
            found = value(reading.metrics)
            if found is not None:
                pieces[-1].append((place, found))
        return ChartLine(name, [piece for piece in pieces if piece], style, dash)

    def metric(self, metric: str, name: str, style: str, dash: str = "") -> ChartLine:
        return self.line(lambda metrics: metrics.get(metric), name, style, dash)


def _device_charts(readings: list[SamplerReading]) -> list[Markup]:
    clock = ReadingClock(readings)
    x = clock.across()
    names = {name for reading in readings for name in reading.metrics}
    charts = [
        line_chart(
            "Processors", [clock.metric("cpu", "all cores", "ink")], x, "share", unit="share of the machine's cores"
        ),
        line_chart(
            "Cores used by pvg", [clock.metric("process_cpu", "cores", "ink")], x, "number", unit="cores", zero=True
        ),
        line_chart(
            "Memory",
            [
                clock.metric("memory_used_bytes", "the machine", "quantile-0", "dashed"),
                clock.metric("rss_bytes", "pvg, resident", "quantile-2"),
            ],
            x,
            "bytes",
            unit="in use",
            zero=True,
        ),
    ]
    numbers = sorted({int(match[1]) for name in names if (match := GPU.fullmatch(name))})
    for title, style, unit, measures in (
        (
            "GPU",
            "share",
            "share of the time, of the SMs, or of the warps",
            (
                ("utilisation", "any kernel runs", ""),
                ("sm_activity", "SMs with work", "dashed"),
                ("sm_occupancy", "warps, of the maximum", "dotted"),
            ),
        ),
        (
            "GPU memory traffic",
            "share",
            "share of the bandwidth, or of the time",
            (("memory_bandwidth", "bandwidth used", ""), ("memory_activity", "any read or write", "dashed")),
        ),
        ("GPU memory", "bytes", "in use", (("memory_bytes", "", ""),)),
        ("GPU power", "number", "W", (("power_w", "", ""),)),
    ):
        lines = [
            clock.metric(f"gpu{number}_{measure}", f"GPU {number} {word}".strip(), f"run-{number % 6}", dash)
            for number in numbers
            for measure, word, dash in measures
        ]
        charts.append(line_chart(title, lines, x, style, unit=unit, zero=True))  # type: ignore[arg-type]
    return charts


def workers_text(summary: RunSummary) -> str:
    """How many workers there were, how busy, and how often one was replaced."""
    readings, found = summary.workers, reading_ranges(summary.workers)
    words = [counted(round(found["up"]["max"]), "worker")]
    if summary.scaling:
        words[0] = f"{found['up']['min']:.0f} to {words[0]}"
    if "busy" in found:
        words.append(f"busy {percent(found['busy']['mean'])} of the time")
        names = sorted((name for name in found if WORKER.fullmatch(name)), key=lambda name: found[name]["mean"])
        if len(names) > 1:
            least, most = (percent(found[name]["mean"]) for name in (names[0], names[-1]))
            words[-1] += f" ({least} to {most})"
        if found["core_wait"]["mean"] > SHARED:
            words.append(f"{percent(found['core_wait']['mean'])} of that waiting for a core")
    # The count starts at 0 in every process of the run.
    counts = [0.0, *(reading.metrics.get("restarts", 0.0) for reading in readings)]
    restarts = sum(max(0.0, after - before) for before, after in itertools.pairwise(counts))
    return ", ".join([*words, counted(round(restarts), "replacement")])


def _scaling_notes(summary: RunSummary) -> list[tuple[str, str]]:
    """Each change of the number of workers and its reason; of many, the last ones."""
    shown = summary.scaling[-MOST_CHANGES:]
    began = summary.began or shown[0].time
    notes = [
        (f"after {duration(change.time - began)}", f"{change.why}; {counted(change.workers, 'worker')} now")
        for change in shown
    ]
    if left_out := len(summary.scaling) - len(shown):
        notes.insert(0, ("before that", f"{counted(left_out, 'change')} of the number of workers"))
    return notes


def _workers_charts(summary: RunSummary) -> list[Markup]:
    readings, clock = summary.workers, ReadingClock(summary.workers)
    charts = []
    if summary.scaling:
        line = clock.metric("up", "ready", "ink")
        charts.append(line_chart("Workers", [line], clock.across(), "number", unit="ready", zero=True))
    numbers = sorted({int(match[1]) for r in readings for name in r.metrics if (match := WORKER.fullmatch(name))})
    if 0 < len(numbers) <= MOST_LINES:
        lines = [clock.metric(f"w{number}_busy", f"worker {number}", f"run-{number % 6}") for number in numbers]
    else:
        lines = [
            clock.metric("busy_most", "the busiest", "quantile-2", "dashed"),
            clock.metric("busy", "mean", "ink"),
            clock.metric("busy_least", "the least busy", "quantile-0", "dotted"),
        ]
    return [*charts, line_chart("Busy", lines, clock.across(), "share", unit="share of the time", zero=True)]


def _lag_chart(readings: list[SamplerReading]) -> Markup:
    clock = ReadingClock(readings)
    # A logarithmic axis cannot show a lag of 0, so it shows the resolution of the clock instead.
    lines = [
        clock.line(lambda m, name=name: max(m[name], 1e-6) if name in m else None, label, style, dash)  # type: ignore[misc]
        for name, label, style, dash in (
            ("lag_p50_s", "p50", "quantile-0", ""),
            ("lag_p90_s", "p90", "quantile-1", "dashed"),
            ("lag_p99_s", "p99", "quantile-2", ""),
            ("lag_max_s", "longest", "trouble-1", "dotted"),
        )
    ]
    return line_chart("Lag", lines, clock.across(), "seconds", unit="delay, logarithmic scale", log=True)


def _lag_text(readings: list[SamplerReading]) -> str:
    figures = lag_summary(readings)
    if "worst_max_s" not in figures:
        return ""
    typical = f"typically {short_seconds(figures['median_p50_s'])}, " if "median_p50_s" in figures else ""
    span = readings[-1].time - readings[0].time
    return (
        f"Delay between the time a task of the event loop was due and the time it ran: {typical}"
        f"at worst {short_seconds(figures['worst_max_s'])}, in {figures['samples']:.0f} samples over {duration(span)}."
    )
