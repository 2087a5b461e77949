"""The sections of an experiment: every setting, its default and what it does. They carry the names of the packages that
read them.

Invariant: a section refuses what is wrong by itself; what is wrong only together with another section is refused in
pvg.config.rules.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pvg.extensions import Reference

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NotEmpty = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Folder = Annotated[Path, Field(strict=False)]  # TOML has no paths: text becomes one


class Section(BaseModel):
    """A part of the configuration: immutable, and no key is ever ignored."""

    # Strict: "30" is no number and true is no count. (An integer is a number still.)
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, strict=True)


class ModchainTask(Section):
    """Chains of modular sums, made on the fly: `7+5+8?` -> `7+5=2;2+8=0;A0`."""

    kind: Literal["modchain"] = "modchain"
    min_terms: Annotated[int, Field(ge=2, le=64)] = 5
    max_terms: Annotated[int, Field(ge=2, le=64)] = 5
    modulus: Annotated[int, Field(ge=2, le=100)] = 10
    problems: Count = 8192
    test_problems: Count = 1024
    seed: int = 0

    @model_validator(mode="after")
    def _ordered(self) -> ModchainTask:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms ({self.min_terms}) is above max_terms ({self.max_terms})")
        return self


class Gsm8kTask(Section):
    """Grade-school word problems. `path`: a folder with train and test as .jsonl or .parquet, or a dataset of the
    Hugging Face hub, such as "hf:openai/gsm8k"."""

    kind: Literal["gsm8k"] = "gsm8k"
    path: Folder | None = None
    limit: Count | None = None
    max_steps: Count | None = None  # only problems whose published solution takes at most this many calculations


class ReasoningGymTask(Section):
    """A dataset of the reasoning-gym package (extra `reasoning-gym`), graded by its own grader."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = "chain_sum"
    settings: dict[str, Any] = Field(default_factory=dict)
    problems: Count = 1024
    test_problems: Count = 256
    threshold: Fraction = 1.0
    seed: int = 0


class CodeTask(Section):
    """Programming problems with hidden tests, graded by execution in a sandbox; `path` holds train.jsonl and test.jsonl
    in the forms of pvg/tasks/code/reading.py. Without it problems are made, some 400 in both splits."""

    kind: Literal["code"] = "code"
    path: Folder | None = None
    limit: Count | None = None  # of the problems read, per split
    unusable: Literal["refuse", "skip"] = "refuse"  # problems read that have no test, or whose reference fails them
    problems: Count = 320  # made
    test_problems: Count = 64
    visible_tests: Count = 3  # per problem, shown in its prompt; pvg's own form says itself which these are
    seed: int = 0
    # "full": what a model wrote runs only where it can do no harm (docs/sandbox.md), or nothing does; "reduced": with
    # the isolation that there is
    sandbox: Literal["full", "reduced"] = "full"
    workers: Count | None = None  # programs run at once; None: as many as there are cores
    cpu_s: Positive = 2.0  # CPU time of a solution, all its tests together
    memory_mb: Count = 256
    output_kb: Count = 256


class CustomTask(Section):
    """A task in a file of the user's own: `source` names the class, made with `settings` (docs/research.md)."""

    kind: Literal["custom"] = "custom"
    source: Reference = "my_task.py:MyTask"
    settings: dict[str, Any] = Field(default_factory=dict)


TASKS: dict[str, type[Section]] = {
    "modchain": ModchainTask,
    "gsm8k": Gsm8kTask,
    "reasoning_gym": ReasoningGymTask,
    "code": CodeTask,
    "custom": CustomTask,
}
TaskSection = Annotated[
    ModchainTask | Gsm8kTask | ReasoningGymTask | CodeTask | CustomTask, Field(discriminator="kind")
]


class ModelSection(Section):
    """Where a model comes from.

    `source`: "embedded:NAME" (shipped with pvg), "hf:OWNER/NAME" or "hf:OWNER/NAME@REVISION" (the Hugging Face hub),
    "gguf:PACKAGE" (a GGUF file inside an installed package), or the path of a Hugging Face directory.
    """

    source: str = "embedded:modchain-prover"
    dtype: Literal["float32", "bfloat16"] = "float32"


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", name):
        raise ValueError(f"models.device = {name!r} is not a device; use 'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'")
    return name


Device = Annotated[str, AfterValidator(_device)]


