"""The thread in which a process computes, and how many threads torch uses in it.

    executor = compute_executor(experiment.models.threads)      # 0: the width of the first model decides
    threads = executor.settle(width_of(model.module))

The default comes from `default_threads`, not from the number of cores. Each operation ends in a barrier where every
thread waits for all others. On a busy machine the kernel often suspends one of them, and the barrier takes
milliseconds. An operation of a small model takes 0.01 to 0.5 ms. On two cores, a step of the embedded game with two
threads takes ten to twelve times as long beside one busy process as on an idle machine; with one thread, hardly longer
(docs/benchmarks/contention.json). One thread has no barriers and computes the same bits on any number of cores.
Operations of a wide model take milliseconds and gain from every core.

libgomp keeps a pool of threads for every thread that ever computed in parallel. Once all pools together have more
threads than the machine has cores, they sleep between operations instead of spinning. A GRPO step of 256 rollouts,
0.86M parameters and 2 threads then switches contexts 7,000 times instead of 30, and decoding takes 1.7 times as long.
So only one thread has a pool, and all other threads compute alone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch

# torch's default, read before an experiment changes it: the available cores, or OMP_NUM_THREADS.
ALL_THREADS = torch.get_num_threads()

# Narrower models are computed in one thread.
WIDE = 512


def default_threads(width: int) -> int:
    """The number of threads for `models.threads = 0`: 1 if the hidden states are narrower than WIDE, otherwise all that
    torch may use. The width sets the size of an operation."""
    return 1 if width < WIDE else ALL_THREADS


def width_of(module: Any) -> int:
    """The size of a transformers model's hidden states."""
    return int(module.config.get_text_config().hidden_size)


class ComputeExecutor(ThreadPoolExecutor):
    """One thread for all torch work, with a pool of `threads` (0: one thread until `settle` decides). `in_use`: the
    threads of the newest executor; torch's default before the first."""

    in_use: ClassVar[int] = ALL_THREADS

    def __init__(self, threads: int) -> None:
        super().__init__(1, "pvg-compute", initializer=torch.set_num_threads, initargs=(threads or 1,))
        self._settled = threads > 0
        self._read()  # starts the thread now, so that its setting becomes that of the process

    def settle(self, width: int) -> int:
        """Return the number of threads. If the setting was 0, the first `width` decides it permanently. All users of
        one executor share it, for example benchmark variants that take turns."""
        if not self._settled:
            self._settled = True
            self.submit(torch.set_num_threads, default_threads(width)).result()
            self._read()
        return self.threads

    def _read(self) -> None:
        self.threads: int = self.submit(torch.get_num_threads).result()
        ComputeExecutor.in_use = self.threads


def compute_executor(threads: int) -> ComputeExecutor:
    """Create the thread for all torch work. From now on the calling thread computes without a pool."""
    torch.set_num_threads(1)
    return ComputeExecutor(threads)
