"""The plain records that travel between the packages. No torch here: these are stored, sent and compared.

Invariant: a rollout keeps for life what the sampler knew (token ids, log-probs, policy versions), so that nothing
is tokenised twice and no second forward pass is needed to learn what was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
# Which experts a mixture-of-experts model chose: [tokens, layers, experts per token], expert numbers; uint8 where there
# are at most 256 experts, else uint16. The last sampled token was never computed, so that one row is less than tokens.
RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]

Split = Literal["train", "test"]
Half = Literal["prover", "verifier"]
FinishReason = Literal["stop", "length"]

BASE_SOURCE = "base"


class Role(StrEnum):
    """The two roles that one prover plays through two prompts."""

    HELPFUL = "helpful"
    SNEAKY = "sneaky"

    @property
    def number(self) -> int:
        """h in the reward formulas: 1 for helpful, 0 for sneaky."""
        return int(self is Role.HELPFUL)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a reference answer. `id` is stable across runs, machines and versions of this package."""

    id: str
    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checks:
    """What executing a solution has shown, where a task executes them (pvg.tasks.code).

    Shares of the tests that it passes, in [0, 1]: of the `visible` ones, which its prompt holds, and of all that there
    are. `certified`: it passes the visible ones, and named an input on which it was found to be wrong.
    """

    visible: float
    passed: float
    certified: bool


@dataclass(frozen=True, slots=True)
class Grade:
    """What a task says of one completion.

    `correct` is the ground truth that verifier labels are made of; `well_formed` is False for a completion that is
    no solution at all (no final answer, broken format): such a one is never role-aligned (see pvg.game.rewards).
    `answer` is the answer found, `note` one short human sentence such as "wrong sum in step 3".
    """

    correct: bool
    well_formed: bool
    answer: str | None = None
    note: str = ""
    checks: Checks | None = None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens from index `start` (of the completion) on were sampled by policy `version`."""

    start: int
    version: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Part of a completion that is a dialogue, from token `start` on to the next one's: written by the prover
    (`sampled`), or what an environment told it."""

    start: int
    sampled: bool
    text: str


@dataclass(frozen=True, slots=True)
class SolverSolution:
    """A solver's solution of a problem, which a rollout of the decoupled game translates; `id` is that of its own
    rollout, and the others are of its grade."""

    id: str
    text: str
    answer: str | None
    correct: bool
    well_formed: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: waiting in the engine's queue, and being decoded."""

    queued_s: float = 0.0
    service_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled solution and everything that is known of it.

    Shapes: `prompt_ids` int32 [P], `completion_ids` int32 [C] (the stop token included when it was sampled),
    `logprobs` float32 [C], in nats, of the distribution that was sampled from (temperature and top-p applied).
    `source` names the prover that wrote it: "base", or "round-000" for the prover trained in round 0.
    `group` numbers the group (same problem, same role, same call) within its phase.
    `routed_experts` [P + C - 1, layers, k], where they were asked for: row t is of token t of prompt + completion.

    `solver` is what it translates (the decoupled game), and `kept_answer` whether it keeps that answer. `turns` divide
    the completion of a dialogue, the first beginning with token 0; none: all of it was sampled in one go. Of tokens
    that nobody sampled the log-prob is 0.
    """

    id: str
    problem_id: str
    question: str
    reference: str
    role: Role
    round: int
    source: str
    step: int
    group: int
    prompt_ids: Int32
    completion_ids: Int32
    logprobs: Float32
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    text: str
    grade: Grade
    timing: Timing = Timing()
    score: float | None = None
    verifier_version: str | None = None
    reward: float | None = None
    routed_experts: RoutedExperts | None = None
    solver: SolverSolution | None = None
    kept_answer: bool | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def version(self) -> int:
        """The oldest policy version among its tokens: what staleness is counted from."""
        return min(span.version for span in self.spans)

    @property
    def proven(self) -> bool:
        """False for a flaw without proof: a sneaky, incorrect solution of a task that executes, without a certificate
        that holds. It may be wrong by accident, and is no solution of its role."""
        checks = self.grade.checks
        return checks is None or self.role is Role.HELPFUL or self.grade.correct or checks.certified

    @property
    def solution(self) -> str:
        """The text of what was graded: of a dialogue the prover's first turn (pvg.game.challenge)."""
        return self.turns[0].text if self.turns else self.text

    @property
    def solution_tokens(self) -> int:
        """How many tokens of the completion are the solution's, from its beginning."""
        return self.turns[1].start if len(self.turns) > 1 else len(self.completion_ids)

    @property
    def is_flaw(self) -> bool:
        """Sneaky, wrong, a solution at all, and proven where its task asks for it: what the sneaky role is for."""
        return self.role is Role.SNEAKY and not self.grade.correct and self.grade.well_formed and self.proven

    @property
    def sampled_mask(self) -> NDArray[np.bool_]:
        """bool [C]: the tokens that the prover sampled; only they are its doing."""
        mask = np.ones(len(self.completion_ids), dtype=np.bool_)
        for turn in self.turns:  # each overrides what the one before said of the rest
            mask[turn.start :] = turn.sampled
        return mask

    @property
    def sampled_tokens(self) -> int:
        return int(self.sampled_mask.sum()) if self.turns else len(self.completion_ids)


class Scorable(Protocol):
    """What a verifier scores: a Rollout, or a row of a shard (pvg.store.samples). Messages name it by `id`."""

    @property
    def id(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def completion_ids(self) -> Int32: ...


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one problem and one role, sampled together: the unit of group-normalised advantages.

    `spread_s`: seconds between the first and the last of them to finish, which is what a straggler costs its group.
    `cancelled` of those that were ordered were cut off by a deadline and given up, after `lost_tokens` tokens, as far
    as the engine told.
    """

    problem: Problem
    role: Role
    rollouts: Sequence[Rollout]
    spread_s: float = 0.0
    cancelled: int = 0
    lost_tokens: int = 0


def source_of_round(round_: int) -> str:
    """The source name of the prover trained in `round_`."""
    return f"round-{round_:03d}"