class Models(Section):
    prover: ModelSection = ModelSection()
    verifier: ModelSection = ModelSection(source="embedded:modchain-verifier")
    device: Device = "auto"
    # 0: one thread for provers of a width below 512, all cores for others (pvg/models/compute.py)
    threads: Annotated[int, Field(ge=0, le=1024)] = 0


class Rollouts(Section):
    """How solutions are sampled."""

    engine: Literal["torch", "vllm"] = "torch"
    dtype: Literal["model", "float32", "bfloat16"] = "model"  # of the sampler's copy; "model": as the prover's
    group_size: Count = 8
    max_tokens: Count = 48
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_rows: Count = 256  # rows decoded together
    concurrency: Count = 1024  # requests in flight
    deadline_s: Positive | None = None  # of one request, retries included (vllm); None: as long as it takes
    group_deadline_s: Positive | None = None  # of the prover's training: a group (spo, rae: a batch) is used with what
    # has arrived, and the rest of it cancelled; None: wait for all. What arrives in time is not the same every time.
    min_group: Count = 2  # a group (spo, rae: a batch) with fewer at its deadline waits until it has them
    partial: bool = False  # true: the deadline is a batch's; groups that are not complete then go on in the next batch,
    # under the next version, from where they were cut, and rollouts of complete groups are what min_group counts
    partial_versions: Count = 4  # by which a group's oldest token may be behind the policy that still samples for it;
    # older ones are used with what is finished, and the rest is given up
    prefetch: Annotated[int, Field(ge=0)] = 0  # batches sampled ahead of the trainer; 0: the two take turns
    # with prefetch: versions behind (in flight and waiting) beyond which a rollout is dropped; None: prefetch + 1
    max_staleness: Count | None = None
    # with prefetch: "fresh" takes the least stale groups and drops more; "old" drops few, and a fast engine waits
    prefer: Literal["fresh", "old"] = "fresh"
    logprobs: Literal["sampled", "recomputed"] = "sampled"
    prompts: Literal["tag", "chat", "plain"] = "tag"
    compaction: bool = True  # finished rows leave their batch; false: they stay until it ends
    shared_prefill: bool = True  # each distinct prompt is prefilled once per batch; false: once per row
    # While rows of one prompt stand side by side, a step reads its keys and values once for all of them; false: once
    # per row. Lean decoding in float32 on a CPU only: elsewhere nothing changes.
    shared_attention: bool = True
    # "lean": a decoding step of pvg's own for Llama-like models, compared with the model's logits when the engine opens
    # (other models go through transformers, and events.log says so); "module": all through transformers
    decoding: Literal["lean", "module"] = "lean"
    # "continuous": requests join as rows finish, and each rollout is returned when it finishes (lean decoding only);
    # "whole": a batch is decoded to its end and then returned. Neither is faster on a CPU: see docs/pipeline.md.
    batching: Literal["continuous", "whole"] = "continuous"
    grading: Literal["thread", "loop"] = "thread"  # where completions are decoded and graded; "loop": all else waits
    routed_experts: bool = False  # the experts that a mixture-of-experts model chose for each token travel with its
    # rollouts: they are stored, and handed to the trainer (torch: decoding is then by the module)

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

    head: Literal["scalar", "implicit", "yes_token"] | Reference = "implicit"
    loss: Literal["bradley_terry", "cross_entropy"] | Reference = "bradley_terry"
    score_penalty: Annotated[float, Field(ge=0.0)] = 0.005  # lambda of V^2
    # mean over all pairs, or over environments (the solutions' sources) with what pvg/verifier/robust.py asks of them
    robust: Literal["none", "balanced", "vrex", "irm", "group_dro"] = "none"
    robust_strength: Annotated[float, Field(ge=0.0)] = 1.0  # of the penalty; group_dro: the step of its weights
    robust_warmup: Annotated[int, Field(ge=0)] = 0  # steps in which the penalty grows to its strength
    robust_clamp: bool = True  # vrex: no environment weighs less than nothing
    beta: Positive = 1.0  # scale of the implicit head
    steps: Count = 100
    pairs: Count = 64  # pairs per optimizer step (pairing by problem: on average)
    pairing: Literal["random", "problem"] = "random"  # each pair drawn by itself, or all pairs of whole problems
    solutions_per_problem: Annotated[int, Field(ge=2)] = 8  # pairing by problem: most solutions taken of a problem
    micro_batch_tokens: Count = 16_384
    fused_layers: bool = True  # heads that read the last token are trained on it alone in the last layer; false: on all
    learning_rate: Positive = 3e-4
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    warmup: Annotated[int, Field(ge=0)] = 10
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    gradient_clip: Positive = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1  # share of the mint's problems kept for calibration and AUC
    acceptance: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9  # share of correct solutions that the threshold accepts
    # 0: all weights are trained; else the head, and adapters of all linear layers on frozen weights, which are the
    # prover's base itself where models.verifier is models.prover
    lora_rank: Annotated[int, Field(ge=0)] = 0
    lora_alpha: Positive = 16.0  # an adapter's product is scaled by lora_alpha / lora_rank
    ensemble: Count = 1  # members, each trained for `steps` on pairs of its own draw, that score as one
    aggregation: Literal["mean", "median", "min"] = "mean"  # of the members' scores, brought to one scale
    bag: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0  # share of the mint's problems that each member learns from
    cache_entries: Count = 100_000
    score_tokens: Count = 16_384  # tokens per scoring batch
    engine: Literal["torch", "vllm"] = "torch"  # who computes the scores: this process, or serving.verifier_servers


