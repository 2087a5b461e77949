from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil
import pytest
import torch
from tiny_llama import tiny_llama

from pvg.config.training import ModelSection
from pvg.models import compute, open_model
from pvg.models.compute import KEPT_BYTES, return_freed_memory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs Linux with glibc"
)


def test_freed_blocks_go_back_to_the_system_before_much_memory_is_taken() -> None:
    blocks = [bytearray(1 << 16) for _ in range(4096)]  # 256 MB, so small that glibc maps none by itself
    pins = blocks[::64]  # the heap cannot shrink below them
    del blocks
    process = psutil.Process()
    kept = process.memory_info().rss
    return_freed_memory(KEPT_BYTES)
    assert process.memory_info().rss > kept - (1 << 26), "small models keep it"
    return_freed_memory(KEPT_BYTES + 1)
    assert process.memory_info().rss < kept - (1 << 27)
    assert len(pins) == 64


def test_a_model_that_rests_takes_memory_only_for_weights_that_its_file_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapped() -> int:
        """Bytes of the file that are in memory."""
        return sum(part.rss for part in psutil.Process().memory_maps() if part.path.startswith(str(tmp_path)))

    monkeypatch.setattr(compute, "KEPT_BYTES", 0)
    with tiny_llama() as model:
        model.save(tmp_path)
    with open_model(ModelSection(source=str(tmp_path)), torch.device("cpu"), "float32") as model:
        before = model.fingerprint()
        whole = mapped()
        swapped = compute.MAPPINGS.read_text().replace("Swap:                  0 kB", "Swap:                  4 kB")
        (tmp_path / "smaps").write_text(swapped)  # as with a changed page that is swapped out
        with monkeypatch.context() as patch:
            patch.setattr(compute, "MAPPINGS", tmp_path / "smaps")
            model.rest()
        assert mapped() == whole > 0
        model.copy().close()
        assert mapped() == 0
        assert model.fingerprint() == before
        with torch.no_grad():
            next(model.module.parameters()).add_(1.0)
        changed = model.fingerprint()
        model.rest()
        assert model.fingerprint() == changed != before
