"""`pvg study` as a user calls it. Most games here are played by a stand-in (tests/study/stand_in_pvg.py); the last
tests play real ones, kill them and go on."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from calling import ENTRY, pvg

sys.path.insert(0, str(Path(__file__).parent.parent / "study"))

from study_samples import PVG, SMALL

pytestmark = pytest.mark.slow

TINY = """
name = "tiny"
seeds = 1
measures = ["helpful_accuracy", "kl"]
reference = "cgc"
threads = 1
processes = 2

[common]
game.rounds = 1
game.mint_problems = 24
verifier.steps = 2
verifier.pairs = 4
verifier.held_out = 0.3
training.steps = 12
training.groups = 2
game.test.problems = 4
game.test.samples = 1
store.commit_every = 1

[[arm]]
name = "cgc"

[[arm]]
name = "src"
set = { game.reward = "src" }
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a study whose games are played by the stand-in."""
    monkeypatch.setattr("pvg_cli.study.PVG", PVG)
    Path("studies").mkdir()
    Path("studies/small.toml").write_text(SMALL)
    return "small"


def behave(**behaviour: str) -> None:
    Path("behaviour.json").write_text(json.dumps({name.replace("_", "-"): how for name, how in behaviour.items()}))


def test_a_study_is_played_told_and_not_played_again(small: str) -> None:
    called = pvg("study", small, "--markdown", "table.md")
    assert called.code == 0, called.err
    assert "4 of 4 games to play, 64 optimizer steps, 1 at a time." in called.err
    assert "warning: 2 seeds cannot show a significant difference between arms: the smallest possible p" in called.err
    assert "[4/4]  src-seed-001 complete after" in called.err
    for said in ("4 of 4 games complete", "helpful accuracy", "65.0 %", "60.0 to 70.0 %", "Against cgc, paired by seed",
                 "2 seeds cannot show a significant difference", "pvg view runs/small/cgc-seed-000"):  # fmt: skip
        assert said in called.out, said
    assert "Page: runs/small/study.html" in called.err
    assert Path("runs/small/study.html").read_text().startswith("<!doctype html>")
    assert "| helpful accuracy | cgc | 2 of 2 | 65.0 % |" in Path("table.md").read_text()

    again = pvg("study", small, "--only-table", "--markdown", "table.md")
    assert (again.code, again.out) == (0, called.out)
    assert "to play" not in again.err
    assert len(Path("played.txt").read_text().splitlines()) == 4

    refused = pvg("report", "small")
    assert refused.code == 2
    assert "small is a study, not a run; its page is runs/small/study.html." in refused.err
    assert pvg("report", "runs/small/cgc-seed-001", "--json").document["status"] == "complete"
    changed = pvg("study", small, "-s", "training.steps=6", "--json")
    assert changed.code == 2
    message = changed.document["error"]["message"]
    assert "4 cells were played with other settings" in message
    assert "training.steps: 5 -> 6" in message
    more = pvg("study", small, "--seeds", "3", "--dry-run", "--json").document
    assert [cell["status"] for cell in more["cells"]].count("new") == 2


def test_json_and_csv_have_the_values_of_each_seed(small: str) -> None:
    document = pvg("study", small, "--seeds", "1", "--csv", "values.csv", "--json").document
    assert (document["status"], document["html"]) == ("complete", "runs/small/study.html")
    assert document["command"] == "pvg study small --seeds 1"
    with Path("values.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [
        (result["arm"], seed, result["measure"], round_, value["number"])
        for result in document["results"]
        for seed, series in result["series"].items()
        for round_, value in enumerate(series)
        if value is not None
    ]
    read = [(row["arm"], row["seed"], row["measure"], int(row["round"] or 0), float(row["value"])) for row in rows]
    assert read == expected
    assert {row["measure"] for row in rows if row["round"] == ""} == {"seconds"}
    assert {row["censored"] for row in rows} == {"0"}


def test_a_failed_game_is_told_tried_once_more_at_the_next_call_and_ends_with_1(small: str) -> None:
    behave(src_seed_000="crash")
    called = pvg("study", small)
    assert called.code == 1
    assert "src-seed-000 failed: It broke." in called.err
    for said in ("3 of 4 games complete", "Failed", "src seed 0", "It broke.", "1 of 4 games is missing"):
        assert said in called.out, said
    assert pvg("study", small, "--only-table", "--json").document["status"] == "failed"
    again = pvg("study", small)
    assert again.code == 1
    assert "1 of 4 games to play" in again.err
    behave()
    assert pvg("study", small).code == 0
    assert [line.split()[0] for line in Path("played.txt").read_text().splitlines()].count("src-seed-000") == 3


def test_a_dry_run_for_a_gpu_tells_hours_money_and_memory_without_one_and_without_a_network() -> None:
    """pvg has the shapes of these models, so it asks no hub."""
    document = pvg("study", "kirchner-gsm8k", "--dry-run", "--price", "2.5", "--json").document
    assert (document["gpu"], document["price"]) == ("h100", 2.5)
    constant, growing = document["costs"]
    assert (constant["arm"], growing["arm"]) == ("constant", "growing")
    for cost in document["costs"]:
        assert cost["hours"] == cost["game_hours"] + cost["evaluation_hours"]
        assert cost["money"] == pytest.approx(2.5 * cost["hours"])
        assert cost["fits"]
        assert (
            24 < cost["peak_gb"] < 80
        )  # weights, gradients and moments of 1.5 billion parameters in float32 are 25 GB
    assert constant["game_hours"] == pytest.approx(
        growing["game_hours"]
    )  # equal mints and steps in all rounds together
    assert constant["game_hours"] > 3 * 800 * 4 / 3600  # three seeds of 800 steps of more than 4 s
    one = pvg("study", "kirchner-gsm8k", "--dry-run", "--gpu", "h200", "--seeds", "1", "--json").document["costs"][0]
    assert one["hours"] < constant["hours"] / 3
    assert one["money"] is None
    assert "GPU-hours" in pvg("study", "kirchner-gsm8k", "--dry-run").out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dry-run", "--price", "2"], "Add --gpu NAME"),
        (["--gpu", "h100"], "Add --dry-run"),
        (["--dry-run", "--gpu", "h10"], "Did you mean 'h100'"),
    ],
)
def test_a_price_without_a_gpu_and_a_gpu_without_a_plan_are_refused(small: str, options: list[str], says: str) -> None:
    called = pvg("study", small, *options)
    assert (called.code, says in called.err) == (2, True)


def test_a_dry_run_plays_nothing_and_tells_the_work(small: str) -> None:
    called = pvg("study", small, "--dry-run")
    assert called.code == 0
    for said in ("2 arms x 2 seeds = 4 games", "game.reward=src", "64 of 64 optimizer steps remain"):
        assert said in called.out, said
    assert not Path("runs").exists()
    document = pvg("study", small, "--dry-run", "--json").document
    assert [(cell["steps"], cell["status"]) for cell in document["cells"]] == [(16, "new")] * 4
    assert len(document["warnings"]) == 2
    assert all(f"warning: {sentence.split(':')[0]}" in called.out for sentence in document["warnings"])
    assert pvg("study", small, "--dry-run", "--seeds", "7", "--json").document["warnings"] == []
    assert pvg("study", small, "--dry-run", "--only-table").code == 2


def test_without_a_name_the_studies_are_listed(small: str) -> None:
    called = pvg("study")
    assert called.code == 0
    for name in ("small", "quick", "published-shape", "robust", "pvg study NAME"):
        assert name in called.out
    assert {"small", "quick"} <= {found["name"] for found in pvg("study", "--json").document["studies"]}


# --- signals and real games -------------------------------------------------------------------------------------------

# `pvg study` as a separate process, the stand-in plays its games.
STUDY = "import sys, pvg_cli.study; pvg_cli.study.PVG = {pvg!r}; from pvg_cli.main import app; app(prog_name='pvg')"


def test_ctrl_c_stops_at_commit_points_and_says_how_to_go_on(small: str) -> None:
    behave(cgc_seed_000="wait")
    command = [sys.executable, "-c", STUDY.format(pvg=PVG), "study", "small", "--json"]
    study = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_a_commit(study, "small", ["cgc-seed-000"])
    pid = int(Path("played.txt").read_text().split()[1])
    study.send_signal(signal.SIGINT)
    out, err = study.communicate(timeout=120)
    assert study.returncode == 130
    assert is_gone(pid)
    assert json.loads(out)["status"] == "stopped"
    for said in ("stopping 1 at their next commit point", "cgc-seed-000 stopped at a commit point",
                 "Stopped. To resume: pvg study small"):  # fmt: skip
        assert said in err, said
    behave()
    again = pvg("study", small)
    assert again.code == 0
    assert "cgc-seed-000 resumes" in again.err


def wait_for_a_commit(owner: subprocess.Popen[str], study: str, cells: list[str]) -> None:
    """Until each of the cells has committed in its prover's phase."""
    states = [Path("runs") / study / cell / "state.json" for cell in cells]
    while not all(state.exists() and b"train_prover" in state.read_bytes() for state in states):
        assert owner.poll() is None, "the study ended by itself"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].startswith("Z")


@pytest.mark.drill
def test_a_killed_study_leaves_no_game_behind_and_goes_on() -> None:
    Path("tiny.toml").write_text(TINY)
    cells = ["cgc-seed-000", "src-seed-000"]
    study = subprocess.Popen(
        [*ENTRY, "study", "tiny.toml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    )
    locks = [Path("runs/tiny") / place / "lock" for place in (".", *cells)]
    while not all(lock.exists() and lock.read_text() for lock in locks):
        assert study.poll() is None, "the study ended by itself"
        time.sleep(0.05)
    second = pvg("study", "tiny.toml")
    assert (second.code, f"is being played by process {study.pid}" in second.err) == (2, True)
    wait_for_a_commit(study, "tiny", cells[1:])
    pids = [int(lock.read_text()) for lock in locks[1:]]
    study.kill()
    study.wait()
    deadline = time.monotonic() + 120
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    done = pvg("study", "tiny.toml", "--json")
    assert done.code == 0, done.err
    assert "src-seed-000 resumes" in done.err
    assert [found["summary"]["n"] for found in done.document["results"]] == [1] * 4
