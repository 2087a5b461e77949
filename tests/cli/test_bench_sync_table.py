"""The tables of a `sync` benchmark on servers: its derived figures, by client, on the terminal and on the page."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from bench_runs import load_profile
from made_reports import higher, lower, made_report, variant
from rich.console import Console

from pvg.bench.report import BenchReport, Variant
from pvg.bench.workloads.sync import PARTS
from pvg_cli.bench_tables import has_updates, report_text, updates_note, updates_table

WORK = {"streams": 150, "updates": {"idle": 20, "loaded": 20}}


def client(label: str, queue_ms: float, updates: int = 100) -> Variant:
    """A variant whose figures can be told apart: wall is 1000 + queue, rpc 1000; p95 twice and p99 three times p50."""
    middle = {"wall": 1000 + queue_ms, "rpc": 1000.0, "queue": queue_ms}
    middle |= {part: 10.0 + place for place, part in enumerate(PARTS)}
    derived = {
        f"{name}_p{percentile}_ms": times * value
        for name, value in middle.items()
        for times, percentile in ((1, 50), (2, 95), (3, 99))
    }
    measured = {
        "loaded_queue_p95_ms": lower([queue_ms, queue_ms + 1], "ms"),
        "wall_s": lower([1.0, 2.0]),
        "tokens_per_s_before": higher([6000.0, 6000.0]),
        "tokens_per_s_during": higher([4000.0, 5000.0]),
        "tokens_per_s_stepped": higher([5990.0, 5990.0]),
        "tokens_per_s_after": higher([6100.0, 6100.0]),
    }
    return variant(measured, label, derived | {"updates": float(updates), "updates_per_s": 2.5})


def report(*clients: Variant, **changes: Any) -> BenchReport:
    plain = load_profile("sync-vllm").plain()
    return made_report(*clients, **({"profile": "sync", "name": "sync-vllm", "config": plain, "work": WORK} | changes))


def test_each_client_has_its_row_and_each_figure_its_place() -> None:
    made = report(client("weights.client=shared", 900.0), client("weights.client=dedicated", 12.0))
    assert has_updates(made)
    heads, _, shared, dedicated = updates_table(made).to_markdown().splitlines()
    columns = [cell.strip() for cell in heads.strip("|").split("|")]
    row = dict(zip(columns, (cell.strip() for cell in dedicated.strip("|").split("|")), strict=True))
    assert (row["client"], row["queue p50"], row["queue p95"], row["queue p99"]) == ("dedicated", "12", "24", "36")
    assert (row["wall p95"], row["rpc p95"]) == ("2,024", "2,000")
    assert "4,500" in shared
    assert "2.5" in shared
    assert updates_note(made) == "Times in ms, of 100 updates per client, under 150 streams."


def test_one_client_alone_is_named_by_its_setting() -> None:
    made = report(client("", 12.0), kind="bench")
    assert "dedicated" in updates_table(made).to_markdown()
    console = Console(file=io.StringIO(), width=120)
    console.print(report_text(made, Path("r.json"), {}))
    assert "dedicated" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_report_of_the_torch_engine_has_no_such_table() -> None:
    torch = made_report(variant({"loaded_wall_p95_ms": lower([1.0, 2.0], "ms")}), profile="sync", kind="bench")
    assert not has_updates(torch)
