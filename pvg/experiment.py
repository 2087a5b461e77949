"""The experiment: one validated configuration, read from TOML, changed by `key=value`, hashed for resuming.

Its sections carry the names of the packages that read them. This is the only module that knows TOML.

    experiment = load_experiment(Path("experiments/modchain.toml"), overrides=["training.steps=30"])
    print(experiment.arithmetic())

Invariant: whatever passes `load_experiment` can be played; what cannot work is refused here, before any model loads.
"""

from __future__ import annotations

import difflib
import hashlib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

import pvg
from pvg.errors import ConfigurationError, UsageError
from pvg.experiment_checks import impossibilities, oddities

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
Folder = Annotated[Path, Field(strict=False)]  # TOML has no paths: text becomes one

# Sections that do not change what is computed: they may differ between a run and its resumption.
UNHASHED_SECTIONS = frozenset({"telemetry", "store", "serving", "weights"})


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
    """Grade-school word problems in the published JSONL form; `path` holds train.jsonl and test.jsonl."""

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


TaskSection = Annotated[ModchainTask | Gsm8kTask | ReasoningGymTask, Field(discriminator="kind")]


class ModelSection(Section):
    """Where a model comes from.

    `source`: "embedded:NAME" (shipped with pvg), "gguf:PACKAGE" (a GGUF file inside an installed package), or the
    path of a Hugging Face directory.
    """

    source: str = "embedded:modchain-prover"
    dtype: Literal["float32", "bfloat16"] = "float32"


class Models(Section):
    prover: ModelSection = ModelSection()
    verifier: ModelSection = ModelSection(source="embedded:modchain-verifier")
    device: str = "auto"
    threads: Annotated[int, Field(ge=0)] = 0  # 0: as many as the machine has cores


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
    group_deadline_s: Positive | None = None  # of the prover's training: a group (spo: a batch) is then used with what
    # has arrived, and the rest of it cancelled; None: wait for all. What arrives in time is not the same every time.
    min_group: Count = 2  # a group (spo: a batch) with fewer at its deadline waits until it has them
    logprobs: Literal["sampled", "recomputed"] = "sampled"
    prompts: Literal["tag", "chat", "plain"] = "tag"
    compaction: bool = True  # finished rows leave their batch; false: they stay until it ends
    shared_prefill: bool = True  # each distinct prompt is prefilled once per batch; false: once per row
    # "lean": a decoding step of pvg's own for Llama-like models, compared with the model's logits when the engine opens
    # (other models go through transformers, and events.log says so); "module": all through transformers
    decoding: Literal["lean", "module"] = "lean"
    # "continuous": requests join as rows finish (lean decoding only); "whole": a batch is decoded to its end
    batching: Literal["continuous", "whole"] = "continuous"


class Verifier(Section):
    """The verifier's head, its loss and its scorer."""

    head: Literal["scalar", "implicit", "yes_token"] = "implicit"
    loss: Literal["bradley_terry", "cross_entropy"] = "bradley_terry"
    score_penalty: Annotated[float, Field(ge=0.0)] = 0.005  # lambda of V^2
    beta: Positive = 1.0  # scale of the implicit head
    steps: Count = 100
    pairs: Count = 64  # pairs per optimizer step (pairing by problem: on average)
    pairing: Literal["random", "problem"] = "random"  # each pair drawn by itself, or all pairs of whole problems
    solutions_per_problem: Annotated[int, Field(ge=2)] = 8  # pairing by problem: most solutions taken of a problem
    micro_batch_tokens: Count = 16_384
    learning_rate: Positive = 3e-4
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    warmup: Annotated[int, Field(ge=0)] = 10
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    gradient_clip: Positive = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1  # share of the mint's problems kept for calibration and AUC
    acceptance: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9  # share of correct solutions that the threshold accepts
    cache_entries: Count = 100_000
    score_tokens: Count = 16_384  # tokens per scoring batch
    engine: Literal["torch", "vllm"] = "torch"  # who computes the scores: this process, or serving.verifier_servers


