"""On the narrow screen of a phone no page scrolls sideways: wide parts scroll inside their frames, which fade out where
they go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, needs_browser
from run_samples import begin, commit, played, rollout, state, step, telemetered, tell

from pvg.evaluation.trace_report import report_of_traces
from pvg.records import Role
from pvg.reporting.live_page import LiveRun
from pvg.reporting.measure_page import measure_page
from pvg.reporting.run_page import collect, compared_runs, run_page, several_page
from pvg.reporting.run_summary import read_run
from pvg.reporting.solutions import rollouts_file, stored_rollouts
from pvg.store.run_directory import RunDirectory
from pvg.traces.loaders import LoadedTraces, Trace
from pvg.traces.measures import MeasuredTrace

LONG = "wordwithoutanyspace" * 40 + "\nfirst line\n\tsecond line " + "word " * 200
# What reaches beyond the screen and is not inside a frame that scrolls or cuts it off.
BEYOND = """[...document.querySelectorAll("main *, .bar-top *, footer *")].filter(node => {
  const box = node.getBoundingClientRect();
  if (!box.width || box.right < document.documentElement.clientWidth + 1) return false;
  for (let above = node.parentElement; !["MAIN", "BODY"].includes(above.tagName); above = above.parentElement)
    if (getComputedStyle(above).overflowX !== "visible") return false;
  return true;
}).map(node => node.outerHTML.slice(0, 120))"""
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def wordy(root: Path) -> RunDirectory:
    """A run whose texts, names and numbers are long."""
    run = begin(root, "a-run-with-a-name-that-is-rather-long-for-a-phone")
    tell(
        run,
        *(step("train_prover", n, helpful_accuracy=0.5, kl=1234567.0, **{"m" * 60: 1.0}) for n in range(1, 40)),
        {"kind": "alert", "round": 0, "phase": "train_prover", "step": 2, "name": "zero_signal", "message": LONG},
        {"kind": "round", "round": 0, "metrics": {"helpful_accuracy": 0.875, "verifier_auc": 0.9, "fooled_rate": 0.5}},
        {"kind": "round", "round": 1, "metrics": {"helpful_accuracy": 0.875, "verifier_auc": 0.9, "fooled_rate": 0.5}},
    )
    changes = {"problem_id": "p", "question": LONG, "reference": LONG, "text": LONG}
    written = [rollout(f"{n}" * 30, role, correct=n > 2, score=n / 3, **changes) for n in range(4) for role in Role]
    commit(run, state("complete"), {"checkpoint-00000": written})
    return run


def pages_of(root: Path) -> dict[str, str]:
    run, summary = wordy(root), read_run(wordy(root / "again"))
    stored = stored_rollouts(run, summary)
    watched = telemetered(root)
    return {
        "report": run_page(collect(run, summary, 2)),
        "report with machine": run_page(collect(watched, read_run(watched), 2)),
        "rollouts": rollouts_file(stored, run, summary, "report.html"),
        "several": several_page(compared_runs([run, played(root)])),
        "watch": LiveRun(watched).page(),
        "traces": traces_page(),
    }


def traces_page() -> str:
    """The page of `pvg measure` for two sources."""
    trace = Trace(LONG, (("user", LONG),), f"{LONG}\n#### {LONG[:200]}", truth=LONG, known=True)
    side = [MeasuredTrace(trace, [LONG[:700], LONG[700:]], [0.1, 0.5, 0.9], [(LONG, 0.5), (LONG, 0.0)], {"sr": LONG})]
    loaded = [LoadedTraces(f"{name}{'-with-a-long-name' * 3}", "x", [trace], [LONG]) for name in "ab"]
    return measure_page(report_of_traces(loaded, [side, side], "reader"), [("a", side), ("b", side)])


@needs_browser
def test_no_page_scrolls_sideways_on_a_phone(tmp_path: Path, browser: Browser) -> None:
    for name, text in pages_of(tmp_path).items():
        path = tmp_path / f"{name.replace(' ', '-')}.html"
        path.write_text(text)
        for place in ("", "#problem=p") if name == "rollouts" else ("",):
            browser.open(path.as_uri() + place, width=390)
            browser.run("new Promise(done => setTimeout(done, 300))")
            assert browser.run(BEYOND) == [], name
            assert browser.run(SIDEWAYS) <= 0, name
