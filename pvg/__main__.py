"""`python -m pvg`: the same as the command `pvg`."""

from __future__ import annotations

import sys

from pvg_cli.main import app

sys.exit(app(prog_name="pvg"))
