"""docs/benchmarks.md is what the committed reports give."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from made_reports import PROFILE, failed_report, higher, lower, made_report, saved, variant

from benchmarks.make_page import BEGIN, END, main, removed

ROOT = Path(__file__).parents[2]
LADDER = {
    **PROFILE,
    "ladder": [{"switch": "rollout.engine.max_rows", "slow": 8, "fast": 256, "says": "decoded together"}],
}


def made(reports: Path, *arguments: str) -> tuple[int, str, str]:
    """(exit code, the page, stderr) of the script, for the reports of a folder."""
    page, told = reports / "page.md", io.StringIO()
    if not page.exists():
        page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nmore\n", encoding="utf-8")
    with contextlib.redirect_stderr(told):
        code = main(["--reports", str(reports), "--page", str(page), *arguments])
    return code, page.read_text(encoding="utf-8"), told.getvalue()


@pytest.mark.slow
def test_the_page_in_the_repository_is_what_the_reports_give() -> None:
    assert main(["--check"]) == 0


def write_three(folder: Path) -> None:
    fast, slow = [100.0, 101.0, 99.0, 100.5, 99.5], [50.0, 50.5, 49.5, 50.25, 49.75]
    ran = variant(
        {"wall_s": lower([0.5, 0.4, 0.6]), "tokens_per_s": higher([90.0, 100.0, 110.0])}, derived={"share": 0.25}
    )
    saved(made_report(ran), folder / "z.json")
    ladder = made_report(
        variant({"tokens_per_s": higher(slow)}, "all slow"),
        variant({"tokens_per_s": higher(fast)}, "rollout.engine.max_rows=256"),
        kind="ablation",
        config={"profile": LADDER, "experiment": {}, "interleave": True},
        command="pvg bench --profile rollout --ablate",
    )
    saved(ladder, folder / "a.json")
    rows = ((8, slow), (256, fast))
    swept = made_report(
        *(
            variant({"tokens_per_s": higher(values), "wall_s": lower(values)}, f"rollout.engine.max_rows={count}")
            for count, values in rows
        )
    )
    saved(swept, folder / "s.json")
    went = made_report(variant({"tokens_per_s": higher(slow)}, "serving.share_prefix=false"), kind="sweep")
    saved(went, folder / "w.json")


def test_measures_ladder_and_sweep(tmp_path: Path) -> None:
    write_three(tmp_path)
    code, page, _ = made(tmp_path)
    assert code == 0
    assert page.startswith(f"# Title\n\n{BEGIN}\n")
    assert page.endswith(f"{END}\n\nmore\n")
    order = ("| tokens_per_s | 100 | 90–110 |", "| switch | tokens_per_s ↑ |", "| rollout.engine.max_rows |")
    assert sorted(order, key=page.index) == list(order)
    assert "Time by part: decode 100 %." in page
    assert "| `rollout.engine.max_rows=256`: decoded together | 100 | **2.00x** (2.000–2.000) | 2.00x" in page
    assert "`pvg bench --profile rollout` ([report](benchmarks/z.json)): 1 + 3 samples, 2026-11-21, 01234567" in page
    assert "- Machine 1: A CPU, 2 cores, 8 GB of memory; Python 3.11.7, torch 2.13.0" in page
    assert "share_prefix" not in page
    assert re.search(r"^\| 256 \| 100 \| 2\.00x \(1\.9.*\|$", page, re.MULTILINE)


def test_check_fails_when_the_page_is_another_one(tmp_path: Path) -> None:
    write_three(tmp_path)
    made(tmp_path)
    assert made(tmp_path, "--check")[0] == 0
    page = tmp_path / "page.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| 100 | 90–", "| 101 | 90–"), encoding="utf-8")
    code, text, err = made(tmp_path, "--check")
    assert code == 1
    assert "| 101 | 90–" in text  # it writes nothing
    assert "-| tokens_per_s | 101 | 90" in err


@pytest.mark.parametrize("broken", ["failed report", "no mark"])
def test_failed_and_broken_reports_make_no_page(tmp_path: Path, broken: str) -> None:
    if broken == "failed report":
        saved(failed_report(), tmp_path / "a.json")
    else:
        (tmp_path / "page.md").write_text(BEGIN)
    before = made(tmp_path, "--check")[1]
    code, page, _ = made(tmp_path)
    assert (code, page) == (2, before)


def test_every_command_that_a_profile_names_can_be_planned() -> None:
    """Those that need no server or run, up to their first sample."""
    commands = [
        command
        for path in sorted((ROOT / "profiles").glob("*.toml"))
        for command in re.findall(r"^#   (pvg bench --profile .*?)(?:  .*)?$", path.read_text(), re.MULTILINE)
        if "--serve" not in command
    ]
    assert len(commands) > 10
    assert [command for command in commands if removed(command)] == []


def test_what_pvg_no_longer_takes_is_marked() -> None:
    assert removed("pvg bench --profile cluster --ablate") == " (removed)"
    assert removed("pvg bench --profile rollout --serve --sweep serving.share_prefix=false,true") == " (removed)"
    assert removed("pvg bench --profile trainer", "training.fused_layers=true") == " (removed)"
    assert removed("pvg bench --profile trainer --ablate --beside 1", "training.shared_prompts=true") == ""
