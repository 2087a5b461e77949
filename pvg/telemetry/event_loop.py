"""The event loop a run uses: uvloop where it is installed, otherwise asyncio's own, and never the one for the other
without saying so.

    run, notice = runner(experiment.telemetry.event_loop)
    with run:
        run.run(main())
"""

from __future__ import annotations

import asyncio
from typing import Literal

Kind = Literal["uvloop", "asyncio"]


def runner(kind: Kind) -> tuple[asyncio.Runner, str | None]:
    """A runner with an event loop of `kind`, and a notice when it had to be another (uvloop is not on Windows)."""
    if kind == "asyncio":
        return asyncio.Runner(), None
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner(), "uvloop is not installed here: the run uses asyncio's own event loop, which is slower."
    return asyncio.Runner(loop_factory=uvloop.new_event_loop), None
