"""The code task: problems with hidden tests, solutions that are executed, flaws that are proven. See `Code`."""

from __future__ import annotations

from pvg.tasks.code.task import Code

__all__ = ["Code"]
