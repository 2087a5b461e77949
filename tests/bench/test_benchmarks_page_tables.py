"""The page's table of targets and its tables of growth, and the README's ladder."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from made_reports import PROFILE, higher, lower, made_report, variant

from benchmarks.pages.make_benchmarks import report_lines
from benchmarks.pages.readme_ladder import BEGIN, END, with_ladder
from benchmarks.pages.scaling_tables import growths, scaling_lines
from benchmarks.pages.targets import TARGETS, beside_it, idle_share, target_lines
from pvg.bench.report import BenchReport, TimeBudget
from pvg.errors import UsageError

AROUND = [0.98, 0.99, 1.0, 1.01, 1.02]


def around(middle: float) -> list[float]:
    return [middle * factor for factor in AROUND]


def row_of(lines: list[str], what: str) -> str:
    (row,) = [line for line in lines if line.startswith(f"| {what} ")]
    return row


# --- targets ---------------------------------------------------------------------------------------------------------


def test_without_reports_nothing_is_measured() -> None:
    lines = target_lines({})
    assert len(lines) == 2 + len(TARGETS)
    assert all("| not measured |" in line for line in lines[2:])


def ladder_report(slow: float, fast: float) -> BenchReport:
    return made_report(
        variant({"step_s": lower(around(slow))}, "all slow"),
        variant({"step_s": lower(around(fast))}, "rollout.engine.max_rows=256"),
        kind="ablation",
        name="e2e",
        command="pvg bench --profile e2e --ablate",
        config={
            "profile": PROFILE
            | {
                "headline": "step_s",
                "ladder": [{"switch": "rollout.engine.max_rows", "slow": 8, "fast": 256, "says": "decoded together"}],
            },
            "experiment": {},
        },
    )


def test_a_ratio_beyond_its_target_is_reached_and_one_around_it_is_not_sure() -> None:
    what = "whole GRPO steps of the embedded game, all switches fast against all slow"

    def row(slow: float) -> str:
        return row_of(target_lines({"e2e-ablation.json": ladder_report(slow, 1.0)}), what)

    assert "| >= 3x | 4.00x (" in row(4.0)
    assert (
        "| reached | `pvg bench --profile e2e --ablate` | [e2e-ablation.json](benchmarks/e2e-ablation.json) |" in row(4)
    )
    assert "| reached, within the noise |" in row(3.02)
    assert "| **not reached**, within the noise |" in row(2.98)
    assert "| **not reached** |" in row(2.0)


def test_what_is_not_reached_says_what_bounds_it() -> None:
    lines = target_lines({"e2e-ablation.json": ladder_report(2.0, 1.0)})
    assert lines[-1].startswith("- Not reached: whole GRPO steps of the embedded game")
    assert lines[-1].endswith("pvg's time by part: decode 100 %.")
    assert not [line for line in target_lines({"e2e-ablation.json": ladder_report(4.0, 1.0)}) if line.startswith("- ")]


def test_a_peer_that_is_too_near_is_told_with_both_sides_figures() -> None:
    def side(step: float) -> dict[str, Any]:
        return {
            name: lower(around(share * step)) for name, share in (("step_s", 1), ("rollout_s", 0.6), ("train_s", 0.4))
        }

    report = made_report(variant(side(2.0), "trainer=TRL"), variant(side(1.5), "trainer=pvg"))
    assert "`rollout_s` 0.9 against 1.2, `train_s` 0.6 against 0.8." in target_lines({"peers-grpo.json": report})[-1]


def test_figures_without_a_ratio_are_medians_with_their_range() -> None:
    telemetry = made_report(variant({"overhead": lower([0.002, 0.004, 0.02], "1")}))
    lag = made_report(variant({"lag_p99_ms": lower([60.0, 61.0, 40.0], "ms")}))
    lines = target_lines({"telemetry.json": telemetry, "loop.json": lag})
    assert "| < 1 % | 0.4 % (0.2 – 2) | reached |" in row_of(lines, "telemetry overhead")
    assert "| < 50 ms | 60 ms (40 – 61) | **not reached** |" in row_of(lines, "event-loop lag p99 in the loop profile")


def test_the_least_idle_pipeline_stands_beside_the_synchronous_one() -> None:
    report = made_report(
        *(
            variant({"trainer_idle": lower(around(idle), "1")}, f"rollout.prefetch.batches={ahead}")
            for ahead, idle in ((0, 0.5), (1, 0.1), (2, 0.15))
        ),
        config={"profile": PROFILE | {"headline": "trainer_idle"}, "experiment": {}},
    )
    row = row_of(
        target_lines({"pipeline.json": report}),
        "trainer's idle share (1 - useful work / wall time) with prefetch, compared with the synchronous share",
    )
    assert "| 10 % (9.8 – 10.2), `rollout.prefetch.batches=1`; synchronous 50 % (49 – 51) | reached |" in row


def stragglers_report(deadline: float, partial: float) -> BenchReport:
    """Wait-for-all, a deadline, spo with partial rollouts, and one more that no target is about."""
    continued = "0.2, loss spo, cut rollouts continue"
    sides = (("none", 1.0, 1.0, 0.0), ("0.25", deadline, 0.6, 0.0), (continued, partial, 0.88, 1.5))
    return made_report(
        *(
            variant(
                {"rollouts_per_s": higher(around(100 * faster)), "tokens_per_s": higher(around(5000 * faster * kept))},
                f"rollout.deadline={label}",
                derived={"length_kept": kept, "staleness": stale},
            ).model_copy(update={"budget": TimeBudget(wall_s=1.0, steps=5, exposed={f"part_{label}": 1.0}, busy={})})
            for label, faster, kept, stale in (*sides, ("9", 9.0, 0.1, 0.0))
        )
    )


def test_what_a_deadline_pays_for_its_speed_with_is_told_beside_it_and_where_it_is_reached() -> None:
    """The row would otherwise compare batches of long answers with batches of short ones."""
    lines = target_lines({"stragglers.json": stragglers_report(3.0, 2.5)})
    row = row_of(lines, "rollouts/s with a deadline against wait-for-all, heavy-tailed latency")
    assert "| 3.00x (" in row
    assert ", `rollout.deadline=0.25`; the kept rollouts have 60 % of the mean length of all; tokens/s: 1.80x (" in row
    assert ") | reached |" in row
    row = row_of(lines, "rollouts/s with spo against wait-for-all, heavy-tailed latency")
    assert "| 2.50x (" in row
    assert ", `rollout.deadline=0.2`, loss spo, cut rollouts continue; the kept rollouts have 88 % of the mean" in row
    assert "; tokens/s: 2.20x (" in row
    silent = [side.model_copy(update={"derived": {}}) for side in stragglers_report(3.0, 2.5).variants]
    with pytest.raises(UsageError, match="length_kept"):
        target_lines({"stragglers.json": made_report(*silent)})


def test_a_missed_target_tells_the_time_and_the_figures_of_the_variant_that_it_is_about() -> None:
    """Which is not the last of its report."""
    lines = target_lines({"stragglers.json": stragglers_report(1.2, 1.5)})
    told = [line for line in lines if line.startswith("- Not reached")]
    assert [line.partition("time by part: ")[2] for line in told] == [
        "part 0.25 100 %.",
        "part 0.2, loss spo, cut rollouts continue 100 %.",
    ]
    target = next(target for target in TARGETS if target.file == "stragglers.json")
    about = replace(target, beside=("length_kept",))
    report = stragglers_report(1.2, 1.5)
    assert beside_it(about, report, about.read(report)).startswith(
        " pvg against the other: `length_kept` 0.6 against 1."
    )
    idle = made_report(
        *(variant({"trainer_idle": lower(around(idle), "1")}, f"k={n}") for n, idle in enumerate((0.5, 0.3, 0.4))),
        config={"profile": PROFILE | {"headline": "trainer_idle"}, "experiment": {}},
    )
    assert idle_share(idle).place == 1


def test_a_share_that_a_report_derives_is_told_with_its_parts_and_an_older_report_has_none() -> None:
    what = "least arithmetic of the same step at the machine's matmul rate, as a share of pvg's step"

    def line(derived: dict[str, float]) -> str:
        measures = {name: lower([1.0]) for name in ("step_s", "rollout_s", "train_s")}
        sides = [variant(measures, f"trainer={name}", derived) for name in ("TRL", "pvg")]
        return row_of(
            target_lines(
                {
                    "peers-grpo.json": made_report(
                        *sides, config={"profile": PROFILE | {"headline": "step_s"}, "experiment": {}}
                    )
                }
            ),
            what,
        )

    found = line({"gflop": 110.0, "matmul_gflops": 130.0, "arithmetic_share": 0.66})
    assert "| 66 % (110 GFLOP at 130 GFLOP/s) | reached |" in found
    assert "| not measured |" in line({})
    sides = [
        variant(
            {"step_s": lower([1.0]), "step_1_s": lower([1.0]), "step_2_s": lower([1.0]), "kept_1": higher([0.9])}, name
        )
        for name in ("threads=cores", "threads=default", "cluster.kind=local")
    ]
    sides[2] = sides[2].model_copy(update={"derived": {"exchange_share": 0.031, "workers": 2.0}})
    lines = target_lines({"contention.json": made_report(*sides, config={"profile": PROFILE, "experiment": {}})})
    (exchange,) = [line for line in lines if line.startswith("| exchange with a worker")]
    assert "| 3.1 % (2 workers) | reached |" in exchange


def test_a_report_that_lacks_the_measure_is_refused() -> None:
    with pytest.raises(UsageError, match="no peak_memory_mb_500k"):
        target_lines({"data.json": made_report(variant({"first_batch_s_5k": lower([1.0])}))})
    with pytest.raises(UsageError, match="no variant 'rollout"):
        target_lines(
            {"stragglers.json": made_report(*(variant({"rollouts_per_s": higher([1.0])}, f"k={n}") for n in "ab"))}
        )


# --- growth ----------------------------------------------------------------------------------------------------------


def scaling_report(decode: float) -> BenchReport:
    """Ten milliseconds and work of 1 GFLOP a rollout; the time of decoding grows with the given power."""

    def one(rollouts: int) -> Any:
        decode_s = 1e-4 * rollouts**decode
        return variant(
            {
                "step_s": lower(around(0.01 * rollouts + decode_s)),
                "decode_s": lower(around(decode_s)),
                "sync_s": lower([0.0] * 5),
                "rest_s": lower(around(0.01 * rollouts)),
                "peak_memory_mb": lower([500.0] * 5, "MB"),
            },
            f"rollouts={rollouts}",
            derived={
                "rollouts": rollouts,
                "tokens": 48.0 * rollouts,
                "flops": 1e9 * rollouts,
                "work_decode": 1e9 * rollouts,
                "work_sync": 5e5,
                "work_rest": 37.0 * rollouts,
            },
        )

    return made_report(
        *map(one, (64, 128, 256, 512, 1024)),
        profile="scaling",
        config={"profile": PROFILE | {"workload": {"axis": "rollouts"}, "headline": "step_s"}, "experiment": {}},
    )


def test_what_grows_with_its_work_is_said_to() -> None:
    lines = list(scaling_lines(scaling_report(1.0)))
    assert lines[-1] == (
        "No part grows significantly faster than its work. By chance, 0.1 of 3 intervals are above the true value."
    )
    assert "fitted from 256 to 1,024" in "\n".join(lines)
    assert "| 1,024 | 10.34 | 0.102 | 0 | 10.24 | 49,152 | 1,024 | 500 |" in lines
    (decode,) = [line for line in lines if line.startswith("| decode ")]
    assert decode.startswith("| decode | 1 % | 1.00 (0.9")
    assert "| 1.00 (operations) | " in decode
    (slower,) = [line for line in scaling_lines(scaling_report(0.5)) if line.startswith("| decode ")]
    assert slower.endswith("| 1.00 (operations) | no faster |")
    (unsure,) = [line for line in scaling_lines(scaling_report(1.005)) if line.startswith("| decode ")]
    assert unsure.endswith("| 1.00 (operations) | within the noise |")
    assert not [line for line in lines if line.startswith("| sync ")]  # takes no time: it has no exponent


def test_what_grows_faster_than_its_work_is_named() -> None:
    report = scaling_report(2.0)
    assert list(scaling_lines(report))[-1].startswith("These parts grow faster than their work: whole step (by 0.8")
    by_part = {growth.part: growth for growth in growths(report)}
    assert by_part["decode"].faster
    assert by_part["decode"].time.value == pytest.approx(2.0)
    assert not by_part["rest"].faster


def test_decoding_may_grow_as_what_it_reads_does() -> None:
    """Where that grows more than its operations do. The whole step then may too, as far as decoding is part of it."""
    report = scaling_report(2.0)
    reading = [
        variant.model_copy(update={"derived": {**variant.derived, "reads_decode": variant.derived["rollouts"] ** 2}})
        for variant in report.variants
    ]
    whole, decode, _ = growths(report.model_copy(update={"variants": tuple(reading)}))
    assert decode.work == pytest.approx({"operations": 1.0, "numbers read": 2.0})
    assert not decode.faster
    assert whole.work["its parts'"] == pytest.approx(whole.time.value)
    assert not whole.faster


# --- the README ------------------------------------------------------------------------------------------------------


def test_the_ladder_names_the_rungs_that_cannot_be_told_apart_from_1() -> None:
    nothing, slower = ladder_report(1.0, 1.0), ladder_report(1.0, 2.0)
    told = "No significant difference in this report (1 of 1): `rollout.engine.max_rows=256`.\n"
    for text in (page_of(nothing), with_ladder(f"{BEGIN}{END}", nothing)):
        assert f"Intervals are at 95 %. {told}" in text
        assert "**" not in text.partition("| all slow |")[2].partition("Intervals")[0]
    for text in (page_of(slower), with_ladder(f"{BEGIN}{END}", slower)):
        assert "Slower than the row above: `rollout.engine.max_rows=256`.\n" in text
        assert "No significant difference" not in text


def test_a_report_of_uncommitted_changes_is_marked_on_the_page_and_in_the_readme() -> None:
    clean = ladder_report(4.0, 1.0)
    environment = clean.environment.model_copy(update={"git_dirty": True})
    dirty = clean.model_copy(update={"environment": environment})
    mark = f"**Measured with uncommitted changes: no commit gives these figures. Repeat `{clean.command}`.**"
    for make in (page_of, lambda report: with_ladder(f"{BEGIN}{END}", report)):
        assert mark in make(dirty)
        assert mark not in make(clean)


def page_of(report: BenchReport) -> str:
    return "\n".join(report_lines(report, None))


def test_the_ladder_stands_between_its_marks_and_nothing_else_changes() -> None:
    readme = f"# pvg\n\n{BEGIN}\nold\n{END}\n\nmore\n"
    text = with_ladder(readme, ladder_report(4.0, 1.0))
    header = "| switch | what it does | step, s | against the row above | against all slow |\n"
    assert text.startswith(f"# pvg\n\n{BEGIN}\n\n{header}")
    assert "| all slow |  | 4 |  |  |\n" in text
    gain = r"\([34].*–4.*\)"
    assert re.search(
        rf"\| `rollout.engine.max_rows=256` \| decoded together \| 1 \| \*\*4.00x\*\* {gain} \| 4.00x {gain} \|\n", text
    )
    assert "Intervals are at 95 %. In bold: a gain whose interval excludes 1.\n" in text
    assert text.endswith(f"{END}\n\nmore\n")
    assert with_ladder(text, ladder_report(4.0, 1.0)) == text
    with pytest.raises(UsageError, match="end of the ladder"):
        with_ladder(f"# pvg\n{BEGIN}\n", ladder_report(4.0, 1.0))
