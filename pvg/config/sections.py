"""The sections of an experiment: every setting, its default and what it does. They carry the names of the packages that
read them.

Invariant: a section refuses what is wrong by itself; what is wrong only together with another section is refused in
pvg.config.rules.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import core_schema

from pvg.extensions import Reference, is_reference

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NotEmpty = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Folder = Annotated[Path, Field(strict=False)]  # TOML has no paths: text becomes one


class Section(BaseModel):
    """A part of the configuration: immutable, and no key is ever ignored."""

    # Strict: "30" is no number and true is no count. (An integer is a number still.)
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, strict=True)


class ByKind:
    """Marks a tagged table: a union of sections, each with a field `kind` that says which kinds it is for.

    A bare string stands for a table with that kind and its defaults. A table without `kind` has the default kind.
    """

    def __init__(self, default: str) -> None:
        self.default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        self.sections: tuple[type[Section], ...] = get_args(source)
        choices: dict[Hashable, core_schema.CoreSchema] = {
            section.__name__: handler.generate_schema(section) for section in self.sections
        }
        tagged = core_schema.tagged_union_schema(choices, discriminator=self.section_of)
        return core_schema.no_info_before_validator_function(as_table, tagged)

    def kinds(self) -> list[str]:
        return [kind for section in self.sections for kind in kinds_of(section)]

    def section_of(self, value: Any) -> str | None:
        """The name of the section that `value` is meant for; None for an unknown kind."""
        if isinstance(value, BaseModel):
            return type(value).__name__
        kind = value.get("kind", self.default) if isinstance(value, dict) else None
        return next((section.__name__ for section in self.sections if takes_kind(section, kind)), None)


def as_table(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The kinds that the section is for; for a section for users' own code, "FILE.py:NAME"."""
    annotation = section.model_fields["kind"].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else (OWN_CODE,)


def takes_kind(section: type[BaseModel], kind: Any) -> bool:
    kinds = kinds_of(section)
    if kinds == (OWN_CODE,):
        return isinstance(kind, str) and is_reference(kind)
    return kind in kinds


OWN_CODE = "FILE.py:NAME"


class ModchainTask(Section):
    """Chains of modular sums, made on the fly: `7+5+8?` -> `7+5=2;2+8=0;A0`."""

    kind: Literal["modchain"] = "modchain"
    min_terms: Annotated[int, Field(ge=2, le=64)] = Field(5, description="Smallest number of terms of a problem.")
    max_terms: Annotated[int, Field(ge=2, le=64)] = Field(5, description="Largest number of terms of a problem.")
    modulus: Annotated[int, Field(ge=2, le=100)] = Field(10, description="Sums are modulo this number.")
    problems: Count = Field(8192, description="Training problems.")
    test_problems: Count = Field(1024, description="Test problems.")
    seed: int = Field(0, description="Seed of the problems.")

    @model_validator(mode="after")
    def _ordered(self) -> ModchainTask:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms ({self.min_terms}) is above max_terms ({self.max_terms})")
        return self


class Gsm8kTask(Section):
    """Grade-school word problems. `path`: a folder with train and test as .jsonl or .parquet, or a dataset of the
    Hugging Face hub, such as "hf:openai/gsm8k"."""

    kind: Literal["gsm8k"] = "gsm8k"
    path: Folder | None = Field(
        None,
        description='Folder with train and test as .jsonl or .parquet, or a hub dataset such as "hf:openai/gsm8k".',
    )
    limit: Count | None = Field(None, description="Most problems read per split. Unset: all.")
    max_steps: Count | None = Field(
        None, description="Only problems whose published solution takes at most this many calculations. Unset: all."
    )


class ReasoningGymTask(Section):
    """A dataset of the reasoning-gym package (extra `reasoning-gym`), graded by its own grader."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field("chain_sum", description="Name of the dataset in reasoning-gym.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Settings of the dataset.")
    problems: Count = Field(1024, description="Training problems.")
    test_problems: Count = Field(256, description="Test problems.")
    threshold: Fraction = Field(1.0, description="Score of the grader from which a solution counts as correct.")
    seed: int = Field(0, description="Seed of the problems.")


class CodeTask(Section):
    """Programming problems with hidden tests, graded by execution in a sandbox; `path` holds train.jsonl and test.jsonl
    in the forms of pvg/tasks/code/reading.py. Without it problems are made, some 400 in both splits."""

    kind: Literal["code"] = "code"
    path: Folder | None = Field(
        None,
        description="Folder with train.jsonl and test.jsonl (pvg/tasks/code/reading.py). Unset: pvg makes problems.",
    )
    limit: Count | None = Field(None, description="Most problems read per split. Unset: all.")
    unusable: Literal["refuse", "skip"] = Field(
        "refuse", description="What happens to read problems that have no test, or whose reference fails a test."
    )
    problems: Count = Field(320, description="Training problems that pvg makes.")
    test_problems: Count = Field(64, description="Test problems that pvg makes.")
    visible_tests: Count = Field(3, description="Tests of a problem that its prompt shows.")
    seed: int = Field(0, description="Seed of the problems.")
    sandbox: Literal["full", "reduced"] = Field(
        "full",
        description='"full": only in a complete sandbox (docs/sandbox.md). "reduced": with what this machine has.',
    )
    workers: Count | None = Field(None, description="Programs that run at once. Unset: one per core.")
    cpu_s: Positive = Field(2.0, description="CPU time of a solution in seconds, for all its tests together.")
    memory_mb: Count = Field(256, description="Memory of a solution in MB.")
    output_kb: Count = Field(256, description="Output of a solution in kB.")


class CustomTask(Section):
    """A task in a file of the user's own: `source` names the class, made with `settings` (docs/research.md)."""

    kind: Literal["custom"] = "custom"
    source: Reference = Field("my_task.py:MyTask", description="The class of the task.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")


