"""The signatures of `pvg diagnose`: how to find each in a tally, what it costs, and which setting to change.

A signature is a function from a tally to a `Finding`, to None (checked, no problem), or to a sentence that says what
the log lacks. To add one: write the function and add it to SIGNATURES.

A signature is reported if its criterion is met and it costs at least LEAST_SHARE of the time. Loop lag is also reported
if a warning level was crossed, because a single stall can cause timeouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from pvg.errors import counted
from pvg.reporting.diagnosis.advice import advised, others_run
from pvg.reporting.diagnosis.log_events import Event
from pvg.reporting.diagnosis.tally import LoadCorrelation, LogTally
from pvg.reporting.formats import short_seconds
from pvg.telemetry.waits import SHARED, LagLimits

LEAST_SHARE = 0.05  # of the time; a smaller gain is within the noise between two runs on one machine
LEAST_EVENTS = 5  # fewer updates or steps show no pattern
DOMINATES = 0.5  # of an update's wall time: the larger half
CHECKPOINT_SHARE = 0.10  # of the time; more is too much for protection against a crash
STARVED_SHARE = 0.5  # of the steps' time; sampling and training in turns are balanced there
STRAGGLING_SHARE = 2 / 3  # of the slowest group's wait: the slowest then takes three times as long as the middle one
STRAGGLING_RATIO = 3.0  # the same where only whole batches are known: p99 over p50 of the longest request
IDLE_WORKERS = 0.5  # of the time; two turns of equal length, the driver's and theirs, have this share
UNBALANCED = 0.2  # between the busiest worker and the mean; samples of 5 s differ by half of this by chance
LEAST_PAIRS = 20  # fewer updates with a known load show no relation
RISES = 0.3  # rank correlation: below, load explains under a tenth of the order (0.3 squared)
FULL = 0.9  # of the machine's cores; with more free cores no thread has to wait
UNSAMPLED = frozenset({"train_verifier", "warmup"})  # the steps of these phases do not wait for rollouts
NOTHING_TO_SET = "pvg knows no setting that would help."
STANDARD_ERRORS = 2.0  # that a correlation must be away from 0; one over the root of n - 1 is its standard error


@dataclass(frozen=True, slots=True)
class Evidence:
    where: str  # log and line
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A signature that was seen. `measured` is compared with `threshold`, both as `criterion` says; `cost_s` seconds
    are lost, `share` of the time the log spans (None where that is unknown)."""

    signature: str
    says: str
    criterion: str
    measured: float
    threshold: float
    cost_s: float
    share: float | None
    settings: tuple[str, ...]
    remedy: str
    evidence: tuple[Evidence, ...]


Looked = Finding | str | None


class _Remedies(TypedDict):
    settings: tuple[str, ...]
    remedy: str


def front_end_queue(tally: LogTally, limits: LagLimits) -> Looked:
    """Weight updates wait before the engine loads them, longer under higher load."""
    queue = tally.quantity("queue_ms")
    if queue.n < LEAST_EVENTS:
        return f"{queue.n} weight updates with wall and rpc times ([weights] client.done); {LEAST_EVENTS} are needed"
    _, share = tally.part_of_wall("queue_ms") or (0.0, 0.0)
    if share < DOMINATES or not costs(tally, queue.total):
        return None
    own_engine = tally.kinds["gen", "decoder"] > 0  # only the torch engine writes this line
    says = f"Weight updates spend {percent(share)} of their wall time waiting, not loading"
    waits, loads = (tally.relations[name].related(LEAST_PAIRS) if name in tally.relations else None for name in RELATED)
    if waits is None or not tally.load_known:
        says += ". These logs do not show how the wait depends on the load of generation."
    elif rises(waits):
        says += f"; the wait grows with the load of generation: {across(waits)}"
        says += f". Loading does not: {across(loads)}." if loads and not rises(loads) else "."
    else:
        says += (
            f". It does not grow with the load ({across(waits)}): look at the network and at the client's event loop."
        )
    if (in_server := tally.quantity("in_server_ms")).n:
        says += f" Once received, an update waits {milliseconds(in_server.quantile(0.5))} in the server (median)."
    return Finding(
        signature="front-end-queue",
        says=says,
        criterion="queue / wall time of the updates with both",
        measured=share,
        threshold=DOMINATES,
        cost_s=queue.total / 1e3,
        share=_share(tally, queue.total),
        **_remedies(tally, *(["fewer-rows"] if own_engine else ["dedicated-updates", "fewer-requests"])),
        evidence=_evidence(tally, "queue_ms"),
    )


