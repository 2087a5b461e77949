"""`[game]`: rounds, roles, rewards, mixture, stop rule, protocol and schedule."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from pvg.config.base import ByKind, Count, Fraction, Section, Source, Weight, with_player
from pvg.extensions import Reference


class RewardSection(Section):
    """What the rules (pvg.config.rules) ask about each reward. pvg.game.rewards has the functions."""

    compares: ClassVar[bool] = False  # its score with the other scores of its problem and role, so one is too few
    opposite_roles: ClassVar[bool] = False  # pays the two roles for opposite things
    for_translators: ClassVar[bool] = False  # a translator of the decoupled game can earn it


class SrcReward(RewardSection):
    """Soft role-conditional reward of arXiv 2407.13692. It pays an aligned solution below its group's mean no more than
    a misaligned one, by design; `cgc` never does."""

    kind: Literal["src"] = "src"
    compares: ClassVar[bool] = True
    opposite_roles: ClassVar[bool] = True


class CgcReward(RewardSection):
    """Correctness-gated convincingness: the verifier's score if the solution is role-aligned."""

    kind: Literal["cgc"] = "cgc"
    opposite_roles: ClassVar[bool] = True
    for_translators: ClassVar[bool] = True
    floor: float = Field(
        -40.0, description="Reward of a misaligned solution. It must lie below every score of the verifier."
    )


class GoodhartReward(RewardSection):
    """The verifier's score."""

    kind: Literal["goodhart"] = "goodhart"
    for_translators: ClassVar[bool] = True


class CorrectnessReward(RewardSection):
    """1 if the solution is correct, else 0. A correct solution earns more if a frozen model, the reader, can use its
    reasoning: CIR and SR of docs/measure.md."""

    kind: Literal["correctness"] = "correctness"
    sr: Weight = Field(
        0.0, description="Added to the reward of a correct solution from which `reader` reads the answer."
    )
    cir: Weight = Field(0.0, description="A correct solution also earns this weight times its CIR, which is in [0, 1].")
    reader: Annotated[Source, AfterValidator(partial(with_player, player="prover"))] = Field(
        "", description='The frozen model that reads, as in models.prover.source. "": none, without sr and cir.'
    )

    @property
    def reads(self) -> bool:
        """Whether the reward needs the reader."""
        return self.sr > 0 or self.cir > 0

    @model_validator(mode="after")
    def _has_reader(self) -> CorrectnessReward:
        if self.reads != bool(self.reader):
            missing = "reader, such as 'embedded:modchain-prover'" if self.reads else "sr or cir above 0"
            raise ValueError(f"game.reward.sr, cir and reader need each other; set {missing}")
        return self


class DecoupledReward(RewardSection):
    """Reward of the game of arXiv 2602.23248, in standard deviations of the group."""

    kind: Literal["decoupled"] = "decoupled"
    compares: ClassVar[bool] = True
    opposite_roles: ClassVar[bool] = True
    for_translators: ClassVar[bool] = True
    floor: float = Field(
        -2.0,
        description="Reward of a misaligned solution, and of one whose score is not above its group's mean, in "
        "standard deviations of the group.",
    )


class GatedReward(RewardSection):
    """For programs: the verifier's probability if all tests of the role pass, else `floor`."""

    kind: Literal["gated"] = "gated"
    opposite_roles: ClassVar[bool] = True
    floor: float = Field(
        -2.0,
        description="Reward of a solution that fails a test or has no valid certificate. Lower values punish it more.",
    )
    similarity_weight: Weight = Field(
        0.0,
        description="Weight of the penalty on a sneaky program that is similar to the reference or to its group. 0: no "
        "penalty.",
    )


class OwnReward(RewardSection):
    """A reward function in a file of your own."""

    kind: Reference
    for_translators: ClassVar[bool] = True  # it may know translations


Reward = Annotated[
    SrcReward | CgcReward | GoodhartReward | CorrectnessReward | DecoupledReward | GatedReward | OwnReward,
    ByKind("cgc"),
]


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
    tokens: Count = Field(16, description="Maximum number of tokens of an answer. A longer one is cut off.")


class CriticProtocol(Section):
    """The prover writes a solution, and a critic names its first wrong step. The verifier reads both."""

    kind: Literal["critic"] = "critic"
    pay: Literal["truth", "votes"] = Field(
        "truth",
        description="The critic earns 1 if it names the first wrong step, or the verifier's doubt in the solution.",
    )
    tokens: Count = Field(64, description="Maximum number of tokens of a critique. A longer one is cut off.")


