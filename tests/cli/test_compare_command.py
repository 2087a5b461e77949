"""`pvg compare` as a user calls it: tables, JSON, Markdown, thresholds, and what it refuses."""

from __future__ import annotations

import io
import resource
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from calling import pvg, pvg_process
from made_reports import ENVIRONMENT, PROFILE, failed_report, higher, lower, made_report, saved, variant

from pvg.bench.compare import compare_reports
from pvg.bench.report import read_report
from pvg.errors import UsageError
from pvg_cli.compare import parse_share
from pvg_cli.compare_table import comparison_text

BASE = [1.00, 1.01, 0.99, 1.02, 0.98, 1.005, 0.995, 1.015]


@pytest.fixture
def reports() -> tuple[str, str]:
    """B takes 1.2 times as long as A, on another torch and with another setting; another metric is better."""

    def side(factor: float) -> dict[str, object]:
        return {
            "wall_s": lower([factor * value for value in BASE]),
            "tokens_per_s": higher([9000 / factor / value for value in BASE]),
            "bytes_copied": lower([2e6 / factor] * 8, "B"),
            "padding": lower([0.0] * 8, "1"),
            "latency_p99": lower(BASE),
        }

    a = made_report(variant(side(1.0)))  # type: ignore[arg-type]
    b = made_report(
        variant(side(1.2)),  # type: ignore[arg-type]
        environment=ENVIRONMENT.model_copy(update={"torch": "2.14.0", "git_commit": "fedcba9876543210"}),
        config={"profile": PROFILE, "experiment": {"rollout": {"engine": {"max_rows": 64}}}},
    )
    return saved(a, Path("a.json")), saved(b, Path("b.json"))


def test_the_table_says_what_got_worse_first_and_in_words(reports: tuple[str, str]) -> None:
    called = pvg("compare", *reports)
    assert called.code == 0
    places = [
        called.out.index(text)
        for text in (
            "Worse in B (2)",
            "wall_s",
            "Better in B (1)",
            "bytes_copied",
            "No difference seen (2)",
            "latency_p99",
        )
    ]
    assert places == sorted(places)
    assert "1.200" in called.out
    assert "torch" in called.out
    assert "2.13.0 -> 2.14.0" in called.out
    assert "rollout.engine.max_rows" in called.out
    assert "256 -> 64" in called.out
    assert "The environments differ, so the code need not be the reason" in called.out


def test_the_threshold_decides_the_exit_code(reports: tuple[str, str]) -> None:
    called = pvg("compare", *reports, "--fail-above", "5%")
    assert called.code == 1
    assert "Worse in B, > 5 % (2)" in called.out
    assert "Worse by more than 5 %, with the whole interval: wall_s, tokens_per_s." in called.err
    assert pvg("compare", *reports, "--fail-above", "0.3").code == 0
    assert pvg("compare", *reversed(reports), "--fail-above", "0%").code == 1  # bytes_copied is worse there


def test_json_is_one_document_also_when_it_fails(reports: tuple[str, str]) -> None:
    called = pvg_process("compare", *reports, "--fail-above", "0.05", "--json")
    assert called.code == 1
    document = called.document
    assert document["failed"] is True
    assert [metric["name"] for metric in document["metrics"] if metric["beyond"]] == ["wall_s", "tokens_per_s"]
    assert document["environment"][-1] == {"key": "torch", "a": "2.13.0", "b": "2.14.0"}
    assert document["counts"]["no difference seen"] == 2
    assert document["a"]["path"] == "a.json"


def test_markdown_to_stdout_and_into_a_file(reports: tuple[str, str]) -> None:
    for arguments in ((*reports, "--markdown"), ("--markdown", "--debug", *reports)):
        called = pvg("compare", *arguments)
        assert called.code == 0, called.err
        assert called.out.startswith("# pvg compare: rollout")
        assert "| **worse** | wall_s | 1.002 | 1.203 | s | 1.200 |" in called.out
        assert called.out.count("\n| ") == 7 + 3 + 4  # the metrics, the environment and the settings, with their heads
    called = pvg("compare", *reports, "--markdown", "out.md", "--json")
    assert called.document["name"] == "rollout"
    assert Path("out.md").read_text().startswith("# pvg compare: rollout")
    for rows in Path("out.md").read_text().split("\n\n"):
        if rows.startswith("|"):
            assert len({line.count("|") for line in rows.splitlines()}) == 1


def test_markdown_never_overwrites_a_report(reports: tuple[str, str]) -> None:
    called = pvg("compare", reports[0], reports[1], "--markdown", "./b.json")
    assert called.code == 2
    assert read_report(Path("b.json"))
    assert pvg("compare", *reports, "--markdown", "none/such.md").code == 2
    assert pvg("compare", *reports, "--markdown", "--json").code == 2


def test_markdown_that_does_not_fit_leaves_what_was_there(reports: tuple[str, str]) -> None:
    Path("out.md").write_text("before")
    called = pvg_process(
        "compare",
        *reports,
        "--markdown",
        "out.md",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)),
    )
    assert called.code == 3
    assert called.err.startswith("error: The file size limit") or "out.md" in called.err
    assert "Give another file." in called.err
    assert Path("out.md").read_text() == "before"


