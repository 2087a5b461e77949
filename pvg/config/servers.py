"""`[serving]` and `[weights]`: vLLM servers, and how trained weights get to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
)

from pvg.config.base import ByKind, Count, Folder, Positive, Section, _names

URL_PATTERN = r"^https?://[^/\s]+/?$"
URL_EXAMPLE = "Write http:// or https://, host and port, and no path: http://127.0.0.1:8000"
Url = Annotated[str, Field(pattern=URL_PATTERN)]


def _addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    """Each server once, however its address is written. Raises ValueError for an impossible host or port."""
    for url in value:
        try:
            parts = urlsplit(url)
            possible = bool(parts.hostname) and parts.port != 0 and not parts.username and parts.path in ("", "/")
        except ValueError:  # a port beyond 65535, or half a bracket
            possible = False
        if not possible or set(url) & set("?#@\\"):
            raise ValueError(f"{url!r} is not the address of a server. {URL_EXAMPLE}")
    return tuple(dict.fromkeys(url.rstrip("/").lower() for url in value))


# One, several with commas, or a list.
Urls = Annotated[tuple[Url, ...], Field(strict=False), BeforeValidator(_names), AfterValidator(_addresses)]


class Serving(Section):
    """vLLM servers: their addresses, how pvg sends requests, and how `pvg serve` starts one. These settings do not
    change results, so you can resume a run with other servers."""

    probe_every_s: ClassVar[float] = 2.0  # between two health checks: a fraction of the time that a restart takes
    # Retries of a request after server failures, with growing pauses: 18 s or more. That is longer than
    # `probe_timeout_s`, after which a server counts as down, and requests wait for another one instead.
    retries: ClassVar[int] = 12
    startup_s: ClassVar[float] = 900.0  # that a server may take to start

    servers: Urls = Field(("http://127.0.0.1:8000",), description="Addresses of the prover's servers.")
    verifier_servers: Urls = Field(
        (), description='Addresses of the verifier\'s servers, for verifier.engine = "vllm".'
    )
    reference_servers: Urls = Field(
        (),
        description="Addresses of servers of the verifier's initial weights. Empty: this process.",
    )
    connections: Count | None = Field(
        None, description="Connections to all servers. Unset: derived from rollout.concurrency."
    )
    share_prefix: bool = Field(True, description="Whether prompts with the same beginning share its KV cache.")
    probe_timeout_s: Positive = Field(
        15.0,
        description="Seconds without an answer to a health check after which a server counts as down. "
        "rollout.engine.timeout_s limits requests.",
    )
    unavailable_s: Positive = Field(120.0, description="Seconds that a request waits for any server.")
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
    client: Literal["dedicated", "shared"] = Field(
        "dedicated", description="Whether weight updates use separate connections, or those of generation."
    )
    root: Folder = Field(Path("runs/.weights"), description="Folder that the trainer and the servers share.")
    canary_prompts: Annotated[int, Field(ge=0)] = Field(
        4, description="Prompts that trainer and servers score after each update, as a check. 0: no check."
    )
    canary_tolerance: Positive | None = Field(
        None, description="Largest gap in nats between the log-probs of trainer and servers. Unset: by the data type."
    )