Rates = Annotated[tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...], Field(strict=False, min_length=1)]
Shares = Annotated[tuple[Fraction, ...], Field(strict=False, min_length=2)]


class Training(Section):
    """Prover training: one step is one optimizer step over a batch of groups. A loss may be FILE.py:NAME, code of the
    user's own."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "spo", "rae"] | Reference = "grpo"
    groups: Count = 32  # groups sampled per batch
    steps: Annotated[int, Field(ge=0)] = 60
    minibatches: Count = 1  # optimizer steps per sampled batch
    micro_batch_tokens: Count = 16_384  # tokens per micro-batch, padding included
    # MB that a micro-batch's forward and backward pass may take beside weights and gradients: the trainer measures how
    # many tokens that is, up to micro_batch_tokens, and makes micro-batches of like size. 0: micro_batch_tokens rules
    micro_batch_memory_mb: Annotated[int, Field(ge=0)] = 0
    micro_batch_rollouts: Count | None = None
    accumulation_steps: Count | None = None  # None: as many as the token budget needs
    bucketing: bool = True  # micro-batches of rows of like length; false: in arrival order, sized for the longest row
    # each distinct prompt and each distinct row of a micro-batch is computed once; false: each row separately, padded
    shared_prompts: bool = True
    learning_rate: Positive = 1e-4
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    warmup: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    gradient_clip: Positive = 1.0
    kl: Annotated[float, Field(ge=0.0)] = 0.02  # coefficient of the KL to the base prover; with kl_target: at first
    # value and gradient of its penalty (pvg/training/penalties.py): k3's value with k2's gradient, which is the KL's
    kl_estimator: Literal["k3_k2", "k1_k2", "k2", "k3"] = "k3_k2"
    kl_target: Positive | None = (
        None  # nats per token at which the coefficient is held by following the KL; None: fixed
    )
    kl_horizon: Positive = 10.0  # kl_target: steps in which an error of a fifth or more moves it by a fifth
    # the metric entropy is -log pi of the sampled tokens; "exact" tells that of the whole distribution beside it
    entropy: Literal["sampled", "exact"] = "sampled"
    entropy_bonus: Annotated[float, Field(ge=0.0)] = 0.0  # coefficient of the exact entropy in the objective; at first
    entropy_target: Positive | None = None  # nats per token below which the bonus acts and grows; None: it stays
    entropy_step: Positive = 1e-4  # entropy_target: by which the bonus's coefficient grows or shrinks in a step
    entropy_bonus_max: Positive = 0.01  # entropy_target: the most that it grows to
    clip_low: Annotated[float, Field(gt=0.0)] | None = None  # None: the loss's own default
    clip_high: Annotated[float, Field(gt=0.0)] | None = None
    # stale rollouts are clipped around the policy that sampled them, or "decoupled": around that of the batch's start
    off_policy: Literal["sampled", "decoupled"] = "sampled"
    # what corrects for a sampler that is not the policy at batch start (other weights, or another arithmetic):
    # "truncated" or "masked" weights (pvg/training/losses.py) of all rollouts, which are then clipped around that
    # policy, or "none"; None: truncated ones of stale rollouts with off_policy = "decoupled", else none
    importance: Literal["none", "truncated", "masked"] | None = None
    importance_high: Positive = 5.0  # most that a weight may be; over it, it is this (truncated) or 0 (masked)
    importance_low: Annotated[float, Field(ge=0.0)] = 0.5  # masked: a weight below it is 0
    # of each token, of its sequence (the product), or the sequence's geometric mean; None: token, but gspo's geometric
    importance_level: Literal["token", "sequence", "geometric"] | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    logits_chunk: Count = 4_194_304  # most logits (tokens x vocabulary) held at once
    fused_layers: bool = True  # norms and rotary embeddings of Llama and Qwen2 in few passes, where prompts are shared
    # fused_layers on a CPU: a layer as two functions on blocks of tokens that fit a cache. Pays with one thread, and on
    # AMD's processors, whose matrix products go by oneDNN in blocks (pvg/models/blocked_layers.py): None is true there
    blocked_layers: bool | None = None
    fused_logprobs: bool = True  # log-probs with a gradient in closed form; false: by autograd, each chunk twice
    gradient_checkpointing: bool = False
    router_replay: bool = False  # a mixture of experts is trained, and its reference asked, with the experts that each
    # token was sampled with (rollout.routed_experts); false: with those that the routers choose now
    lora_rank: Annotated[int, Field(ge=0)] = 0  # 0: all weights are trained; else adapters of all linear layers
    lora_alpha: Positive = 16.0  # an adapter's product is scaled by lora_alpha / lora_rank
    spo_half_life: Positive = 100.0  # versions of the policy after which spo's tracked values count half
    # which problems are asked: all in turn, or by tracked success rates (of each problem in each role): "prioritised"
    # draws uncertain ones more often, "buckets" cuts the rates at curriculum_edges and keeps curriculum_shares
    curriculum: Literal["none", "buckets", "prioritised"] = "none"
    curriculum_half_life: Positive = 100.0  # versions of the policy after which tracked rates count half
    curriculum_edges: Rates = (0.2, 0.8)  # success rates, rising: here hard, middle and easy problems
    curriculum_shares: Shares = (0.25, 0.5, 0.25)  # of each role's groups in a batch, from hard to easy; sum to 1
    # groups whose rewards are all the same are replaced by others, sampled in up to so many further rounds
    dynamic_sampling: bool = False
    dynamic_sampling_rounds: Count = 4
    overlong_buffer: Annotated[int, Field(ge=0)] = 0  # dapo's soft overlong reward starts this many tokens early

    @model_validator(mode="after")
    def _buckets(self) -> Training:
        edges, shares = self.curriculum_edges, self.curriculum_shares
        if any(low >= high for low, high in pairwise(edges)):
            raise ValueError(f"training.curriculum_edges = {list(edges)} must rise")
        if len(shares) != len(edges) + 1:
            raise ValueError(
                f"training.curriculum_shares has {len(shares)} shares, but {len(edges)} training.curriculum_edges make "
                f"{len(edges) + 1} buckets"
            )
        if abs(sum(shares) - 1.0) > 1e-6:
            raise ValueError(f"training.curriculum_shares = {list(shares)} sum to {sum(shares):g}, not to 1")
        return self

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether entropy is part of the objective, be it at times with a coefficient of 0."""
        return self.entropy_bonus > 0.0 or self.entropy_target is not None

    @property
    def exact_entropy(self) -> bool:
        return self.entropy == "exact" or self.has_entropy_bonus

    @property
    def groupless(self) -> bool:
        """Whether the loss takes no statistics of groups: a group of one teaches as much as any."""
        return self.loss in ("spo", "rae")