class Training(Section):
    """Prover training: one step is one optimizer step over a batch of groups."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "spo"] = "grpo"
    groups: Count = 32  # groups sampled per batch
    steps: Annotated[int, Field(ge=0)] = 60
    minibatches: Count = 1  # optimizer steps per sampled batch
    micro_batch_tokens: Count = 16_384
    micro_batch_rollouts: Count | None = None
    accumulation_steps: Count | None = None  # None: as many as the token budget needs
    bucketing: bool = True  # micro-batches of rows of like length; false: in arrival order, sized for the longest row
    shared_prompts: bool = True  # each distinct prompt of a micro-batch is computed once; false: once per row
    learning_rate: Positive = 1e-4
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    warmup: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    gradient_clip: Positive = 1.0
    kl: Annotated[float, Field(ge=0.0)] = 0.02
    clip_low: Annotated[float, Field(gt=0.0)] | None = None  # None: the loss's own default
    clip_high: Annotated[float, Field(gt=0.0)] | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    logits_chunk: Count = 4_194_304  # most logits (tokens x vocabulary) held at once
    fused_layers: bool = True  # norms and rotary embeddings of Llama and Qwen2 in few passes, where prompts are shared
    fused_logprobs: bool = True  # log-probs with a gradient in closed form; false: by autograd, each chunk twice
    gradient_checkpointing: bool = False
    lora_rank: Annotated[int, Field(ge=0)] = 0  # 0: all weights are trained; else adapters of all linear layers
    lora_alpha: Positive = 16.0  # an adapter's product is scaled by lora_alpha / lora_rank
    spo_half_life: Positive = 100.0  # versions of the policy after which spo's tracked values count half
    spo_prioritised: bool = False  # problems whose outcome is uncertain are drawn more often; false: all alike
    overlong_buffer: Annotated[int, Field(ge=0)] = 0  # dapo's soft overlong reward starts this many tokens early


class Game(Section):
    """Rounds, roles, rewards, mixture and stop rule."""

    rounds: Count = 3
    reward: Literal["src", "cgc", "goodhart", "correctness", "decoupled"] = "src"
    misaligned_reward: float = -1.0  # src's "else" branch, and what malformed solutions get
    cgc_floor: float = -15.0  # V0 of cgc: must lie below every live score (-2 suits scores bounded above it)
    decoupled_floor: float = -2.0  # decoupled's misaligned reward, in group standard deviations
    sneaky_share: Fraction = 0.5
    mint_problems: Count = 256
    mint_samples: Count = 8  # solutions per problem, shared by the sources
    mixture: Literal["equal", "exponential", "geometric", "window", "latest"] = "equal"
    mixture_decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    mixture_window: Count = 2
    stop: Literal["steps", "score_parity"] = "steps"
    stop_ema: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    stop_min_steps: Annotated[int, Field(ge=0)] = 10


URL_PATTERN = r"^https?://[^/\s]+/?$"
URL_EXAMPLE = "Write http:// or https://, host and port, and no path: http://127.0.0.1:8000"
Url = Annotated[str, Field(pattern=URL_PATTERN)]


def _names(value: Any) -> Any:
    """Names as a list, each once."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    return tuple(dict.fromkeys(value)) if isinstance(value, (list, tuple)) else value


def _addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    """Each server once, however its address is written."""
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
    probe_every_s: Positive = 2.0  # how often each server is asked whether it lives
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


class Telemetry(Section):
    """What is watched, and when it warns. Changes nothing that is computed."""

    refresh_per_second: Positive = 8.0
    event_loop: Literal["uvloop", "asyncio"] = "uvloop"
    shortest_span_ms: Annotated[float, Field(ge=0.0)] = 0.2  # shorter spans count in the budget, but are not written
    device_every_s: Positive = 5.0  # between two samples of the GPU, the CPU and the memory
    loop_lag_hz: Positive = 10.0
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


class Store(Section):
    root: Folder = Path("runs")
    commit_every: Count = 10  # optimizer steps between commit points
    row_digests: bool = True  # minted rows are checked when they are read; false: whole shards when they are opened