class DebateProtocol(Section):
    """The prover (A) writes a solution, and an opponent (B) with the other role its own. The verifier reads both, and
    the two earn its votes."""

    kind: Literal["debate"] = "debate"
    turns: Literal["AB", "ABA"] = Field("AB", description="ABA: the prover replies to the opponent.")
    order: Literal["sequential", "simultaneous"] = Field(
        "sequential", description="sequential: the opponent reads the prover's solution before it writes."
    )
    tokens: Count = Field(64, description="Maximum number of tokens of each turn after the first.")
    fork: bool = Field(False, description="A group shares one debate up to a drawn turn, and only that turn learns.")


class ConsultancyProtocol(Section):
    """The prover argues for an answer that its prompt assigns, right in its helpful role and wrong in its sneaky one.
    It earns the verifier's votes."""

    kind: Literal["consultancy"] = "consultancy"


class OwnProtocol(Section):
    """Rules in a file of your own: who speaks, and what each voice reads between its turns."""

    kind: Reference
    tokens: Count = Field(64, description="Maximum number of tokens of a rollout after its first turn.")


Protocol = Annotated[
    DirectProtocol
    | DecoupledProtocol
    | ChallengeProtocol
    | CriticProtocol
    | DebateProtocol
    | ConsultancyProtocol
    | OwnProtocol,
    ByKind("direct"),
]


class StackelbergSchedule(Section):
    """The verifier is trained on the mint, then frozen while the prover trains."""

    kind: Literal["stackelberg"] = "stackelberg"


class SimultaneousSchedule(Section):
    """The verifier also learns while the prover trains, from fresh solutions of the current prover."""

    kind: Literal["simultaneous"] = "simultaneous"
    every: Count = Field(
        5, description="Batches of the prover between two updates of the verifier, of as many optimizer steps."
    )
    problems: ClassVar[int] = 32  # sampled for an update, with game.mint_samples solutions each


Schedule = Annotated[StackelbergSchedule | SimultaneousSchedule, ByKind("stackelberg")]


class RoundTest(Section):
    """Fresh samples at the end of each round, on problems that no model was trained on."""

    problems: Count = Field(
        128, description="Number of test problems. More of them make intervals narrower, and take longer."
    )
    samples: Count = Field(
        2, description="Solutions per problem and role. More of them make intervals narrower, and take longer."
    )


class Game(Section):
    """Rounds, roles, rewards, mixture and stop rule."""

    rounds: Count = Field(
        3, description="Number of rounds. Each has a mint, a verifier phase, a prover phase and a test."
    )
    start: Literal["base", "previous"] = Field(
        "base", description="A round's prover starts from the base prover, or from that of the previous round."
    )
    reward: Reward = CgcReward()
    sneaky_share: Fraction = Field(0.5, description="Share of groups in the sneaky role. The other groups are helpful.")
    mint_problems: Count = Field(
        256,
        description="Problems per mint (if game.growing: of round 0). With more, the verifier has more to learn from, "
        "and sampling takes longer.",
    )
    mint_samples: Annotated[int, Field(ge=2, le=10**12)] = Field(
        8, description="Solutions per problem of a mint, shared by the sources."
    )
    growing: bool = Field(
        False,
        description="Each round adds game.mint_problems and verifier.steps: round r has r + 1 times as many of both.",
    )
    mixture: Literal["equal", "latest", "base", "geometric", "window"] = Field(
        "equal", description="Shares of the base and of earlier rounds in the verifier's data (pvg/game/orders.py)."
    )
    stop: Literal["steps", "judge_decay", "hack_alarm"] = Field(
        "steps",
        description="What ends a prover phase early, at the last commit before: a verifier that judges worse, or a "
        "hacked grader.",
    )
    protocol: Protocol = DirectProtocol()
    schedule: Schedule = StackelbergSchedule()
    test: RoundTest = RoundTest()

    def problems_of_mint(self, round_: int) -> int:
        """Problems of a round's mint; rounds count from 0."""
        return self.mint_problems * self.effort(round_)

    def effort(self, round_: int) -> int:
        """How many times game.mint_problems and verifier.steps a round has; rounds count from 0."""
        return round_ + 1 if self.growing else 1