TASKS: dict[str, type[Section]] = {
    "modchain": ModchainTask,
    "gsm8k": Gsm8kTask,
    "reasoning_gym": ReasoningGymTask,
    "code": CodeTask,
    "custom": CustomTask,
}
TaskSection = Annotated[ModchainTask | Gsm8kTask | ReasoningGymTask | CodeTask | CustomTask, ByKind("modchain")]


class ModelSection(Section):
    """Where a model comes from.

    `source`: "embedded:NAME" (shipped with pvg), "hf:OWNER/NAME" or "hf:OWNER/NAME@REVISION" (the Hugging Face hub),
    "gguf:PACKAGE" (a GGUF file inside an installed package), or the path of a Hugging Face directory.
    """

    source: str = Field(
        "embedded:modchain-prover",
        description='"embedded:NAME", "hf:OWNER/NAME[@REVISION]", "gguf:PACKAGE", or a Hugging Face directory.',
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Data type of the weights.")


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise ValueError(f"models.device = {name!r} is not a device; use 'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'")
    return name


Device = Annotated[str, AfterValidator(_device)]


class Models(Section):
    """The models of the two players, and where they compute."""

    prover: ModelSection = ModelSection()
    verifier: ModelSection = ModelSection(source="embedded:modchain-verifier")
    device: Device = Field("auto", description='"auto", "cpu", "mps", "cuda" or "cuda:N".')
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="Compute threads. 0: one for models narrower than 512, else one per core."
    )


class Rollouts(Section):
    """How solutions are sampled."""

    engine: Literal["torch", "vllm"] = Field(
        "torch", description="Where the prover samples: in this process, or on vLLM servers."
    )
    dtype: Literal["model", "float32", "bfloat16"] = Field(
        "model", description='Data type of the sampling copy of the prover. "model": the type of the prover.'
    )
    group_size: Count = Field(8, description="Solutions per problem and role.")
    max_tokens: Count = Field(48, description="Most tokens of a solution.")
    temperature: Positive = Field(1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Nucleus sampling: smallest probability mass that is kept. 1: all tokens."
    )
    top_k: Annotated[int, Field(ge=0)] = Field(
        0, description="Only this many most likely tokens are sampled. 0: all tokens."
    )
    max_rows: Count = Field(256, description="Rows that are decoded together.")
    concurrency: Count = Field(1024, description="Requests in flight.")
    deadline_s: Positive | None = Field(
        None, description="vLLM: timeout of a request in seconds, retries included. Unset: none."
    )
    group_deadline_s: Positive | None = Field(
        None,
        description="Seconds until a group (spo, rae, partial: a batch) is used as it is. Unset: wait for all.",
    )
    min_group: Count = Field(
        2, description="Fewest rollouts of a group (spo, rae, partial: of a batch) at its deadline."
    )
    partial: bool = Field(
        False, description="Whether groups that are incomplete at the deadline continue in the next batch."
    )
    partial_versions: Count = Field(
        4,
        description="Versions that a continued group's oldest token may be behind. Older groups are used as they are.",
    )
    prefetch: Annotated[int, Field(ge=0)] = Field(
        0, description="Batches that are sampled ahead of the trainer. 0: sampling and training take turns."
    )
    max_staleness: Count | None = Field(
        None, description="With prefetch: versions behind from which a rollout is dropped. Unset: prefetch + 1."
    )
    prefer: Literal["fresh", "old"] = Field(
        "fresh", description='With prefetch: "fresh" takes the least stale groups first, "old" drops few.'
    )
    logprobs: Literal["sampled", "recomputed"] = Field(
        "sampled", description="Log-probs of the sampler: as sampled, or computed again by the trainer."
    )
    prompts: Literal["tag", "chat", "plain"] = Field(
        "tag", description="How the prompt names the role: by a tag, by a chat instruction, or not at all."
    )
    compaction: bool = Field(True, description="Whether finished rows leave their batch at once.")
    shared_prefill: bool = Field(True, description="Whether each distinct prompt is prefilled once per batch.")
    shared_attention: bool = Field(
        True,
        description="Whether a decoding step reads the keys and values of a shared prompt once (float32 on a CPU).",
    )
    decoding: Literal["lean", "module"] = Field(
        "lean",
        description='"lean": pvg\'s own decoding step for Llama-like models. "module": the model\'s own forward pass.',
    )
    batching: Literal["continuous", "whole"] = Field(
        "continuous", description='"continuous": requests join as rows finish. "whole": a batch is decoded to its end.'
    )
    grading: Literal["thread", "loop"] = Field(
        "thread", description="Where completions are decoded and graded: in a thread, or on the event loop."
    )
    routed_experts: bool = Field(
        False, description="Whether the chosen experts of a mixture-of-experts model are stored with each rollout."
    )

    @property
    def staleness_budget(self) -> int:
        """Versions of the policy that a rollout may be behind when it is trained on.

        Groups that are taken in the order they were begun are trained on `prefetch` + 1 versions after they were: with
        less, most of what is sampled ahead would be dropped."""
        if not self.prefetch:
            return 0
        return self.prefetch + 1 if self.max_staleness is None else self.max_staleness


