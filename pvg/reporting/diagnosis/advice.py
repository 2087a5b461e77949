"""What `pvg diagnose` advises: changes of settings, and only those that apply to the run.

    advised(tally, "dedicated-updates", "fewer-requests")  ->  [Advice(...), ...]

A rule proposes new values for a run: from its settings, and from what its log shows. A proposal is dropped if the
settings have these values already, or if they would not load because they exclude each other. So a user can type each
override as it is printed.

Without the settings (a log alone), nothing can be checked: a rule then gives its general sentence and its keys.
"""

from __future__ import annotations

import importlib.util
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pvg.config.cluster import LocalCluster, RayCluster, shards_of
from pvg.config.experiment import Experiment
from pvg.config.load import changed
from pvg.config.rollout import ServerSampling, TorchSampling
from pvg.config.servers import FileTransport
from pvg.reporting.diagnosis.tally import LogTally
from pvg.telemetry.cpu import native_bfloat16
from pvg.telemetry.device import has_nvidia_gpu

LIMITED = 0.9  # of the requests that are allowed; from here on the limit, and not the work, bounds those in flight
CROWDED_LOOP = 64  # requests in flight; fewer are no work for an event loop
OTHERS_CORES = 0.2  # cores; less is the system itself
DEADLINE_FACTOR = 1.5  # of the middle batch's longest request
SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Advice:
    """One change. `settings`: its keys, none if no setting helps. `overrides`: the same with values, as `--set` takes
    them; none if the settings of the run are unknown."""

    says: str
    settings: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A sentence, and the new values by key. Without values: something else than a setting helps."""

    says: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdviceRule:
    """`propose`: what applies to a run with these settings and this log; None: nothing. `settings`: all keys that it
    may change. `general`: the sentence without settings; "" says nothing. `by_log`: replaces `general` where the log
    alone decides."""

    settings: tuple[str, ...]
    general: str
    propose: Callable[[Experiment, LogTally], Proposal | None]
    by_log: Callable[[LogTally], Proposal | None] | None = None


def advised(tally: LogTally, *names: str) -> list[Advice]:
    """The advice of these rules that applies to the run of the log, in their order."""
    return [advice for name in names for advice in _advice(RULES[name], tally)]


def _advice(rule: AdviceRule, tally: LogTally) -> Iterator[Advice]:
    experiment = tally.experiment
    if experiment is None:
        yield from _general(rule, tally)
        return
    proposal = rule.propose(experiment, tally)
    if proposal is None:
        return
    if not proposal.values:
        yield Advice(proposal.says)
        return
    other = changed(experiment, proposal.values)
    if other is not None and other != experiment:
        overrides = tuple(f"{key}={value}" for key, value in proposal.values.items())
        yield Advice(proposal.says, tuple(proposal.values), overrides)


def _general(rule: AdviceRule, tally: LogTally) -> Iterator[Advice]:
    if rule.by_log is not None:
        if (proposal := rule.by_log(tally)) is not None:
            yield Advice(proposal.says, tuple(proposal.values))
    elif rule.general:
        yield Advice(rule.general, rule.settings)


# --- weight updates --------------------------------------------------------------------------------------------------


def _dedicated_updates(experiment: Experiment, tally: LogTally) -> Proposal | None:
    if not _on_servers(experiment):
        return None
    return Proposal(
        "Separate connections let weight updates pass the generation requests.", {"weights.client": "dedicated"}
    )


def _fewer_requests(experiment: Experiment, tally: LogTally) -> Proposal | None:
    if not _on_servers(experiment):
        return None
    most = _most_in_flight(experiment, tally)
    if most < 2:
        return None
    return Proposal(f"Allow fewer requests in flight. There were up to {most:,}.", {"rollout.concurrency": most // 2})


def _fewer_rows(experiment: Experiment, tally: LogTally) -> Proposal | None:
    engine = experiment.rollout.engine
    if not isinstance(engine, TorchSampling):
        return None
    rows = min(engine.max_rows, _most_in_flight(experiment, tally))
    if rows < 2:
        return None
    return Proposal(
        "The engine is in this process, and an update waits until no row is decoded: decode fewer rows together.",
        {"rollout.engine.max_rows": rows // 2},
    )


def _smaller_weights(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """bfloat16 halves what is sent. On a CPU without instructions for it, sampling would be far slower."""
    dtype = experiment.rollout.dtype
    sent = experiment.models.prover.dtype if dtype == "model" else dtype
    if sent == "bfloat16" or (on_cpu(experiment) and native_bfloat16(Path("/")) is not True):
        return None
    return Proposal("Send half as many bytes, in bfloat16.", {"rollout.dtype": "bfloat16"})


def _adapters_only(experiment: Experiment, tally: LogTally) -> Proposal | None:
    whole = isinstance(experiment.weights.transport, FileTransport)
    if not (_on_servers(experiment) and whole and experiment.training.adapters.kind == "lora"):
        return None
    return Proposal("Send only the adapters, not the whole weights.", {"weights.transport.kind": "lora"})


def _weights_in_memory(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """Only if all servers run on this machine: others do not see its memory."""
    by_files = experiment.weights.transport.kind in ("filesystem", "lora")
    in_memory = experiment.weights.root.absolute().is_relative_to(SHARED_MEMORY)
    if not (_on_servers(experiment) and by_files and servers_are_here(experiment)) or in_memory:
        return None
    if not SHARED_MEMORY.is_dir():
        return None
    return Proposal(
        "Let the servers read the weights from memory, not from a disk. Give `pvg serve` the same setting.",
        {"weights.root": str(SHARED_MEMORY / "pvg-weights")},
    )


def _larger_batches(experiment: Experiment, tally: LogTally) -> Proposal | None:
    groups = 2 * experiment.training.groups
    return Proposal("Update the weights less often, with larger batches.", {"training.groups": groups})


def _more_minibatches(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """Twice as many optimizer steps per batch, unless a batch cannot be divided like that."""
    return Proposal(
        "Train more on each batch, with more optimizer steps.",
        {"training.minibatches": 2 * experiment.training.minibatches},
    )


# --- commits ---------------------------------------------------------------------------------------------------------


def _rarer_commits(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """The setting counts optimizer steps. A phase commits at its end in any case, so more steps between two commits
    than a phase has change nothing."""
    longest = experiment.verifier_steps(experiment.game.rounds - 1)
    now, phase = experiment.store.commit_every, max(experiment.training.steps, longest)
    if now >= phase or _by_chunks(tally):
        return None
    return Proposal("Commit less often.", {"store.commit_every": min(2 * now, phase)})


def _larger_chunks(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """A phase without training commits after each chunk: as many rollouts as the engine samples at once."""
    engine, now = experiment.rollout.engine, experiment.rollout.concurrency
    if not _by_chunks(tally):
        return None
    says = "Phases that only sample commit after each chunk of rollouts: sample more of them at once."
    if not isinstance(engine, TorchSampling):
        return Proposal(says, {"rollout.concurrency": 2 * now})
    rows = 2 * engine.max_rows
    more = {"rollout.concurrency": rows} if rows > now else {}
    return Proposal(says, {"rollout.engine.max_rows": rows, **more})


def _by_chunks(tally: LogTally) -> bool:
    """Whether most of the time of checkpoints goes into those of phases that only sample."""
    return tally.chunk_write_ms > tally.sketch("write_ms").total / 2


def _faster_disk(experiment: Experiment, tally: LogTally) -> Proposal | None:
    if experiment.store.root.absolute().is_relative_to(SHARED_MEMORY):
        return None
    return Proposal("Put the runs on a faster disk (store.root).")


# --- sampling --------------------------------------------------------------------------------------------------------


def _more_requests(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """Only if the limit bounds the requests in flight: a batch has more, and the servers decode more."""
    engine, now = experiment.rollout.engine, experiment.rollout.concurrency
    if not isinstance(engine, ServerSampling):
        return None
    most = min(_wanted_requests(experiment), 2 * now)
    if experiment.server_cluster is None:
        most = min(most, experiment.serving.max_num_seqs * len(experiment.serving.servers))
    limited = not tally.most_in_flight or tally.most_in_flight >= LIMITED * now
    if most <= now or not limited:
        return None
    return Proposal("Allow more requests in flight.", {"rollout.concurrency": most})


def _more_rows(experiment: Experiment, tally: LogTally) -> Proposal | None:
    engine, now = experiment.rollout.engine, experiment.rollout.concurrency
    if not isinstance(engine, TorchSampling):
        return None
    rows = min(_wanted_requests(experiment), 2 * engine.max_rows)
    if rows <= engine.max_rows:
        return None
    more = {"rollout.concurrency": rows} if rows > now else {}
    return Proposal("Decode more rows together.", {"rollout.engine.max_rows": rows, **more})


def _shorter_solutions(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """Only if some were cut already: otherwise none is as long as the limit."""
    tokens = experiment.rollout.max_tokens * 3 // 4
    if not tally.truncated or tokens < 1:
        return None
    return Proposal("Cut very long completions earlier, if the task allows it.", {"rollout.max_tokens": tokens})


def _discouraged_length(experiment: Experiment, tally: LogTally) -> Proposal | None:
    tokens = experiment.rollout.max_tokens // 4
    if not tally.truncated or experiment.training.overlong_buffer or tokens < 1:
        return None
    return Proposal("Discourage very long completions.", {"training.overlong_buffer": tokens})


def _whole_groups(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """A group that is spread over two batches of the torch engine waits for both."""
    engine, size = experiment.rollout.engine, experiment.rollout.group_size
    if not isinstance(engine, TorchSampling) or engine.max_rows % size == 0:
        return None
    rows = max(size, engine.max_rows // size * size)
    return Proposal("Decode whole groups together.", {"rollout.engine.max_rows": rows})


def _deadline(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """A deadline, or a shorter one, beyond what the middle batch takes."""
    longest, now = tally.sketch("longest_ms"), experiment.rollout.deadline
    seconds = round(DEADLINE_FACTOR * longest.quantile(0.5) / 1e3, 1) if longest.n else 0.0
    times = {"rollout.deadline.seconds": seconds} if seconds > 0 else {}
    if now.kind == "none":
        return Proposal("Give groups a deadline.", {"rollout.deadline.kind": "cut", **times})
    if not times or seconds >= now.seconds:
        return None
    return Proposal("Give groups an earlier deadline.", times)


def _sample_ahead(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """Only if others sample, and have time for it: one process that samples and trains does one after the other."""
    busy = tally.sketch("workers.busy")
    cores_free = tally.all_cores is None or not tally.all_cores.shared
    idle_workers = bool(_workers(experiment)) and cores_free and busy.n > 0 and busy.total / busy.n < LIMITED
    if experiment.rollout.prefetch.kind != "none" or not (_on_servers(experiment) or idle_workers):
        return None
    return Proposal("Sample ahead, so that sampling and training overlap.", {"rollout.prefetch.kind": "fresh"})


# --- the event loop, and the cores -----------------------------------------------------------------------------------


def _uvloop(experiment: Experiment, tally: LogTally) -> Proposal | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    return Proposal("uvloop does the same work in less time.", {"telemetry.event_loop": "uvloop"})


def _crowded_loop(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """Requests to servers are work for the loop. Those to the engine in this process are not."""
    return _fewer_requests(experiment, tally) if tally.most_in_flight >= CROWDED_LOOP else None


def _profile(experiment: Experiment, tally: LogTally) -> Proposal | None:
    what = shlex.quote(str(tally.experiment_file)) if tally.experiment_file is not None else experiment.name
    return Proposal(f"To see which functions run on the event loop: pvg profile {what} --stage e2e")


def _threads(tally: LogTally) -> Proposal | None:
    threads, cores = int(tally.threads or 1), int(tally.usable_cores or 1)
    if threads > cores:
        says = f"pvg has {threads} compute threads, and may use {cores} cores: lower the number of threads."
        return Proposal(says, {"models.threads": cores})
    if threads > 1 and others_run(tally):
        says = "With one thread pvg loses less, because no operation waits for a second thread."
        return Proposal(says, {"models.threads": 1})
    return None


def _fewer_threads(experiment: Experiment, tally: LogTally) -> Proposal | None:
    return _threads(tally)


def _processes(tally: LogTally) -> Proposal | None:
    workers, cores = int(tally.most_workers), int(tally.usable_cores or 1)
    if workers <= cores:
        return None
    says = f"{workers} workers share {cores} cores. Fewer processes give the same results."
    return Proposal(says, {"cluster.max_workers": cores})


def _fewer_processes(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """Workers on other machines have other cores."""
    return _processes(tally) if isinstance(experiment.cluster, LocalCluster) else None


def _others(tally: LogTally) -> Proposal | None:
    return Proposal(OWN_CORES) if others_run(tally) else None


def _own_cores(experiment: Experiment, tally: LogTally) -> Proposal | None:
    if not others_run(tally):
        return None
    if _on_servers(experiment) and servers_are_here(experiment):
        return Proposal("Give the model servers other cores than the trainer, or stop other programs.")
    return Proposal(OWN_CORES)


# --- workers ---------------------------------------------------------------------------------------------------------


def _fewer_idle_workers(experiment: Experiment, tally: LogTally) -> Proposal | None:
    busy, workers = tally.sketch("workers.busy"), int(tally.most_workers)
    if not busy.n or workers < 2:
        return None
    enough = max(1, math.ceil(workers * busy.total / busy.n))
    if enough >= workers:
        return None
    return Proposal("Fewer worker processes cost no time here.", {"cluster.max_workers": enough})


def _equal_shares(experiment: Experiment, tally: LogTally) -> Proposal | None:
    """Whole groups are shared out, so a number of groups that is no multiple leaves some workers with fewer."""
    shards, groups = _workers(experiment), experiment.training.groups
    if shards < 2 or groups % shards == 0:
        return None
    return Proposal(
        "Let the number of groups be a multiple of the number of workers, because whole groups are shared out.",
        {"training.groups": math.ceil(groups / shards) * shards},
    )


def _slow_machine(experiment: Experiment, tally: LogTally) -> Proposal | None:
    if not isinstance(experiment.cluster, RayCluster) or experiment.cluster.address is None:
        return None  # all workers are on one machine
    return Proposal(SLOW_MACHINE)


# --- facts about a run -----------------------------------------------------------------------------------------------


def on_cpu(experiment: Experiment) -> bool:
    """Whether torch computes on a CPU, as far as this machine can tell."""
    device = experiment.models.device
    return device == "cpu" or (device == "auto" and not has_nvidia_gpu(Path("/")))


def servers_are_here(experiment: Experiment) -> bool:
    """Whether all of the prover's servers are on this machine, and none on a cluster."""
    servers = experiment.serving.servers
    return experiment.server_cluster is None and all(urlsplit(url).hostname in LOOPBACK for url in servers)