RELATED = ("queue_ms", "rpc_ms")


def engine_reload(tally: LogTally, limits: LagLimits) -> Looked:
    """The engine itself takes long to load the weights."""
    rpc = tally.quantity("rpc_ms")
    if rpc.n < LEAST_EVENTS:
        return f"{rpc.n} weight updates with an rpc time ([weights] client.done or rpc.done); {LEAST_EVENTS} are needed"
    known = tally.part_of_wall("rpc_ms")
    if known is None and tally.quantity("wall_ms").n:
        return "no weight update with both a wall and an rpc time"
    cost_ms, share = known or (rpc.total, 1.0)  # the server's log alone
    share = min(1.0, share)  # the clocks of two processes
    if share < DOMINATES or not costs(tally, cost_ms):
        return None
    says = (
        f"Loading weights takes the engine {milliseconds(rpc.quantile(0.5))} (median), {percent(share)} of an "
        "update's wall time"
    )
    loads = tally.relations["rpc_ms"].related(LEAST_PAIRS) if "rpc_ms" in tally.relations else None
    if loads is not None and tally.load_known and rises(loads):
        says += f"; more under load: {across(loads)}"
    return Finding(
        signature="engine-reload",
        says=f"{says}.",
        criterion="rpc / wall time of the updates with both",
        measured=share,
        threshold=DOMINATES,
        cost_s=cost_ms / 1e3,
        share=_share(tally, cost_ms),
        **_remedies(tally, "smaller-weights", "weights-in-memory", "larger-batches", "more-minibatches"),
        evidence=_evidence(tally, "rpc_ms"),
    )


def checkpoint(tally: LogTally, limits: LagLimits) -> Looked:
    """Steps wait for checkpoints. If the log has waits, they are the cost, and writing happens in the background.
    Otherwise the whole time of writing is the cost."""
    write, wait = tally.quantity("write_ms"), tally.quantity("wait_ms")
    if write.n + wait.n < LEAST_EVENTS:
        return f"{write.n + wait.n} checkpoints ([ckpt] write.done or wait.done); {LEAST_EVENTS} are needed"
    name, cost = ("wait_ms", wait) if wait.n else ("write_ms", write)
    share = cost.total / 1e3 / tally.elapsed_s if tally.elapsed_s else 0.0
    if share < CHECKPOINT_SHARE:
        return None
    what = "Steps wait for checkpoints" if wait.n else "Checkpoints are written"
    says = f"{what} {percent(share)} of the time: {milliseconds(cost.quantile(0.5))} each (median)."
    if wait.n and write.n:
        says += f" Writing one takes {milliseconds(write.quantile(0.5))}."
    return Finding(
        signature="checkpoint",
        says=says,
        criterion=f"{name} / time",
        measured=share,
        threshold=CHECKPOINT_SHARE,
        cost_s=cost.total / 1e3,
        share=_share(tally, cost.total),
        **_remedies(tally, "rarer-commits", "faster-disk"),
        evidence=_evidence(tally, name),
    )


def starved_trainer(tally: LogTally, limits: LagLimits) -> Looked:
    """The trainer waits for something to train on."""
    steps = sum(int(sums["steps"]) for sums in tally.phases.values())
    if steps < LEAST_EVENTS:
        return f"{counted(steps, 'step')} with idle times ([step] done); {LEAST_EVENTS} are needed"
    phase, sums = max(tally.phases.items(), key=lambda item: item[1]["idle_ms"])
    share = sums["idle_ms"] / sums["wall_ms"] if sums["wall_ms"] else 0.0
    if share < STARVED_SHARE or not costs(tally, sums["idle_ms"]):
        return None
    says = f"In the steps of {phase} the trainer is idle {percent(share)} of the time: it waits for other work."
    longest, batch = tally.quantity("longest_ms"), tally.quantity("dur_ms")
    sampling = ["more-requests", "sample-ahead"]
    if longest.n and batch.n and longest.total > 1.5 * batch.total:
        sampling = ["more-rows", *sampling]
        says += (
            f" Requests wait for a place in the engine's batch: the longest of a batch takes "
            f"{milliseconds(longest.quantile(0.5))}, the batch itself {milliseconds(batch.quantile(0.5))} (medians)."
        )
    if tally.truncated:  # otherwise no completion hit the limit
        sampling.append("shorter-solutions")
    advice = [*sampling, "more-minibatches"] if phase not in UNSAMPLED else []
    return Finding(
        signature="starved-trainer",
        says=says,
        criterion="idle / wall time of the steps",
        measured=share,
        threshold=STARVED_SHARE,
        cost_s=sums["idle_ms"] / 1e3,
        share=_share(tally, sums["idle_ms"]),
        **_remedies(tally, *advice, then="The time budget of `pvg report` shows what the steps wait for."),
        evidence=_evidence(tally, "step.idle_ms"),
    )


