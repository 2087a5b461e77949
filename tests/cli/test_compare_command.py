"""`pvg compare` as a user calls it: tables, JSON, Markdown, thresholds, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from calling import pvg
from made_reports import ENVIRONMENT, PROFILE, higher, lower, made_report, saved, variant

from pvg.bench.report import read_report
from pvg.errors import UsageError
from pvg_cli.options import parse_share

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


def test_the_table_says_what_got_worse_first_and_in_words(
    reports: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    called = pvg("compare", *reports)
    assert called.code == 0
    texts = ("2 worse, 1 better, 2 no difference seen", "wall_s", "tokens_per_s", "bytes_copied", "latency_p99")
    places = [called.out.index(text) for text in texts]
    assert places == sorted(places)
    shown = " ".join(called.out.split())
    for text in ("1.200", "torch 2.13.0 2.14.0", "rollout.engine.max_rows 256 64"):
        assert text in shown
    assert "The environments differ, so the code need not be the reason" in called.out


@pytest.mark.parametrize("options", [(), ("--markdown",)])
def test_texts_of_a_report_are_shown_without_markup_and_control_characters(options: tuple[str, ...]) -> None:
    metrics = {"[/x]\x1b[31m": lower(BASE), ":cat:\u202e": lower(BASE)}
    a = saved(made_report(variant(metrics), name="n\x1b]0;t"), Path("a.json"))
    called = pvg("compare", a, a, *options)
    assert called.code == 0
    assert called.out.replace("\n", "").isprintable()
    for shown in ("[/x]", ":cat:", "n\\x1b]0;t"):
        assert shown in called.out


def test_the_threshold_decides_the_exit_code(reports: tuple[str, str]) -> None:
    called = pvg("compare", *reports, "--fail-above", "5%")
    assert called.code == 1
    assert "Worse by more than 5 %, with the whole interval: wall_s, tokens_per_s." in called.err
    assert pvg("compare", *reports, "--fail-above", "0.3").code == 0
    assert pvg("compare", *reversed(reports), "--fail-above", "0%").code == 1  # bytes_copied is worse there
    called = pvg("compare", *reports, "--fail-above", "0.05", "--json")
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
        assert "| worse | wall_s | 1.002 | 1.203 | s | 1.200 |" in called.out
        assert called.out.count("\n| ") == 7 + 3 + 4  # the metrics, the environment and the settings, with their heads
    called = pvg("compare", *reports, "--markdown", "out.md", "--json")
    assert called.document["name"] == "rollout"
    assert Path("out.md").read_text().startswith("# pvg compare: rollout")
    called = pvg("compare", reports[0], reports[1], "--markdown", "./b.json")
    assert called.code == 2
    assert read_report(Path("b.json"))
    assert pvg("compare", *reports, "--markdown", "none/such.md").code == 2
    assert pvg("compare", *reports, "--markdown", "--json").code == 2


def test_what_is_no_report(reports: tuple[str, str]) -> None:
    (Path("runs") / "first").mkdir(parents=True)
    (Path("runs") / "first" / "experiment.toml").touch()
    Path("new.json").write_text('{"schema_version": 2}')
    for wrong, said in {
        "runs/first": "Give two runs, or two reports",
        "first": "Give two runs, or two reports",
        "runs": "runs is a folder, not a benchmark report",
        "new.json": "schema version 2",
        "none.json": "No such file",
    }.items():
        called = pvg("compare", reports[0], wrong)
        assert (called.code, called.out) == (2, "")
        assert said in called.err


def test_shares() -> None:
    assert parse_share("5%") == parse_share("5 %") == parse_share(" 0.05 ") == 0.05
    assert parse_share("0") == 0
    assert parse_share("150%") == 1.5
    for wrong in ("5", "-0.1", "many", "%", "nan", "inf%", "1e9%"):
        with pytest.raises(UsageError, match="not a share"):
            parse_share(wrong)
