"""Two of the tests' own servers behind fault proxies, an engine over them, and what its completions must be.

async with drill(tmp_path) as d:
    await d.publish(0)
    d.proxies[0].plan(Fault("reset", after=200))
    d.check(await d.engine.generate(request(1)))
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

SERVING = Path(__file__).parent.parent / "servers"
sys.path.insert(0, str(SERVING))

from fake_model import AS_STARTED, as_vllm_writes, prompt_logprobs, routed_experts, sampled  # noqa: E402
from fake_model import Weights as Fingerprinted  # noqa: E402
from fake_vllm import FakeOptions, FakeVllm  # noqa: E402
from fault_proxy import Fault, FaultProxy  # noqa: E402
from patience import until  # noqa: E402

from pvg.config.operation import Serving, Weights  # noqa: E402
from pvg.rollout.engine import Completion, GenerationRequest, Sampling  # noqa: E402
from pvg.rollout.vllm_engine import Canary, SharedGpu, VllmEngine  # noqa: E402
from pvg.servers.control import Connections  # noqa: E402
from pvg.servers.publishing import PublishingSession, SyncTiming, WeightUpdate  # noqa: E402
from pvg.servers.served_model import ServedModel, ServerRequirements  # noqa: E402
from pvg.servers.transports.opening import open_transport  # noqa: E402
from pvg.telemetry.events import Events, SilentEvents  # noqa: E402

__all__ = [
    "AS_STARTED",
    "Drill",
    "FakeOptions",
    "FakeVllm",
    "Fault",
    "as_vllm_writes",
    "check",
    "drill",
    "engine_over",
    "fingerprint",
    "prompt_logprobs",
    "request",
    "routed_experts",
    "run",
    "until",
]

KEY = "the-key-of-the-drills"
STOP = 1
CANARY = [np.arange(2, 30, dtype=np.int32), np.arange(30, 40, dtype=np.int32)]
QUICK: dict[str, float] = {  # constants of `Serving` under which a drill takes about a second
    "probe_every_s": 0.05,
    "probe_timeout_s": 10.0,  # only the drills of servers that hang wait for it
    "retries": 5,
    "unavailable_s": 10.0,
}


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), float(version)), "b": torch.arange(4.0)}


def fingerprint(version: int) -> str:
    return Fingerprinted.of(tensors(version)).fingerprint


def request(
    number: int,
    max_tokens: int = 12,
    *,
    prompt: int = 20,
    stops: bool = True,
    on_tokens: Callable[[int], None] | None = None,
) -> GenerationRequest:
    ids = (np.arange(prompt, dtype=np.int32) * (number + 3)) % 60 + 2
    sampling = Sampling(max_tokens, (STOP,) if stops else ())
    return GenerationRequest(f"r{number}", ids, sampling, seed=1000 + number, on_tokens=on_tokens)


class Heard:
    """The engine's events, as (tag, fields). `log` receives them too."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []
        self.log: Events = SilentEvents()

    def event(self, tag: str, **fields: object) -> None:
        self.all.append((tag, dict(fields)))
        self.log.event(tag, **fields)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for _, fields in self.all if fields.get("event") == name]


@dataclass
class Drill:
    engine: VllmEngine
    servers: list[FakeVllm]
    proxies: list[FaultProxy]
    events: Heard
    asked: dict[str, GenerationRequest] = field(default_factory=dict)

    async def publish(self, version: int) -> SyncTiming:
        return await self.engine.load_weights(WeightUpdate(version, tensors(version), f"trace-{version}"))

    async def ask(self, asked: GenerationRequest) -> Completion:
        """Generate, and check what comes."""
        return check(await self.engine.generate(asked), asked)

    async def ask_all(self, asked: Sequence[GenerationRequest]) -> list[Completion]:
        return await asyncio.gather(*map(self.ask, asked))

    async def break_generation(self, *faults: Fault, default: Fault | None = None, only: int | None = None) -> None:
        """Plan `faults` for the connections to come of generation requests, through all proxies or one of them; those
        that are open are ended, and the engine has seen it."""
        for proxy in self.proxies if only is None else [self.proxies[only]]:
            proxy.only = "/inference/"
            proxy.plan(*faults)
            proxy.default = default or Fault()
            proxy.reset_all()
        await asyncio.sleep(0.02)

    def up(self) -> list[str]:
        return [server.url for server in self.engine.served.fleet.up]

    def running(self) -> int:
        return sum(server.running for server in self.servers)

    def received(self) -> int:
        return sum(sum(server.received.values()) for server in self.servers)


