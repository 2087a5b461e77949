"""The names of the parts of an evaluation; no torch, so that the command line can refuse a wrong one at once."""

from __future__ import annotations

from collections.abc import Sequence

from pvg.errors import UsageError
from pvg.experiment import nearest

PARTS = ("exploit", "best-of-n", "detection", "separability", "calibration", "localisation", "tax")


def parse_parts(text: str) -> Sequence[str]:
    """The parts in `a,b,c`, in their own order. Raises UsageError that names the nearest one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            hint = nearest(name, PARTS)
            raise UsageError(
                f"There is no part {name!r} of an evaluation." + (f" Did you mean {hint!r}?" if hint else ""),
                f"Known: {', '.join(PARTS)}.",
            )
    if not names:
        raise UsageError("--parts names no part.", f"Known: {', '.join(PARTS)}.")
    return tuple(part for part in PARTS if part in names)


def parse_rounds(text: str | None) -> Sequence[int] | None:
    """The rounds in `0,2`; None for None. Raises UsageError for what is no number."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not all(name.isdecimal() for name in names):
        raise UsageError(f"--rounds {text!r} is no list of rounds.", "For example: --rounds 0,2")
    return [int(name) for name in names]
