"""The thread in which a process computes, and how many threads torch uses in it.

libgomp keeps a pool of threads for every thread that ever computed something in parallel. As soon as all pools together
have more threads than the machine has cores, they go to sleep between two operations instead of spinning: a GRPO step
of 256 rollouts, 0.86M parameters and 2 threads then switches contexts 7,000 times instead of 30 times, and its decoding
takes 1.7 times as long. So one thread has a pool, and everybody else computes alone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

# What `models.threads = 0` stands for: torch's own choice, read before an experiment sets another for the process.
ALL_THREADS = torch.get_num_threads()


def compute_executor(threads: int) -> ThreadPoolExecutor:
    """The thread that does all torch work, with a pool of `threads` for it (0: torch's own choice). The calling thread
    has none from now on: what it computes, it computes alone."""
    torch.set_num_threads(1)
    executor = ThreadPoolExecutor(
        1, "pvg-compute", initializer=torch.set_num_threads, initargs=(threads or ALL_THREADS,)
    )
    executor.submit(torch.get_num_threads).result()  # the thread starts here, so that its number is the process's
    return executor
