"""All sections of an experiment: fields only. pvg.config.experiment checks and uses them together."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from pvg.config.base import Section
from pvg.config.game import Game
from pvg.config.operation import AutoCluster, Cluster, Evaluate, RayCluster, Serving, Store, Telemetry, Weights
from pvg.config.rollout import Prompts, Rollouts, TagPrompts
from pvg.config.task import ModchainTask, TaskSection
from pvg.config.training import DataType, Models, Training, Verifier, Warmup

# Run folders have this name, with a number if there are several. Most file systems allow 255 bytes.
LONGEST_NAME = 100


class AllSections(Section):
    """The sections of an experiment, each checked by itself."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=LONGEST_NAME)] = Field(
        "modchain", description="Name of the experiment, and of its runs."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="Seed of all random numbers. Another seed plays another run."
    )
    task: TaskSection = ModchainTask()
    models: Models = Models()
    prompts: Prompts = TagPrompts()
    rollout: Rollouts = Rollouts()
    verifier: Verifier = Verifier()
    training: Training = Training()
    game: Game = Game()
    warmup: Warmup = Warmup()
    serving: Serving = Serving()
    weights: Weights = Weights()
    cluster: Cluster = AutoCluster()
    evaluate: Evaluate = Evaluate()
    telemetry: Telemetry = Telemetry()
    store: Store = Store()

    @property
    def server_cluster(self) -> RayCluster | None:
        """The cluster on which pvg starts the prover's vLLM servers; None if you start them, or if there are none."""
        on_servers = self.rollout.engine.kind == "vllm"
        return self.cluster if on_servers and isinstance(self.cluster, RayCluster) else None

    @property
    def samples_on_base(self) -> bool:
        """Whether the torch engine samples with adapters beside the weights of the base prover, which it shares."""
        rank, engine = self.training.adapters.rank, self.rollout.engine.kind
        return rank > 0 and engine == "torch" and self.models.dtype == "bfloat16"

    @property
    def merges_adapters(self) -> bool:
        """Whether the prover samples with adapters that are added to its weights."""
        apart = self.rollout.engine.kind == "vllm" and self.weights.transport.kind == "lora"
        return self.training.adapters.rank > 0 and not apart and not self.samples_on_base

    @property
    def sampling_dtype(self) -> DataType:
        """The data type of the weights with which the prover samples. Rounding to bfloat16 would remove most of what
        the first steps of adapters add to a weight."""
        if self.merges_adapters:
            return "float32"
        return "bfloat16" if "bfloat16" in (self.models.dtype, self.models.compute_dtype) else "float32"


def value_of(experiment: AllSections, key: str) -> Any:
    """The value of a setting; the kind of a tagged table."""
    node: Any = experiment
    for part in key.split("."):
        node = getattr(node, part)
    return getattr(node, "kind", node)
