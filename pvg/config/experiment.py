"""The experiment: one validated configuration, hashed for resuming. pvg.config.load reads it from TOML.

Each table has a module: pvg.config.rollout has `[rollout]`. Invariant: what passes validation can be played; what
cannot work is refused here, before any model loads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import orjson
import tomli_w
from pydantic import BaseModel, model_validator
from pydantic.fields import FieldInfo

from pvg.config.base import READER, ByKind, without_folder
from pvg.config.game import ChallengeProtocol, CriticProtocol, DebateProtocol, OwnProtocol, SimultaneousSchedule
from pvg.config.rules import conflicts, warnings_about
from pvg.config.sections import AllSections
from pvg.extensions import EXTENSIBLE, is_reference

# Sections that do not change results, so a resumed run may have other values.
UNHASHED_SECTIONS = frozenset({"telemetry", "store", "serving", "weights", "evaluate", "cluster"})
# Settings that bound memory. They change the last bits of results and nothing else, so a resumed run may have other
# values, for example after it ran out of memory.
MEMORY_SETTINGS = {"training": ("micro_batch_tokens", "gradient_checkpointing"), "verifier": ("micro_batch_tokens",)}
# Also bounds memory, but changes what is sampled: phases sample chunks of this size, each from its own seed, and a
# commit counts chunks. So it is not one of MEMORY_SETTINGS.
MAX_ROWS = "rollout.engine.max_rows"
# What a new run lowers if the memory is too small (pvg.planning.plan.fitted_here).
FITTED = ("training.micro_batch_tokens", "verifier.micro_batch_tokens", MAX_ROWS)


TAG_ROOM, QUOTED_ROOM = 16, 320  # most tokens of a question in the challenge protocol
TURN_ROOM, REPLY_ROOM = 16, 64  # most tokens around a turn that the prover hears, and around one that asks for a reply


def spoken_room(protocol: CriticProtocol | DebateProtocol, *, in_words: bool) -> int:
    """The most tokens of the prover's rollout after its solution: what it hears, and its reply. `in_words`: whether a
    prompt asks for the reply."""
    replies = isinstance(protocol, DebateProtocol) and protocol.turns == "ABA"
    return (REPLY_ROOM if replies and in_words else TURN_ROOM) + protocol.tokens * (1 + replies)


class Experiment(AllSections):
    """A whole, validated experiment. `arithmetic()` gives the numbers that follow from it."""

    @model_validator(mode="after")
    def _can_work(self) -> Experiment:
        for complaint in conflicts(self):
            raise ValueError(complaint)
        return self

    def verifier_steps(self, round_: int) -> int:
        """Optimizer steps of a round's verifier, or of each member of its ensemble."""
        return self.verifier.steps * self.game.effort(round_)

    def verifier_phase_steps(self, round_: int) -> int:
        """Optimizer steps of a round's verifier phase; self-play has none."""
        return 0 if self.task.kind == "play" else self.verifier.ensemble.size * self.verifier_steps(round_)

    def verifier_update_steps(self, prover_steps: int) -> int:
        """Optimizer steps of the verifier beside the first `prover_steps` of a prover phase: those of
        `game.schedule = "simultaneous"`. They do not grow with `game.growing`."""
        schedule = self.game.schedule
        if self.task.kind == "play" or not isinstance(schedule, SimultaneousSchedule):
            return 0
        return prover_steps // self.training.minibatches // schedule.every * schedule.every

    @property
    def judge_steps(self) -> int:
        """Optimizer steps of the judge with which the first mint compares a critic. A generative judge has none."""
        trained = isinstance(self.game.protocol, CriticProtocol) and not self.verifier.verdict_tokens
        return self.verifier_steps(0) * trained

    def sources(self) -> dict[str, str]:
        """Where the models and the task's data come from, by the settings that say so."""
        found = {f"models.{player}.source": getattr(self.models, player).source for player in ("prover", "verifier")}
        more = {"task.path": getattr(self.task, "path", None), READER: getattr(self.game.reward, "reader", None)}
        return found | {key: str(source) for key, source in more.items() if source}

    def with_sources(self, sources: Mapping[str, str]) -> Experiment:
        """The experiment with these `sources`; those that are not named stay."""
        given = dict(sources)
        path = given.pop("task.path", None)
        task = self.task if path is None else self.task.model_copy(update={"path": Path(path)})
        models, game = self.models, self.game
        if reader := given.pop(READER, None):
            game = game.model_copy(update={"reward": game.reward.model_copy(update={"reader": reader})})
        for key, source in given.items():
            player = key.split(".")[1]
            models = models.model_copy(update={player: getattr(models, player).model_copy(update={"source": source})})
        return self.model_copy(update={"task": task, "models": models, "game": game})

    def own_code(self) -> list[tuple[str, str]]:
        """(setting, reference) of every setting that names user code (pvg.extensions)."""
        found = []
        for section, names in EXTENSIBLE.items():
            for name in names:
                value = getattr(getattr(self, section), name, None)  # only one kind of task has `source`
                value = getattr(value, "kind", value)
                if isinstance(value, str) and is_reference(value):
                    found.append((f"{section}.{name}", value))
        return found

    @property
    def verifier_is_on_base(self) -> bool:
        """Whether the verifier is adapters on the base prover's own weights, which a warm start changes."""
        return self.verifier.adapters.rank > 0 and self.models.verifier == self.models.prover and not self.warmup.path

    @property
    def server_can_rest(self) -> bool:
        """Whether `pvg serve` starts servers that can sleep. Only the trainer's command may choose `rollout.engine`."""
        in_turns = self.rollout.prefetch.kind == "none" and self.game.schedule.kind != "simultaneous"
        return in_turns and self.server_cluster is None and self.models.on_gpu and self.serving.tensor_parallel == 1

    @property
    def servers_rest(self) -> bool:
        """Whether a server on the trainer's GPU sleeps while the trainer works: it has nothing to do then."""
        return self.server_can_rest and self.rollout.engine.kind == "vllm"

    @property
    def reference_served(self) -> bool:
        """Whether servers compute the log-probs of the KL penalty's reference: they hold the base below its adapters.
        vLLM's log-probs of a prompt ignore the temperature, and replay no experts. "recomputed" keeps them out."""
        holds_base = self.rollout.engine.kind == "vllm" and self.weights.transport.kind == "lora"
        alike = (
            self.rollout.temperature == 1.0 and self.rollout.logprobs == "sampled" and not self.training.router_replay
        )
        return holds_base and alike and self.training.penalised

    @property
    def rollouts_per_batch(self) -> int:
        """Of all voices of the policy. The number of voices in a user's protocol is not known here and counts as 1."""
        voices = 2 if isinstance(self.game.protocol, CriticProtocol | DebateProtocol) else 1
        return self.training.groups * self.rollout.group_size * voices

    def completion_room(self) -> int:
        """The most tokens of a completion, including what the environment writes."""
        protocol, room = self.game.protocol, self.rollout.max_tokens
        if isinstance(protocol, ChallengeProtocol):
            return room + (TAG_ROOM if self.prompts.kind == "tag" else QUOTED_ROOM) + protocol.tokens
        if isinstance(protocol, CriticProtocol | DebateProtocol):
            return room + spoken_room(protocol, in_words=self.prompts.kind != "tag")
        return room + protocol.tokens if isinstance(protocol, OwnProtocol) else room

    def token_limits(self) -> TokenLimits:
        # Self-play has one role, and its reward is a change in value.
        opposite = self.task.kind != "play" and self.game.reward.opposite_roles
        budgets = {
            "training.micro_batch_tokens": self.training.micro_batch_tokens,
            "verifier.micro_batch_tokens": self.verifier.micro_batch_tokens,
        }
        room, beyond = self.completion_room(), int(self.reference_served)
        return TokenLimits(self.rollout.max_tokens, room, budgets, opposite, beyond)

    def arithmetic(self) -> BatchArithmetic:
        """The batch sizes that follow from the settings."""
        training, rollout = self.training, self.rollout
        rounds, first, last = (
            self.game.rounds,
            self.verifier_phase_steps(0),
            self.verifier_phase_steps(self.game.rounds - 1),
        )
        rollouts = self.rollouts_per_batch
        per_step = rollouts // training.minibatches
        updates = self.verifier_update_steps(training.steps)
        longest = rollout.max_tokens + PROMPT_ALLOWANCE
        micro = min(max(1, training.micro_batch_tokens // longest), per_step)
        return BatchArithmetic(
            groups=training.groups,
            group_size=rollout.group_size,
            rollouts_per_batch=rollouts,
            optimizer_steps_per_batch=training.minibatches,
            rollouts_per_optimizer_step=per_step,
            micro_batch_rollouts=micro,
            accumulation_steps=-(-per_step // micro),
            completion_tokens_per_batch=rollouts * rollout.max_tokens,
            mint_rollouts_per_round=0 if self.task.kind == "play" else self.game.mint_problems * self.game.mint_samples,
            verifier_pairs_per_round=first * self.verifier.pairs,
            prover_rollouts_per_round=rollouts * -(-training.steps // training.minibatches),
            verifier_update_steps_per_round=updates,
            # The verifier's phases grow by equal amounts.
            optimizer_steps=self.judge_steps + rounds * (first + last) // 2 + rounds * (training.steps + updates),
        )

    def warnings(self) -> list[str]:
        """Settings that are valid but probably not intended: one sentence each."""
        return warnings_about(self)

    def hash(self) -> str:
        """A digest of all settings that change results."""
        return digest_of(self.hashed())

    def hashed(self) -> dict[str, Any]:
        """The settings that change results, as plain data. A resumed run must share them with the original run, except
        MEMORY_SETTINGS. Another run whose player is a model may move: only the digest of its weights counts."""
        found = {key: value for key, value in self.plain().items() if key not in UNHASHED_SECTIONS}
        for player in ("prover", "verifier"):
            section = found["models"][player]
            section["source"] = without_folder(section["source"])
        if reader := found["game"]["reward"].get("reader"):
            found["game"]["reward"]["reader"] = without_folder(reader)
        return found

    def plain(self) -> dict[str, Any]:
        """JSON-compatible data. Leaves out unset (None) settings, because TOML has no null."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.plain())


def digest_of(hashed: Mapping[str, Any]) -> str:
    """`Experiment.hash`, from the `hashed` settings."""
    return hashlib.sha256(orjson.dumps(hashed, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def without_memory_settings(hashed: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed run must share with the original run, from the `hashed` settings of one of them."""
    return {
        key: {name: kept for name, kept in value.items() if name not in MEMORY_SETTINGS[key]}
        if key in MEMORY_SETTINGS
        else value
        for key, value in hashed.items()
    }


# Assumed prompt length in tokens; pvg checks the true longest prompt when it renders the problems.
PROMPT_ALLOWANCE = 16


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def fields_of(section: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    """(dotted key, its section, the field) of everything in a section: settings, sections, and tagged tables. Those of
    a tagged table come once per section of it."""
    for name, info in section.model_fields.items():
        key = f"{place}{name}"
        yield key, section, info
        inner = [info.annotation] if is_section(info.annotation) else []
        for each in (*inner, *(each for mark in info.metadata if isinstance(mark, ByKind) for each in mark.sections)):
            yield from fields_of(each, f"{key}.")


TABLES: dict[str, ByKind] = {
    key: mark for key, _, info in fields_of(Experiment) for mark in info.metadata if isinstance(mark, ByKind)
}
SECTION_NAMES = frozenset(section.__name__ for table in TABLES.values() for section in table.sections)


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """`solution`: the most tokens of a solution; `room`: of a completion, with what the environment writes. `budgets`:
    tokens of each setting. `opposite_roles`: the reward pays the roles for opposite things. `beyond`: tokens that a
    server writes after a whole completion, when it computes the reference's log-probs."""

    solution: int
    room: int
    budgets: Mapping[str, int]
    opposite_roles: bool
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """Numbers that follow from the settings: counts, and upper bounds of tokens."""

    groups: int
    group_size: int
    rollouts_per_batch: int
    optimizer_steps_per_batch: int
    rollouts_per_optimizer_step: int
    micro_batch_rollouts: int
    accumulation_steps: int
    completion_tokens_per_batch: int
    mint_rollouts_per_round: int  # these two: of the first round; game.growing adds as many in each round
    verifier_pairs_per_round: int
    prover_rollouts_per_round: int
    verifier_update_steps_per_round: int  # in the prover phase (game.schedule = "simultaneous")
    optimizer_steps: int