class Experiment(Section):
    """A whole experiment, resolved. `arithmetic()` shows the numbers derived from it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "modchain"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    task: TaskSection = ModchainTask()
    models: Models = Models()
    rollout: Rollouts = Rollouts()
    verifier: Verifier = Verifier()
    training: Training = Training()
    game: Game = Game()
    serving: Serving = Serving()
    weights: Weights = Weights()
    evaluation: Evaluation = Evaluation()
    telemetry: Telemetry = Telemetry()
    store: Store = Store()

    @model_validator(mode="after")
    def _can_work(self) -> Experiment:
        for complaint in impossibilities(self):
            raise ValueError(complaint)
        return self

    def arithmetic(self) -> BatchArithmetic:
        """The batch sizes that follow from the settings."""
        training, rollout = self.training, self.rollout
        rollouts = training.groups * rollout.group_size
        per_step = rollouts // training.minibatches
        longest = rollout.max_tokens + PROMPT_ALLOWANCE
        by_tokens = max(1, training.micro_batch_tokens // longest)
        micro = min(by_tokens, per_step, training.micro_batch_rollouts or per_step)
        if training.accumulation_steps is not None:  # at least so many micro-batches (pvg.training.losses)
            micro = min(micro, max(1, per_step // training.accumulation_steps))
        return BatchArithmetic(
            groups=training.groups,
            group_size=rollout.group_size,
            rollouts_per_batch=rollouts,
            optimizer_steps_per_batch=training.minibatches,
            rollouts_per_optimizer_step=per_step,
            micro_batch_rollouts=micro,
            accumulation_steps=-(-per_step // micro),
            completion_tokens_per_batch=rollouts * rollout.max_tokens,
            mint_rollouts_per_round=self.game.mint_problems * self.game.mint_samples,
            verifier_pairs_per_round=self.verifier.steps * self.verifier.pairs,
            prover_rollouts_per_round=rollouts * -(-training.steps // training.minibatches),
            optimizer_steps=self.game.rounds * (self.verifier.steps + training.steps),
        )

    def warnings(self) -> list[str]:
        """What is valid and will run, but is probably not what was meant: one sentence each."""
        return oddities(self)

    def hash(self) -> str:
        """A digest of everything that changes what is computed."""
        return hashlib.sha256(orjson.dumps(self.hashed(), option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]

    def hashed(self) -> dict[str, Any]:
        """The settings a resumed run must share with the run it resumes, as plain data."""
        return {key: value for key, value in self.plain().items() if key not in UNHASHED_SECTIONS}

    def plain(self) -> dict[str, Any]:
        """As JSON-compatible data; unset (None) settings are left out, as TOML has no null."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.plain())


# Tokens the derived numbers assume for a prompt; the true longest prompt is checked when the problems are rendered.
PROMPT_ALLOWANCE = 16


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """Numbers derived from the settings (counts; tokens are the most there can be)."""

    groups: int
    group_size: int
    rollouts_per_batch: int
    optimizer_steps_per_batch: int
    rollouts_per_optimizer_step: int
    micro_batch_rollouts: int
    accumulation_steps: int
    completion_tokens_per_batch: int
    mint_rollouts_per_round: int
    verifier_pairs_per_round: int
    prover_rollouts_per_round: int
    optimizer_steps: int


# --- reading -----------------------------------------------------------------------------------------------------


def find_experiment(name: str, directory: Path = Path("experiments")) -> Path:
    """The file of experiment `name`: a path, or a name in ./experiments, or one shipped with pvg.

    Raises UsageError naming the known experiments and the nearest one.
    """
    return find_named("experiment", name, [directory, *shipped_directories()])


def find_named(kind: str, name: str, places: Sequence[Path]) -> Path:
    """The TOML file `name` of a `kind` ("experiment", "profile"): a path, or a name in the first place that has it.

    Raises UsageError naming the known ones and the nearest.
    """
    candidate = Path(name)
    if candidate.suffix == ".toml":
        if candidate.is_file():
            return candidate
        raise UsageError(f"There is no {kind} file {candidate}.", "Give a path to a TOML file, or a name.")
    for place in places:
        if (place / f"{name}.toml").is_file():
            return place / f"{name}.toml"
    known = sorted({path.stem for place in places for path in place.glob("*.toml")})
    hint = nearest(name, known)
    raise UsageError(
        f"There is no {kind} {name!r}." + (f" Did you mean {hint!r}?" if hint else ""),
        f"Known: {', '.join(known) or 'none'}.",
    )


def shipped_directories(kind: str = "experiments") -> list[Path]:
    """Where the experiments (or profiles) that come with pvg lie: in a wheel, or beside the package in a checkout."""
    package = Path(pvg.__file__).parent
    return [place for place in (package / f"_{kind}", package.parent / kind) if place.is_dir()]


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read `path`, apply `key=value` overrides in order, validate.

    Raises ConfigurationError with the key, the file (or the override) it came from, and the nearest valid key.
    """
    data = read_toml(path, "experiment")
    origins: dict[str, str] = {}
    for override in overrides:
        for key, value, origin in read_override(override):
            assign(data, key, value)
            origins[key] = origin
    return build_experiment(data, str(path), origins)


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The data of the TOML file of a `kind`. Raises UsageError or ConfigurationError that name the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"There is no {kind} file {path}.") from None
    except OSError as error:
        raise UsageError(f"The {kind} file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}.") from None


def build_experiment(data: dict[str, Any], origin: str = "", overrides: dict[str, str] | None = None) -> Experiment:
    """Validate plain data. `origin` and `overrides` (key -> where it was set) only serve the error message."""
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        raise _explain(error, origin, overrides or {}) from None


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` -> (key, value). The value is TOML where it parses as TOML, a plain string where it does not."""
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise UsageError(f"--set {text!r} is not of the form key=value.", "For example: --set training.steps=30")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value.strip()


