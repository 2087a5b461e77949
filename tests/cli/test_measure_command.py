"""`pvg measure`: from files to a table, a JSON document and a page."""

from __future__ import annotations

import json
import re

import pytest
from cli.calling import SMALL, pvg

from pvg.tasks.modchain import chain_problem, clean_trace

pytestmark = pytest.mark.slow
READER = ("--reader", "embedded:modchain-prover", "--max-tokens", "32")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Clean chains, and chains that state the right answer after wrong steps."""
    monkeypatch.chdir(tmp_path)
    problems = [chain_problem((a, b, 3, 4, 5), 10) for a, b in ((1, 2), (5, 6), (7, 8), (9, 9))]

    def write(name, text_of):
        rows = [{"question": p.question, "text": text_of(p), "truth": p.answer} for p in problems]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("clean.jsonl", clean_trace)
    write("empty.jsonl", lambda p: f"0+0=0;A{p.answer}")
    (tmp_path / "other.jsonl").write_text('{"question": "9+9?", "text": "9+9=8;A8"}\n')
    return tmp_path


def test_one_source_gets_a_table_a_document_and_a_page(files):
    called = pvg("measure", "clean.jsonl", *READER)
    assert called.code == 0, called.err
    assert "CIR" in called.out
    document = json.loads((files / "measures/clean/measures.json").read_text())
    values = {name: row["value"] for name, row in document["sources"][0]["measures"].items()}
    assert values["accuracy"] == values["sr"] == 1.0
    assert values["cir"] > 0.3
    page = (files / "measures/clean/measures.html").read_text()
    assert "1+2=3;" in re.sub(r"<[^>]+>", "", page)


def test_two_sources_are_compared_and_the_second_call_reads_nothing_again(files):
    called = pvg("measure", "clean.jsonl", "empty.jsonl", *READER, "--json")
    assert called.code == 0, called.err
    rows = {row["name"]: row["difference"]["value"] for row in called.document["comparison"]}
    assert rows["sr"] < 0  # the answer does not follow from 0+0=0
    kept = (files / "measures/clean-vs-empty/results.jsonl").read_bytes()
    (files / "other").mkdir()
    (files / "other/clean.jsonl").write_bytes((files / "empty.jsonl").read_bytes())
    alike = pvg("measure", "clean.jsonl", "other/clean.jsonl", "--json").document
    assert [source["name"] for source in alike["sources"]] == ["clean", "clean-b"]
    again = pvg("measure", "clean.jsonl", "empty.jsonl", *READER, "--json")
    assert (files / "measures/clean-vs-empty/results.jsonl").read_bytes() == kept
    assert again.document["comparison"] == called.document["comparison"]


def test_a_run_is_read_by_the_model_that_it_started_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pvg("train", "--name", "mine", *SMALL, "-s", "game.test.samples=4").code == 0
    called = pvg("measure", "mine/base", "mine/round-0", "--measures", "cir,sr", "--json")
    assert called.code == 0, called.err
    document = called.document
    assert document["reader"] == "modchain-prover"
    assert [source["name"] for source in document["sources"]] == ["mine-base", "mine-round-0"]
    assert document["sources"][0]["problems"] == document["comparison"][0]["difference"]["problems"] == 4
    assert {"mcc", "accepted", "separability"} < document["sources"][1]["measures"].keys()
    assert "mcc" in pvg("measure", "mine", "--json", "--measures", "sr").document["sources"][0]["measures"]
    assert pvg("measure", "mine/round-7").code == 2
    roles = [pvg("measure", f"mine/{role}", "--json").document["sources"][0] for role in ("helpful", "sneaky")]
    assert [role["name"] for role in roles] == ["mine-helpful", "mine-sneaky"]
    assert all("separability" not in role["measures"] for role in roles)


def test_texts_cannot_change_the_page(files):
    evil = "<script>alert(1)</script>\u202e"
    row = {"question": f"1+2?{evil}", "text": f"{evil}\n#### {evil}", "truth": evil}
    (files / "evil.jsonl").write_text(json.dumps(row) + "\n")
    called = pvg("measure", "evil.jsonl")
    assert called.code == 0, called.err
    page = (files / "measures/evil/measures.html").read_text()
    assert "<script>alert" not in page
    assert "\u202e" not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.jsonl",), "There is no file"),
        (("clean.jsonl", "--measures", "cir"), "need a reader"),
        (("clean.jsonl", "--reader", "embedded:nothing"), "nothing"),
        (("clean.jsonl", "other.jsonl", "--reader", "embedded:nothing"), "no problem in common"),
        (("clean.jsonl", "--measures", "sir", *READER), "sir"),
        (("clean.jsonl", "--answer", "(", *READER), "regular expression"),
        (("clean.jsonl", "--answer", "A", *READER), "no group"),
        (("clean.jsonl", "--answer", "Z(.)", *READER), "no trace states a final answer"),
        (("clean.jsonl", "--field", "truth", *READER), "FIELD=COLUMN"),
        (("clean.jsonl", "--model", "m", *READER), "behind a URL"),
        (("clean.jsonl", "--reader", "http://me:pw@host/v1"), "environment variable"),
    ],
)
def test_mistakes_are_one_line_and_a_remedy(files, arguments, message):
    called = pvg("measure", *arguments)
    assert called.code == 2, called.err
    assert message in called.err
    assert not list(files.glob("measures/*/measures.json"))
