"""The page of benchmark reports: samples as dots, what each switch bought, budgets, environments."""

from __future__ import annotations

from pathlib import Path

from bench_samples import HERE, bench_report, ladder, one, variant
from page_checks import Page, check

from pvg.bench.report import BenchReport, Variant
from pvg.reporting.bench_page import bench_page, names_of

NASTY = "</pre><script>alert(1)</script>"


def page_of(*reports: BenchReport) -> Page:
    return check(bench_page([Path(f"r{place}.json") for place in range(len(reports))], reports))


def test_every_sample_is_a_dot_and_the_median_is_told() -> None:
    page = page_of(one())
    dots = [a for _, a in page.tags if "mark dot" in str(a.get("class"))]
    assert len(dots) == 10  # five samples of two measures
    assert "tokens per s tokens/s, higher is better" in page.text
    assert "rollout 100 90 110 median" in page.text
    assert "git commit abcdef0123456789" in page.text


def test_a_ladder_tells_what_each_switch_bought() -> None:
    page = page_of(ladder())
    assert "gain of each variant" in page.text
    assert "4×" in page.text
    assert "groups decoded together" in page.text
    assert any("4 times as good, 3.39 to 4.72" in str(a.get("title")) for _, a in page.tags)


def test_hidden_work_has_its_columns() -> None:
    page = page_of(one((100.0,) * 5))
    # Per sample: 1 s, of which decode is exposed for 0.75 s and busy for 1 s.
    assert "decode 750 ms 75.0 % 1.0 s 250 ms" in page.text


def test_two_reports_are_drawn_together_and_their_environments_compared() -> None:
    elsewhere = HERE.model_copy(update={"cpu": "another processor"})
    page = page_of(one(), one((50.0, 51.0, 52.0, 53.0, 54.0), environment=elsewhere))
    assert "Coloured where the reports differ" in page.text
    assert "a processor another processor" in page.text
    assert "r0 100 r1 52" in page.text


def test_a_failed_report_says_why_and_a_foreign_one_does_not_break_the_page() -> None:
    failed = Variant(label="rollout.engine.max_rows=0", status="failed", reason=f"no rows {NASTY}")
    page = page_of(bench_report(failed, variant("rollout.engine.max_rows=8", (1.0,) * 5), kind="sweep"))
    assert "no rows </pre>" in page.text
    page_of(ladder().model_copy(update={"config": {}}))


def test_names_tell_reports_apart() -> None:
    assert names_of([Path("a.json")], [one()]) == ["rollout"]
    assert names_of([Path("x/a.json"), Path("x/b.json")], [one(), one()]) == ["a", "b"]
    assert names_of([Path("x/a.json"), Path("y/a.json")], [one(), one()]) == ["x/a.json", "y/a.json"]


def test_what_stands_in_a_report_is_text() -> None:
    page = page_of(one(command=NASTY, work={NASTY: NASTY}, name=NASTY))
    assert "alert(1)" in page.text
    assert "alert(1)" not in page.scripts[0]