def stragglers(tally: LogTally, limits: LagLimits) -> Looked:
    """One slow rollout delays its group, and the group delays the batch."""
    excess, longest = tally.quantity("group_excess_ms"), tally.quantity("longest_ms")
    if excess.n < LEAST_EVENTS:
        if longest.n < LEAST_EVENTS:
            return f"group times ([rollout] batch): {excess.n}; {LEAST_EVENTS} are needed"
        return _straggling_batches(tally)
    slowest = tally.quantity("group_max_ms")
    share = excess.total / slowest.total if slowest.total else 0.0
    if share < STRAGGLING_SHARE or not costs(tally, excess.total):
        return None
    middle = tally.quantity("group_p50_ms")
    says = (
        f"The slowest group of a batch waits {milliseconds(slowest.quantile(0.5))} for its last rollout, the middle "
        f"group {milliseconds(middle.quantile(0.5))} (medians over {excess.n} batches)."
    )
    return _straggling(tally, says, "(slowest - middle) / slowest group's wait", share, STRAGGLING_SHARE, excess.total)


def _straggling_batches(tally: LogTally) -> Looked:
    """Without group times: batches whose longest request took far longer than that of the middle batch."""
    longest = tally.quantity("longest_ms")
    middle, tail = longest.quantile(0.5), longest.quantile(0.99)
    ratio, cost_ms = tail / max(middle, 1e-3), longest.excess_over(middle)
    if ratio < STRAGGLING_RATIO or not costs(tally, cost_ms):
        return None
    says = f"One batch in a hundred waits {milliseconds(tail)} for its longest request, the middle one "
    says += f"{milliseconds(middle)}."
    return _straggling(tally, says, "p99 / p50 of a batch's longest request", ratio, STRAGGLING_RATIO, cost_ms)


def _straggling(
    tally: LogTally, says: str, criterion: str, measured: float, threshold: float, cost_ms: float
) -> Finding:
    shorter = ["shorter-solutions"] if tally.truncated else []
    return Finding(
        signature="stragglers",
        says=says,
        criterion=criterion,
        measured=measured,
        threshold=threshold,
        cost_s=cost_ms / 1e3,
        share=_share(tally, cost_ms),
        **_remedies(tally, *shorter, "whole-groups", "deadline"),
        evidence=_evidence(tally, "group_excess_ms" if "group_excess_ms" in tally.worst else "longest_ms"),
    )


def loop_lag(tally: LogTally, limits: LagLimits) -> Looked:
    """The event loop is blocked, so requests, weight updates and all other work on it are late. Either something
    computes on the loop, or other programs use the cores."""
    if not tally.quantity("lag.max_ms").n:
        return "measurements of the event loop ([loop] lag)"
    crossed = {
        name: tally.quantity(f"lag.{name}_ms").largest / 1e3 / limit
        for name, limit in (("p90", limits.p90_s), ("p99", limits.p99_s), ("max", limits.max_s))
    }
    name, ratio = max(crossed.items(), key=lambda item: item[1])
    if ratio <= 1.0 and not costs(tally, tally.lagged_ms):
        return None
    largest = tally.quantity(f"lag.{name}_ms").largest
    says = f"The event loop was late by {milliseconds(tally.quantity('lag.max_ms').largest)} at worst"
    if ratio > 1.0:
        level = milliseconds(largest / ratio)
        says += f"; the {name} of a window reached {milliseconds(largest)} (warning level {level})"
        criterion, measured, threshold = f"largest {name} / its warning level", ratio, 1.0
    else:
        criterion, measured, threshold = "blocked time / time", _share(tally, tally.lagged_ms) or 0, LEAST_SHARE
    says += f". It was blocked for at least {milliseconds(tally.lagged_ms)} in all"
    advice: tuple[str, ...] = ("profile", "uvloop", "fewer-requests")
    if tally.lagged_shared_ms > tally.lagged_ms / 2:
        says += f", {milliseconds(tally.lagged_shared_ms)} of it while pvg's threads waited for cores that were busy"
        advice = ("cores",)
    else:
        says += ". Something computes on it that should run in a thread"
    return Finding(
        signature="loop-lag",
        says=f"{says}.",
        criterion=criterion,
        measured=measured,
        threshold=threshold,
        cost_s=tally.lagged_ms / 1e3,
        share=_share(tally, tally.lagged_ms),
        **_remedies(tally, *advice),
        evidence=_evidence(tally, f"lag.{name}_ms" if ratio > 1.0 else "lag.max_ms"),
    )


