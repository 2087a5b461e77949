"""`[training]`: what the prover learns from, and how."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    model_validator,
)

from pvg.config.base import ByKind, Count, Fraction, Positive, Section
from pvg.config.models import Adapters, NoAdapters
from pvg.extensions import Reference

Clip = Annotated[float, Field(gt=0.0)] | None
ClipLow = Annotated[
    Clip,
    Field(
        description="The ratio is clipped below 1 - clip_low. Higher values allow larger updates. Unset: the loss's "
        "own value."
    ),
]
ClipHigh = Annotated[
    Clip,
    Field(
        description="The ratio is clipped above 1 + clip_high. Higher values allow larger updates. Unset: the "
        "loss's own value."
    ),
]


class ClippedLoss(Section):
    """Policy losses that clip the probability ratio on both sides. `dapo` has no KL term."""

    kind: Literal["grpo", "dr_grpo", "dapo", "gspo", "reinforce_pp", "rae"] = "grpo"
    clip_low: ClipLow = None
    clip_high: ClipHigh = None


class CappedLoss(Section):
    """CISPO: the ratio is a weight with an upper limit."""

    kind: Literal["cispo"] = "cispo"
    clip_low: ClassVar[Clip] = None
    clip_high: Clip = Field(None, description="The weight is at most 1 + clip_high. Unset: the loss's own value.")


class UnclippedLoss(Section):
    """RLOO: REINFORCE with a leave-one-out baseline, without a probability ratio."""

    kind: Literal["rloo"] = "rloo"
    clip_low: ClassVar[Clip] = None
    clip_high: ClassVar[Clip] = None


class SpoLoss(Section):
    """SPO: the baseline is a tracked value of each problem and role, so it needs no groups."""

    kind: Literal["spo"] = "spo"
    clip_low: ClipLow = None
    clip_high: ClipHigh = None


class OwnLoss(Section):
    """A `PolicyLoss` in a file of your own."""

    kind: Reference
    clip_low: ClipLow = None
    clip_high: ClipHigh = None


Loss = Annotated[ClippedLoss | CappedLoss | UnclippedLoss | SpoLoss | OwnLoss, ByKind("grpo")]


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


class NoEntropy(Section):
    """Only the metric `entropy`: the mean of -log pi of the sampled tokens."""

    kind: Literal["none"] = "none"
    coefficient: ClassVar[float] = 0.0
    target: ClassVar[float | None] = None


class ExactEntropy(Section):
    """Also the metric `entropy_exact`: the entropy of the whole distribution."""

    kind: Literal["exact"] = "exact"
    coefficient: ClassVar[float] = 0.0
    target: ClassVar[float | None] = None


class EntropyBonus(Section):
    """An entropy bonus in the objective, with a fixed coefficient."""

    kind: Literal["bonus"] = "bonus"
    coefficient: Positive = Field(
        0.001,
        description="Coefficient of the exact entropy in the objective. Higher values keep solutions more varied.",
    )
    target: ClassVar[float | None] = None


# What AdaptiveEntropy's coefficient grows to. Beyond it the bonus outweighs the reward, and the policy becomes noise.
MOST_ENTROPY_BONUS = 0.01


class AdaptiveEntropy(Section):
    """An entropy bonus that acts and grows while the entropy is below its target."""

    kind: Literal["adaptive"] = "adaptive"
    coefficient: Annotated[float, Field(ge=0.0, le=MOST_ENTROPY_BONUS)] = Field(
        0.0, description="Coefficient of the exact entropy in the first step."
    )
    target: Positive = Field(0.2, description="Entropy in nats per token below which the bonus acts and grows.")


Entropy = Annotated[NoEntropy | ExactEntropy | EntropyBonus | AdaptiveEntropy, ByKind("none")]
Level = Annotated[
    Literal["token", "sequence", "geometric"] | None,
    Field(description="Ratio of the token, the sequence, or its geometric mean. Unset: token; for gspo geometric."),
]
TruncationLimit = Annotated[Positive, Field(description="Largest importance weight. A larger one becomes this.")]


class _WithoutWeights(Section):
    kind: str
    high: ClassVar[float] = 5.0
    low: ClassVar[float] = 0.0
    level: ClassVar[Level] = None


class _TruncatedWeights(Section):
    kind: str
    high: TruncationLimit = 5.0
    low: ClassVar[float] = 0.0
    level: Level = None


class NoImportance(_WithoutWeights):
    """No importance weights. The ratio is clipped around the policy that sampled."""

    kind: Literal["none"] = "none"


class DecoupledImportance(_TruncatedWeights):
    """Stale rollouts only: the ratio is clipped around the policy at batch start, with truncated importance weights."""

    kind: Literal["decoupled"] = "decoupled"


class UnweightedImportance(_WithoutWeights):
    """Stale rollouts only: the ratio is clipped around the policy at batch start, without importance weights."""

    kind: Literal["unweighted"] = "unweighted"


class TruncatedImportance(_TruncatedWeights):
    """All rollouts: the ratio is clipped around the policy at batch start, with truncated importance weights."""

    kind: Literal["truncated"] = "truncated"


class MaskedImportance(Section):
    """All rollouts: as `truncated`, but tokens with a weight outside the limits get the weight 0."""

    kind: Literal["masked"] = "masked"
    high: Annotated[float, Field(ge=1.0)] = Field(5.0, description="Largest importance weight. A larger one becomes 0.")
    low: Fraction = Field(0.5, description="Smallest importance weight. A smaller one becomes 0.")
    level: Level = None

    @model_validator(mode="after")
    def _range(self) -> MaskedImportance:
        if self.low >= self.high:
            raise ValueError(
                f"training.importance.low = {self.low} is not below training.importance.high = {self.high}"
            )
        return self


Importance = Annotated[
    NoImportance | DecoupledImportance | UnweightedImportance | TruncatedImportance | MaskedImportance, ByKind("none")
]


class Training(Section):
    """Prover training: one step is one optimizer step over a batch of groups. FILE.py:NAME names a loss
    of your own."""

    loss: Loss = ClippedLoss()
    kl: Kl = FixedKl()
    entropy: Entropy = NoEntropy()
    importance: Importance = NoImportance()
    curriculum: Literal["none", "buckets", "prioritised"] = Field(
        "none",
        description="All problems, hard to easy ones in fixed shares, or more of those with an uncertain outcome.",
    )
    adapters: Adapters = NoAdapters()
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
    def exact_entropy(self) -> bool:
        return self.entropy.kind != "none"

    @property
    def groupless(self) -> bool:
        """Whether the loss takes no statistics of groups: groups of one solution work too."""
        return self.loss.kind in ("spo", "rae")
