"""Trainer ranks in processes that a real torchrun starts: the bits of local ranks, whatever is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from test_ray_workers import weights
from typer.testing import CliRunner

from pvg.config.load import build_experiment
from pvg.errors import MissingRequirementError, StoppedAtStart, UsageError
from pvg.workers import torchrun
from pvg.workers.node_agent import DriverAddress
from pvg.workers.torchrun import Launch, Meeting, News, driver_address, driving, launched, refuse_other_counts, serve
from pvg.workers.torchrun_supply import TorchrunSupply
from pvg_cli.main import app

pytestmark = pytest.mark.slow

GAME = (
    "game.rounds=1",
    "training.steps=5",
    "training.groups=4",
    "verifier.steps=2",
    "game.mint_problems=16",
    "game.test.problems=4",
    "store.commit_every=2",
    "cluster.kind=local",
    "cluster.trainer_ranks=2",
)
PATIENCE_S = 240.0
FIRST_STEP = re.compile(r"\[step\].* phase=train_prover .*step=3 ")  # one step after the second commit of the phase
LOOPBACK = ("--rdzv-backend", "c10d", "--local-addr", "127.0.0.1")


def train(root: Path, *words: str, settings: Sequence[str] = GAME) -> list[str]:
    given = [word for text in (*settings, f"store.root={root}") for word in ("-s", text)]
    return ["train", *given, *words]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Started:
    """Agents of torchrun, each with its processes."""

    def __init__(self, agents: list[subprocess.Popen[str]]) -> None:
        self.agents = agents

    def process(self, number: int) -> psutil.Process:
        """The process with this rank: 0 is the driver."""
        found = [
            child
            for agent in self.agents
            for child in psutil.Process(agent.pid).children()
            if child.environ().get("RANK") == str(number)
        ]
        assert len(found) == 1
        return found[0]

    def rank(self, number: int) -> psutil.Process:
        """The trainer rank that runs in this process: a child of the process that forks ranks there."""
        (nursery,) = [child for child in self.process(number).children() if "pvg.workers.local" in str(child.cmdline())]
        (rank,) = nursery.children()
        return rank

    def ended(self) -> tuple[list[int], str]:
        """The exit codes of the agents, and what all processes have printed to stderr."""
        told = [agent.communicate(timeout=PATIENCE_S)[1] for agent in self.agents]
        return [agent.returncode for agent in self.agents], "".join(told)


@contextmanager
def running(command: Sequence[str], *agents: Sequence[str]) -> Iterator[Started]:
    """torchrun with these arguments, once per agent. At the end, no process is left."""
    before = {process.pid for process in psutil.process_iter()}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "-m", "pvg", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for options in agents
    ]
    try:
        yield Started(found)
        wait_until(lambda: not _left(before), "all processes have ended")
    finally:
        for process in _left(before):
            process.kill()
        for agent in found:
            agent.kill()
            agent.communicate()


def _left(before: set[int]) -> list[psutil.Process]:
    """Processes of this test that run."""
    own = []
    for process in psutil.process_iter():
        try:
            if process.pid not in before and "TORCHELASTIC_RUN_ID" in process.environ():
                own.append(process)
        except psutil.Error:
            continue
    return own


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def trains(run: Path) -> None:
    """Wait until the run has made steps since a commit of its prover."""
    log = run / "events.log"
    wait_until(lambda: log.exists() and FIRST_STEP.search(log.read_text()) is not None, f"{log} has a step")


def two_agents(*more: str) -> list[list[str]]:
    port = free_port()
    return [["--nnodes", "2", *LOOPBACK, "--rdzv-endpoint", f"127.0.0.1:{port}", *more]] * 2


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights of the game with two local ranks."""
    root = tmp_path_factory.mktemp("local")
    command = [sys.executable, "-m", "pvg", *train(root, "--name", "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return weights(root / "run")


# --- games ------------------------------------------------------------------------------------------------------------


def test_ranks_of_torchrun_train_the_bits_of_local_ones_also_if_one_is_killed(
    tmp_path: Path, expected: dict[str, str]
) -> None:
    with running(train(tmp_path, "--name", "run", "--json"), ["--nproc-per-node", "2"]) as started:
        trains(tmp_path / "run")
        os.kill(started.rank(1).pid, signal.SIGKILL)
        codes, told = started.ended()
    assert codes == [0], told
    assert weights(tmp_path / "run") == expected != {}
    log = (tmp_path / "run" / "events.log").read_text()
    assert re.search(r'event="rank lost" rank=1 why="killed by SIGKILL, on node \S+/1"', log)
    assert "Process 1 of torchrun: a trainer rank of the driver at 127.0.0.1." in told


@pytest.mark.drill
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_all_of_them_and_the_run_continues_with_local_ranks(
    tmp_path: Path, expected: dict[str, str], killed: int
) -> None:
    run = tmp_path / "run"
    with running(train(tmp_path, "--name", "run"), *two_agents()) as started:
        trains(run)
        os.kill(started.process(killed).pid, signal.SIGKILL)
        codes, told = started.ended()
    assert codes == [1, 1], told
    lost = re.search(r"error: A process of torchrun was lost: the connection to \S+/1 broke\.", told)
    assert (lost is not None) == (killed == 1), told
    command = [sys.executable, "-m", "pvg", "train", "--resume", str(run)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert weights(run) == expected


@pytest.mark.drill
@pytest.mark.parametrize("killed", [0, 1])
def test_torchrun_restarts_a_killed_process_and_the_driver_resumes_its_run(
    tmp_path: Path, expected: dict[str, str], killed: int
) -> None:
    run = tmp_path / "run"
    with running(train(tmp_path, "--name", "run"), *two_agents("--max-restarts", "1")) as started:
        trains(run)
        os.kill(started.process(killed).pid, signal.SIGKILL)
        codes, told = started.ended()
    assert codes == [0, 0], told
    assert "Resuming run." in told
    assert weights(run) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.drill
@pytest.mark.parametrize("agent_of", [0, 1])
def test_ctrl_c_at_any_agent_stops_the_run_at_its_next_commit(tmp_path: Path, agent_of: int) -> None:
    run = tmp_path / "run"
    with running(train(tmp_path, "--name", "run", "--json"), *two_agents()) as started:
        trains(run)
        agent = psutil.Process(started.process(agent_of).pid).parent()
        assert agent is not None
        agent.send_signal(signal.SIGINT)
        documents = [agent.communicate(timeout=PATIENCE_S)[0] for agent in started.agents]
        assert all(agent.returncode != 0 for agent in started.agents)
    (document,) = [json.loads(text) for text in documents if text]
    assert document["status"] == "interrupted"
    state = json.loads((run / "state.json").read_text())["state"]
    # A later commit than the one before the signal.
    assert state["phase"] == "checkpoint" or (state["phase"] == "train_prover" and state["step"] > 2)


def test_a_wrong_number_of_processes_ends_all_of_them_with_one_error(tmp_path: Path) -> None:
    command = train(tmp_path, settings=("cluster=none",))
    with running(command, ["--nproc-per-node", "2"]) as started:
        codes, told = started.ended()
    assert codes == [1]
    assert told.count("error: torchrun has started 2 processes, but the experiment has no trainer ranks.") == 1
    assert "Use -s cluster.kind=local -s cluster.trainer_ranks=2, or start pvg without torchrun" in told
    assert "Traceback" not in told.partition("error: ")[0]
    assert not list(tmp_path.iterdir())


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Launch, Launch]]:
    """Two processes whose store is in this one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Launch(0, 2, 0, True, "127.0.0.1", store.port), Launch(1, 2, 1, True, "127.0.0.1", store.port)
    del store  # ends its server


ADDRESS = DriverAddress("127.0.0.1", 1, b"secret", "/")


def failed(launch: Launch) -> None:
    """A driver that has ended with an error."""
    with pytest.raises(RuntimeError), driving(launch):
        raise RuntimeError


def test_a_note_is_there_for_all_processes_when_it_was_left(pair: tuple[Launch, Launch]) -> None:
    driver, process = Meeting(pair[0]), Meeting(pair[1])
    for number in range(10_000):
        driver._leave(str(number), number)
        assert process._note(str(number)) == number


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_process_waits_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as torchrun:
        try:
            assert torchrun.stdout is not None
            port = int(torchrun.stdout.readline())
            driver, process = (Meeting(Launch(n, 2, n, True, "127.0.0.1", port)) for n in range(2))
            driver.begin("one")
            monkeypatch.setattr("pvg.workers.torchrun.STORE_S", 0.5)
            monkeypatch.setattr("pvg.workers.torchrun.JOIN_S", 0.5)
            torchrun.send_signal(signal.SIGSTOP)
            calls: list[Callable[[], object]] = [process.news, driver.others, lambda: driver.invite(ADDRESS, [])]
            for call in [*calls, lambda: Meeting(process.launch)]:
                with pytest.raises(MissingRequirementError, match="torchrun"):
                    call()
            driver.end(1)
        finally:
            torchrun.kill()


def test_a_restarted_process_waits_for_the_next_driver_when_the_last_one_failed(pair: tuple[Launch, Launch]) -> None:
    failed(pair[0])
    process = Meeting(pair[1])
    assert process.news() == process.news() == News()
    with driving(pair[0]):
        assert process.news() == News(begun=True)
    assert process.news() == News(exit_code=0)


@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError(), 1), (StoppedAtStart(), 130), (UsageError("wrong", "mend it"), 2)]
)
def test_a_process_ends_with_the_exit_code_of_a_driver_that_began_and_failed_after_it(
    error: BaseException, code: int, pair: tuple[Launch, Launch]
) -> None:
    process = Meeting(pair[1])
    assert process.news() == News()
    with pytest.raises(type(error)), driving(pair[0]):
        raise error
    assert process.news() == News(begun=True, exit_code=code)


def test_a_process_does_not_follow_the_invitation_of_the_one_that_it_replaces(pair: tuple[Launch, Launch]) -> None:
    address = ADDRESS
    driver, first = Meeting(pair[0]), Meeting(pair[1])
    driver.begin("driver")
    assert first.news() == News(begun=True)
    driver.others()
    driver.invite(address, [7, 8])
    second = Meeting(pair[1])
    assert first.news() == News(begun=True, driver=address, key=8)
    assert second.news() == News()
    driver.end(1)
    assert first.news() == News(begun=True, exit_code=1)
    assert second.news() == News()
    with driving(pair[0]):
        assert second.news() == News(begun=True)


def test_the_exit_code_is_that_of_the_driver_that_follows_a_failed_one(pair: tuple[Launch, Launch]) -> None:
    failed(pair[0])

    def next_driver() -> None:
        time.sleep(1.0)  # the process looks before it
        with driving(pair[0]):
            pass

    driver = threading.Thread(target=next_driver)
    driver.start()
    assert serve(pair[1], print) == 0
    driver.join()


@pytest.mark.parametrize("served", [False, True])
def test_a_process_that_loses_the_store_prints_no_document(served: bool) -> None:
    """The first torchrun takes the store with it, perhaps before the other processes have read the driver's end."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (Launch(n, 2, n, True, "127.0.0.1", store.port) for n in range(2))
    process = subprocess.Popen(
        [sys.executable, "-m", "pvg", "train", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **inherited(second), "OMP_NUM_THREADS": "1"},
    )

    async def serve_and_leave(meeting: Meeting) -> None:
        supply = TorchrunSupply(meeting, lambda: None)
        await supply.ready()
        await supply.close()

    try:
        meeting = Meeting(first)
        meeting.begin("driver")
        if served:
            asyncio.run(serve_and_leave(meeting))
        else:
            meeting.others()  # waits until the process has looked
        del store, meeting  # ends the store, without a note of the end
        document, told = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, document) == (3, ""), told
    if served:
        assert "Process 1 of torchrun: the driver has ended without an exit code." in told
        assert "error: " not in told
    else:
        assert re.search(r"error: torchrun's store at 127\.0\.0\.1:\d+ does not answer: ", told)


