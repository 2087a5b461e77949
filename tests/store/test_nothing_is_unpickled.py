"""Invariant 8: nothing in pvg or its command line unpickles, and importing the store loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pickletools"}
READERS = {"torch.load", "pandas.read_pickle", "pd.read_pickle", "numpy.lib.format.read_array"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            modules = []
        found += [f"import {name}" for name in modules if name.split(".")[0] in PICKLERS or name in READERS]
        if isinstance(node, ast.Attribute) and ast.unparse(node) in READERS:
            found.append(ast.unparse(node))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            allowed = node.value
            if not (isinstance(allowed, ast.Constant) and allowed.value is False):
                found.append("allow_pickle")
        if isinstance(node, ast.Constant) and node.value in PICKLERS:
            found.append(f"the name {node.value!r}")  # importlib.import_module("pickle")
    return found


def test_no_module_unpickles() -> None:
    files = [path for folder in ("pvg", "cli") for path in (REPOSITORY / folder).rglob("*.py")]
    assert len(files) > 20
    assert {str(path): found for path in files if (found := offences(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path, weights_only=True)",
        "read = torch.load",
        "np.load(path, allow_pickle=True)",
        "importlib.import_module('pickle')",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert offences(source)


def test_importing_the_store_loads_no_torch() -> None:
    code = "import sys, pvg.store, pvg.store.checkpoints; print(*({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
