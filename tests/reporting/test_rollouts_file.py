"""The page with all solutions of a run: what it contains, what it leaves out, and how a browser searches it."""

from __future__ import annotations

import base64
import gzip
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
from browser import Browser, needs_browser
from page_checks import Page
from run_samples import begin, commit, rollout, state, tell

from pvg.records import Grade, Role, Rollout, SolverSolution, Turn
from pvg.reporting.run_summary import read_run
from pvg.reporting.solutions import LONGEST_STORED, rollouts_file, stored_rollouts, threshold_of, verdict_word
from pvg.reporting.table import showable
from pvg.store.run_directory import RunDirectory

DATA = "application/octet-stream"
HOSTILE = '</script><img src=x onerror="document.title=\'hacked\'"><script>document.title="hacked"</script><!--'


NASTY = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\x00\u202e\u2066"
WORDS = ("7+5=2", "Étude", "a.b(c", "[x]*", NASTY, "ligne\nfeed", "")


def random_rollout(name: str, chance: random.Random, round_: int) -> Rollout:
    correct, formed = chance.random() < 0.5, chance.random() < 0.8
    return rollout(
        name,
        chance.choice(list(Role)),
        correct=correct and formed,
        score=None if chance.random() < 0.3 else round(chance.uniform(-3, 3), 1),
        problem_id=f"p{chance.randrange(4)}",
        question=f"{chance.choice(WORDS)}?",
        text=f"{chance.choice(WORDS)} {chance.choice(WORDS)}",
        round=round_,
        step=chance.randrange(5),
        group=chance.randrange(2),
        grade=Grade(correct and formed, formed, "8"),
    )


def made(root: Path, count: int = 60) -> tuple[RunDirectory, list[tuple[str, Rollout]]]:
    """A run of several shards and rounds, and its solutions with their phases, in the order of their commits."""
    run, chance, everything, plain = begin(root), random.Random(7), [], state("train_prover")
    tell(run, {"kind": "phase", "round": 0, "phase": "train_verifier", "metrics": {"threshold": 0.5}})
    for round_, label in itertools.product((0, 1), ("mint-00000", "train_prover-00000", "train_prover-00001")):
        written = [random_rollout(f"{round_}/{label}/{n}", chance, round_) for n in range(count)]
        commit(run, plain, {label: written})
        plain = run.load_state().state or {}
        everything += [(label.rsplit("-", 1)[0], found) for found in written]
    return run, everything


# Each filter, written once more as plainly as possible.
FILTERS: dict[str, tuple[dict[str, Any], Callable[[str, Rollout], bool]]] = {
    "all": ({}, lambda phase, r: True),
    "role": ({"role": "sneaky"}, lambda phase, r: r.role is Role.SNEAKY),
    "wrong": ({"grade": "wrong"}, lambda phase, r: not r.grade.correct and r.grade.well_formed),
    "flaw": ({"grade": "flaw"}, lambda phase, r: r.is_flaw),
    "refused": ({"verdict": "refused"}, lambda phase, r: r.round == 0 and r.score is not None and r.score < 0.5),
    "round": ({"round": 1}, lambda phase, r: r.round == 1),
    "phase": ({"phase": "mint"}, lambda phase, r: phase == "mint"),
    "steps": ({"first_step": 1, "last_step": 3}, lambda phase, r: 1 <= r.step <= 3),
    "high": ({"highest": -0.5}, lambda phase, r: r.score is not None and r.score <= -0.5),
    "text": ({"text": "7+5"}, lambda phase, r: "7+5" in r.text or "7+5" in r.question),
    "letters": ({"text": "éTUDE"}, lambda phase, r: "Étude" in r.text or "Étude" in r.question),
    "together": (
        {"text": "x", "role": "helpful", "grade": "wrong", "round": 0, "lowest": -2.0, "highest": 2.0, "last_step": 4},
        lambda phase, r: (
            ("x" in r.text or "x" in r.question)
            and (r.role, r.grade.correct, r.grade.well_formed, r.round) == (Role.HELPFUL, False, True, 0)
            and r.score is not None
            and abs(r.score) <= 2
            and r.step <= 4
        ),
    ),
}


def page_of(run: RunDirectory, **limits: int) -> str:
    summary = read_run(run)
    return rollouts_file(stored_rollouts(run, summary, **limits), run, summary, report="report.html")