def shared_machine(tally: LogTally, limits: LagLimits) -> Looked:
    """Other programs use the cores while threads of pvg, or its workers, are ready to run. The kernel counts such waits
    on Linux; elsewhere the cores that pvg used far below the cores that were busy show the same."""
    cores = tally.all_cores
    if cores is None:
        return _shared_by_use(tally)
    longest_ms = 1e3 * cores.longest_s
    if not cores.shared or not costs(tally, longest_ms):
        return None
    whose = "its threads" if tally.worker_cores is None else "the threads of all its processes"
    one = "thread" if tally.worker_cores is None else "thread or worker"
    return Finding(
        signature="shared-machine",
        says=f"Added up over {whose}, pvg ran for {milliseconds(1e3 * cores.ran_s)} and waited "
        f"{milliseconds(1e3 * cores.waited_s)} for a core, {_why_shared(tally)}. Other times in this log are longer "
        f"for the same reason. In the evidence, waited_ms is such a sum, and longest_wait_ms is the wait of one {one}.",
        criterion="time threads waited for a core / time they were ready to run",
        measured=cores.share,
        threshold=SHARED,
        cost_s=longest_ms / 1e3,
        share=_share(tally, longest_ms),
        **_remedies(tally, "cores"),
        evidence=_evidence(tally, "longest_wait_ms"),
    )


def _shared_by_use(tally: LogTally) -> Looked:
    busy, others = tally.quantity("machine.busy"), tally.quantity("machine.others")
    if not others.n or not tally.machine_cores:
        return "how long threads waited for a core ([loop] lag), and which programs used the cores ([machine] sample)"
    used, share = busy.total / busy.n, others.total / max(busy.total, 1e-9)
    own_cores_only = tally.usable_cores is not None and tally.usable_cores < tally.machine_cores
    if own_cores_only or used < FULL * tally.machine_cores or share <= SHARED:
        return None
    lost_ms = 1e3 * share * tally.elapsed_s
    own = used - others.total / others.n
    return Finding(
        signature="shared-machine",
        says=f"{used:.1f} of {tally.machine_cores:g} cores were busy, and pvg used {own:.1f} of them. Other programs "
        "used the rest. Other times in this log are longer for the same reason.",
        criterion="cores that other programs used / busy cores",
        measured=share,
        threshold=SHARED,
        cost_s=lost_ms / 1e3,  # at most: with all cores, pvg might not have used them
        share=_share(tally, lost_ms),
        **_remedies(tally, "cores"),
        evidence=_evidence(tally, "machine.others"),
    )


def _why_shared(tally: LogTally) -> str:
    others = tally.quantity("machine.others")
    if others.n and others_run(tally):
        return f"because other programs used {others.total / others.n:.1f} of {tally.machine_cores or 0:g} cores"
    if others.n:
        return "although hardly anything else ran: pvg has more threads and processes than cores"
    crowd = ", or because there are more workers than cores" if tally.most_workers > (tally.usable_cores or 1) else ""
    return f"because other programs use the cores too{crowd}"


