"""`[models]`, `[training]`, `[warmup]` and `[verifier]`: the models, and what they learn from."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from pvg.config.base import ByKind, Count, Folder, Fraction, Player, Positive, Section, Source, Weight, with_player
from pvg.extensions import Reference
from pvg.installation import native_bfloat16, usable_gpus

# `[models]`: where the models come from, and where they compute. `[*.adapters]`: low-rank adapters.

DataType = Literal["float32", "bfloat16"]


class ModelSection(Section):
    """Where a model comes from.

    `source`: "embedded:NAME" (shipped with pvg), "hf:OWNER/NAME" or "hf:OWNER/NAME@REVISION" (the Hugging Face hub),
    "run:NAME" or "run:NAME/round-2/verifier" (a player of another run), "gguf:PACKAGE" (a GGUF file inside an installed
    package), or the path of a Hugging Face directory.
    """

    source: Source = Field(
        "embedded:modchain-prover",
        description='"embedded:NAME", "hf:OWNER/NAME[@REVISION]", "run:NAME[/round-N][/verifier]", "gguf:PACKAGE", or '
        "a Hugging Face directory.",
    )


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise ValueError(f"models.device = {name!r} is not a device; use 'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'")
    return name


Device = Annotated[str, AfterValidator(_device)]


def _for_player(player: Player, section: ModelSection) -> ModelSection:
    """The section; a run's source that names no player means the same player."""
    source = with_player(section.source, player)
    return section if source == section.source else section.model_copy(update={"source": source})


ProverModel = Annotated[ModelSection, AfterValidator(partial(_for_player, "prover"))]
VerifierSource = Annotated[ModelSection, AfterValidator(partial(_for_player, "verifier"))]


def _known_here(precision: Any) -> Any:
    """`native` becomes what it means on this machine, so that a run has the same precision everywhere."""
    if precision != "native":
        return precision
    return "bfloat16" if native_bfloat16() else "auto"


class Models(Section):
    """The models of the two players, and where they compute."""

    prover: ProverModel = ModelSection()
    verifier: VerifierSource = ModelSection(source="embedded:modchain-verifier")
    dtype: DataType = Field(
        "float32",
        description="Data type of the weights. bfloat16 halves their memory, and is slow on a CPU without support "
        "for it.",
    )
    precision: Annotated[Literal["auto", "native", DataType], BeforeValidator(_known_here)] = Field(
        "auto",
        description="Data type of passes and of sampling. auto: bfloat16 on a GPU for models that are not embedded. "
        "native: also on CPUs made for it.",
    )
    device: Device = Field("auto", description='"auto", "cpu", "mps", "cuda" or "cuda:N". "mps" is untested.')
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="Compute threads. 0: one for models narrower than 512, else one per core."
    )

    @property
    def on_gpu(self) -> bool:
        """Whether the models compute on an NVIDIA GPU here, as far as one can tell without torch."""
        return self.device.startswith("cuda") or (self.device == "auto" and usable_gpus() > 0)

    @property
    def embedded(self) -> bool:
        """Whether both models are shipped with pvg. They are small, and gain nothing from 16 bits."""
        return all(model.source.startswith("embedded:") for model in (self.prover, self.verifier))

    @property
    def compute_dtype(self) -> DataType:
        """The data type of forward and backward passes on this machine."""
        if self.precision in ("float32", "bfloat16"):
            return self.precision
        return "bfloat16" if self.on_gpu and not self.embedded else "float32"


class Adapters(Section):
    """Low-rank adapters of all linear layers, which are trained instead of all weights (extra `lora`)."""

    rank: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0, description="Rank of the adapters. Higher ranks can learn more, and take more memory. 0: no adapters."
    )
    alpha: Positive = Field(
        16.0,
        description="The output of an adapter is multiplied by alpha / rank. Higher values act like a higher "
        "learning rate.",
    )


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

    kind: Literal["grpo", "dr_grpo", "dapo", "gspo", "reinforce_pp", "spo", "rae"] = "grpo"
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


class OwnLoss(Section):
    """A `PolicyLoss` in a file of your own."""

    kind: Reference
    clip_low: ClipLow = None
    clip_high: ClipHigh = None


Loss = Annotated[ClippedLoss | CappedLoss | UnclippedLoss | OwnLoss, ByKind("grpo")]


class Kl(Section):
    """The penalty on the KL divergence to the base prover."""

    coefficient: Weight = Field(
        0.02,
        description="Coefficient of the KL penalty. Higher values keep the prover nearer to its base. 0: no penalty, "
        "and no forward pass of the base prover.",
    )
    target: Positive | None = Field(
        None,
        description="KL in nats per token at which an adaptive coefficient stays as it is. Unset: the coefficient is "
        "fixed.",
    )

    @model_validator(mode="after")
    def _adapts(self) -> Kl:
        if self.target is not None and not self.coefficient:
            raise ValueError("training.kl.target has no effect with training.kl.coefficient = 0; leave it out")
        return self


