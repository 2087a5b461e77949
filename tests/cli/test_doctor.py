"""`pvg doctor` on machines where something is wrong: it names the problem, and never fails itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from calling import pvg, pvg_process

from pvg_cli import doctor

pytestmark = pytest.mark.slow


def test_packages_that_cannot_be_loaded_or_are_too_old_are_named() -> None:
    facts = Path("broken/transformers-4.40.0.dist-info/METADATA")
    facts.parent.mkdir(parents=True)
    facts.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.40.0\n")
    package = Path("broken/torch/__init__.py")
    package.parent.mkdir()
    package.write_text('raise OSError("libcudart.so.12: cannot open shared object file")\n')
    called = pvg_process("doctor", "--json", env={**os.environ, "PYTHONPATH": str(Path("broken").absolute())})
    checks = {check["name"]: check for check in called.document["checks"]}
    assert called.code == 1
    assert checks["torch"]["verdict"] == "missing"
    assert "cannot be loaded: OSError: libcudart.so.12" in checks["torch"]["found"]
    assert checks["torch"]["remedy"].startswith("Uninstall torch first. Then: ")
    assert {"disk", "runs folder", "cores"} <= checks.keys()  # the other checks go on
    assert "Traceback" not in called.err
    found = checks["transformers"]
    assert (found["verdict"], found["found"]) == ("missing", "4.40.0, but pvg needs 5.0 or newer")
    assert "'transformers>=5.0'" in found["remedy"]


def test_versions_compare_as_numbers() -> None:
    for version, least, enough in (("2.13.0+cpu", "2.9", True), ("2.9", "2.9", True), ("2.8.1", "2.9", False)):
        assert (doctor._numbers(version) >= doctor._numbers(least)) is enough


def test_a_file_in_the_place_of_the_runs_folder() -> None:
    Path("runs").touch()
    called = pvg("doctor", "--json")
    assert called.code == 1
    assert "Not a directory" in called.out


def test_it_is_healthy_here_and_names_variables_that_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """pvg works if OMP_NUM_THREADS is not a number, and if the interpreter for vLLM does not exist."""
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    monkeypatch.setenv("PVG_VLLM_PYTHON", "/no/such/python")
    called = pvg("doctor", "--json")
    checks = {check["name"]: check for check in called.document["checks"]}
    assert called.code == 0, called.out
    assert {"python", "torch", "transformers", "disk", "runs folder", "cores", "memory"} <= checks.keys()
    assert checks["torch"]["verdict"] == "ok"
    assert sum(name.startswith("gpu") for name in checks) >= 1
    assert checks["vllm"]["verdict"] == "notice"
    assert "PVG_VLLM_PYTHON = '/no/such/python' is not an executable file" in checks["vllm"]["found"]


WITHOUT = "sys.modules['numpy'] = sys.modules['aiohttp'] = sys.modules['psutil'] = None"


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (WITHOUT, {"numpy": "cannot be loaded", "aiohttp": "cannot be loaded", "machine": "psutil"}),
        ("os.environ['HF_HUB_DOWNLOAD_TIMEOUT'] = 'abc'", {"transformers": "abc"}),
    ],
)
def test_it_works_on_a_broken_machine_and_names_what_is_broken(broken: str, named: dict[str, str]) -> None:
    start = f"import os, sys\n{broken}\nsys.argv = ['pvg', 'doctor', '--json']\n"
    command = [sys.executable, "-c", f"{start}from pvg_cli.main import app\nsys.exit(app(prog_name='pvg'))"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    checks = {each["name"]: each for each in orjson.loads(done.stdout)["checks"]}
    for check, words in named.items():
        assert checks[check]["verdict"] != "ok"
        assert words in checks[check]["found"]
