"""`pvg report` as a user calls it: where the page lands, what is refused, and the one JSON document."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from calling import pvg
from run_samples import begin, commit, played, rollout, state, step, tell

sys.path.insert(0, str(Path(__file__).parent.parent / "reporting"))
from bench_samples import ladder, one
from page_checks import Page, check

from pvg.bench.report import write_report
from pvg.records import Role


def test_the_page_of_a_run_lies_in_its_folder_and_the_terminal_says_so() -> None:
    run = played(Path("runs"))
    called = pvg("report", "first", "--no-html")
    assert called.code == 0
    assert "Page:" not in called.err
    assert not list(run.path.glob("*.html"))
    called = pvg("report", "first")
    assert called.code == 0
    assert "Page: runs/first/report.html" in called.err
    page = check(run.report.read_text())
    assert "87.5 %" in page.text
    assert "pvg diagnose first " in page.text
    assert [path.name for path in Path().iterdir()] == ["runs"]
    assert not list(run.path.glob(".tmp-*"))


ENDED = {"kind": "run", "time": 1.0, "status": "interrupted", "seconds": 1.0, "budget": {}}


@pytest.mark.slow
@pytest.mark.parametrize("word", ["empty", "samples", "stopped", "failed", "damaged", "complete"])
def test_a_state_of_a_run_has_one_word(word: str) -> None:
    run = played(Path("runs")) if word == "complete" else begin(Path("runs"))
    if word == "samples":
        commit(run, state("init"), {"samples": [rollout("a", Role.HELPFUL, correct=True, score=None)]})
    if word in ("stopped", "failed"):
        commit(run, state("train_verifier"))
        tell(run, step("mint", 8, helpful_accuracy=0.6), *([ENDED] if word == "stopped" else []))
    if word == "damaged":
        commit(run, state("complete", rounds=[{}]))
        (run.path / "state.json").write_text("{broken")
    begin(Path("runs"), "second")
    both = pvg("report", "first", "second").out.splitlines()[0].split()[-1]
    one = pvg("report", "first").out.splitlines()[0].split()[-1]
    (listed,) = [line.split() for line in pvg("runs").out.splitlines() if line.startswith("first")]
    assert (one, both, listed[3]) == (word,) * 3
    assert word in check(run.report.read_text()).text
    assert word in check(Path("report.html").read_text()).text
    assert pvg("report", "first", "--json").document["damaged"] is (word == "damaged")


@pytest.mark.parametrize("name", ["report.html", "rollouts.html"])
def test_a_page_is_not_written_through_a_link(tmp_path: Path, name: str) -> None:
    run, other = played(Path("runs")), tmp_path / "other"
    other.write_text("not of pvg")
    (run.path / name).symlink_to(other)
    called = pvg("report", run.name)
    assert called.code == 2
    assert f"{name} is not a regular file" in called.err
    assert other.read_text() == "not of pvg"


def test_a_second_page_has_all_solutions_and_the_two_pages_link_to_each_other() -> None:
    run = played(Path("runs"))
    called = pvg("report", "first")
    assert "All solutions: runs/first/rollouts.html" in called.err
    assert links(run.report) == {"rollouts.html"}
    assert links(run.rollouts_page) == {"report.html"}
    assert pvg("report", "first", "--json").document["rollouts_html"] == "runs/first/rollouts.html"
    document = pvg("report", "first", "--html", "mine.html", "--json").document
    assert document["rollouts_html"] == "mine-rollouts.html"
    assert links(Path("mine.html")) == {"mine-rollouts.html"}
    assert links(Path("mine-rollouts.html")) == {"mine.html"}
    assert pvg("report", "first", "--html", "/dev/null", "--json").document["rollouts_html"] is None
    assert not Path("/dev/null-rollouts.html").exists()
    begin(Path("runs"), "empty")
    document = pvg("report", "empty", "--json").document
    assert document["rollouts_html"] is None
    assert [path.name for path in Path("runs/empty").glob("*.html")] == ["report.html"]


def links(path: Path) -> set[str]:
    """The files that a page links to."""
    addresses = (str(attributes["href"]) for name, attributes in Page(path.read_text()).tags if name == "a")
    return {address for address in addresses if not address.startswith("#")}


def test_several_runs_share_a_page_in_the_current_folder() -> None:
    played(Path("runs"))
    begin(Path("runs"), "second", seed=9)
    called = pvg("report", "first", "second")
    assert called.code == 0
    assert "seed" in called.out
    assert "2 runs" in check(Path("report.html").read_text()).text
    document = pvg("report", "first", "second", "--json").document
    assert document["settings"] == {"seed": ["0", "9"]}
    assert [run["name"] for run in document["runs"]] == ["first", "second"]
    assert document["runs"][0]["final"]["helpful_accuracy"] == 0.875
    assert pvg("compare", "first", "second", "--json").document["runs"] == document["runs"]
    write_report(Path("a.json"), one())
    assert pvg("compare", "first", "a.json").code == 2


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("report", "first", "second"), "report.html"),
        (("report", "first", "--html", "mine.html"), "mine.html"),
        (("report", "first", "--html", "mine.html"), "mine-rollouts.html"),
        (("compare", "a.json", "b.json", "--markdown", "notes.md"), "notes.md"),
        (("study", "quick", "--only-table", "--csv", "values.csv"), "values.csv"),
        (("study", "quick", "--only-table", "--markdown", "notes.md"), "notes.md"),
        (("bench", "-p", "rollout", "--out", "found.json"), "found.json"),
        (("attack", "my.py:grade", "--data", "p.jsonl", "--out", "found"), "found/card.json"),
        (("measure", "t.jsonl", "--out", "found"), "found/measures.html"),
        (("measure", "t.jsonl", "--out", "found"), "found/results.jsonl"),
    ],
)
def test_no_command_replaces_a_file_that_pvg_did_not_write(command: tuple[str, ...], file: str) -> None:
    played(Path("runs"))
    begin(Path("runs"), "second")
    write_report(Path("a.json"), one())
    write_report(Path("b.json"), one())
    Path("my.py").write_text("def grade(problem, text):\n    return 0.0\n")
    Path("p.jsonl").write_text('{"problem": "1+1?", "text": "A2", "answer": "2"}\n')
    Path("t.jsonl").write_text('{"question": "1+1?", "text": "1+1=2;A2", "truth": "2"}\n')
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("not of pvg")
    called = pvg(*command)
    assert called.code == 2
    assert file in called.err
    assert Path(file).read_text() == "not of pvg"
    Path(file).unlink()
    if command[0] not in ("bench", "attack"):  # what pvg wrote, it writes again
        assert [pvg(*command).code for _ in range(2)] == [0, 0]


def test_benchmark_reports_are_shown_on_the_terminal() -> None:
    write_report(Path("a.json"), one())
    write_report(Path("b.json"), ladder())
    called = pvg("report", "a.json", "b.json")
    assert called.code == 0
    assert "tokens_per_s" in called.out
    assert not Path("report.html").exists()
    assert pvg("report", "a.json", "--html", "x.html").code == 2
    assert pvg("report", "a.json", "--json").document["reports"][0]["profile"] == "rollout"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("first", "a.json"), "cannot be shown together"),
        (("first", "first"), "given twice"),
        (("first", "--html", "x.html", "--no-html"), "cannot be used together"),
        (("firts",), "Did you mean 'first'?"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], said: str) -> None:
    played(Path("runs"))
    write_report(Path("a.json"), one())
    called = pvg("report", *arguments)
    assert called.code == 2
    assert said in called.err
    assert not list(Path().rglob("*.html"))
