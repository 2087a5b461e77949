"""Small benchmark reports for the tests of their page."""

from __future__ import annotations

from typing import Any

from pvg.bench.report import BenchReport, MachineInfo, Samples, TimeBudget, Variant

HERE = MachineInfo(
    python="3.11.0", platform="Linux", pvg="0.1.0", git_commit="abcdef0123456789", git_dirty=True, torch="2.13.0",
    transformers="5.0", vllm=None, cpu="a processor", cores=2, threads=2, memory_gb=16.0, gpu=None, driver=None,
    event_loop="uvloop",
)  # fmt: skip
LADDER = [{"switch": "rollout.engine.max_rows", "slow": 8, "fast": 256, "says": "groups decoded together"}]


def variant(label: str, rates: tuple[float, ...], **changes: Any) -> Variant:
    walls = tuple(100 / rate for rate in rates)
    return Variant(
        label=label,
        status="ok",
        samples={
            "tokens_per_s": Samples(unit="tokens/s", better="higher", values=rates),
            "wall_s": Samples(unit="s", better="lower", values=walls),
        },
        budget=TimeBudget(
            wall_s=sum(walls),
            steps=len(walls),
            exposed={"decode": sum(walls) * 0.75, "unaccounted": sum(walls) * 0.25},
            busy={"decode": sum(walls), "unaccounted": sum(walls) * 0.25},
        ),
        derived={"matmul_share": 0.25},
        **changes,
    )


def bench_report(*variants: Variant, **changes: Any) -> BenchReport:
    failed = next((found.reason for found in variants if found.status == "failed"), "")
    fields: dict[str, Any] = {
        "kind": "bench",
        "profile": "rollout",
        "name": "rollout",
        "status": "failed" if failed else "ok",
        "reason": failed,
        "created": "2026-11-21T10:00:00Z",
        "command": "pvg bench --profile rollout",
        "config": {"profile": {"headline": "tokens_per_s", "ladder": LADDER}, "experiment": {"seed": 1}},
        "work": {"rollouts": 256},
        "environment": HERE,
        "warmup": 1,
        "repeats": 5,
        "variants": variants,
    }
    return BenchReport(**{**fields, **changes})


def one(rates: tuple[float, ...] = (100.0, 110.0, 90.0, 105.0, 95.0), **changes: Any) -> BenchReport:
    return bench_report(variant("", rates), **changes)


def ladder() -> BenchReport:
    return bench_report(
        variant("all slow", (10.0, 11.0, 9.0, 10.5, 9.5)),
        variant("rollout.engine.max_rows=256", (40.0, 44.0, 36.0, 42.0, 38.0)),
        kind="ablation",
    )
