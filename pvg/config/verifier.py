"""`[verifier]`: the verifier's head, its loss and its scorer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    model_validator,
)

from pvg.config.base import ByKind, Count, Positive, Section, Weight
from pvg.config.models import Adapters, NoAdapters
from pvg.extensions import Reference

YES_NO_QUESTION = "Is this solution correct? Answer yes or no."


class LogprobHead(Section):
    """The score is `beta` times the log-probability of the solution minus that under the initial weights."""

    kind: Literal["implicit"] = "implicit"
    beta: Positive = Field(1.0, description="Scale of the score. A larger one multiplies all scores.")


class LastTokenHead(Section):
    """The score is read at the last token, by a trained linear layer."""

    kind: Literal["scalar"] = "scalar"


class AnswerHead(Section):
    """The verifier is asked a question after the solution. The score is the logit of "yes" minus that of "no"."""

    kind: Literal["yes_token"] = "yes_token"


class OwnHead(Section):
    """A verifier in a file of your own."""

    kind: Reference


Head = Annotated[LogprobHead | LastTokenHead | AnswerHead | OwnHead, ByKind("implicit")]


class PlainRisk(Section):
    """`none`: the mean over all pairs. `balanced`: the mean of the sources' mean losses."""

    kind: Literal["none", "balanced"] = "none"
    strength: ClassVar[float] = 0.0


class PenalisedRisk(Section):
    """A penalty on differences between the sources: `vrex` (arXiv 2003.00688) or `irm` (arXiv 1907.02893)."""

    kind: Literal["vrex", "irm"] = "vrex"
    strength: Weight = Field(
        1.0, description="Coefficient of the penalty. Higher values make the losses of the sources more equal."
    )
    warmup: Annotated[int, Field(ge=0)] = Field(
        0, description="Optimizer steps in which the penalty grows to its full strength. 0: full from the start."
    )


class WorstCaseRisk(Section):
    """Sources with a higher loss get more weight (arXiv 1911.08731)."""

    kind: Literal["group_dro"] = "group_dro"
    strength: Weight = Field(
        1.0, description="Step size of the sources' weights. Higher values follow the worst source faster."
    )


Robust = Annotated[PlainRisk | PenalisedRisk | WorstCaseRisk, ByKind("none")]


class SingleVerifier(Section):
    """One verifier."""

    kind: Literal["none"] = "none"
    size: ClassVar[int] = 1


class EnsembleOfVerifiers(Section):
    """Several verifiers score together. The kind says how pvg combines their scores."""

    kind: Literal["mean", "median", "min"] = "mean"
    size: Annotated[int, Field(ge=2, le=10**12)] = Field(
        3, description="Number of verifiers, each trained on its own pairs. Time and memory grow with it."
    )

    @model_validator(mode="after")
    def _median(self) -> EnsembleOfVerifiers:
        if self.kind == "median" and self.size == 2:
            raise ValueError("verifier.ensemble.size = 2: the median of two scores is their mean; set it to 3 or more")
        return self


Ensemble = Annotated[SingleVerifier | EnsembleOfVerifiers, ByKind("none")]


SOLUTIONS_PER_PROBLEM = 8  # that pairing by problem takes at most; with more, a step has fewer problems


class Verifier(Section):
    """The verifier's head, its loss and its scorer. FILE.py:NAME names a head or a loss of your own."""

    head: Head = LogprobHead()
    robust: Robust = PlainRisk()
    ensemble: Ensemble = SingleVerifier()
    adapters: Adapters = NoAdapters()
    loss: Literal["bradley_terry", "cross_entropy"] | Reference = Field(
        "bradley_terry", description='Pair loss: "bradley_terry", "cross_entropy", or FILE.py:NAME.'
    )
    pairing: Literal["random", "problem"] = Field(
        "random", description="Pairs are drawn independently, or problems are drawn with all pairs of their solutions."
    )
    score_penalty: Weight = Field(
        0.005, description="Coefficient of the penalty on squared scores. Higher values keep scores nearer to 0."
    )
    steps: Count = Field(
        100,
        description="Optimizer steps of the verifier per round (if game.growing: of round 0). More of them learn more, "
        "and take longer.",
    )
    pairs: Count = Field(
        64,
        description="Pairs per optimizer step (pairing by problem: on average). More pairs make steadier, slower "
        "steps.",
    )
    micro_batch_tokens: Count = Field(
        16_384, description="Tokens per micro-batch, padding included. Lower it if memory runs out."
    )
    learning_rate: Positive = Field(
        3e-4, description="Learning rate of AdamW. Higher values learn faster, and may diverge."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the forward and backward pass."
    )
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1, description="Share of the mint's problems that no verifier learns from: they serve calibration and AUC."
    )
    cache_entries: Count = Field(
        100_000, description="Number of scores that are kept in memory, so that a solution is scored once."
    )
    score_tokens: Count = Field(16_384, description="Tokens per scoring batch. Lower it if memory runs out.")
    engine: Literal["torch", "vllm"] = Field(
        "torch", description="Where scores are computed: in this process, or on serving.verifier_servers."
    )