def read_override(text: str) -> list[tuple[str, Any, str]]:
    """What `--set TEXT` sets, as (key, value, where it was said): one setting for `key=value`, all settings of a TOML
    file for `@FILE`. Raises UsageError and ConfigurationError that name what is wrong."""
    if not text.startswith("@"):
        return [(*parse_override(text), f"--set {text}")]
    path = Path(text[1:]).expanduser()
    return [(key, value, str(path)) for key, value in _leaves(read_toml(path, "settings"))]


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def parse_list(text: str) -> tuple[str, list[Any]]:
    """`key=a,b,c` -> (key, [a, b, c]): TOML values where the whole list is TOML, otherwise each on its own."""
    key, separator, values = text.partition("=")
    key = key.strip()
    if not separator or not key or not values.strip(" ,"):
        raise UsageError(f"{text!r} is not of the form key=a,b,c.", "For example: rollout.max_rows=8,64,256")
    try:
        return key, tomllib.loads(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError:
        return key, [parse_override(f"{key}={value}")[1] for value in values.split(",") if value.strip()]


def assign(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in plain data."""
    *sections, leaf = key.split(".")
    node = data
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigurationError(f"--set {key}: {section!r} is a setting, not a section.")
    node[leaf] = value


def _explain(error: ValidationError, origin: str, overrides: dict[str, str]) -> ConfigurationError:
    """The first complaint of pydantic, in one line a user can act on."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part not in TASKS)
    where = next((where for set_, where in reversed(overrides.items()) if _overlap(key, set_)), origin)
    suffix = f" ({where})" if where else ""
    if first["type"] == "extra_forbidden":
        if key in valid_keys():  # only a task's keys depend on another setting
            kinds = [kind for kind, task in TASKS.items() if key.removeprefix("task.") in task.model_fields]
            return ConfigurationError(
                f"{key} is a setting of task.kind = {' or '.join(map(repr, kinds))} alone{suffix}."
            )
        hint = nearest_key(key)
        return ConfigurationError(
            f"Unknown key {key!r}{suffix}." + (f" The nearest valid key is {hint!r}." if hint else ""),
            "See `pvg config schema` for all keys.",
        )
    if first["type"] == "value_error":
        message = str(first["msg"]).removeprefix("Value error, ")
        return ConfigurationError(f"{message}{suffix}.")
    if first["type"].startswith("union_tag"):
        return ConfigurationError(f"task.kind must be one of {', '.join(TASKS)}{suffix}.")
    given = repr(first["input"])
    if first["type"] == "string_pattern_mismatch" and first["ctx"]["pattern"] == URL_PATTERN:
        return ConfigurationError(f"{key}: {given[:60]} is no address of a server{suffix}.", URL_EXAMPLE)
    return ConfigurationError(f"{key}: {first['msg']}, not {given[:60]}{suffix}.")


def _overlap(key: str, other: str) -> bool:
    """Whether one of two dotted keys is the other or lies inside of it."""
    return bool(key) and (f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."))


TASKS: dict[str, type[Section]] = {"modchain": ModchainTask, "gsm8k": Gsm8kTask, "reasoning_gym": ReasoningGymTask}


def nearest_key(key: str) -> str | None:
    """The valid key, or section, most like `key`: as a whole, or the one whose last part is most like its last part."""
    keys = valid_keys()
    sections = {".".join(parts[:end]) for parts in (k.split(".") for k in keys) for end in range(1, len(parts))}
    if hint := nearest(key, [*keys, *sorted(sections)]):
        return hint
    leaves = {k.rsplit(".", 1)[-1]: k for k in reversed(keys)}
    leaf = nearest(key.rsplit(".", 1)[-1], list(leaves))
    return leaves[leaf] if leaf else None


def valid_keys() -> list[str]:
    """Every dotted key an experiment file may hold."""
    keys: list[str] = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, info in model.model_fields.items():
            annotation = info.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                walk(annotation, f"{prefix}{name}.")
            elif name == "task":
                for task in TASKS.values():
                    walk(task, "task.")
            else:
                keys.append(f"{prefix}{name}")

    walk(Experiment, "")
    return list(dict.fromkeys(keys))


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word most like `word`, if any is alike."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return found[0] if found else None


def differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `key: before -> after` for every setting that differs, sorted by key."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {_shown(old)} -> {_shown(new)}")
    return lines


def _shown(value: Any) -> str:
    return "unset" if value is None else orjson.dumps(value).decode()