class Game(Section):
    """Rounds, roles, rewards, mixture and stop rule. A reward may be FILE.py:NAME, code of the user's own."""

    rounds: Count = 3
    reward: Literal["src", "cgc", "goodhart", "correctness", "decoupled", "gated", "composite"] | Reference = "src"
    misaligned_reward: float = -1.0  # src's "else" branch, and what malformed solutions get
    cgc_floor: float = -15.0  # V0 of cgc: must lie below every live score (-2 suits scores bounded above it)
    decoupled_floor: float = -2.0  # decoupled's misaligned reward, in group standard deviations
    gate_floor: float = -2.0  # gated's reward where a gate is closed
    score_weight: Annotated[float, Field(ge=0.0)] = 1.0  # gated, composite: of the verifier's probability
    tests_weight: Annotated[float, Field(ge=0.0)] = 1.0  # composite: of the share of tests passed
    # gated, composite: of how alike a sneaky program is to the problem's reference, the others of its group, or either
    similarity_weight: Annotated[float, Field(ge=0.0)] = 0.0
    similarity: Literal["reference", "group", "both"] = "both"
    sneaky_share: Fraction = 0.5
    mint_problems: Count = 256
    mint_samples: Count = 8  # solutions per problem, shared by the sources
    mixture: Literal["equal", "exponential", "geometric", "window", "latest"] = "equal"
    mixture_decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    mixture_window: Count = 2
    stop: Literal["steps", "score_parity"] = "steps"
    stop_ema: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    stop_min_steps: Annotated[int, Field(ge=0)] = 10  # score_parity: the fewest batches of a phase
    # What the prover writes: "direct", solutions; "decoupled", translations of a solver's solutions: faithful ones keep
    # its answer, sneaky ones lead to another, wrong one; "challenge", solutions and answers to the verifier's questions
    protocol: Literal["direct", "decoupled", "challenge"] = "direct"
    solver: str = "base"  # decoupled: who solves; the base prover, or the directory of a run: its newest prover
    challenge: Literal["weakest", "random"] = "weakest"  # challenge: the step that the verifier supports least, or any
    challenge_tokens: Count = 16  # challenge: most tokens of an answer
    # "stackelberg": the verifier is trained on the mint, then frozen while the prover answers it; "simultaneous": from
    # there on the two take turns, and the verifier also learns from fresh solutions of the prover as it is
    schedule: Literal["stackelberg", "simultaneous"] = "stackelberg"
    verifier_every: Count = 5  # simultaneous: batches of the prover between two updates of the verifier
    verifier_updates: Count = 5  # simultaneous: the verifier's optimizer steps in an update
    fresh_problems: Count = 32  # simultaneous: problems that an update samples, mint_samples solutions of each
    fresh_window: Count = 4  # simultaneous: updates whose fresh solutions pairs are drawn from; older ones are let go
    fresh_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5  # simultaneous: of the pairs; the rest are the mint's


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

    servers: Urls = ("http://127.0.0.1:8000",)  # of the prover
    verifier_servers: Urls = ()  # of the round's verifier, for verifier.engine = "vllm"
    reference_servers: Urls = ()  # of the verifier's untrained start (implicit head); none: computed in this process
    connections: Count | None = None  # to all servers; None: derived from rollout.concurrency
    share_prefix: bool = True  # prompts that begin alike are computed once; false: every request has a salt of its own
    seeded: bool = True  # each request brings its seed; false: faster sampling on a GPU, nothing is repeatable
    connect_timeout_s: Positive = 5.0
    probe_every_s: Annotated[float, Field(ge=0.01)] = 2.0  # how often pvg checks each server
    probe_timeout_s: Positive = 15.0  # a server that is silent for longer is given up until it answers
    unavailable_s: Positive = 120.0  # how long a request waits for any server to come back
    retries: Annotated[int, Field(ge=0)] = 5  # of one request, after failures of servers
    # How `pvg serve` starts a server.
    python: str = ""  # the interpreter that has vLLM; "": this one, or the one that `make vllm-cpu` made
    max_num_seqs: Count = 256  # rows decoded together
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9  # of the server's GPU
    cpu_cache_gb: Count = 1  # of its KV cache, where it runs on a CPU
    prefix_caching: bool = True
    max_model_len: Count | None = None  # None: the model's own
    tensor_parallel: Count = 1
    eager: bool = False  # no CUDA graphs, no compilation; always so on a CPU
    startup_s: Positive = 900.0
    extra_args: Annotated[tuple[str, ...], Field(strict=False)] = ()  # handed on to vLLM as they are


