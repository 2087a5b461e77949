"""`[training]`: what the prover learns from, and how."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
)

from pvg.config.base import ByKind, Count, Positive, Section, Weight
from pvg.config.models import Adapters, NoAdapters
from pvg.extensions import Reference


class NoKl(Section):
    """No KL term, and no forward pass of the base prover."""

    kind: Literal["none"] = "none"
    coefficient: ClassVar[float] = 0.0
    target: ClassVar[float | None] = None


class FixedKl(Section):
    """A penalty on the KL divergence to the base prover, with a fixed coefficient."""

    kind: Literal["fixed"] = "fixed"
    coefficient: Positive = Field(
        0.02, description="Coefficient of the KL penalty. Higher values keep the prover nearer to its base."
    )
    target: ClassVar[float | None] = None


class AdaptiveKl(Section):
    """A penalty on the KL divergence to the base prover, with a coefficient that follows the measured KL."""

    kind: Literal["adaptive"] = "adaptive"
    coefficient: Positive = Field(0.02, description="Coefficient of the KL penalty in the first step.")
    target: Positive = Field(0.05, description="KL in nats per token at which the coefficient stays as it is.")


Kl = Annotated[NoKl | FixedKl | AdaptiveKl, ByKind("fixed")]


class Training(Section):
    """Prover training: one step is one optimizer step over a batch of groups. FILE.py:NAME names a loss
    of your own."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "spo", "rae"] | Reference = Field(
        "grpo", description="The policy loss (docs/learning.md), or FILE.py:NAME."
    )
    kl: Kl = FixedKl()
    curriculum: Literal["none", "buckets", "prioritised"] = Field(
        "none",
        description="All problems, hard to easy ones in fixed shares, or more of those with an uncertain outcome.",
    )
    adapters: Adapters = NoAdapters()
    entropy_bonus: Weight = Field(
        0.0, description="Coefficient of the exact entropy in the objective. Higher values keep solutions more varied."
    )
    importance: Literal["none", "decoupled", "unweighted", "truncated", "masked"] = Field(
        "none", description="How off-policy rollouts are weighted: only stale ones, or all (docs/learning.md)."
    )
    groups: Count = Field(32, description="Groups sampled per batch. More groups make steadier, slower steps.")
    steps: Annotated[int, Field(ge=0)] = Field(
        60, description="Optimizer steps of the prover per round. 0: the prover is not trained."
    )
    minibatches: Count = Field(
        1, description="Optimizer steps per sampled batch. More of them use the same samples again, which grow stale."
    )
    micro_batch_tokens: Count = Field(
        16_384, description="Tokens per micro-batch, padding included. Lower it if memory runs out."
    )
    micro_batch_rollouts: Count | None = Field(
        None, description="Maximum number of rollouts per micro-batch. Unset: as many as the tokens allow."
    )
    shared_prompts: bool = Field(
        True, description="Whether equal prompts and equal rows of a micro-batch are computed once."
    )
    learning_rate: Positive = Field(
        1e-4, description="Learning rate of AdamW. Higher values learn faster, and may diverge."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the forward and backward pass."
    )
    fused_layers: bool = Field(
        True, description="Whether norms and rotary embeddings of Llama and Qwen2 use pvg's fused code."
    )
    gradient_checkpointing: bool = Field(
        False, description="Whether the backward pass computes activations again, to save memory."
    )
    router_replay: bool = Field(
        False, description="Mixtures of experts: whether the trainer uses the experts that the sampler used."
    )
    dynamic_sampling: Annotated[int, Field(ge=0)] = Field(
        0, description="Additional sampling rounds that replace groups with equal rewards. 0: pvg keeps these groups."
    )
    overlong_buffer: Annotated[int, Field(ge=0)] = Field(
        0, description="Tokens before rollout.max_tokens from which a penalty grows to 1. 0: no penalty."
    )

    @property
    def groupless(self) -> bool:
        """Whether the loss takes no statistics of groups: groups of one solution work too."""
        return self.loss in ("spo", "rae")
