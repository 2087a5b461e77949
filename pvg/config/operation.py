"""`[serving]`, `[weights]`, `[cluster]`, `[evaluate]`, `[telemetry]`, `[store]`: sections that change no results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from pvg.config.base import ByKind, Count, Folder, Fraction, NotEmpty, Positive, Section, Source, _names
from pvg.inputs import has_place


class AutoCluster(Section):
    """Local workers if the models are the embedded ones on a CPU, and the machine has Linux and two cores or more;
    otherwise none."""

    kind: Literal["auto"] = "auto"


class NoCluster(Section):
    """One process computes everything."""

    kind: Literal["none"] = "none"


class LocalCluster(Section):
    """Worker processes on this machine, each with one compute thread. The last bits of results depend on the number of
    shards of the work, `workers`."""

    kind: Literal["local"] = "local"
    workers: Annotated[int, Field(ge=0, le=256)] | None = Field(
        None,
        description="Shards of the work, and processes unless `max_workers` is lower. "
        "Unset: `max_workers`, or one per core, at most 8; with `trainer_ranks`, 0.",
    )
    trainers: Annotated[int, Field(ge=1, le=255)] | None = Field(
        None,
        description="With `rollout.prefetch`: workers that only train while the others sample and score. "
        "Unset: all do both.",
    )
    min_workers: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="Worker processes at the start, and at least. Unset: `max_workers`, so their number is fixed."
    )
    max_workers: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="Worker processes at most. Results do not depend on it. Unset: `workers`."
    )
    trainer_ranks: Annotated[int, Field(ge=2, le=64)] | None = Field(
        None,
        description="Processes that divide the prover's weights, gradients and moments (on GPUs: experimental). "
        "Unset: none.",
    )


class RayCluster(Section):
    """Worker processes on the nodes of a Ray cluster. Results are those of as many local ones. With
    `rollout.engine = "vllm"`, vLLM servers in place of workers, which pvg starts."""

    kind: Literal["ray"] = "ray"
    workers: Annotated[int, Field(ge=0, le=4096)] | None = Field(
        None,
        description="Shards of the work, as for local workers. Required with an address, unless `max_workers` is set. "
        "vLLM servers: 1.",
    )
    trainers: Annotated[int, Field(ge=1, le=4095)] | None = Field(
        None, description="Workers that only train, as for local workers. Unset: all do both."
    )
    min_workers: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="Worker processes at the start, and at least. Unset: `max_workers`."
    )
    max_workers: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="Worker processes at most. Unset: `workers`."
    )
    address: NotEmpty | None = Field(
        None, description="HOST:PORT of a running cluster. Unset: pvg starts one on this machine."
    )
    gpus_per_worker: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="GPUs for each vLLM server; 0: CPU nodes. Above 0 it is EXPERIMENTAL: no GPU has run it."
    )


Cluster = Annotated[AutoCluster | NoCluster | LocalCluster | RayCluster, ByKind("auto")]
COUNTS = ("workers", "trainers", "min_workers", "max_workers", "trainer_ranks")


def shards_of(cluster: LocalCluster | RayCluster) -> int | None:
    """The number of shards of the work; None if the machine decides it."""
    return cluster.max_workers if cluster.workers is None else cluster.workers


def processes_of(cluster: LocalCluster | RayCluster, shards: int) -> tuple[int, int]:
    """The lowest and the highest number of worker processes. A process without a shard would have nothing to do."""
    highest = min(cluster.max_workers or shards, shards)
    return min(cluster.min_workers or highest, highest), highest


def has_workers(cluster: Cluster) -> bool:
    """Whether a cluster that is not "auto" has workers. Clusters of vLLM servers have none, whatever this returns."""
    if not isinstance(cluster, LocalCluster | RayCluster):
        return False
    return bool(cluster.workers) if cluster.workers is not None else ranks_of(cluster) is None


def ranks_of(cluster: Cluster) -> int | None:
    """The processes that divide the prover's training state; None: one process has it."""
    return cluster.trainer_ranks if isinstance(cluster, LocalCluster) else None


# `[serving]` and `[weights]`: vLLM servers, and how trained weights get to them.

URL_PATTERN = r"^https?://[^/\s]+/?$"
URL_EXAMPLE = "Write http:// or https://, host and port, and no path: http://127.0.0.1:8000"
Url = Annotated[str, Field(pattern=URL_PATTERN)]


def _addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    """Each server once, however its address is written. Raises ValueError for an impossible host or port."""
    for url in value:
        if not has_place(url) or urlsplit(url).path not in ("", "/") or set(url) & set("?#@\\"):
            raise ValueError(f"{url!r} is not the address of a server. {URL_EXAMPLE}")
    return tuple(dict.fromkeys(url.rstrip("/").lower() for url in value))


# One, several with commas, or a list.
Urls = Annotated[tuple[Url, ...], Field(strict=False), BeforeValidator(_names), AfterValidator(_addresses)]


