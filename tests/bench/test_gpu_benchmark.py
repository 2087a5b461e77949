"""`make gpu` on machines without a GPU: what it says, which Python it finds, and that its scripts run."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import peer
from benchmarks.gpu.__main__ import main as gpu
from benchmarks.gpu.environment import EnvironmentProblemError, missing, prepared, requirements, torch_of
from benchmarks.gpu.results import Results, page_of
from benchmarks.gpu.sizes import SMALL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
DUMMY, INNER = "pvg-dummy-of-a-test", "pvg-inner-of-a-test"


def call(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=600)


def wheel(folder: Path, name: str, requires: str = "") -> None:
    folder.mkdir(exist_ok=True)
    plain = name.replace("-", "_")
    info = f"{plain}-1.4.dist-info"
    # No torch fulfils this, so a pip that looked at it would fail.
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.4\nRequires-Dist: torch>=99\n{requires}"
    with zipfile.ZipFile(folder / f"{plain}-1.4-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{plain}.py", "")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without a GPU: `CUDA_VISIBLE_DEVICES= make test`"
)
def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "new")])
    assert gpu() == 3
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("make gpu: there is no GPU")
    assert torch.__version__ in line
    assert not (tmp_path / "new").exists()


def test_a_python_with_all_packages_is_used_as_it_is(tmp_path: Path) -> None:
    wanted = requirements(ROOT)
    assert {"numpy>=2.1", "uvloop>=0.21", "peft>=0.18", "huggingface-hub"} <= set(wanted)  # no markers, no torch
    assert not [line for line in wanted if line.startswith("torch")]
    assert requirements(ROOT, tmp_path) == wanted
    (tmp_path / "trl-1.16.0-py3-none-any.whl").touch()
    assert requirements(ROOT, tmp_path) == [*wanted, "trl"]
    assert prepared(tmp_path / "new", wanted, None) == sys.executable
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("requirement", "met"), [("numpy>=99", False), ("numpy", True), (DUMMY, False)])
def test_which_requirements_are_met(requirement: str, met: bool) -> None:
    assert (missing(sys.executable, [requirement]) == []) == met


@pytest.mark.drill
def test_missing_packages_come_from_a_folder_and_torch_stays(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", DUMMY, f"Requires-Dist: {INNER}\nRequires-Dist: numpy\n")
    wheel(tmp_path / "wheels", INNER)
    folder = tmp_path / "new"
    python = prepared(folder, [f"{DUMMY}>=1.2", "numpy>=2.1"], tmp_path / "wheels")
    assert python == str(folder / "bin" / "python")
    assert torch_of(python)[:2] == torch_of(sys.executable)[:2]
    done = subprocess.run(
        [python, "-c", "import numpy, pvg_dummy_of_a_test, pvg_inner_of_a_test"], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    # Again: the environment is there already.
    assert prepared(folder, [f"{DUMMY}>=1.2"], tmp_path / "wheels") == python

    with pytest.raises(
        EnvironmentProblemError, match=r"lacks pvg-dummy-of-a-test>=2, and pip could not .*make gpu WHEELS"
    ):
        prepared(folder, [f"{DUMMY}>=2"], tmp_path / "wheels")


# A figure that each part must have. The tests play the part `game` often enough.
FIGURES = {
    "verifier": "solutions of 96 tokens, bfloat16: peak memory",
    "steps": "four times the rows: hardware MFU",
    "decoding": "engine, 12 rows, lean decoding",
    "full": "FSDP2 over gloo with MixedPrecisionPolicy: forward and backward",
    "ipc": "again: 2e-06 GB handed over and doubled",
    "parity": "trainer and sampler, adapters beside bfloat16: k3",
    "peer": "adapters: 96 tokens, vocabulary of 1000: peak memory",
}


def test_the_parts_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="`make install`")
    documents = []
    for part, figure in FIGURES.items():
        words = ["gpu", "--device", "cpu", "--small", "--out", str(tmp_path), "--only", part, "--here"]
        monkeypatch.setattr(sys, "argv", words)
        assert gpu() == 0
        documents.append(json.loads((tmp_path / f"{part}.json").read_text()))
        assert documents[-1]["machine"]["torch"] == torch.__version__
        figures = {found["name"]: found for found in documents[-1]["figures"]}
        assert all(found["value"] > 0 for found in figures.values())
        assert figure in figures
        if part == "verifier":
            assert float(figures[figure]["planned"]) > 0
    page = page_of(documents, [])
    assert all(f"## {document['part']}" in page for document in documents)
    assert "| of the measured rate |  | >= 0.5 |" in page
    assert "| of the copy's |  | >= 0.6 |" in page
    assert "profile of decoding of 12 rows: aten::" in page


def test_a_step_of_trl_is_compared_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="`make install`")
    pytest.importorskip("trl", reason="`make test-bridges`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    results = Results("peer")
    peer.measure(results, SMALL, torch.device("cpu"))
    figures = {found["name"]: found for found in results.figures}
    assert figures["TRL: a step with 12 rows sampled"]["value"] > 0
    compared = [figures[f"{what} of TRL's step"] for what in ("time", "memory")]
    assert [each["goal"] for each in compared] == [">= 2", ">= 1"]
    assert all(each["value"] > 0 for each in compared)


@pytest.mark.drill
def test_a_part_is_a_process_and_the_first_is_pytest(tmp_path: Path) -> None:
    for part in ("tests", "verifier"):
        done = call("-m", "benchmarks.gpu", "--device", "cpu", "--small", "--out", str(tmp_path), "--only", part)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed" in done.stdout if part == "tests" else (tmp_path / f"{part}.json").exists()


def test_a_failed_check_fails_the_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results("parity")
    results.check("fine", 0.1, 0.2)
    results.check("not a number", float("nan"), 0.2)
    assert results.write(tmp_path / "parity.json", torch.device("cpu")) == 1
    assert "FAIL not a number" in capsys.readouterr().out
    page = page_of([json.loads((tmp_path / "parity.json").read_text())], ["steps: stopped after its limit of 150 s."])
    assert "| not a number | nan | 0.2 | **failed** |" in page
    assert "**steps: stopped" in page
