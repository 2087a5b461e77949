"""What a vLLM server says of its work at /metrics, as the few numbers that are worth a line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

# Of all the metrics: the names that are read, by what they are kept as. Those of several engines are added up.
READ = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "generated",
    "vllm:prompt_tokens_total": "read",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """At one moment: requests being computed and in the queue; tokens sampled and read since the start."""

    running: int = 0
    waiting: int = 0
    generated: int = 0
    read: int = 0
    at: float = field(default_factory=time.monotonic)  # seconds

    def rates(self, before: Figures) -> tuple[float, float]:
        """Tokens per second sampled and read since `before`."""
        seconds = max(self.at - before.at, 1e-9)
        return (self.generated - before.generated) / seconds, (self.read - before.read) / seconds


def read_figures(text: str) -> Figures:
    """The figures in Prometheus' text format; what is not there counts as 0."""
    found = dict.fromkeys(READ.values(), 0.0)
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, rest = line.partition(" ")
        if name in READ:
            found[READ[name]] += float(rest.rpartition("}")[2].split()[0])
    return Figures(**{key: int(value) for key, value in found.items()})
