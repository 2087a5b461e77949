"""Sets variables of the process that torch and the libraries below it read once: call it before torch is loaded.

It limits how long torch's threads spin for their next piece of work before they sleep; libgomp's default is some 16 ms.
If other processes use the cores, one of two threads often spins while its partner waits for a core, at every operation.
It limits how many compiled products oneDNN keeps: it compiles one for each number of rows. It lets torch ask for pages
of 2 MB for tensors of 2 MB and more, where Linux gives them on request: 512 small ones take the system more time.
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
    """For this process and its children. What the user has set stays. Returns whether spinning is limited to TURNS now:
    not if torch is loaded, so that it is too late, or if the user has made another choice."""
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
