"""Trainer ranks that a real torchrun starts: the bits of ranks that pvg starts, whatever is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from rank_runs import PVG, TORCHRUN, played, running, train, trains, weights
from typer.testing import CliRunner

from pvg.config.load import build_experiment
from pvg.errors import UsageError
from pvg.workers.launch import Launch, launched, refuse_other_counts
from pvg_cli.main import app


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights of the game with two ranks that pvg starts."""
    return played(tmp_path_factory.mktemp("local"))


def agents(count: int, command: list[str], *more: str) -> list[list[str]]:
    """Commands of torchrun that start two processes, in one agent or in two."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = f"127.0.0.1:{server.getsockname()[1]}"
    meeting = ["--rdzv-backend", "c10d", "--local-addr", "127.0.0.1", "--rdzv-endpoint", end]
    options = ["--nnodes", str(count), "--nproc-per-node", str(2 // count), *meeting, *more]
    return [[*TORCHRUN, *options, "-m", "pvg", *command]] * count


@pytest.mark.drill
@pytest.mark.parametrize(("count", "killed"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_torchrun_restarts_killed_ranks_and_the_driver_resumes_its_run(
    tmp_path: Path, expected: dict[str, str], count: int, killed: int
) -> None:
    run = tmp_path / "run"
    with running(*agents(count, train(tmp_path), "--max-restarts", "3")) as started:
        trains(tmp_path / "modchain")
        started.rank(killed).send_signal(signal.SIGKILL)
        codes, _, told = started.ended()
    assert codes == [0] * count, told
    assert "Resuming modchain." in told
    (tmp_path / "modchain").rename(run)
    assert weights(run) == expected != {}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.drill
def test_without_restarts_a_lost_rank_ends_the_run_which_any_number_of_ranks_continues(
    tmp_path: Path, expected: dict[str, str]
) -> None:
    run = tmp_path / "run"
    with running(*agents(1, train(tmp_path, "--name", "run"))) as started:
        trains(run)
        started.rank(1).send_signal(signal.SIGKILL)
        codes, _, told = started.ended()
    assert codes == [1], told
    assert "error: The connection to another rank broke" in told
    assert "pvg train --resume" in told
    with running([*PVG, "train", "--resume", str(run)]) as started:
        assert started.ended()[0] == [0]
    assert weights(run) == expected


@pytest.mark.drill
def test_ctrl_c_stops_the_run_at_its_next_commit(tmp_path: Path) -> None:
    with running(*agents(1, train(tmp_path, "--name", "run", "--json"))) as started:
        trains(tmp_path / "run")
        started.launchers[0].send_signal(signal.SIGINT)
        _, documents, told = started.ended()
    assert json.loads("".join(documents))["status"] == "interrupted", told


@pytest.mark.drill
def test_a_wrong_number_of_processes_ends_all_of_them_with_one_error(tmp_path: Path) -> None:
    with running(*agents(1, train(tmp_path, settings=("cluster=none",)))) as started:
        codes, _, told = started.ended()
    assert codes == [1]
    assert told.count("error: torchrun has started 2 processes, but the experiment has no trainer ranks.") == 1
    assert "Use -s cluster.kind=local -s cluster.trainer_ranks=2, or" in told
    assert "Traceback" not in told.partition("error: ")[0]
    assert not list(tmp_path.iterdir())


# --- what the launcher says -------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
FOUR = Launch(number=3, processes=4, local=1, here=2, one_machine=False, host="10.0.0.1", port=29500)


def test_only_several_processes_of_a_launcher_are_a_launch() -> None:
    assert launched(ENVIRONMENT) == FOUR
    assert launched({**ENVIRONMENT, "WORLD_SIZE": "1"}) is None
    other_launchers = {name: text for name, text in ENVIRONMENT.items() if not name.startswith("TORCHELASTIC")}
    assert launched(other_launchers) is None
    with pytest.raises(UsageError, match="does not share its store") as raised:
        launched({**ENVIRONMENT, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert "--rdzv-backend c10d" in raised.value.remedy
    with pytest.raises(UsageError, match="missing or wrong: invalid literal"):
        launched({**ENVIRONMENT, "RANK": ""})
    with pytest.raises(UsageError, match="missing or wrong: 'WORLD_SIZE'") as raised:
        launched({name: text for name, text in ENVIRONMENT.items() if name != "WORLD_SIZE"})
    assert "env -u TORCHELASTIC_RUN_ID" in raised.value.remedy


def test_an_experiment_needs_one_rank_per_process() -> None:
    refuse_other_counts(build_experiment({"cluster": {"kind": "local", "trainer_ranks": 4}}), FOUR)
    with pytest.raises(UsageError, match="4 processes, but the experiment has no trainer ranks"):
        refuse_other_counts(build_experiment({"cluster": "none"}), FOUR)
    with pytest.raises(UsageError, match=r"has 2 trainer ranks\. Use .* -s cluster\.trainer_ranks=4"):
        refuse_other_counts(build_experiment({"cluster": {"kind": "local", "trainer_ranks": 2}}), FOUR)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--json", "--name", "a", "--resume", "b"],  # pvg refuses them together
        ["train", "--json", "--no-such-option"],  # typer refuses it
    ],
)
def test_of_several_processes_only_the_first_prints_the_document_of_an_error(words: list[str]) -> None:
    places = [{**ENVIRONMENT, "RANK": str(number), "WORLD_SIZE": "2"} for number in range(2)]
    first, second = (CliRunner().invoke(app, words, env=place) for place in places)
    assert json.loads(first.stdout)["error"]["exit_code"] == first.exit_code == second.exit_code == 2
    assert second.stdout == ""
    assert second.stderr == first.stderr != ""
    alone = CliRunner().invoke(app, words, env={**places[1], "WORLD_SIZE": "1"})
    assert alone.stdout == first.stdout
    other = CliRunner().invoke(app, ["report", "no-such-run", "--json"], env=places[1])
    assert json.loads(other.stdout)["error"]["exit_code"] == other.exit_code == 2


def test_a_dry_run_in_another_process_says_where_the_plan_is() -> None:
    called = CliRunner().invoke(app, ["train", "--dry-run"], env=ENVIRONMENT)
    assert (called.exit_code, called.stdout) == (0, "")
    assert "Process 3 of torchrun prints no plan, because process 0 does." in called.stderr
    assert "env -u TORCHELASTIC_RUN_ID pvg train" in called.stderr


def test_an_address_without_a_way_is_an_error_that_names_it() -> None:
    place = {**ENVIRONMENT, "MASTER_ADDR": "no.such.host.invalid"}
    called = CliRunner().invoke(app, ["train"], env=place)
    assert called.exit_code == 3
    assert re.search(r"error: This machine cannot reach no\.such\.host\.invalid: .*\.\nGive torchrun", called.stderr)
    assert os.environ.get("RANK") is None