def others_run(tally: LogTally) -> bool:
    """Whether other programs used cores. Logs of older versions, and of some systems, do not say; then: yes."""
    others = tally.sketch("machine.others")
    return not others.n or others.total / others.n >= OTHERS_CORES


def _on_servers(experiment: Experiment) -> bool:
    return isinstance(experiment.rollout.engine, ServerSampling)


def _workers(experiment: Experiment) -> int:
    """The shards of the work; 0 without workers, and for model servers on a cluster."""
    cluster = experiment.cluster
    if not isinstance(cluster, LocalCluster | RayCluster) or experiment.server_cluster is not None:
        return 0
    return shards_of(cluster) or 0


def _most_in_flight(experiment: Experiment, tally: LogTally) -> int:
    """The most requests that were in flight; the most that are allowed, if the log does not say."""
    allowed = experiment.rollout.concurrency
    return min(allowed, int(tally.most_in_flight)) if tally.most_in_flight else allowed


def _wanted_requests(experiment: Experiment) -> int:
    """The requests that could be in flight without a limit: those of a batch, and of the batches sampled ahead."""
    return experiment.arithmetic().rollouts_per_batch * (1 + experiment.rollout.prefetch.batches)


TASKSET = "taskset, another machine" if sys.platform == "linux" else "another machine"
OWN_CORES = f"Stop other programs on this machine, or reserve cores for pvg ({TASKSET})."
SLOW_MACHINE = "If one machine is slower or busy, take it out of the cluster."

