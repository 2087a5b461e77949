"""The plain records that the packages exchange, store and compare. This module does not import torch.

Invariant: a rollout always keeps what the sampler knew (token ids, log-probs, policy versions). So nothing is tokenized
twice, and no second forward pass is needed to learn what was sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
# The experts that a mixture-of-experts model chose: expert numbers [tokens, layers, experts per token], uint8 with at
# most 256 experts, otherwise uint16. There is one row fewer than tokens, because the last token was never an input.
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
    """A question with a reference answer. `id` is the same across runs, machines and versions of this package."""

    id: str
    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wording:
    """What a prompt says besides a task's question: instructions per role, and an example of a question with the answer
    of each role (question "": no example). A task gives its own one as `wording` in the metadata of its problems.

    `form`: how a solution writes its final answer, such as "#### {answer}", for checks of prompts and grader; "": no
    such form. Raises ValueError if a role is missing, or if the form does not contain {answer}.
    """

    instructions: Mapping[Role, str]
    question: str = ""
    answers: Mapping[Role, str] = field(default_factory=dict)
    form: str = ""

    def __post_init__(self) -> None:
        for name, texts in (("instructions", self.instructions), ("answers", self.answers)):
            missing = [role.value for role in Role if role not in texts]
            if missing and (name == "instructions" or self.question):
                raise ValueError(f"the {name} of a Wording have no text for the {missing[0]} role")
        if self.form and "{answer}" not in self.form:
            raise ValueError(f"the form {self.form!r} of a Wording does not contain {{answer}}")

    def written(self, answer: str) -> str:
        """The end of a solution with this answer."""
        return self.form.replace("{answer}", answer)


@dataclass(frozen=True, slots=True)
class Checks:
    """The results of executing a solution, for tasks that execute them (pvg.tasks.code).

    Shares of passed tests, in [0, 1]: of the `visible` ones, which the prompt contains, and of all tests. `certified`:
    it passes the visible tests and named an input on which it was found to be wrong.
    """

    visible: float
    passed: float
    certified: bool


@dataclass(frozen=True, slots=True)
class Grade:
    """A task's grade of one completion.

    `correct`: the ground truth for verifier labels. `well_formed`: False for a completion that is not a solution (no
    final answer, broken format); it is never role-aligned (see pvg.game.rewards). `answer`: the answer found. `note`: a
    short sentence such as "wrong sum in step 3".
    """

    correct: bool
    well_formed: bool
    answer: str | None = None
    note: str = ""
    checks: Checks | None = None


def flaw_kind(note: str) -> str:
    """The kind of flaw that a grade's note names: "wrong sum in step 3" -> "wrong sum". Of the plan game: "refuted by
    ab;c+ab" -> "refuted"."""
    return re.split(" in step|:|(?<=^refuted) by ", note, maxsplit=1)[0]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Policy `version` sampled the completion's tokens from index `start` on."""

    start: int
    version: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Part of a dialogue's completion, from token `start` to the start of the next turn: what its voice wrote
    (`sampled`), or what it heard from others. `seat`: who wrote it; several are joined by "+". `score`: the verifier's
    after this turn, in the test of a round; None: it is not known."""

    start: int
    sampled: bool
    text: str
    seat: str = "prover"
    score: float | None = None


@dataclass(frozen=True, slots=True)
class SolverSolution:
    """A solver's solution, which a rollout of the decoupled game translates. `id`: the id of its rollout; the other
    fields are from its grade."""

    id: str
    text: str
    answer: str | None
    correct: bool
    well_formed: bool


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds in the engine's queue, and seconds of decoding."""

    queued_s: float = 0.0
    service_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled solution with everything known about it.

    Shapes: `prompt_ids` int32 [P]; `completion_ids` int32 [C], including the stop token if it was sampled; `logprobs`
    float32 [C], in nats, of the distribution that was sampled from (after temperature and top-p).
    `source`: the prover that wrote it: "base", or "round-000" for the prover trained in round 0.
    `group`: the number of its group (same problem, same role, same call) within the phase.
    `routed_experts` [P + C - 1, layers, k], if requested: row t belongs to token t of prompt + completion.

    `solver`: the solution that it translates (the decoupled game). `kept_answer`: whether it keeps that answer. `turns`
    divide the completion of a dialogue; the first begins at token 0. Without turns, one request sampled the whole
    completion. Tokens that were not sampled have log-prob 0.

    `sr` and `cir`: what `game.reward.reader` found in its reasoning, in [0, 1]; None: it did not read it.

    In memory only: `others`, the rollouts of the other voices of its interaction, by seat, and `end`, the state of the
    rules in which it ended. What the others wrote is stored as turns. `compared`: the turn in which the rollouts of its
    group begin to differ, from 0, and which alone learns; -1: that of another voice; None: they share no turn.
    `reference_logprobs` float32 [C]: under the base model, if the engine computed them.
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
    sr: float | None = None
    cir: float | None = None
    others: Mapping[str, Rollout] = field(default_factory=dict, compare=False, repr=False)
    end: Any = field(default=None, compare=False, repr=False)
    compared: int | None = field(default=None, compare=False, repr=False)
    reference_logprobs: Float32 | None = field(default=None, compare=False, repr=False)

    @property
    def version(self) -> int:
        """The oldest policy version among its tokens, from which staleness is counted."""
        return min(span.version for span in self.spans)

    @property
    def proven(self) -> bool:
        """False for a flaw without proof: a sneaky, incorrect solution of a task that executes solutions, without a
        valid certificate. It may be wrong by accident and does not fit its role."""
        checks = self.grade.checks
        return checks is None or self.role is Role.HELPFUL or self.grade.correct or checks.certified

    @property
    def solution(self) -> str:
        """The text that was graded; in a dialogue the prover's first turn (pvg.game.protocols)."""
        return self.turns[0].text if self.turns else self.text

    @property
    def solution_tokens(self) -> int:
        """The number of tokens of the solution, which begins the completion."""
        return self.turns[1].start if len(self.turns) > 1 else len(self.completion_ids)

    @property
    def is_flaw(self) -> bool:
        """Sneaky, wrong, well-formed, and proven if its task requires a proof: the aim of the sneaky role."""
        return self.role is Role.SNEAKY and not self.grade.correct and self.grade.well_formed and self.proven

    @property
    def sampled_mask(self) -> NDArray[np.bool_]:
        """bool [C]: the tokens that the prover sampled."""
        mask = np.ones(len(self.completion_ids), dtype=np.bool_)
        for turn in self.turns:  # each turn overrides the previous one from its start on
            mask[turn.start :] = turn.sampled
        return mask

    @property
    def learned(self) -> Rollout:
        """The rollout as if others had written all turns that are not compared."""
        if self.compared is None or not self.turns:
            return self
        turns = (replace(turn, sampled=turn.sampled and n == self.compared) for n, turn in enumerate(self.turns))
        return replace(self, turns=tuple(turns))

    @property
    def sampled_tokens(self) -> int:
        return int(self.sampled_mask.sum()) if self.turns else len(self.completion_ids)


class Scorable(Protocol):
    """What a verifier scores: a Rollout, or a row of a shard (pvg.store.samples). `id` names it in messages."""

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

    `spread_s`: seconds between the first and the last finished one, the cost of stragglers. `cancelled`: the number of
    ordered rollouts that a deadline cancelled, after `lost_tokens` tokens, as far as the engine reported.
    """

    problem: Problem
    role: Role
    rollouts: Sequence[Rollout]
    spread_s: float = 0.0
    cancelled: int = 0
    lost_tokens: int = 0


def source_of_round(round_: int) -> str:
    return f"round-{round_:03d}"
