"""`CudaClock`: marks on a CUDA stream, for spans with `device=True`. Importing this loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.cuda import Event


class CudaClock:
    """A `DeviceClock` on the current stream of the calling thread. Reading it never waits for the device."""

    def mark(self) -> Event:
        import torch

        event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_s(self, start: Event, end: Event) -> float | None:
        if not end.query():  # type: ignore[no-untyped-call]
            return None
        return float(start.elapsed_time(end)) / 1e3
