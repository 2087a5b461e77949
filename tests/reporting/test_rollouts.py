"""All stored solutions of a run: the filters against a slow reference, paging, transcripts, hostile text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from page_checks import Page
from run_samples import begin, commit, played, rollout, state, tell
from tokenizers import Tokenizer as FastTokenizer

from pvg.config.load import embedded_model
from pvg.records import Grade, Role, Rollout, Turn
from pvg.reporting.follow import FollowedRun
from pvg.reporting.rollouts import RolloutIndex, RolloutQuery
from pvg.reporting.rollouts_page import LONGEST, prompt_text, rollout_page, rollouts_page
from pvg.reporting.run_summary import read_run
from pvg.store.run_directory import RunDirectory

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
    for round_, label in itertools.product((0, 1), ("mint-00000", "train_prover-00000", "train_prover-00001")):
        written = [random_rollout(f"{round_}/{label}/{n}", chance, round_) for n in range(count)]
        commit(run, plain, {label: written})
        plain = run.load_state().state or {}
        everything += [(label.rsplit("-", 1)[0], found) for found in written]
    return run, everything


def indexed(run: RunDirectory) -> RolloutIndex:
    followed = FollowedRun(run)
    followed.update()
    index = RolloutIndex(run)
    index.extend(followed.shards)
    assert index.read_more(60.0) == 0
    return index


# Each filter, written once more as plainly as possible.
FILTERS: dict[str, tuple[RolloutQuery, Callable[[str, Rollout], bool]]] = {
    "all": (RolloutQuery(), lambda phase, r: True),
    "role": (RolloutQuery(role="sneaky"), lambda phase, r: r.role is Role.SNEAKY),
    "correct": (RolloutQuery(grade="correct"), lambda phase, r: r.grade.correct and r.grade.well_formed),
    "wrong": (RolloutQuery(grade="wrong"), lambda phase, r: not r.grade.correct and r.grade.well_formed),
    "malformed": (RolloutQuery(grade="malformed"), lambda phase, r: not r.grade.well_formed),
    "flaw": (RolloutQuery(grade="flaw"), lambda phase, r: r.is_flaw),
    "round": (RolloutQuery(round=1), lambda phase, r: r.round == 1),
    "phase": (RolloutQuery(phase="mint"), lambda phase, r: phase == "mint"),
    "unknown phase": (RolloutQuery(phase="solve"), lambda phase, r: False),
    "steps": (RolloutQuery(first_step=1, last_step=3), lambda phase, r: 1 <= r.step <= 3),
    "low": (RolloutQuery(lowest=0.5), lambda phase, r: r.score is not None and r.score >= 0.5),
    "high": (RolloutQuery(highest=-0.5), lambda phase, r: r.score is not None and r.score <= -0.5),
    "text": (RolloutQuery(text="7+5"), lambda phase, r: "7+5" in r.text or "7+5" in r.question),
    "special text": (RolloutQuery(text="A.B("), lambda phase, r: "a.b(" in (r.text + " | " + r.question)),
    "letters": (RolloutQuery(text="éTUDE"), lambda phase, r: "Étude" in r.text or "Étude" in r.question),
    "hostile text": (RolloutQuery(text=NASTY), lambda phase, r: NASTY in r.text or NASTY in r.question),
    "together": (
        RolloutQuery(text="x", role="helpful", grade="wrong", round=0, lowest=-2.0, highest=2.0, last_step=4),
        lambda phase, r: (
            ("x" in r.text or "x" in r.question)
            and (r.role, r.grade.correct, r.grade.well_formed, r.round) == (Role.HELPFUL, False, True, 0)
            and r.score is not None
            and abs(r.score) <= 2
            and r.step <= 4
        ),
    ),
}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[RolloutIndex, list[tuple[str, Rollout]]]:
    run, everything = made(tmp_path_factory.mktemp("runs"))
    return indexed(run), everything


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_finds_what_reading_every_solution_finds(
    several: tuple[RolloutIndex, list[tuple[str, Rollout]]], name: str
) -> None:
    index, everything = several
    query, fits = FILTERS[name]
    expected = [found.id for phase, found in everything if fits(phase, found)]
    assert expected or name == "unknown phase"
    assert [index.rollout(int(place)).id for place in index.find(query)] == expected[::-1]


def test_orders(several: tuple[RolloutIndex, list[tuple[str, Rollout]]]) -> None:
    index, everything = several
    scores = [index.rollout(int(place)).score for place in index.find(RolloutQuery(order="highest"))]
    scored = sorted((r.score for _, r in everything if r.score is not None), reverse=True)
    assert scores == [*scored, *[None] * (len(everything) - len(scored))]
    lowest = [index.rollout(int(place)).score for place in index.find(RolloutQuery(order="lowest"))]
    assert lowest[: len(scored)] == scored[::-1]
    oldest = [index.rollout(int(place)).id for place in index.find(RolloutQuery(order="oldest"))]
    assert oldest == [r.id for _, r in everything]


def test_mates_are_the_other_solutions_of_the_problem_in_the_round(
    several: tuple[RolloutIndex, list[tuple[str, Rollout]]],
) -> None:
    index, everything = several
    place = 100
    _phase, own = everything[place]
    group, others = index.mates(place)
    same = [r.id for _, r in everything if (r.problem_id, r.round) == (own.problem_id, own.round) and r.id != own.id]
    shard = own.id.rsplit("/", 1)[0]
    near = {
        r.id
        for _, r in everything
        if r.id in same
        and r.id.startswith(shard + "/")
        and (r.role, r.step, r.group) == (own.role, own.step, own.group)
    }
    assert {index.rollout(int(n)).id for n in group} == near
    assert len(group) + len(others) == min(64, len(same))
    assert {index.rollout(int(n)).id for n in others} <= set(same) - near


def test_the_index_grows_with_the_commits_and_begins_anew_after_an_earlier_one(tmp_path: Path) -> None:
    run, _everything = made(tmp_path, count=5)
    shards = (run.load_state().state or {})["shards"]
    index = RolloutIndex(run)
    index.extend(shards[:2])
    assert index.read_more(0.0) == 1  # at least one file per call
    assert index.read_more(0.0) == 0
    index.extend(shards)
    index.read_more(60.0)
    assert len(index) == len(index.find(RolloutQuery())) == 30
    other = [shards[0], *shards[2:]]  # another second shard than before
    index.extend(other)
    assert len(index) == 0
    index.read_more(60.0)
    assert [row.address[:2] for row in index.rows(index.find(RolloutQuery(order="oldest"))[5:6], 10)] == [
        (0, "train_prover-00001")
    ]


def test_a_damaged_shard_is_left_out_and_noted(tmp_path: Path) -> None:
    run, _ = made(tmp_path, count=5)
    path = run.path / (run.load_state().state or {})["shards"][1]["path"]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    index = indexed(run)
    assert len(index) == 25
    assert "is damaged" in index.problems[0]
    assert "is damaged" in Page(rollouts_page(index, read_run(run), {}, 0)).text


def test_pages_of_the_list_hold_every_solution_once(tmp_path: Path) -> None:
    run, everything = made(tmp_path, count=30)
    index, seen = indexed(run), []
    for number in range(1, 5):
        page = Page(rollouts_page(index, read_run(run), {"page": str(number)}, 0))
        assert page.wrong == []
        seen += [attributes["href"] for name, attributes in page.tags if attributes.get("class", "").startswith("hit ")]  # type: ignore[union-attr]
    assert len(seen) == len(set(seen)) == len(everything) == 180
    assert f"{180} solutions of 180; shown: 1 to 50" in Page(rollouts_page(index, read_run(run), {}, 0)).text
    for odd in ("0", "99", "-1", "x", "9" * 400):  # the nearest page
        assert "shown: " in Page(rollouts_page(index, read_run(run), {"page": odd}, 0)).text


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"lowest": "nan"}, "score from"),
        ({"round": "one"}, "round"),
        ({"first_step": "9" * 30}, "step from"),
        ({"role": NASTY}, "role"),
        ({"grade": "good"}, "grade"),
        ({"order": "best"}, "order"),
    ],
)
def test_a_field_that_cannot_be_used_is_named_and_left_out(
    several: tuple[RolloutIndex, list[tuple[str, Rollout]]], tmp_path: Path, fields: dict[str, str], problem: str
) -> None:
    query, problems = RolloutQuery.of(fields)
    assert query == RolloutQuery()
    assert problems[0].startswith(f"{problem}: ")
    text = rollouts_page(several[0], read_run(begin(tmp_path)), fields, 0)
    page = Page(text)
    assert page.wrong == []
    assert "cannot be used, so it is left out" in page.text


def test_a_form_keeps_its_fields_in_its_links() -> None:
    fields = {"text": "a&b=c", "role": "sneaky", "round": "1", "lowest": "-0.5", "order": "highest"}
    query, problems = RolloutQuery.of(fields)
    assert problems == []
    assert query.fields() == fields
    assert RolloutQuery.of({"text": "\ud800"})[0].text == "?"


def harmless(text: str) -> Page:
    """Nothing of what a model wrote has become markup."""
    page = Page(text)
    assert page.wrong == []
    assert len(page.scripts) == 1
    assert "alert(1)" not in page.scripts[0]
    for name, attributes in page.tags:
        assert name not in {"img", "iframe", "object", "embed", "base", "link"}
        assert not [key for key in attributes if key.startswith("on")]
    for character in "\x00\u202e\u2066":
        assert character not in text
    return page


def test_hostile_and_long_text_stays_text(tmp_path: Path) -> None:
    run = begin(tmp_path)
    long = NASTY + "x" * 100_000
    grade = Grade(False, True, NASTY, f"wrong sum in step 1 {NASTY}")
    turns = (Turn(0, True, long), Turn(1, False, NASTY))
    written = [
        rollout("a", Role.SNEAKY, correct=False, score=1.0, text=long, question=NASTY, reference=NASTY, grade=grade),
        rollout("b", Role.HELPFUL, correct=True, score=1.0, text=NASTY, question=NASTY, turns=turns, problem_id="p-a"),
        rollout(NASTY, Role.HELPFUL, correct=True, score=1.0, text="", question="q?", problem_id="p-a"),
    ]
    commit(run, state("train_prover"), {"mint-00000": written})
    index, summary = indexed(run), read_run(run)
    page = harmless(rollouts_page(index, summary, {"text": NASTY}, 0))
    assert "2 solutions of 3" in page.text
    assert len(rollouts_page(index, summary, {}, 0)) < 100_000  # the list has only the beginning of a text
    for place in range(3):
        harmless(rollout_page(index, place, summary, run.experiment()))
    page = harmless(rollout_page(index, 0, summary, run.experiment()))
    assert "x" * 100_000 in page.text
    assert len(long) < LONGEST


def test_a_transcript_shows_prompt_solution_grade_score_and_group(tmp_path: Path) -> None:
    run = begin(tmp_path)
    tokenizer = FastTokenizer.from_file(str(embedded_model("modchain-prover") / "tokenizer.json"))
    ids = tokenizer.encode("S7+5?", add_special_tokens=False).ids
    changes = {"question": "7+5?", "problem_id": "p", "prompt_ids": np.array(ids, np.int32)}
    written = [
        rollout("000/x/0", Role.SNEAKY, correct=False, score=0.75, text="7+5=3;A3", reward=0.25, **changes),
        rollout("000/x/1", Role.SNEAKY, correct=True, score=-0.5, text="7+5=2;A2", **changes),
        rollout("000/x/2", Role.HELPFUL, correct=True, score=0.5, text="other role", **changes),
    ]
    commit(run, state("complete"), {"train_prover-00000": written})
    tell(run, {"kind": "phase", "round": 0, "phase": "train_prover", "metrics": {"threshold": 0.5}})
    text = rollout_page(indexed(run), 0, read_run(run), run.experiment())
    page = harmless(text)
    assert "S7+5?" in page.text
    assert "score +0.750, accepted" in page.text
    assert "reward +0.2500" in page.text
    assert "<mark" in text
    before, _, after = page.text.partition("Its group")
    group, _, others = after.partition("Same problem, same round")
    assert "7+5=2;A2" in group
    assert "-0.500 refused" in group
    assert "other role" in others
    assert "other role" not in before + group


def test_without_the_tokenizer_the_page_says_why_there_is_no_prompt(tmp_path: Path) -> None:
    run = played(tmp_path)
    experiment = run.experiment()
    there = prompt_text(experiment, rollout("a", Role.HELPFUL, correct=True, score=None).prompt_ids)
    assert there[0] is not None
    prover = experiment.models.prover.model_copy(update={"source": str(tmp_path / "nothing")})
    models = experiment.models.model_copy(update={"prover": prover})
    without = experiment.model_copy(update={"models": models})
    text, why = prompt_text(without, rollout("a", Role.HELPFUL, correct=True, score=None).prompt_ids)
    assert text is None
    assert "is not on this machine" in why
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "tokenizer.json").write_text("{nonsense")
    prover = prover.model_copy(update={"source": str(damaged)})
    without = experiment.model_copy(update={"models": models.model_copy(update={"prover": prover})})
    text, why = prompt_text(without, rollout("a", Role.HELPFUL, correct=True, score=None).prompt_ids)
    assert text is None
    assert "cannot be opened" in why
