"""What `pvg diagnose` advises for each cause: settings to change, or something else to do.

    advised(tally, "dedicated-updates", "fewer-requests")  ->  [Advice(...), ...]

The advice is general: it names settings and does not know their values in the run. Advice about cores depends on the
log, because it helps only in some cases.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pvg.reporting.diagnosis.tally import LogTally

OTHERS_CORES = 0.2  # cores; less is the system itself


@dataclass(frozen=True, slots=True)
class Advice:
    """One change. `settings`: its keys; none if no setting helps."""

    says: str
    settings: tuple[str, ...] = ()


TASKSET = "taskset, another machine" if sys.platform == "linux" else "another machine"
OWN_CORES = Advice(f"Stop other programs on this machine, or reserve cores for pvg ({TASKSET}).")
ADVICE = {
    "dedicated-updates": Advice(
        'weights.client = "dedicated" sends updates over separate connections, past the generation requests.',
        ("weights.client",),
    ),
    "fewer-requests": Advice("Allow fewer requests in flight.", ("rollout.concurrency",)),
    "fewer-rows": Advice(
        "The engine is in this process, and an update waits until no row is decoded: decode fewer rows together.",
        ("rollout.engine.max_rows",),
    ),
    "smaller-weights": Advice(
        "Send less (bfloat16 is half of float32, but slow on most CPUs; adapters are less than whole weights).",
        ("rollout.dtype", "weights.transport.kind"),
    ),
    "weights-in-memory": Advice("Let model servers read the weights from memory, not from a disk.", ("weights.root",)),
    "larger-batches": Advice("Update the weights less often, with larger batches.", ("training.groups",)),
    "more-minibatches": Advice("Train more on each batch, with more optimizer steps.", ("training.minibatches",)),
    "rarer-commits": Advice("Commit less often.", ("store.commit_every",)),
    "faster-disk": Advice("Put the runs on a faster disk.", ("store.root",)),
    "more-requests": Advice("Allow more requests in flight.", ("rollout.concurrency",)),
    "more-rows": Advice("Decode more rows together.", ("rollout.engine.max_rows", "rollout.concurrency")),
    "shorter-solutions": Advice(
        "Cut very long completions earlier, if the task allows it, or discourage them.",
        ("rollout.max_tokens", "training.overlong_buffer"),
    ),
    "whole-groups": Advice(
        "With the torch engine, let the number of rows be a multiple of rollout.group_size.",
        ("rollout.engine.max_rows",),
    ),
    "deadline": Advice("Give groups a deadline.", ("rollout.deadline.kind", "rollout.deadline.seconds")),
    "sample-ahead": Advice(
        "With workers or model servers, sample ahead (rollout.prefetch), so that sampling and training overlap.",
        ("rollout.prefetch.kind",),
    ),
    "uvloop": Advice("Use uvloop, which does the same work in less time.", ("telemetry.event_loop",)),
    "profile": Advice("To see which functions run on the event loop: pvg profile EXPERIMENT --stage e2e"),
    "fewer-idle-workers": Advice("Fewer worker processes cost no time here.", ("cluster.max_workers",)),
    "equal-shares": Advice(
        "Let the number of groups be a multiple of the number of workers, because whole groups are shared out.",
        ("training.groups",),
    ),
    "slow-machine": Advice("If one machine is slower or busy, take it out of the cluster."),
}


def advised(tally: LogTally, *names: str) -> list[Advice]:
    """The named advice in this order. "cores" stands for what helps threads that wait for a core."""
    return [advice for name in names for advice in (_about_cores(tally) if name == "cores" else [ADVICE[name]])]


def others_run(tally: LogTally) -> bool:
    """Whether other programs used cores. On some systems logs do not say; then: yes."""
    others = tally.quantity("machine.others")
    return not others.n or others.total / others.n >= OTHERS_CORES


def _about_cores(tally: LogTally) -> list[Advice]:
    threads, workers, cores = (int(n or 1) for n in (tally.threads, tally.most_workers, tally.usable_cores))
    found = [OWN_CORES] if others_run(tally) else []
    if threads > cores:
        says = f"pvg has {threads} compute threads, and may use {cores} cores: lower the number of threads."
        found.append(Advice(says, ("models.threads",)))
    elif threads > 1 and others_run(tally):
        says = "With one thread pvg loses less, because no operation waits for a second thread."
        found.append(Advice(says, ("models.threads",)))
    if workers > cores:
        says = f"{workers} workers share {cores} cores. Fewer processes give the same results."
        found.append(Advice(says, ("cluster.max_workers",)))
    return found