RULES: dict[str, AdviceRule] = {
    "dedicated-updates": AdviceRule(
        ("weights.client",),
        'weights.client = "dedicated" sends updates over separate connections, past the generation requests.',
        _dedicated_updates,
    ),
    "fewer-requests": AdviceRule(("rollout.concurrency",), "Allow fewer requests in flight.", _fewer_requests),
    "fewer-rows": AdviceRule(
        ("rollout.engine.max_rows",),
        "The engine is in this process, and an update waits until no row is decoded: decode fewer rows together.",
        _fewer_rows,
    ),
    "smaller-weights": AdviceRule(
        ("rollout.dtype",), "Send less (bfloat16 is half of float32, but slow on most CPUs).", _smaller_weights
    ),
    "adapters-only": AdviceRule(("weights.transport.kind",), "", _adapters_only),
    "weights-in-memory": AdviceRule(
        ("weights.root",), "Let model servers read the weights from memory, not from a disk.", _weights_in_memory
    ),
    "larger-batches": AdviceRule(
        ("training.groups",), "Update the weights less often, with larger batches.", _larger_batches
    ),
    "more-minibatches": AdviceRule(
        ("training.minibatches",), "Train more on each batch, with more optimizer steps.", _more_minibatches
    ),
    "rarer-commits": AdviceRule(("store.commit_every",), "Commit less often.", _rarer_commits),
    "larger-chunks": AdviceRule(("rollout.engine.max_rows", "rollout.concurrency"), "", _larger_chunks),
    "faster-disk": AdviceRule(("store.root",), "Put the runs on a faster disk.", _faster_disk),
    "more-requests": AdviceRule(("rollout.concurrency",), "Allow more requests in flight.", _more_requests),
    "more-rows": AdviceRule(
        ("rollout.engine.max_rows", "rollout.concurrency"), "Decode more rows together.", _more_rows
    ),
    "shorter-solutions": AdviceRule(
        ("rollout.max_tokens",), "Cut very long completions earlier, if the task allows it.", _shorter_solutions
    ),
    "discouraged-length": AdviceRule(
        ("training.overlong_buffer",), "Discourage very long completions.", _discouraged_length
    ),
    "whole-groups": AdviceRule(
        ("rollout.engine.max_rows",),
        "With the torch engine, let the number of rows be a multiple of rollout.group_size.",
        _whole_groups,
    ),
    "deadline": AdviceRule(("rollout.deadline.kind", "rollout.deadline.seconds"), "Give groups a deadline.", _deadline),
    "sample-ahead": AdviceRule(
        ("rollout.prefetch.kind",),
        "With workers or model servers, sample ahead (rollout.prefetch), so that sampling and training overlap.",
        _sample_ahead,
    ),
    "uvloop": AdviceRule(("telemetry.event_loop",), "Use uvloop, which does the same work in less time.", _uvloop),
    "crowded-loop": AdviceRule(("rollout.concurrency",), "Allow fewer requests to model servers.", _crowded_loop),
    "profile": AdviceRule(
        (), "To see which functions run on the event loop: pvg profile EXPERIMENT --stage e2e", _profile
    ),
    "own-cores": AdviceRule((), "", _own_cores, _others),
    "fewer-threads": AdviceRule(("models.threads",), "", _fewer_threads, _threads),
    "fewer-processes": AdviceRule(("cluster.max_workers",), "", _fewer_processes, _processes),
    "fewer-idle-workers": AdviceRule(
        ("cluster.max_workers",), "Fewer worker processes cost no time here.", _fewer_idle_workers
    ),
    "equal-shares": AdviceRule(
        ("training.groups",),
        "Let the number of groups be a multiple of the number of workers, because whole groups are shared out.",
        _equal_shares,
    ),
    "slow-machine": AdviceRule((), SLOW_MACHINE, _slow_machine),
}
