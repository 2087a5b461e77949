"""Limits how long torch's threads spin for their next piece of work before they sleep.

libgomp's default is 300,000 iterations, some 16 ms on a current x86 processor. This costs nothing on an idle machine.
If other processes use the cores, one of two threads often spins while its partner waits for a core, at every operation.

Also limits how many compiled products oneDNN keeps, which computes in bfloat16, and in float32 on some processors
(pvg.models.compute). It compiles one for each number of rows, and by default keeps 1,024, of about 0.6 MB each.

Also lets torch ask for pages of 2 MB for tensors of 2 MB and more, where Linux gives them on request: the system clears
a page when it is taken, and 512 small ones take it more time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "GOMP_SPINCOUNT"
TURNS = 30_000
OTHERS = ("OMP_WAIT_POLICY",)  # a user who sets this has made the choice
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's own, and torch's
KEPT = 64  # a layer needs some 25, forward and backward
PAGES, ON_REQUEST = "THP_MEM_ALLOC_ENABLE", Path("/sys/kernel/mm/transparent_hugepage")  # torch's, and Linux's


def set_torch_environment() -> bool:
    """Limit spinning to TURNS iterations in this process and its children. Returns False if it is too late because
    torch is loaded (libgomp reads its variables once), or if the user has made another choice."""
    if "torch" in sys.modules:
        return False
    if not any(name in os.environ for name in CACHES):
        os.environ |= dict.fromkeys(CACHES, str(KEPT))
    if ON_REQUEST.is_dir():
        os.environ.setdefault(PAGES, "1")
    if any(name in os.environ for name in (VARIABLE, *OTHERS)):
        return False
    os.environ[VARIABLE] = str(TURNS)
    return True
