"""How long torch's threads spin for their next piece of work before they go to sleep.

libgomp has them spin for 300,000 turns, some 16 ms on a current x86 processor. That costs nothing while nothing else
runs. Beside other processes, one thread of two spins in vain for a partner that is not being run, and does so again at
every operation: on 2 cores that five other processes shared, a GRPO step took 16 to 30 s so, and 4 to 6 s with 10,000
turns. On the quiet machine, decoding of a batch took 0.30 s with 300,000 turns and with 30,000, 0.33 s with 10,000 and
0.40 s with 3,000.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "GOMP_SPINCOUNT"
TURNS = 30_000
OTHERS = ("OMP_WAIT_POLICY",)  # who has set this has decided


def bound_spinning() -> bool:
    """Have threads spin for TURNS at most in this process and its children; False where that comes too late, because
    torch is loaded (libgomp reads its variables once), or where the user has decided otherwise."""
    if "torch" in sys.modules or any(name in os.environ for name in (VARIABLE, *OTHERS)):
        return False
    os.environ[VARIABLE] = str(TURNS)
    return True
