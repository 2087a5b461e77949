"""`python -m pvg`: the same as the command `pvg`."""

from __future__ import annotations

import os
import sys

import pvg

# `-m` without `-P` looks for modules in the current folder first. pvg itself may be there, in a checkout.
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(pvg.__file__)):
    del sys.path[0]

from pvg_cli.main import app

sys.exit(app(prog_name="pvg"))