class Verifier(Section):
    """The verifier's head, its loss and its scorer. A head and a loss may be FILE.py:NAME, code of the user's own."""

    head: Literal["scalar", "implicit", "yes_token"] | Reference = Field(
        "implicit",
        description='How a score is read from the model: "scalar", "implicit", "yes_token", or FILE.py:NAME.',
    )
    loss: Literal["bradley_terry", "cross_entropy"] | Reference = Field(
        "bradley_terry", description='Pair loss: "bradley_terry", "cross_entropy", or FILE.py:NAME.'
    )
    score_penalty: Annotated[float, Field(ge=0.0)] = Field(
        0.005, description="Coefficient of the penalty on squared scores."
    )
    robust: Literal["none", "balanced", "vrex", "irm", "group_dro"] = Field(
        "none", description="How the loss treats the sources of solutions (pvg/verifier/robust.py)."
    )
    robust_strength: Annotated[float, Field(ge=0.0)] = Field(
        1.0, description="Strength of the penalty; for group_dro the step size of its weights."
    )
    robust_warmup: Annotated[int, Field(ge=0)] = Field(
        0, description="Steps in which the penalty grows to its strength."
    )
    robust_clamp: bool = Field(True, description="vrex: whether the weight of a source is at least 0.")
    beta: Positive = Field(1.0, description="Scale of the implicit head.")
    steps: Count = Field(100, description="Optimizer steps per round.")
    pairs: Count = Field(64, description="Pairs per optimizer step (pairing by problem: on average).")
    pairing: Literal["random", "problem"] = Field(
        "random", description='"random": each pair is drawn by itself. "problem": all pairs of whole problems.'
    )
    solutions_per_problem: Annotated[int, Field(ge=2)] = Field(
        8, description="Pairing by problem: most solutions of a problem."
    )
    micro_batch_tokens: Count = Field(16_384, description="Tokens per micro-batch, padding included.")
    fused_layers: bool = Field(True, description="Whether the last layer computes only the token that the head reads.")
    learning_rate: Positive = Field(3e-4, description="Learning rate of AdamW.")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(0.0, description="Weight decay of AdamW.")
    warmup: Annotated[int, Field(ge=0)] = Field(10, description="Steps in which the learning rate grows from 0.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="How the learning rate falls after the warmup."
    )
    gradient_clip: Positive = Field(1.0, description="Largest norm of the gradient.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the forward and backward pass."
    )
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1, description="Share of the mint's problems that is kept for calibration and AUC."
    )
    acceptance: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.9, description="Share of correct solutions that the threshold accepts."
    )
    lora_rank: Annotated[int, Field(ge=0)] = Field(0, description="Rank of the adapters. 0: all weights are trained.")
    lora_alpha: Positive = Field(16.0, description="An adapter's product is scaled by lora_alpha / lora_rank.")
    ensemble: Count = Field(1, description="Number of verifiers that score together, each trained on its own pairs.")
    aggregation: Literal["mean", "median", "min"] = Field("mean", description="How the members' scores become one.")
    bag: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Share of the mint's problems that each member learns from."
    )
    cache_entries: Count = Field(100_000, description="Scores that are kept in memory.")
    score_tokens: Count = Field(16_384, description="Tokens per scoring batch.")
    engine: Literal["torch", "vllm"] = Field(
        "torch", description="Where scores are computed: in this process, or on serving.verifier_servers."
    )


Rates = Annotated[tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...], Field(strict=False, min_length=1)]
Shares = Annotated[tuple[Fraction, ...], Field(strict=False, min_length=2)]
Clip = Annotated[float, Field(gt=0.0)] | None


class ClippedLoss(Section):
    """Policy losses that clip the probability ratio on both sides. `dapo` has no KL term."""

    kind: Literal["grpo", "dr_grpo", "dapo", "gspo", "reinforce_pp", "rae"] = "grpo"
    clip_low: Clip = Field(None, description="The ratio is clipped below 1 - clip_low. Unset: the loss's own value.")
    clip_high: Clip = Field(None, description="The ratio is clipped above 1 + clip_high. Unset: the loss's own value.")