class Serving(Section):
    """vLLM servers: their addresses, how pvg sends requests, and how `pvg serve` starts one. These settings do not
    change results, so you can resume a run with other servers."""

    probe_every_s: ClassVar[float] = 2.0  # between two health checks: a fraction of the time that a restart takes
    probe_timeout_s: ClassVar[float] = 15.0  # without an answer to a health check, until a server counts as down
    # Retries of a request after server failures, with growing pauses: 18 s or more. That is longer than
    # `probe_timeout_s`, after which requests wait for another server instead.
    retries: ClassVar[int] = 12
    unavailable_s: ClassVar[float] = 120.0  # that a request waits for any server
    startup_s: ClassVar[float] = 900.0  # that a server may take to start

    servers: Urls = Field(("http://127.0.0.1:8000",), description="Addresses of the prover's servers.")
    verifier_servers: Urls = Field(
        (), description='Addresses of the verifier\'s servers, for verifier.engine = "vllm".'
    )
    reference_servers: Urls = Field(
        (), description="Addresses of servers of the verifier's initial weights. Empty: this process."
    )
    max_num_seqs: Count = Field(
        256,
        description="Maximum number of sequences that the server decodes together. More of them take more GPU memory.",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.9, description="Share of the GPU's memory that the server takes. Lower it if the trainer shares the GPU."
    )
    tensor_parallel: Count = Field(1, description="GPUs per server. Above 1 it is EXPERIMENTAL: no GPU has run it.")
    extra_args: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="Further command-line arguments for vLLM."
    )


class FileTransport(Section):
    """pvg sends whole weights through a shared folder."""

    kind: Literal["filesystem"] = "filesystem"


class LoraTransport(Section):
    """pvg sends only adapters, through a shared folder. Requires training.adapters."""

    kind: Literal["lora"] = "lora"


class DeviceTransport(Section):
    """EXPERIMENTAL: no GPU has run it. pvg sends weights from GPU to GPU, by NCCL."""

    kind: Literal["nccl"] = "nccl"


TransportSection = Annotated[FileTransport | LoraTransport | DeviceTransport, ByKind("filesystem")]


class Weights(Section):
    """How pvg sends trained weights to the servers, and checks that they arrived."""

    timeout_s: ClassVar[float] = 600.0  # of an update: gigabytes over a slow disk take minutes

    transport: TransportSection = FileTransport()
    root: Folder = Field(Path("runs/.weights"), description="Folder that the trainer and the servers share.")
    canary_prompts: Annotated[int, Field(ge=0)] = Field(
        4, description="Prompts that trainer and servers score after each update, as a check. 0: no check."
    )
    canary_tolerance: Positive | None = Field(
        None, description="Largest gap in nats between the log-probs of trainer and servers. Unset: by the data type."
    )


class Evaluate(Section):
    """What `pvg evaluate` measures in the finished rounds of a run, and with how much effort. These settings do not
    change the run, so you can set them for a complete run."""

    problems: Annotated[int, Field(ge=2)] = Field(
        128, description="Number of test problems. More of them make intervals narrower, and take longer."
    )
    samples: Annotated[int, Field(ge=2)] = Field(
        8, description="Solutions per problem and role. More of them make intervals narrower, and take longer."
    )
    attacks: Annotated[tuple[Literal["src", "cgc", "goodhart"], ...], Field(strict=False), BeforeValidator(_names)] = (
        Field(("src", "cgc", "goodhart"), description="Rewards of the attackers.")
    )
    attack_steps: Annotated[int, Field(ge=1, le=100_000)] = Field(
        200,
        description="Optimizer steps after which an attack ends without success. With more of them, attacks are "
        "stronger.",
    )
    attack_window: Count = Field(
        10, description="Batches that the criterion of an attack is averaged over. More of them make it less noisy."
    )
    attack_error_rate: Fraction = Field(
        0.95, description="Share of well-formed wrong solutions that an exploit needs (arXiv 2407.13692)."
    )
    attack_groups: Count | None = Field(None, description="Groups per batch of attackers. Unset: training.groups.")
    baseline_probes: Annotated[int, Field(ge=1, le=90)] = Field(
        6, description="Points on the trajectory of the baseline, besides its start. More of them take longer."
    )
    reader: Source | None = Field(
        None,
        description="Who reads solutions for the part legibility: as in models.prover.source, or http://HOST:PORT/v1. "
        "Unset: that model.",
    )


class Telemetry(Section):
    """What pvg monitors, and when it raises an alert. These settings do not change results."""

    stall_s: Positive = Field(600.0, description="Alert when no step has ended for this many seconds.")
    sinks: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False), BeforeValidator(_names)
    ] = Field((), description="Experiment trackers that also get the metrics.")
    metrics_port: Annotated[int, Field(ge=0, lt=65536)] = Field(
        0, description="Port of the Prometheus endpoint on 127.0.0.1. 0: none."
    )
    alert_command: Annotated[tuple[NotEmpty, ...], Field(strict=False)] = Field(
        (), description="Program to run for each alert, with its arguments. It reads the alert as JSON. Empty: none."
    )


class Store(Section):
    """Where runs are stored, and how often they commit."""

    root: Folder = Field(Path("runs"), description="Folder of the runs.")
    commit_every: Count = Field(
        10,
        description="Optimizer steps between two commits. A killed run repeats at most that many, and the steps "
        "that ran while a commit was written.",
    )