# --- variables that a child of torchrun's process has inherited -------------------------------------------------------


def inherited(launch: Launch) -> dict[str, str]:
    place = {"RANK": str(launch.number), "WORLD_SIZE": "2", "MASTER_ADDR": launch.host, "MASTER_PORT": str(launch.port)}
    return {**ENVIRONMENT, "GROUP_WORLD_SIZE": "1", **place}


def test_train_in_one_process_alone_ends_with_the_way_out(
    pair: tuple[Launch, Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torchrun, "JOIN_S", 0.5)
    alone = "start pvg without torchrun's variables: env -u TORCHELASTIC_RUN_ID pvg train ..."
    other = CliRunner().invoke(app, ["train"], env=inherited(pair[1]))
    assert other.exit_code == 3
    assert "error: Process 1 of torchrun has found no driver in 0.5 s: pvg train has not begun in process 0." in (
        other.stderr
    )
    assert f"Start pvg train in all processes of torchrun, or {alone}" in other.stderr
    first = CliRunner().invoke(app, ["train"], env=inherited(pair[0]))
    assert first.exit_code == 2
    assert "torchrun has started 2 processes, but the experiment has no trainer ranks." in first.stderr
    assert f"-s cluster.trainer_ranks=2, or {alone}" in first.stderr
    ranks = ["train", "-s", "cluster.kind=local", "-s", "cluster.trainer_ranks=2"]
    waiting = CliRunner().invoke(app, ranks, env=inherited(pair[0]))
    assert waiting.exit_code == 3
    assert "error: Process 1 of torchrun has not reached its store in 0.5 s." in waiting.stderr
    assert alone in waiting.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--json", "--name", "a", "--resume", "b"],  # pvg refuses them together
        ["train", "--json", "--no-such-option"],  # typer refuses it
    ],
)
def test_of_several_processes_only_the_first_prints_the_document_of_an_error(words: list[str]) -> None:
    launches = [Launch(number, 2, number, True, "127.0.0.1", 1) for number in range(2)]
    first, second = (CliRunner().invoke(app, words, env=inherited(launch)) for launch in launches)
    assert json.loads(first.stdout)["error"]["exit_code"] == first.exit_code == second.exit_code == 2
    assert second.stdout == ""
    assert second.stderr == first.stderr != ""
    alone = CliRunner().invoke(app, words, env={**inherited(launches[1]), "WORLD_SIZE": "1"})
    assert alone.stdout == first.stdout
    other = CliRunner().invoke(app, ["report", "no-such-run", "--json"], env=inherited(launches[1]))
    assert json.loads(other.stdout)["error"]["exit_code"] == other.exit_code == 2