class CappedLoss(Section):
    """CISPO: the ratio is a weight with an upper limit."""

    kind: Literal["cispo"] = "cispo"
    clip_low: ClassVar[Clip] = None
    clip_high: Clip = Field(None, description="The weight is at most 1 + clip_high. Unset: the loss's own value.")


class UnclippedLoss(Section):
    """RLOO: plain REINFORCE without a ratio."""

    kind: Literal["rloo"] = "rloo"
    clip_low: ClassVar[Clip] = None
    clip_high: ClassVar[Clip] = None


class SpoLoss(Section):
    """SPO: the baseline is a tracked value of each problem and role, so it needs no groups."""

    kind: Literal["spo"] = "spo"
    clip_low: Clip = Field(None, description="The ratio is clipped below 1 - clip_low. Unset: the loss's own value.")
    clip_high: Clip = Field(None, description="The ratio is clipped above 1 + clip_high. Unset: the loss's own value.")
    half_life: Positive = Field(100.0, description="Policy versions after which a tracked value counts half.")


class OwnLoss(Section):
    """A `PolicyLoss` in a file of your own."""

    kind: Reference
    clip_low: Clip = Field(None, description="The ratio is clipped below 1 - clip_low. Unset: the loss's own value.")
    clip_high: Clip = Field(None, description="The ratio is clipped above 1 + clip_high. Unset: the loss's own value.")


Loss = Annotated[ClippedLoss | CappedLoss | UnclippedLoss | SpoLoss | OwnLoss, ByKind("grpo")]
Estimator = Literal["k3_k2", "k1_k2", "k2", "k3"]


class NoKl(Section):
    """No KL term, and no forward pass of the base prover."""

    kind: Literal["none"] = "none"
    coefficient: ClassVar[float] = 0.0
    estimator: ClassVar[Estimator] = "k3_k2"
    target: ClassVar[float | None] = None


class FixedKl(Section):
    """A penalty on the KL divergence to the base prover, with a fixed coefficient."""

    kind: Literal["fixed"] = "fixed"
    coefficient: Positive = Field(0.02, description="Coefficient of the KL penalty.")
    estimator: Estimator = Field(
        "k3_k2",
        description="Value and gradient of the penalty (docs/learning.md): k3_k2 has k3's value and k2's gradient.",
    )
    target: ClassVar[float | None] = None


class AdaptiveKl(Section):
    """A penalty on the KL divergence to the base prover, with a coefficient that follows the measured KL."""

    kind: Literal["adaptive"] = "adaptive"
    coefficient: Positive = Field(0.02, description="Coefficient of the KL penalty in the first step.")
    estimator: Estimator = Field(
        "k3_k2",
        description="Value and gradient of the penalty (docs/learning.md): k3_k2 has k3's value and k2's gradient.",
    )
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
    coefficient: Positive = Field(0.001, description="Coefficient of the exact entropy in the objective.")
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
    step: Positive = Field(1e-4, description="How much the coefficient grows or shrinks per step.")


Entropy = Annotated[NoEntropy | ExactEntropy | EntropyBonus | AdaptiveEntropy, ByKind("none")]
Level = Literal["token", "sequence", "geometric"] | None
Weight = Annotated[float, Field(ge=0.0)]


class NoImportance(Section):
    """No importance weights. The ratio is clipped around the policy that sampled."""

    kind: Literal["none"] = "none"
    high: ClassVar[float] = 5.0
    low: ClassVar[float] = 0.0
    level: ClassVar[Level] = None


class DecoupledImportance(Section):
    """Stale rollouts only: the ratio is clipped around the policy at batch start, with truncated importance weights."""

    kind: Literal["decoupled"] = "decoupled"
    high: Positive = Field(5.0, description="Largest importance weight. A larger one becomes this.")
    low: ClassVar[float] = 0.0
    level: Level = Field(
        None,
        description="Ratio of the token, the sequence, or its geometric mean. Unset: token; for gspo geometric.",
    )


class UnweightedImportance(Section):
    """Stale rollouts only: the ratio is clipped around the policy at batch start, without importance weights."""

    kind: Literal["unweighted"] = "unweighted"
    high: ClassVar[float] = 5.0
    low: ClassVar[float] = 0.0
    level: ClassVar[Level] = None


class TruncatedImportance(Section):
    """All rollouts: the ratio is clipped around the policy at batch start, with truncated importance weights."""

    kind: Literal["truncated"] = "truncated"
    high: Positive = Field(5.0, description="Largest importance weight. A larger one becomes this.")
    low: ClassVar[float] = 0.0
    level: Level = Field(
        None,
        description="Ratio of the token, the sequence, or its geometric mean. Unset: token; for gspo geometric.",
    )


class MaskedImportance(Section):
    """All rollouts: as `truncated`, but tokens with a weight outside the limits get the weight 0."""

    kind: Literal["masked"] = "masked"
    high: Annotated[float, Field(ge=1.0)] = Field(5.0, description="Largest importance weight. A larger one becomes 0.")
    low: Fraction = Field(0.5, description="Smallest importance weight. A smaller one becomes 0.")
    level: Level = Field(
        None,
        description="Ratio of the token, the sequence, or its geometric mean. Unset: token; for gspo geometric.",
    )

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