class Weights(Section):
    """How trained weights get to the servers, and how their arrival is proven."""

    transport: Literal["filesystem", "lora", "nccl", "ipc"] = "filesystem"
    client: Literal["dedicated", "shared"] = "dedicated"  # updates over connections of their own, or generation's
    root: Folder = Path("runs/.weights")  # a folder that the trainer and the servers share; holds the control key
    keep: Annotated[int, Field(ge=1)] = 2  # versions left on the disk
    keep_kv: bool = False  # requests in flight go on with the old weights' keys and values; false: computed again
    timeout_s: Positive = 600.0  # of one update
    canary_prompts: Annotated[int, Field(ge=0)] = 4  # scored by trainer and servers after every update; 0: no canary
    canary_tolerance: Positive | None = None  # largest log-prob gap in nats; None: by the sampler's dtype
    checksums: Literal["first", "always", "never"] = "first"  # tensors compared bit by bit: at every
    # update, or up to the first one that changed them


class Evaluation(Section):
    """Fresh samples taken at the end of each round, on problems nobody trained on."""

    problems: Count = 128
    samples: Count = 2  # per problem and role


class Evaluate(Section):
    """What `pvg evaluate` measures of a run whose rounds are finished, and with how much effort. Changes nothing that
    the run computed, so it may be set for a run that is over."""

    problems: Annotated[int, Field(ge=2)] = 128  # test problems, the same ones for every round and every part
    samples: Annotated[int, Field(ge=2)] = 8  # solutions per problem and role
    attacks: Annotated[tuple[Literal["src", "cgc", "goodhart"], ...], Field(strict=False), BeforeValidator(_names)] = (
        "src",
        "cgc",
        "goodhart",
    )  # what the attackers are paid
    attack_steps: Annotated[int, Field(ge=1, le=100_000)] = 200  # optimizer steps after which an attack is censored
    attack_window: Count = 10  # batches that the criterion is pooled over: none succeeds by one lucky batch
    attack_error_rate: Fraction = 0.95  # share of well-formed wrong solutions that an exploit needs (arXiv 2407.13692)
    attack_learning_rate: Positive | None = None  # None: training.learning_rate
    attack_groups: Count | None = None  # None: training.groups
    attack_cgc_floor: float | None = (
        None  # V0 of the cgc attacker; None: by the round's own scores (docs/evaluation.md)
    )
    # of the correctness baseline that the legibility tax is measured against; None: training.steps
    baseline_steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    baseline_probes: Annotated[int, Field(ge=1, le=90)] = 6  # points of its trajectory, besides its start
    localisation_solutions: Count = 256  # most flawed solutions per round that are scored step by step
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95  # of every interval
    resamples: Annotated[int, Field(ge=100)] = 1000  # of the bootstrap over problems
    bins: Annotated[int, Field(ge=2)] = 10  # of the calibration error, of equal mass
    ngrams: Annotated[int, Field(ge=1, le=8)] = 3  # longest token n-gram that the separability probe sees
    folds: Annotated[int, Field(ge=2)] = 5  # of cross-validation by problem: the probe's, and the Platt fit's


