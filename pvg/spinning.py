"""Limits how long torch's threads spin for their next piece of work before they sleep.

libgomp's default is 300,000 iterations, some 16 ms on a current x86 processor. This costs nothing on an idle machine.
If other processes use the cores, one of two threads often spins while its partner waits for a core, at every operation.
On 2 cores shared with five other processes, a GRPO step took 16 to 30 s this way, and 4 to 6 s with 10,000 iterations.
On the idle machine, decoding a batch took 0.30 s with 300,000 and with 30,000 iterations, 0.33 s with 10,000 and 0.40 s
with 3,000.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "GOMP_SPINCOUNT"
TURNS = 30_000
OTHERS = ("OMP_WAIT_POLICY",)  # a user who sets this has made the choice


def bound_spinning() -> bool:
    """Limit spinning to TURNS iterations in this process and its children. Returns False if it is too late because
    torch is loaded (libgomp reads its variables once), or if the user has made another choice."""
    if "torch" in sys.modules or any(name in os.environ for name in (VARIABLE, *OTHERS)):
        return False
    os.environ[VARIABLE] = str(TURNS)
    return True