class AllProblems(Section):
    """All problems in turn."""

    kind: Literal["none"] = "none"


class BucketCurriculum(Section):
    """Problems by difficulty: tracked success rates put each problem into a bucket, and each bucket has its share."""

    kind: Literal["buckets"] = "buckets"
    edges: Rates = Field((0.2, 0.8), description="Success rates between the buckets, rising: hard, middle, easy.")
    shares: Shares = Field(
        (0.25, 0.5, 0.25), description="Share of each role's groups in a batch, from hard to easy. They sum to 1."
    )
    half_life: Positive = Field(100.0, description="Policy versions after which a tracked success rate counts half.")

    @model_validator(mode="after")
    def _buckets(self) -> BucketCurriculum:
        edges, shares = self.edges, self.shares
        if any(low >= high for low, high in pairwise(edges)):
            raise ValueError(f"training.curriculum.edges = {list(edges)} must rise")
        if len(shares) != len(edges) + 1:
            raise ValueError(
                f"training.curriculum.shares has {len(shares)} shares, but {len(edges)} training.curriculum.edges make "
                f"{len(edges) + 1} buckets"
            )
        if abs(sum(shares) - 1.0) > 1e-6:
            raise ValueError(f"training.curriculum.shares = {list(shares)} sum to {sum(shares):g}, not to 1")
        return self


class PrioritisedCurriculum(Section):
    """Problems with an uncertain outcome are drawn more often."""

    kind: Literal["prioritised"] = "prioritised"
    edges: ClassVar[Rates] = (0.2, 0.8)  # only for the metrics success_hard and success_easy
    half_life: Positive = Field(100.0, description="Policy versions after which a tracked success rate counts half.")


CurriculumSection = Annotated[AllProblems | BucketCurriculum | PrioritisedCurriculum, ByKind("none")]


class Training(Section):
    """Prover training: one step is one optimizer step over a batch of groups. A loss may be FILE.py:NAME, code of the
    user's own."""

    loss: Loss = ClippedLoss()
    kl: Kl = FixedKl()
    entropy: Entropy = NoEntropy()
    importance: Importance = NoImportance()
    curriculum: CurriculumSection = AllProblems()
    groups: Count = Field(32, description="Groups sampled per batch.")
    steps: Annotated[int, Field(ge=0)] = Field(60, description="Optimizer steps per round.")
    minibatches: Count = Field(1, description="Optimizer steps per sampled batch.")
    micro_batch_tokens: Count = Field(16_384, description="Tokens per micro-batch, padding included.")
    micro_batch_memory_mb: Annotated[int, Field(ge=0)] = Field(
        0,
        description="MB of a forward and backward pass; pvg measures how many tokens fit. 0: no limit.",
    )
    micro_batch_rollouts: Count | None = Field(
        None, description="Most rollouts per micro-batch. Unset: as many as the tokens allow."
    )
    accumulation_steps: Count | None = Field(
        None, description="Fewest micro-batches per step. Unset: as many as the token budget needs."
    )
    bucketing: bool = Field(True, description="Whether micro-batches hold rows of similar length.")
    shared_prompts: bool = Field(
        True, description="Whether equal prompts and equal rows of a micro-batch are computed once."
    )
    learning_rate: Positive = Field(1e-4, description="Learning rate of AdamW.")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(0.0, description="Weight decay of AdamW.")
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="First beta of AdamW.")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.95, description="Second beta of AdamW.")
    warmup: Annotated[int, Field(ge=0)] = Field(0, description="Steps in which the learning rate grows from 0.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate falls after the warmup."
    )
    gradient_clip: Positive = Field(1.0, description="Largest norm of the gradient.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the forward and backward pass."
    )
    logits_chunk: Count = Field(4_194_304, description="Most logits (tokens x vocabulary) in memory at once.")
    fused_layers: bool = Field(
        True, description="Whether norms and rotary embeddings of Llama and Qwen2 take few passes."
    )
    blocked_layers: bool | None = Field(
        None,
        description="Whether a layer runs on blocks that fit a CPU cache. Unset: with one thread on AMD.",
    )
    fused_logprobs: bool = Field(True, description="Whether log-probs have a gradient in closed form.")
    gradient_checkpointing: bool = Field(
        False, description="Whether the backward pass computes activations again, to save memory."
    )
    router_replay: bool = Field(False, description="Whether the trainer uses the experts of rollout.routed_experts.")
    lora_rank: Annotated[int, Field(ge=0)] = Field(0, description="Rank of the adapters. 0: all weights are trained.")
    lora_alpha: Positive = Field(16.0, description="An adapter's product is scaled by lora_alpha / lora_rank.")
    dynamic_sampling: Annotated[int, Field(ge=0)] = Field(
        0, description="Rounds of further groups that replace groups with equal rewards. 0: such groups stay."
    )
    overlong_buffer: Annotated[int, Field(ge=0)] = Field(
        0, description="Tokens before rollout.max_tokens from which a penalty grows to 1. 0: no penalty."
    )

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether entropy is part of the objective, be it at times with a coefficient of 0."""
        return self.entropy.kind in ("bonus", "adaptive")

    @property
    def exact_entropy(self) -> bool:
        return self.entropy.kind != "none"

    @property
    def groupless(self) -> bool:
        """Whether the loss takes no statistics of groups: a group of one teaches as much as any."""
        return self.loss.kind in ("spo", "rae")


class SrcReward(Section):
    """Soft role-conditional reward of arXiv 2407.13692."""

    kind: Literal["src"] = "src"
    misaligned: float = Field(-1.0, description="Reward of a misaligned or malformed solution.")


class CgcReward(Section):
    """Correctness-gated convincingness: the verifier's score if the solution is role-aligned."""

    kind: Literal["cgc"] = "cgc"
    floor: float = Field(
        -15.0, description="Reward of a misaligned solution. It must lie below every score of the verifier."
    )


