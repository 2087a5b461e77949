"""`[rollout]`: how solutions are sampled."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
)

from pvg.config.base import ByKind, Count, Positive, Section


class TorchSampling(Section):
    """This process samples, with torch."""

    kind: Literal["torch"] = "torch"
    max_rows: Count = Field(
        256,
        description="Maximum number of sequences that are decoded together. More of them are faster and take more "
        "memory.",
    )
    decoding: Literal["lean", "module"] = Field(
        "lean",
        description='"lean": pvg\'s own decoding step for Llama-like models. "module": the model\'s own forward pass.',
    )
    batching: Literal["auto", "continuous", "whole"] = Field(
        "auto",
        description='"continuous": rows join as others finish. "whole": batch by batch. "auto": whole on a CPU '
        "without deadline or prefetch.",
    )


class ServerSampling(Section):
    """vLLM servers sample (docs/scaling.md). Their addresses are in `[serving]`."""

    kind: Literal["vllm"] = "vllm"
    timeout_s: Positive | None = Field(
        None, description="Timeout of a request in seconds, retries included. Unset: none."
    )


SamplingEngine = Annotated[TorchSampling | ServerSampling, ByKind("torch")]


class NoDeadline(Section):
    """A batch waits for all of its rollouts."""

    kind: Literal["none"] = "none"


class CuttingDeadline(Section):
    """Unfinished rollouts are cancelled at the deadline, and the group (spo, rae: the batch) is used as it is."""

    kind: Literal["cut"] = "cut"
    seconds: Positive = Field(60.0, description="Seconds until the deadline of a group (spo, rae: of a batch).")
    min_rollouts: Count = Field(
        2, description="Minimum number of rollouts of a group (spo, rae: of a batch) at the deadline."
    )


class ContinuingDeadline(Section):
    """A batch is used at its deadline. Its incomplete groups (spo, rae: rollouts) continue in the next batch."""

    kind: Literal["continue"] = "continue"
    seconds: Positive = Field(60.0, description="Seconds until the deadline of a batch.")
    min_rollouts: Count = Field(2, description="Minimum number of rollouts of a batch at the deadline.")
    max_versions: Count = Field(
        4,
        description="Versions that a continued group's oldest token may be behind. Older groups are used as they are.",
    )


DeadlineSection = Annotated[NoDeadline | CuttingDeadline | ContinuingDeadline, ByKind("none")]


class NoPrefetch(Section):
    """Sampling and training take turns."""

    kind: Literal["none"] = "none"
    batches: ClassVar[int] = 0
    staleness_budget: ClassVar[int] = 0


class SamplingAhead(Section):
    """Groups are sampled ahead of the trainer (docs/scaling.md). The trainer takes the least stale groups first
    (`fresh`), or the oldest first, which drops few (`old`)."""

    kind: Literal["fresh", "old"] = "fresh"
    batches: Count = Field(
        1, description="Batches that are sampled ahead of the trainer. With more of them, rollouts are more stale."
    )
    max_staleness: Count | None = Field(
        None,
        description="Versions that a rollout may be behind at most. An older rollout is dropped. Unset: batches + 1.",
    )

    @property
    def staleness_budget(self) -> int:
        """Versions of the policy that a rollout may be behind when it is trained on.

        Groups that are taken in the order they were begun are trained on `batches` + 1 versions after they were: with
        less, most of what is sampled ahead would be dropped."""
        return self.batches + 1 if self.max_staleness is None else self.max_staleness


PrefetchSection = Annotated[NoPrefetch | SamplingAhead, ByKind("none")]


class Rollouts(Section):
    """How solutions are sampled."""

    engine: SamplingEngine = TorchSampling()
    deadline: DeadlineSection = NoDeadline()
    prefetch: PrefetchSection = NoPrefetch()
    dtype: Literal["model", "float32", "bfloat16"] = Field(
        "model", description='Data type of the sampling copy of the prover. "model": the type of the prover.'
    )
    group_size: Count = Field(
        8, description="Solutions per problem and role. More of them give a better baseline, and take longer to sample."
    )
    max_tokens: Count = Field(48, description="Maximum number of tokens of a solution. A longer one is cut off.")
    temperature: Positive = Field(1.0, description="Sampling temperature. Higher values give more varied solutions.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Nucleus sampling: smallest probability mass that is kept. 1: all tokens."
    )
    top_k: Annotated[int, Field(ge=0)] = Field(
        0, description="Only this many most likely tokens are sampled. 0: all tokens."
    )
    concurrency: Count = Field(1024, description="Maximum number of requests in flight.")
    logprobs: Literal["sampled", "recomputed"] = Field(
        "sampled", description="Log-probs of the sampler: as sampled, or computed again by the trainer."
    )

    @property
    def chunk(self) -> int:
        """Rollouts that phases without training sample between two commits: what the engine samples at once."""
        return self.engine.max_rows if isinstance(self.engine, TorchSampling) else self.concurrency
