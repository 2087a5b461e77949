"""The code task: problems with hidden tests, executed solutions, and proven flaws. See `Code`."""

from __future__ import annotations

from pvg.tasks.code.task import Code

__all__ = ["Code"]