class PlainReward(Section):
    """`goodhart`: the verifier's score. `correctness`: 1 if the solution is correct, else 0."""

    kind: Literal["goodhart", "correctness"] = "goodhart"


class DecoupledReward(Section):
    """Reward of the game of arXiv 2602.23248, in standard deviations of the group."""

    kind: Literal["decoupled"] = "decoupled"
    floor: float = Field(-2.0, description="Reward of a misaligned solution, in standard deviations of the group.")


Similarity = Literal["reference", "group", "both"]
SIMILARITY = (
    "What a sneaky program is compared with: the problem's reference, the other programs of its group, or both."
)
SIMILARITY_WEIGHT = "Weight of the penalty on a sneaky program that is similar to others. 0: no penalty."


class GatedReward(Section):
    """For programs: the verifier's probability if all tests of the role pass, else `floor`."""

    kind: Literal["gated"] = "gated"
    floor: float = Field(-2.0, description="Reward of a solution that fails a test or has no valid certificate.")
    score_weight: Weight = Field(1.0, description="Weight of the verifier's probability.")
    similarity_weight: Weight = Field(0.0, description=SIMILARITY_WEIGHT)
    similarity: Similarity = Field("both", description=SIMILARITY)


class CompositeReward(Section):
    """For programs: a weighted sum of the verifier's probability and the share of tests passed."""

    kind: Literal["composite"] = "composite"
    score_weight: Weight = Field(1.0, description="Weight of the verifier's probability.")
    tests_weight: Weight = Field(1.0, description="Weight of the share of tests passed.")
    similarity_weight: Weight = Field(0.0, description=SIMILARITY_WEIGHT)
    similarity: Similarity = Field("both", description=SIMILARITY)


class OwnReward(Section):
    """A reward function in a file of your own."""

    kind: Reference


Reward = Annotated[
    SrcReward | CgcReward | PlainReward | DecoupledReward | GatedReward | CompositeReward | OwnReward, ByKind("src")
]


class SimpleMixture(Section):
    """`equal`: every source has the same share. `latest`: only the newest source."""

    kind: Literal["equal", "latest"] = "equal"


class DecayMixture(Section):
    """Older sources have smaller shares (pvg/game/mixtures.py)."""

    kind: Literal["exponential", "geometric"] = "exponential"
    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="Factor from one source to the next older.")


class WindowMixture(Section):
    """The newest sources, with equal shares."""

    kind: Literal["window"] = "window"
    size: Count = Field(2, description="Number of newest sources.")


Mixture = Annotated[SimpleMixture | DecayMixture | WindowMixture, ByKind("equal")]


class StopAfterSteps(Section):
    """A prover phase ends after training.steps."""

    kind: Literal["steps"] = "steps"


class StopAtScoreParity(Section):
    """A prover phase ends early when sneaky incorrect solutions score as high as helpful correct ones."""

    kind: Literal["score_parity"] = "score_parity"
    min_steps: Annotated[int, Field(ge=0)] = Field(10, description="Smallest number of batches in a phase.")


Stop = Annotated[StopAfterSteps | StopAtScoreParity, ByKind("steps")]


class DirectProtocol(Section):
    """The prover writes solutions."""

    kind: Literal["direct"] = "direct"


class DecoupledProtocol(Section):
    """The prover translates a solver's solutions: faithful ones keep the answer, sneaky ones lead to a wrong answer."""

    kind: Literal["decoupled"] = "decoupled"
    solver: str = Field("base", description="The base prover, or the directory of a run whose newest prover solves.")


class ChallengeProtocol(Section):
    """The prover writes a solution and answers the verifier's question about one of its steps."""

    kind: Literal["challenge"] = "challenge"
    step: Literal["weakest", "random"] = Field(
        "weakest", description="The questioned step: the one with the least support by the verifier, or a random one."
    )
    tokens: Count = Field(16, description="Most tokens of an answer.")


Protocol = Annotated[DirectProtocol | DecoupledProtocol | ChallengeProtocol, ByKind("direct")]


class StackelbergSchedule(Section):
    """The verifier is trained on the mint, then frozen while the prover trains."""

    kind: Literal["stackelberg"] = "stackelberg"