def test_a_dry_run_in_another_process_says_where_the_plan_is(pair: tuple[Launch, Launch]) -> None:
    called = CliRunner().invoke(app, ["train", "--dry-run"], env=inherited(pair[1]))
    assert (called.exit_code, called.stdout) == (0, "")
    assert "Process 1 of torchrun prints no plan, because process 0 does." in called.stderr
    assert "env -u TORCHELASTIC_RUN_ID pvg train" in called.stderr


# --- what torchrun says -----------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
FOUR = Launch(number=3, processes=4, local=1, one_machine=False, host="10.0.0.1", port=29500)


def test_only_several_processes_of_torchrun_are_a_launch() -> None:
    assert launched(ENVIRONMENT) == FOUR
    assert launched({**ENVIRONMENT, "WORLD_SIZE": "1"}) is None
    other_launchers = {name: text for name, text in ENVIRONMENT.items() if not name.startswith("TORCHELASTIC")}
    assert launched(other_launchers) is None
    with pytest.raises(UsageError, match="does not share its store") as raised:
        launched({**ENVIRONMENT, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert "--rdzv-backend c10d" in raised.value.remedy
    with pytest.raises(UsageError, match="one of its variables is no number"):
        launched({**ENVIRONMENT, "RANK": ""})
    with pytest.raises(UsageError, match="variable WORLD_SIZE is not set") as raised:
        launched({name: text for name, text in ENVIRONMENT.items() if name != "WORLD_SIZE"})
    assert "env -u TORCHELASTIC_RUN_ID" in raised.value.remedy


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"kind": "none"}, "4 processes, but the experiment has no trainer ranks"),
        ({"kind": "local", "trainer_ranks": 2}, r"cluster\.trainer_ranks = 2\. Use -s cluster\.trainer_ranks=4"),
        ({"kind": "ray", "trainer_ranks": 4}, "cluster = 'ray' starts its ranks itself"),
    ],
)
def test_an_experiment_needs_one_rank_per_process(cluster: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        refuse_other_counts(build_experiment({"cluster": cluster}), FOUR)
    refuse_other_counts(build_experiment({"cluster": {"kind": "local", "trainer_ranks": 4}}), FOUR)


def test_the_driver_listens_where_the_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Debian, a machine's own name stands for 127.0.1.1 there."""
    ways = {"10.0.0.1": "127.0.0.1", "10.0.0.2": "10.0.0.1", "localhost": "127.0.0.1"}
    monkeypatch.setattr(torchrun, "_route", ways.__getitem__)
    assert driver_address(FOUR, ["10.0.0.2"]) == "10.0.0.1"
    assert driver_address(FOUR, ["127.0.0.1", "10.0.0.2"]) == "10.0.0.1"
    assert driver_address(FOUR, ["127.0.0.1"]) == "127.0.0.1"


def test_an_address_without_a_way_is_an_error_that_names_it() -> None:
    with pytest.raises(MissingRequirementError, match=r"This machine cannot reach no\.such\.host\.invalid: ") as raised:
        driver_address(Launch(0, 2, 0, False, "no.such.host.invalid", 1), [])
    assert "--local-addr" in raised.value.remedy