def check(found: Completion, asked: GenerationRequest) -> Completion:
    """Every token and log-prob is what the weights of its span sample, to the end of the completion."""
    assert found.request_id == asked.id
    assert found.spans[0].start == 0
    versions = np.zeros(len(found.token_ids), dtype=int)
    for span in found.spans:
        versions[span.start :] = span.version
    prints = {version: fingerprint(version) for version in set(versions.tolist())}
    pairs = [
        sampled(prints[version], asked.prompt_ids.tolist(), asked.seed, position, asked.sampling.stop_ids)
        for position, version in enumerate(versions.tolist())
    ]
    assert found.token_ids.tolist() == [token for token, _ in pairs]
    assert found.logprobs.tolist() == [logprob for _, logprob in pairs]
    stops = [position for position, (token, _) in enumerate(pairs) if token in asked.sampling.stop_ids]
    assert stops in ([], [len(pairs) - 1])
    assert found.finish_reason == ("stop" if stops else "length")
    assert stops or len(pairs) == asked.sampling.max_tokens
    return found


def canary() -> Canary:
    def reference(found: Mapping[str, torch.Tensor], sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        print_ = Fingerprinted.of(found).fingerprint
        return [np.asarray(prompt_logprobs(print_, ids.tolist()), np.float32) for ids in sequences]

    return Canary(lambda: CANARY, reference, None, tolerance=0.02)  # type: ignore[arg-type]


def quick_serving(servers: Sequence[str], **constants: float) -> Serving:
    """Checks servers more often than a run does."""
    made: Serving = type("QuickServing", (Serving,), {**QUICK, **constants})(servers=tuple(servers))
    return made


def engine_over(
    urls: Sequence[str],
    root: Path,
    events: Heard,
    *,
    session: PublishingSession | None = None,
    deadline_s: float | None = None,
    timeout_s: float = 5.0,
    concurrency: int = 256,
    canary_: Canary | None = None,
    longest: int = 100,
    key: str = KEY,
    transport: str = "filesystem",
    shape: str = "",
    wants_experts: bool = False,
    shared: SharedGpu | None = None,
    gives_reference: bool = False,
    **serving: float,
) -> VllmEngine:
    section = quick_serving(urls, **serving)
    session = session or PublishingSession.begin()
    weights: Weights = type("QuickWeights", (Weights,), {"timeout_s": timeout_s})(root=root, transport=transport)
    served = ServedModel(
        ServerRequirements(
            purpose="prover",
            runner="generate",
            shape=shape,
            max_length=longest,
            processed_logprobs=True,
            lora_rank=8 * (transport == "lora"),
        ),
        urls,
        Connections.open(section, weights, concurrency, key=key),
        events,
        session=session,
        transport=open_transport(weights, "drill", None, "float32", session),
    )
    proof = canary_ or canary()
    return VllmEngine(
        served,
        canary=proof,
        routed_experts=wants_experts,
        deadline_s=deadline_s,
        shared=shared,
        gives_reference=gives_reference,
    )


def run(use: Callable[[Drill], Awaitable[None]], root: Path, **options: Any) -> None:
    """`use(drill)` on a new event loop; `options` as for `drill`."""

    async def main() -> None:
        async with drill(root, **options) as d:
            await use(d)

    asyncio.run(main())


@asynccontextmanager
async def drill(root: Path, *, servers: int = 2, token_ms: float = 1.0, **options: Any) -> AsyncIterator[Drill]:
    """`options`: of the servers (load_ms, keeps_cache, ...) where FakeOptions has them, else of `engine_over`."""
    of_servers = {name: options.pop(name) for name in list(options) if hasattr(FakeOptions, name)}
    fakes = [FakeVllm(FakeOptions(root=root, key=KEY, token_ms=token_ms, **of_servers)) for _ in range(servers)]
    for fake in fakes:
        await fake.start()
    proxies = [FaultProxy(fake.url) for fake in fakes]
    for proxy in proxies:
        await proxy.accept()
    events = Heard()
    engine = engine_over([proxy.url for proxy in proxies], root, events, **options)
    try:
        await engine.ready()
        yield Drill(engine, fakes, proxies, events)
    finally:
        await engine.close()
        for proxy in proxies:
            await proxy.__aexit__()
        for fake in fakes:
            await fake.kill()