class SimultaneousSchedule(Section):
    """The verifier also learns while the prover trains, from fresh solutions of the current prover."""

    kind: Literal["simultaneous"] = "simultaneous"
    every: Count = Field(5, description="Batches of the prover between two updates of the verifier.")
    updates: Count = Field(5, description="Optimizer steps of the verifier in an update.")
    problems: Count = Field(32, description="Problems sampled for an update, with game.mint_samples solutions each.")
    window: Count = Field(4, description="Number of newest updates whose fresh solutions are used.")
    share: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.5, description="Share of pairs with fresh solutions. The others come from the mint."
    )


Schedule = Annotated[StackelbergSchedule | SimultaneousSchedule, ByKind("stackelberg")]


class RoundTest(Section):
    """Fresh samples at the end of each round, on problems that nothing was trained on."""

    problems: Count = Field(128, description="Test problems.")
    samples: Count = Field(2, description="Solutions per problem and role.")


class Game(Section):
    """Rounds, roles, rewards, mixture and stop rule."""

    rounds: Count = Field(3, description="Rounds of mint, verifier phase and prover phase.")
    reward: Reward = SrcReward()
    sneaky_share: Fraction = Field(0.5, description="Share of groups in the sneaky role.")
    mint_problems: Count = Field(256, description="Problems per mint.")
    mint_samples: Count = Field(8, description="Solutions per problem of a mint, shared by the sources.")
    mixture: Mixture = SimpleMixture()
    stop: Stop = StopAfterSteps()
    protocol: Protocol = DirectProtocol()
    schedule: Schedule = StackelbergSchedule()
    test: RoundTest = RoundTest()


URL_PATTERN = r"^https?://[^/\s]+/?$"
URL_EXAMPLE = "Write http:// or https://, host and port, and no path: http://127.0.0.1:8000"
Url = Annotated[str, Field(pattern=URL_PATTERN)]


