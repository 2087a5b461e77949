"""Synthetic event logs: a run of `steps` steps with the times each test wants, written by the product's own format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pvg.telemetry.events import format_event


@dataclass
class Log:
    """Lines with a separate clock, in seconds."""

    now: float = 100.0
    lines: list[str] = field(default_factory=list)

    def add(self, tag: str, **fields: object) -> None:
        head, _, rest = format_event(tag, **fields).split(" ", 2)
        self.lines.append(f"{head} t={self.now:.6f} {rest}")

    def wait(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3

    def update(
        self, trace: str, queue_ms: float, rpc_ms: float, *, server: Log | None = None, client: bool = True
    ) -> None:
        """A weight update; `server` gets the server's lines on its own clock. The queue lies within the server."""
        server, wall_ms = server or self, queue_ms + rpc_ms
        if client:
            self.add("weights", event="client.send", trace=trace, version=1, engines=1)
        server.add("weights", event="server.recv", trace=trace, version=1)
        for log in {id(self): self, id(server): server}.values():
            log.wait(queue_ms)
        server.add("weights", event="rpc.start", trace=trace, version=1)
        for log in {id(self): self, id(server): server}.values():
            log.wait(rpc_ms)
        server.add("weights", event="rpc.done", trace=trace, version=1, rpc_ms=rpc_ms)
        if client:
            timing = {"wall_ms": wall_ms, "rpc_ms": rpc_ms, "queue_ms": queue_ms}
            self.add("weights", event="client.done", trace=trace, version=1, engines=1, failed=0, **timing)

    def write(self, path: Path) -> Path:
        path.write_text("".join(f"{line}\n" for line in self.lines))
        return path


def steps(
    count: int = 40,
    *,
    queue_ms: Callable[[int], float] = lambda load: 1.0,
    rpc_ms: Callable[[int], float] = lambda load: 20.0,
    loads: tuple[int, ...] = (4, 90, 180),
    write_ms: float = 10.0,
    train_ms: float = 1000.0,
    idle_ms: float = 500.0,
    group_max_ms: float = 120.0,
    lag_ms: float = 2.0,
    waited_ms: float = 30.0,
    trunc_pct: float = 1.0,
    threads: int = 2,
) -> Log:
    """A run in which nothing stands out unless it is asked for."""
    log = Log()
    log.add("run", event="start", run="r", round=0, phase="mint", threads=threads, cores=2)
    for step in range(count):
        load = loads[step % len(loads)]
        log.add("gen", event="batch.start", batch=step, inflight=load, target_batch=256)
        log.update(f"trace{step}", queue_ms(load), rpc_ms(load))
        log.wait(idle_ms)
        log.add("gen", event="batch.done", batch=step, completions=load, dur_ms=idle_ms, tokens=99, longest_ms=idle_ms)
        log.add(
            "rollout", event="batch", trunc_pct=trunc_pct, staleness=0, group_p50_ms=100.0, group_max_ms=group_max_ms
        )
        log.wait(train_ms)
        log.add("ckpt", event="write.done", write_ms=write_ms, label=f"train_prover-{step:05}")
        times = {"wall_ms": train_ms + idle_ms, "train_ms": train_ms, "idle_ms": idle_ms}
        log.add("step", event="done", phase="train_prover", round=0, step=step, **times)
        cores = {"ran_ms": 1500.0, "waited_ms": waited_ms, "longest_wait_ms": min(waited_ms, 1500.0)}
        log.add("loop", event="lag", p50_ms=0.1, p90_ms=1.0, p99_ms=lag_ms, max_ms=lag_ms, samples=50, **cores)
    log.add("run", event="stop", status="complete", seconds=1.0)
    return log
