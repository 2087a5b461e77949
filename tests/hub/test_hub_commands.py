"""Commands whose experiment names a model or a dataset of the hub: what they say, download, and write down."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pytest
from calling import pvg
from huggingface_hub import constants
from loopback_hub import Hub
from pyarrow import parquet

from pvg import hub as pvg_hub
from pvg.config.experiment import Experiment
from pvg.config.task import Gsm8kTask
from pvg.errors import ConfigurationError
from pvg.store.run_directory import RunDirectory
from pvg.study.plan import load_study
from pvg.tasks import open_task

pytestmark = pytest.mark.slow

PROVER = ("-s", "models.prover.source=hf:tiny/prover")
WANTED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def rows_of(split: str, count: int) -> bytes:
    content = io.BytesIO()
    questions = [f"{split} {number}?" for number in range(count)]
    table = {"question": questions, "answer": [f"1+1 = <<1+1=2>>2\n#### {number}" for number in range(count)]}
    parquet.write_table(pyarrow.table(table), content)
    return content.getvalue()


@pytest.fixture
def dataset() -> dict[str, bytes]:
    """In the layout of openai/gsm8k, which has a second variant."""
    return {
        "README.md": b"# Data",
        "load.py": b"raise SystemExit",
        "main/train-00000-of-00001.parquet": rows_of("train", 20),
        "main/test-00000-of-00001.parquet": rows_of("test", 5),
        "socratic/train-00000-of-00001.parquet": b"another variant",
    }


def test_a_dry_run_prints_the_commit_and_the_size_and_downloads_nothing(
    hub: Hub, here: Path, model: dict[str, bytes]
) -> None:
    commit = hub.add("tiny/prover", model)
    called = pvg("train", "--dry-run", *PROVER)
    assert called.code == 0, called.err
    size = sum(len(data) for name, data in model.items() if name in WANTED)
    assert f"models.prover.source: 5 of 5 files to download, {size / 1e6:.1f} MB" in called.out
    document = pvg("train", "--dry-run", "--json", *PROVER).document
    assert document["experiment"]["models"]["prover"]["source"] == f"hf:tiny/prover@{commit}"
    assert document["downloads"] == {"models.prover.source": {"files": 5, "missing": 5, "size": size}}
    assert hub.downloads() == []
    assert not Path("runs").exists()


def test_a_run_keeps_the_commit_that_it_began_with(hub: Hub, here: Path, model: dict[str, bytes]) -> None:
    commit = hub.add("tiny/prover", model)
    begun = Experiment.model_validate(pvg("train", "--dry-run", "--json", *PROVER).document["experiment"])
    RunDirectory.create(Path("runs"), "first", begun)
    hub.add("tiny/prover", model)
    pvg_hub._commit.cache_clear()  # as in another process
    for again in (("--resume", "first"), ("modchain", *PROVER, "--resume", "first")):
        called = pvg("train", *again, "--dry-run", "--json")
        assert called.code == 0, called.err
        assert called.document["experiment"]["models"]["prover"]["source"] == f"hf:tiny/prover@{commit}"
    other = pvg("train", "modchain", "-s", "models.prover.source=hf:tiny/prover@main", "--resume", "first", "--dry-run")
    assert other.code == 2
    assert f'"hf:tiny/prover@{commit}" -> "hf:tiny/prover@' in other.err


def test_a_study_names_commits(here: Path) -> None:
    Path("mine.toml").write_text(
        'name = "mine"\nexperiment = "modchain"\n[common]\nmodels.prover.source = "hf:tiny/prover"\n'
    )
    with pytest.raises(ConfigurationError, match=r"models\.prover\.source = 'hf:tiny/prover' has no commit.*dry-run"):
        load_study("mine.toml", [], runs=Path("runs"))
    Path("mine.toml").write_text(Path("mine.toml").read_text().replace('prover"', f'prover@{"a" * 40}"'))
    assert load_study("mine.toml", [], runs=Path("runs")).cells


def test_problems_of_a_dataset_of_the_hub(hub: Hub, here: Path, dataset: dict[str, bytes]) -> None:
    commit = hub.add("openai/gsm8k", dataset, kind="datasets")
    Path("gsm.toml").write_text('name = "gsm"\n[task]\nkind = "gsm8k"\npath = "hf:openai/gsm8k"\n')
    called = pvg("train", "gsm.toml", "--dry-run", "--json")
    assert called.document["experiment"]["task"]["path"] == f"hf:openai/gsm8k@{commit}"
    task = open_task(Gsm8kTask(path=Path("hf:openai/gsm8k")))
    assert [problem.question for problem in task.problems("test")] == [f"test {number}?" for number in range(5)]
    assert len(list(task.problems("train"))) == 20
    assert sorted(hub.downloads()) == ["test-00000-of-00001.parquet", "train-00000-of-00001.parquet"]
    hub.add("tiny/nothing", {"README.md": b""}, kind="datasets")
    with pytest.raises(ConfigurationError, match="has no train and test files"):
        open_task(Gsm8kTask(path=Path("hf:tiny/nothing")))


TRAIN = """
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 1000  # bytes between two looks at what was asked; 10 MB by default
from pvg_cli.main import app
app(["train", "-s", "models.prover.source=hf:tiny/prover"], prog_name="pvg")
"""


@pytest.mark.parametrize(
    ("number", "ignored"), [(signal.SIGINT, False), (signal.SIGTERM, True)], ids=["SIGINT", "SIGTERM in the background"]
)
def test_a_download_is_stopped_by_a_signal(
    hub: Hub, environment: Path, model: dict[str, bytes], number: signal.Signals, ignored: bool
) -> None:
    """The slow file would take 40 seconds. Its process ends before, and leaves no part of it. `ignored`: SIGINT is
    ignored, as in a command that a script started with `&`."""
    hub.add("tiny/prover", model)
    hub.slow.add("model.safetensors")
    script = """trap '' INT; exec "$@" """ if ignored else """exec "$@" """
    command = ["sh", "-c", script, "sh", sys.executable, "-c", TRAIN]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while "model.safetensors" not in hub.downloads() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
    assert "model.safetensors" not in hub.sent
    assert process.returncode == 130, err
    assert err.endswith("Stopped before the work started.\n")
    assert "Traceback" not in err
    assert list(environment.rglob("*.incomplete")) == []
    assert not Path("runs").exists()


def test_a_hub_that_stops_answering_while_a_game_begins_leaves_no_run(
    hub: Hub, here: Path, model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("tiny/prover", model)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    called = pvg("train", *PROVER)
    assert called.code == 3
    assert "http://127.0.0.1:9" in called.err
    assert not Path("runs").exists()


def test_a_dataset_out_of_reach_is_named_with_what_works_without_a_network(
    hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    words = ["task.kind=data", "task.path=hf:tiny/sums"]
    called = pvg("train", "--dry-run", *(word for setting in words for word in ("-s", setting)))
    assert called.code == 3
    assert "hf:tiny/sums" in called.err
    assert "-s task.path=DIR" in called.err


def test_a_reader_of_traces_may_be_a_model_of_the_hub(hub: Hub, here: Path, model: dict[str, bytes]) -> None:
    hub.add("tiny/prover", model)
    Path("t.jsonl").write_text('{"prompt": "H1+2+3+4+5?", "text": "1+2=3;3+3=6;6+4=0;0+5=5;A5", "truth": "5"}\n')
    called = pvg("measure", "t.jsonl", "--reader", "hf:tiny/prover", "--measures", "cir", "--json")
    assert called.code == 0, called.err
    assert called.document["sources"][0]["measures"]["cir"]["value"] > 0