def _names(value: Any) -> Any:
    """Names as a list, each once."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    named = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    return tuple(dict.fromkeys(value)) if named else value


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
    """vLLM servers: where they are, how they are asked, and how `pvg serve` starts one. Changes nothing that is
    computed, so a run may be resumed with other servers."""

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
    share_prefix: bool = Field(True, description="Whether prompts with the same beginning share a cache.")
    seeded: bool = Field(True, description="Whether each request has a seed. false: faster on a GPU, not repeatable.")
    connect_timeout_s: Positive = Field(5.0, description="Timeout of a connection attempt in seconds.")
    probe_every_s: Annotated[float, Field(ge=0.01)] = Field(
        2.0, description="Seconds between two health checks of a server."
    )
    probe_timeout_s: Positive = Field(
        15.0, description="Seconds without an answer after which a server counts as down."
    )
    unavailable_s: Positive = Field(120.0, description="Seconds that a request waits for any server.")
    retries: Annotated[int, Field(ge=0)] = Field(5, description="Retries of a request after server failures.")
    python: str = Field("", description="Interpreter that has vLLM. Empty: this one, or the one of `make vllm-cpu`.")
    max_num_seqs: Count = Field(256, description="Rows that the server decodes together.")
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.9, description="Share of the GPU's memory that the server takes."
    )
    cpu_cache_gb: Count = Field(1, description="Size of the KV cache in GB on a CPU.")
    prefix_caching: bool = Field(True, description="Whether the server caches prefixes.")
    max_model_len: Count | None = Field(None, description="Longest sequence in tokens. Unset: the model's own limit.")
    tensor_parallel: Count = Field(1, description="GPUs per server.")
    eager: bool = Field(False, description="Whether the server runs without CUDA graphs and compilation.")
    startup_s: Positive = Field(900.0, description="Seconds that a server may take to start.")
    extra_args: Annotated[tuple[str, ...], Field(strict=False)] = Field((), description="Further arguments for vLLM.")


class Weights(Section):
    """How trained weights get to the servers, and how their arrival is proven."""

    transport: Literal["filesystem", "lora", "nccl", "ipc"] = Field(
        "filesystem", description="How weights get to the servers."
    )
    client: Literal["dedicated", "shared"] = Field(
        "dedicated", description="Whether weight updates use separate connections, or those of generation."
    )
    root: Folder = Field(Path("runs/.weights"), description="Folder that the trainer and the servers share.")
    keep: Annotated[int, Field(ge=1)] = Field(2, description="Versions that stay on the disk.")
    keep_kv: bool = Field(False, description="Whether requests in flight keep the old weights' keys and values.")
    timeout_s: Positive = Field(600.0, description="Timeout of an update in seconds.")
    canary_prompts: Annotated[int, Field(ge=0)] = Field(
        4, description="Prompts that trainer and servers score after each update. 0: no check."
    )
    canary_tolerance: Positive | None = Field(
        None, description="Largest log-prob gap in nats. Unset: by the data type."
    )
    checksums: Literal["first", "always", "never"] = Field(
        "first",
        description="When tensors are compared bit by bit: at the first update that changes them, always, or never.",
    )


class Evaluate(Section):
    """What `pvg evaluate` measures of a run whose rounds are finished, and with how much effort. Changes nothing that
    the run computed, so it may be set for a run that is over."""

    problems: Annotated[int, Field(ge=2)] = Field(128, description="Test problems.")
    samples: Annotated[int, Field(ge=2)] = Field(8, description="Solutions per problem and role.")
    attacks: Annotated[tuple[Literal["src", "cgc", "goodhart"], ...], Field(strict=False), BeforeValidator(_names)] = (
        Field(
            (
                "src",
                "cgc",
                "goodhart",
            ),
            description="Rewards of the attackers.",
        )
    )
    attack_steps: Annotated[int, Field(ge=1, le=100_000)] = Field(
        200, description="Optimizer steps after which an attack ends without success."
    )
    attack_window: Count = Field(10, description="Batches that the criterion is averaged over.")
    attack_error_rate: Fraction = Field(
        0.95, description="Share of well-formed wrong solutions that an exploit needs (arXiv 2407.13692)."
    )
    attack_learning_rate: Positive | None = Field(
        None, description="Learning rate of attackers. Unset: training.learning_rate."
    )
    attack_groups: Count | None = Field(None, description="Groups per batch of attackers. Unset: training.groups.")
    attack_cgc_floor: float | None = Field(
        None, description="Floor of the cgc attacker's reward. Unset: by the round's own scores (docs/evaluation.md)."
    )
    baseline_steps: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None, description="Steps of the correctness baseline. Unset: training.steps."
    )
    baseline_probes: Annotated[int, Field(ge=1, le=90)] = Field(
        6, description="Points on the trajectory of the baseline, besides its start."
    )
    localisation_solutions: Count = Field(
        256, description="Most flawed solutions per round that are scored step by step."
    )
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.95, description="Level of every confidence interval.")
    resamples: Annotated[int, Field(ge=100)] = Field(1000, description="Resamples of the bootstrap over problems.")
    bins: Annotated[int, Field(ge=2)] = Field(10, description="Bins of the calibration error, with equal counts.")
    ngrams: Annotated[int, Field(ge=1, le=8)] = Field(3, description="Longest token n-gram of the separability probe.")
    folds: Annotated[int, Field(ge=2)] = Field(5, description="Folds of the cross-validation by problem.")


class Telemetry(Section):
    """What is watched, and when it warns. Changes nothing that is computed."""

    refresh_per_second: Annotated[float, Field(gt=0.0, le=60.0)] = Field(
        8.0, description="Redraws of the display per second."
    )
    event_loop: Literal["uvloop", "asyncio"] = Field("uvloop", description="Event loop.")
    shortest_span_ms: Annotated[float, Field(ge=0.0)] = Field(
        0.2, description="Shorter spans, in ms, count in the budget but are not written."
    )
    device_every_s: Annotated[float, Field(ge=0.01)] = Field(
        5.0, description="Seconds between two samples of GPU, CPU and memory."
    )
    loop_lag_hz: Annotated[float, Field(gt=0.0, le=1000.0)] = Field(
        10.0, description="Measurements of the event-loop lag per second."
    )
    loop_lag_p90_s: Positive = Field(
        1.0, description="Alert when the 90th percentile of the event-loop lag is above this, in seconds."
    )
    loop_lag_p99_s: Positive = Field(
        5.0, description="Alert when the 99th percentile of the event-loop lag is above this, in seconds."
    )
    loop_lag_max_s: Positive = Field(30.0, description="Alert when the event-loop lag is above this, in seconds.")
    stall_s: Positive = Field(600.0, description="Alert when no step has ended for this many seconds.")
    sinks: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False), BeforeValidator(_names)
    ] = Field((), description="Where curves are also written.")
    metrics_port: Annotated[int, Field(ge=0, lt=65536)] = Field(
        0, description="Port of the Prometheus endpoint on 127.0.0.1. 0: none."
    )
    sneaky_collapse: Fraction = Field(0.1, description="Alert below this share of role-aligned samples.")
    zero_signal: Fraction = Field(0.9, description="Alert above this share of groups with equal rewards.")
    truncation: Fraction = Field(0.5, description="Alert above this share of rollouts that reach the length limit.")
    weights_queue_ms: Positive = Field(1000.0, description="Alert when a weight update waits longer than this, in ms.")
    chance_auc: Fraction = Field(0.55, description="Alert when the verifier's AUC is at most this. 0.5 is chance.")
    alert_command: Annotated[tuple[NotEmpty, ...], Field(strict=False)] = Field(
        (),
        description="Program and arguments for each alert, which is JSON on standard input. Empty: none.",
    )
    alert_command_s: Positive = Field(10.0, description="Timeout of the alert command in seconds.")


class Store(Section):
    """Where runs are stored, and how often they commit."""

    root: Folder = Field(Path("runs"), description="Folder of the runs.")
    commit_every: Count = Field(10, description="Optimizer steps between two commits.")
    row_digests: bool = Field(
        True,
        description="Whether minted rows are checked when they are read. false: whole shards when they are opened.",
    )