class Training(Section):
    """Prover training: one step is one optimizer step over a batch of groups. FILE.py:NAME names a loss
    of your own."""

    loss: Loss = ClippedLoss()
    kl: Kl = Kl()
    adapters: Adapters = Adapters()
    importance: Literal["auto", "none", "decoupled", "unweighted", "truncated", "masked"] = Field(
        "auto",
        description="How off-policy rollouts are weighted (docs/learning.md). auto: truncated if servers sample or "
        "passes are in bfloat16.",
    )
    groups: Count = Field(32, description="Groups sampled per batch. More groups make steadier, slower steps.")
    steps: Annotated[int, Field(ge=0)] = Field(
        60, description="Optimizer steps of the prover per round. 0: the prover is not trained."
    )
    minibatches: Count = Field(
        1, description="Optimizer steps per sampled batch. More of them use the same samples again, which grow stale."
    )
    micro_batch_tokens: Count = Field(
        16_384, description="Tokens per micro-batch, those in common counted once. Lower it if memory runs out."
    )
    shared_prompts: bool = Field(
        True,
        description="Whether both players compute once, without padding, what rows of a micro-batch have in common.",
    )
    learning_rate: Positive = Field(
        1e-4, description="Learning rate of AdamW. Higher values learn faster, and may diverge."
    )
    gradient_checkpointing: bool = Field(
        False, description="Whether the backward pass of both players computes activations again, to save memory."
    )
    router_replay: bool = Field(
        False, description="Mixtures of experts: whether the trainer uses the experts that the sampler used."
    )
    dynamic_sampling: Annotated[int, Field(ge=0)] = Field(
        0, description="Additional sampling rounds that replace groups with equal rewards. 0: pvg keeps these groups."
    )

    @property
    def groupless(self) -> bool:
        """Whether the loss takes no statistics of groups: groups of one solution work too."""
        return self.loss.kind in ("spo", "rae")

    @property
    def penalised(self) -> bool:
        """Whether the loss has a KL term. For a user's own loss, only the trainer knows this."""
        return self.kl.coefficient > 0 and self.loss.kind != "dapo"


class Warmup(Section):
    """Before round 0 the prover learns to write the solutions of a file. The result is the base prover of the game. The
    file has the columns `question` and `solution`, and may have `role`: "helpful" (the default) or "sneaky"."""

    path: Annotated[Folder | None, BeforeValidator(lambda path: None if path == "" else path)] = Field(
        None,
        description='File .jsonl, .csv or .parquet with questions and their solutions. Unset or "": no warm start.',
    )
    steps: Count = Field(100, description="Optimizer steps. Too many of them make the prover repeat the file.")
    batch: Count = Field(32, description="Solutions per step. More of them make steadier, slower steps.")
    learning_rate: Positive = Field(
        1e-4, description="Learning rate of AdamW, which falls to 0. Higher values learn faster, and may diverge."
    )


# `[verifier]`: the verifier's head, its loss and its scorer.

YES_NO_QUESTION = "Is this solution correct? Answer yes or no."


class LogprobHead(Section):
    """The score is `beta` times the log-probability of the solution, minus `reference` times that under the initial
    weights."""

    kind: Literal["implicit"] = "implicit"
    beta: Positive = Field(1.0, description="Scale of the score. A larger one multiplies all scores.")
    reference: Fraction = Field(
        1.0,
        description="Share of the log-probability under the initial weights that is subtracted. "
        "0: what those find unlikely scores low.",
    )


class LastTokenHead(Section):
    """The score is read at the last token, by a trained linear layer."""

    kind: Literal["scalar"] = "scalar"


class AnswerHead(Section):
    """The verifier is asked a question after the solution. The score is the logit of "yes" minus that of "no"."""

    kind: Literal["yes_token"] = "yes_token"


class VerdictHead(Section):
    """The verifier writes a check and a verdict, and learns by GRPO whether its verdicts are right. The score is the
    log-odds of the share of its votes for "correct"."""

    kind: Literal["generative"] = "generative"
    votes: Count = Field(4, description="Verdicts per score. More of them make finer scores, and take longer.")
    tokens: Count = Field(16, description="Maximum number of tokens of a check with its verdict.")


class OwnHead(Section):
    """A verifier in a file of your own."""

    kind: Reference


Head = Annotated[LogprobHead | LastTokenHead | AnswerHead | VerdictHead | OwnHead, ByKind("implicit")]


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
    ensemble: Ensemble = SingleVerifier()
    adapters: Adapters = Adapters()
    loss: Literal["bradley_terry", "cross_entropy"] | Reference = Field(
        "bradley_terry", description='Pair loss: "bradley_terry", "cross_entropy", or FILE.py:NAME.'
    )
    pairing: Literal["random", "problem"] = Field(
        "random", description="Pairs are drawn independently, or problems are drawn with all pairs of their solutions."
    )
    score_penalty: Weight = Field(
        0.005, description="Coefficient of the penalty on squared scores. Higher values keep scores nearer to 0."
    )
    steps: Annotated[int, Field(ge=0)] = Field(
        100,
        description="Optimizer steps of the verifier per round (if game.growing: of round 0). 0: a frozen judge "
        "(generative, or with reference below 1).",
    )
    keeps: Literal["nothing", "weights", "mints", "both"] = Field(
        "nothing",
        description="What a verifier keeps of earlier rounds: the weights with which it starts, the mints from which "
        "it learns, or both.",
    )
    pairs: Count = Field(
        64,
        description="Pairs of solutions per optimizer step (pairing by problem: on average). More pairs make steadier, "
        "slower steps.",
    )
    micro_batch_tokens: Count = Field(
        16_384,
        description="Tokens per micro-batch of training, those in common counted once; per batch of scoring, padding "
        "included. Lower it if memory runs out.",
    )
    learning_rate: Positive = Field(
        3e-4, description="Learning rate of AdamW. Higher values learn faster, and may diverge."
    )
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1, description="Share of the mint's problems that no verifier learns from: they serve calibration and AUC."
    )
    engine: Literal["torch", "vllm"] = Field(
        "torch", description="Where scores are computed: in this process, or on serving.verifier_servers."
    )

    @property
    def verdict_tokens(self) -> int:
        """The most tokens that a generative verifier writes; 0 for others."""
        return self.head.tokens if isinstance(self.head, VerdictHead) else 0