class Telemetry(Section):
    """What is watched, and when it warns. Changes nothing that is computed."""

    refresh_per_second: Annotated[float, Field(gt=0.0, le=60.0)] = 8.0
    event_loop: Literal["uvloop", "asyncio"] = "uvloop"
    shortest_span_ms: Annotated[float, Field(ge=0.0)] = 0.2  # shorter spans count in the budget, but are not written
    device_every_s: Annotated[float, Field(ge=0.01)] = 5.0  # between two samples of the GPU, the CPU and the memory
    loop_lag_hz: Annotated[float, Field(gt=0.0, le=1000.0)] = 10.0
    loop_lag_p90_s: Positive = 1.0  # warn above these
    loop_lag_p99_s: Positive = 5.0
    loop_lag_max_s: Positive = 30.0
    stall_s: Positive = 600.0  # warn when no step has ended for this long
    sinks: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False), BeforeValidator(_names)
    ] = ()  # one name, names with commas between, or a list
    metrics_port: Annotated[int, Field(ge=0, lt=65536)] = 0  # Prometheus on 127.0.0.1; 0: none
    sneaky_collapse: Fraction = 0.1  # alert below this share of role-aligned samples
    zero_signal: Fraction = 0.9  # alert above this share of groups whose rewards are all the same
    truncation: Fraction = 0.5  # alert above this share of rollouts that hit the length limit
    weights_queue_ms: Positive = 1000.0  # alert when a weight update waits longer before the engine works on it
    chance_auc: Fraction = 0.55  # alert when the verifier's AUC is at most this; 0.5 is chance
    # Program and arguments, run for each alert without a shell; the alert is JSON on its standard input. Empty: none
    alert_command: Annotated[tuple[NotEmpty, ...], Field(strict=False)] = ()
    alert_command_s: Positive = 10.0  # the command is killed after this many seconds


class Store(Section):
    root: Folder = Path("runs")
    commit_every: Count = 10  # optimizer steps between commit points
    row_digests: bool = True  # minted rows are checked when they are read; false: whole shards when they are opened
