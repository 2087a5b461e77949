from __future__ import annotations

import ctypes
import sys

import psutil
import pytest

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