def test_peak_memory_is_shown_without_a_verdict(tmp_path: Path) -> None:
    paths = []
    for name, most in (("a", 2.0**30), ("b", 3 * 2.0**30)):
        peaks = {"rss_bytes": most, "worker_rss_bytes": most / 4, "workers_rss_bytes": most / 2}
        report = made_report(variant({"wall_s": lower(BASE)}), peak_memory=peaks)
        paths.append(saved(report, tmp_path / f"{name}.json"))
    comparison = compare_reports(*map(read_report, map(Path, paths)), fail_above=0.05)
    assert comparison.plain()["peak_memory"]["rss_bytes"] == (2.0**30, 3 * 2.0**30)
    assert comparison.plain()["peak_memory"]["workers_rss_bytes"] == (2.0**29, 3 * 2.0**29)
    assert comparison.failing == ()
    result = pvg("compare", *map(str, paths), "--fail-above", "5%")
    assert result.code == 0
    words = " ".join(result.out.split())
    assert "peak resident memory of the main process over the whole call: 1 GiB in A, 3 GiB in B" in words
    assert "sum of the workers' peaks (an upper bound) over the whole call: 512 MiB in A, 1.5 GiB in B" in words


def test_the_same_file_twice(reports: tuple[str, str]) -> None:
    called = pvg("compare", reports[0], reports[0], "--fail-above", "0%")
    assert called.code == 0
    assert "A and B are the same report" in called.out
    assert "0 worse" in called.out
    assert "may still differ" not in called.out


def test_a_sweep_names_its_variants_by_value() -> None:
    for name, slow in (("a", 1.0), ("b", 2.0)):
        variants = [
            variant(
                {"wall_s": lower([value * (slow if rows == 8 else 1) for value in BASE])},
                f"rollout.engine.max_rows={rows}",
            )
            for rows in (8, 64)
        ]
        saved(made_report(*variants), Path(f"{name}.json"))
    called = pvg("compare", "a.json", "b.json", "--fail-above", "5%")
    assert called.out.index("wall_s @8") < called.out.index("No difference seen") < called.out.index("wall_s @64")
    assert "@: the value of rollout.engine.max_rows" in called.out
    assert "wall_s rollout.engine.max_rows=8." in called.err


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_keeps_its_columns_at_every_width(reports: tuple[str, str], width: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None)
    console.print(comparison_text(compare_reports(*(read_report(Path(path)) for path in reports), fail_above=0.05)))
    lines = stream.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    rows = [line for line in lines if "1.200" in line or "0.833" in line]
    assert len(rows) == 3
    assert len({line.index("1.200" if "1.200" in line else "0.833") for line in rows}) == 1
    assert any(line.startswith("✗ Worse in B") for line in lines)


def test_a_long_name_is_folded_and_not_cut() -> None:
    name = "a_metric_with_a_name_that_is_really_much_too_long_for_any_table"
    report = made_report(variant({name: lower([1e6 * value for value in BASE], "steps/hour")}))
    stream = io.StringIO()
    Console(file=stream, width=80, color_system=None).print(comparison_text(compare_reports(report, report)))
    folded = [line.split("  1,0")[0].strip() for line in stream.getvalue().splitlines()]
    assert name in "".join(folded)


def test_what_is_no_report(reports: tuple[str, str]) -> None:
    (Path("runs") / "first").mkdir(parents=True)
    (Path("runs") / "first" / "experiment.toml").touch()
    Path("new.json").write_text('{"schema_version": 2}')
    Path("list.json").write_text("[1]")
    Path("torn.json").write_text(Path("a.json").read_text()[:-20])
    for wrong, said in {
        "runs/first": "To see the run: pvg report runs/first",
        "first": "To see the run: pvg report first",
        "runs": "runs is a folder, not a benchmark report",
        "new.json": "schema version 2",
        "list.json": "not a benchmark report",
        "torn.json": "is not JSON",
        "none.json": "No such file",
    }.items():
        for pair in ((wrong, reports[0]), (reports[0], wrong)):
            called = pvg("compare", *pair)
            assert called.code == 2
            assert said in called.err
            assert not called.out


def test_refusals_are_exit_code_two_and_json(reports: tuple[str, str]) -> None:
    saved(failed_report(), Path("failed.json"))
    called = pvg("compare", reports[0], "failed.json", "--json")
    assert called.code == 2
    assert called.document["error"]["message"] == "The benchmark of failed.json failed: No model of that name."
    other = read_report(Path("a.json")).model_copy(update={"work": {"rollouts": 1}})
    saved(other, Path("other.json"))
    assert "rollouts is 256 in A and 1 in B" in pvg("compare", reports[0], "other.json").err
    assert pvg("compare", reports[0]).code == 2


def test_shares() -> None:
    assert parse_share("5%") == parse_share("5 %") == parse_share(" 0.05 ") == 0.05
    assert parse_share("0") == 0
    assert parse_share("150%") == 1.5
    for wrong in ("5", "-1%", "-0.1", "many", "%", "", "nan", "inf", "inf%", "1e9%"):
        with pytest.raises(UsageError, match="not a share"):
            parse_share(wrong)