def unpacked(text: str) -> list[dict[str, Any]]:
    """The solutions in a page, as a browser reads them."""
    (packed,) = re.findall(rf'<script type="{DATA}" id="data">([^<]*)</script>', text)
    found = orjson.loads(gzip.decompress(base64.b64decode(packed)))
    return [
        row | {"problem": found["problems"][row["problem"]], "marked": row["text"][1], "text": "".join(row["text"])}
        for row in found["rows"]
    ]


def harmless(text: str) -> Page:
    """The page loads nothing, and its data are in letters that cannot become markup."""
    page = Page(text)
    assert page.wrong == []
    for name, attributes in page.tags:
        assert name not in {"img", "iframe", "object", "embed", "base", "link"}
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "action")]
        assert name != "a" or str(attributes["href"]).startswith("#") or attributes["href"] == "report.html"
    *data, script = page.scripts
    assert all(re.fullmatch(r"[A-Za-z0-9+/=]+", one) for one in data)
    assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write|\beval\b|\bfetch\b|https?:", script)
    return page


def test_the_page_contains_every_solution_of_the_run_with_its_score_and_verdict(tmp_path: Path) -> None:
    run, everything = made(tmp_path)
    text, summary = page_of(run), read_run(run)
    harmless(text)
    found = unpacked(text)
    assert [row["id"] for row in found] == [stored.id for _, stored in reversed(everything)]
    assert {row["verdict"] for row in found} == {"", "accepted", "refused"}
    for row, (phase, stored) in zip(found, reversed(everything), strict=True):
        assert row["text"] == showable(stored.text)
        assert row["problem"] == [stored.problem_id, showable(stored.question), stored.reference]
        assert row["verdict"] == verdict_word(stored.score, threshold_of(summary, stored.round))
        written = (stored.role.value, stored.round, stored.step, stored.score, stored.sampled_tokens)
        assert (row["role"], row["round"], row["step"], row["score"], row["tokens"]) == written
        assert row["phase"] == phase
        assert (row["grade"] == "flaw") == stored.is_flaw


def test_a_large_run_keeps_its_newest_solutions_and_names_the_place_of_the_rest(tmp_path: Path) -> None:
    run, everything = made(tmp_path)
    text = page_of(run, most=30_000)
    found = unpacked(text)
    assert 70 < len(found) < 120
    assert [row["id"] for row in found] == [stored.id for _, stored in everything[: -len(found) - 1 : -1]]
    assert f"the newest {len(found)} solutions of {len(everything)}" in harmless(text).text
    assert "/rollouts has all of them" in Page(text).text
    assert "/rollouts has all of them" not in Page(page_of(run)).text


def test_each_long_text_is_cut_and_says_so(tmp_path: Path) -> None:
    run = begin(tmp_path)
    long = "y" * (LONGEST_STORED + 5)
    solver, turns = SolverSolution("s", long, "8", True, True), (Turn(0, True, "x"), Turn(1, False, long))
    changes = {
        "question": long,
        "reference": long,
        "solver": solver,
        "turns": turns,
        "grade": Grade(False, True, "8", long),
    }
    commit(run, state("complete"), {"mint-00000": [rollout("0", Role.SNEAKY, correct=False, score=None, **changes)]})
    (row,) = unpacked(page_of(run))
    for shown in (*row["problem"][1:], *row["before"], *row["after"], row["said"]):
        assert LONGEST_STORED < len(shown) < LONGEST_STORED + 60
        assert re.search(r" … and \d+ more characters$", shown)


def test_a_damaged_shard_is_noted_and_the_rest_kept(tmp_path: Path) -> None:
    run, _ = made(tmp_path, count=5)
    path = run.path / (run.load_state().state or {})["shards"][1]["path"]
    path.write_bytes(path.read_bytes()[:-1])
    text = page_of(run)
    assert len(unpacked(text)) == 25
    assert "is damaged" in Page(text).text
    assert "the newest" not in Page(text).text


