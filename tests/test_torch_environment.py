"""How long torch's threads spin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pvg.torch_environment import set_torch_environment

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COMMAND = "import pvg_cli.main, os; print(os.environ.get('GOMP_SPINCOUNT', '-'))"


def say(code: str, **variables: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=clean | variables, capture_output=True, text=True, check=True, timeout=300
    )
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("variables", "turns"), [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "-")]
)
def test_the_command_bounds_spinning_unless_the_user_decided(variables: dict[str, str], turns: str) -> None:
    assert say(COMMAND, **variables) == turns


def test_the_command_bounds_what_onednn_keeps_unless_the_user_decided() -> None:
    """One number of rows needs some 25 products for each layer. By default oneDNN keeps 1,024."""
    name, other = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
    start = f"import os; [os.environ.pop(each, None) for each in ({name!r}, {other!r})]; "
    end = f"import pvg_cli.main; print(os.environ.get({name!r}), os.environ.get({other!r}))"
    kept, same = say(start + end).split()
    assert kept == same
    assert 25 <= int(kept) <= 128
    assert say(f"{start}os.environ[{other!r}] = '300'; {end}").split() == ["None", "300"]


@pytest.mark.skipif(not PAGES.is_file(), reason="needs Linux with large pages")
@pytest.mark.parametrize(("start", "asks"), [("pop('{}', None)", True), ("update({{'{}': '0'}})", False)])
def test_large_tensors_ask_for_large_pages_unless_the_user_decided(start: str, asks: bool) -> None:
    start = f"import os; os.environ.{start.format('THP_MEM_ALLOC_ENABLE')}; import pvg_cli.main, torch; "
    ask = (
        "print(' hg' in open('/proc/self/smaps').read().partition(f'{at:x}-')[2].partition('VmFlags')[2].split('-')[0])"
    )
    assert say(f"{start}large = torch.ones(1 << 26); at = large.data_ptr() & ~0xFFF; {ask}") == str(asks)


def test_once_torch_is_loaded_it_is_too_late_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: F401

    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert not set_torch_environment()
    assert "GOMP_SPINCOUNT" not in os.environ