def idle_workers(tally: LogTally, limits: LagLimits) -> Looked:
    """The workers wait for the driver."""
    busy = tally.quantity("workers.busy")
    if not busy.n:  # a run without workers
        return None
    if busy.n < LEAST_EVENTS:
        return f"{counted(busy.n, 'sample')} of the workers ([workers] sample); {LEAST_EVENTS} are needed"
    idle = 1.0 - busy.total / busy.n
    if idle < IDLE_WORKERS:
        return None
    return Finding(
        signature="idle-workers",
        says=f"The workers had nothing to do for {percent(idle)} of the time: the driver does not give them enough.",
        criterion="mean time without work / time",
        measured=idle,
        threshold=IDLE_WORKERS,
        cost_s=idle * tally.elapsed_s,
        share=idle,
        **_remedies(tally, "fewer-idle-workers", "larger-batches", "sample-ahead"),
        evidence=_evidence(tally, "workers.busy"),
    )


def unbalanced_workers(tally: LogTally, limits: LagLimits) -> Looked:
    """One worker has much more to do than the others, which wait for it."""
    busy, most = tally.quantity("workers.busy"), tally.quantity("workers.most")
    if not busy.n:  # a run without workers
        return None
    if busy.n < LEAST_EVENTS:
        return f"{counted(busy.n, 'sample')} of the workers ([workers] sample); {LEAST_EVENTS} are needed"
    gap = (most.total - busy.total) / busy.n
    if gap < UNBALANCED:
        return None
    says = f"The busiest worker had work for {percent(most.total / most.n)} of the time, the mean worker for "
    return Finding(
        signature="unbalanced-workers",
        says=f"{says}{percent(busy.total / busy.n)}: the others wait for the slowest.",
        criterion="share of the busiest worker - mean share",
        measured=gap,
        threshold=UNBALANCED,
        cost_s=gap * tally.elapsed_s,
        share=gap,
        **_remedies(tally, "equal-shares", "slow-machine"),
        evidence=_evidence(tally, "workers.most"),
    )


def _remedies(tally: LogTally, *rules: str, then: str = NOTHING_TO_SET) -> _Remedies:
    """What to change according to these rules, as fields of a finding. `then`: the last sentence; by default said only
    if no rule applies."""
    found = advised(tally, *rules)
    sentences = [advice.says for advice in found]
    if not sentences or then != NOTHING_TO_SET:
        sentences.append(then)
    return {
        "settings": tuple(dict.fromkeys(key for advice in found for key in advice.settings)),
        "remedy": " ".join(sentences),
    }


SIGNATURES: dict[str, Callable[[LogTally, LagLimits], Looked]] = {
    "front-end-queue": front_end_queue,
    "engine-reload": engine_reload,
    "checkpoint": checkpoint,
    "starved-trainer": starved_trainer,
    "stragglers": stragglers,
    "loop-lag": loop_lag,
    "shared-machine": shared_machine,
    "idle-workers": idle_workers,
    "unbalanced-workers": unbalanced_workers,
}


# --- shared by the signatures ----------------------------------------------------------------------------------------


def costs(tally: LogTally, cost_ms: float) -> bool:
    """Whether the cost is worth reporting. If the time of the log is unknown, every cost is."""
    share = _share(tally, cost_ms)
    return share is None or share >= LEAST_SHARE


def rises(related: LoadCorrelation) -> bool:
    return related.correlation >= max(RISES, STANDARD_ERRORS / math.sqrt(max(1, related.n - 1)))


def across(related: LoadCorrelation | None) -> str:
    """`0.3 s at 4 requests in flight, 7.9 s at 180 (rank correlation 0.81)`."""
    assert related is not None
    return (
        f"{milliseconds(related.idle)} at {related.idle_load:g} requests in flight, {milliseconds(related.busy)} at "
        f"{related.busy_load:g} (rank correlation {related.correlation:.2f})"
    )


def milliseconds(value: float) -> str:
    """A time in milliseconds as text: 12.3 -> `12.3 ms`, 8580 -> `8.6 s`, 125000 -> `2 min 05 s`."""
    return short_seconds(value / 1e3)


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.1f}%"


def _share(tally: LogTally, cost_ms: float) -> float | None:
    return cost_ms / 1e3 / tally.elapsed_s if tally.elapsed_s else None


def _evidence(tally: LogTally, name: str) -> tuple[Evidence, ...]:
    worst: list[Event] = tally.worst[name].events()
    return tuple(Evidence(tally.where(event), event.text) for event in worst)