def special(root: Path) -> RunDirectory:
    """Hostile texts, letters outside of the first Unicode plane, a dialogue and a translation."""
    run = begin(root)
    grade = Grade(False, True, HOSTILE, f"wrong sum in step 2 {HOSTILE}")
    solver = SolverSolution("s", f"solved {HOSTILE}", "8", True, True)
    turns = (Turn(0, True, "I think 8."), Turn(1, False, HOSTILE, "verifier"))
    changes = {"problem_id": "p", "question": HOSTILE, "reference": HOSTILE}
    written = [
        rollout("marked", Role.SNEAKY, correct=False, score=1.0, text=f"𝟕+𝟓=𝟐\n{HOSTILE}\n", grade=grade, **changes),
        rollout("turns", Role.HELPFUL, correct=True, score=-1.0, text="I think 8.", turns=turns, **changes),
        rollout(HOSTILE, Role.HELPFUL, correct=True, score=None, text=NASTY, solver=solver, **changes),
    ]
    commit(run, state("train_prover"), {"mint-00000": written})
    return run


def test_the_wrong_step_is_apart_and_all_turns_are_there(tmp_path: Path) -> None:
    translated, dialogue, marked = unpacked(page_of(special(tmp_path)))
    assert marked["marked"] == f"{HOSTILE}\n"
    assert dialogue["after"] == [f"verifier: {HOSTILE}"]
    assert translated["before"] == [f"solver: solved {HOSTILE}"]
    assert translated["text"] == showable(NASTY)


# --- in a browser --------------------------------------------------------------------------------------------------

SHOW = """new Promise(done => {
  const wait = () => document.getElementById("browser").hidden ? setTimeout(wait, 5) : done();
  if ((location.hash || "#") === %(hash)s) { wait(); return; }
  addEventListener("hashchange", wait, { once: true });
  location.hash = %(hash)s;
})"""
LINKS = (
    "[...document.querySelectorAll('#hits .hit')].map(one => new URLSearchParams(one.hash.slice(1)).get('solution'))"
)
PAGES = "Math.max(1, ...[...document.querySelectorAll('#pages a, #pages span')].map(one => +one.textContent))"


def shown(browser: Browser, fields: dict[str, Any]) -> None:
    browser.run(SHOW % {"hash": orjson.dumps("#" + urlencode(fields)).decode()})


def listed(browser: Browser, query: dict[str, Any]) -> list[str]:
    """The ids of all pages of a list."""
    found: list[str] = []
    shown(browser, query)
    for number in range(1, browser.run(PAGES) + 1):
        shown(browser, {**query, "page": number})
        found += browser.run(LINKS)
    return found


@needs_browser
def test_a_browser_finds_what_reading_every_solution_finds(tmp_path: Path) -> None:
    run, everything = made(tmp_path, count=20)
    path = tmp_path / "rollouts.html"
    path.write_text(page_of(run))
    newest = [found for _, found in reversed(everything)]
    scored = [found for found in newest if found.score is not None]
    unscored = [found.id for found in newest if found.score is None]
    with Browser(tmp_path) as browser:
        browser.open(path.as_uri())
        for query, fits in FILTERS.values():
            expected = [found.id for phase, found in reversed(everything) if fits(phase, found)]
            assert listed(browser, query) == expected, query
        assert listed(browser, {"order": "oldest"}) == [found.id for _, found in everything]
        highest = listed(browser, {"order": "highest"})
        assert sorted(highest[len(scored) :]) == sorted(unscored)
        scores = {found.id: found.score or 0.0 for found in scored}
        assert [scores[name] for name in highest[: len(scored)]] == sorted(scores.values(), reverse=True)
        shown(browser, {"lowest": "much", "role": "sneaky"})
        assert "score from: 'much'" in browser.run("document.getElementById('problems').textContent")
        assert browser.errors == []


@needs_browser
def test_hostile_text_stays_text_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.html"
    path.write_text(page_of(special(tmp_path)))
    harmless(path.read_text())

    with Browser(tmp_path) as browser:
        browser.open(path.as_uri())
        for fields in ({}, {"text": HOSTILE}, {"problem": "p", "solution": HOSTILE}):
            shown(browser, fields)
            assert browser.run("document.title") == "first: rollouts"
            assert browser.run("document.images.length") == 0
            assert browser.run("document.scripts.length") == 2
            assert HOSTILE in browser.run("document.body.innerText")
        assert browser.run("document.querySelectorAll('#solutions .solution').length") == 3
        assert browser.run("document.querySelector('#solutions mark').textContent") == f"{HOSTILE}\n"
        assert browser.run("document.querySelector('.chosen .id').textContent") == f"step 0, {HOSTILE}"
        assert browser.run("document.querySelector('#reference .given').textContent") == HOSTILE
        assert browser.errors == []
