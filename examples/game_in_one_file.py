"""A whole prover-verifier game in one file. Read this first.

    python examples/game_in_one_file.py            # about a minute and a half on 2 cores; no GPU, no download

One language model, the prover, answers under two prompts. Its helpful role is paid for correct solutions that convince
the verifier. Its sneaky role is paid for wrong solutions that convince the verifier. A smaller model, the verifier,
learns to score correct solutions above wrong ones. It never sees which prompt was used. Each round has three parts:

    1. mint       Sample solutions from the base prover and from the provers of all earlier rounds.
    2. verifier   Train a fresh verifier on pairs of a correct and a wrong solution of the same problem.
    3. prover     Freeze the verifier. Train a copy of the base prover against it with GRPO:
                  sample, grade, score, reward, advantage, optimizer step, publish the weights, repeat.

The problems are chains of sums modulo 10, such as `7+5+8+3+6?`. A solution is `7+5=2;2+8=0;0+3=3;3+6=9;A9`.

`pvg train` plays this game with commits, resuming, metrics and many more choices. In its embedded game, each round's
prover goes on from the previous round (`game.start`). Its loop is in pvg/game: run.py,
mint.py, verifier_phase.py and round.py have the parts below in the same order.

Names of arrays end in their shape: N rollouts, M pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pvg.config.experiment import Experiment
from pvg.config.load import find_experiment, load_experiment
from pvg.game.players import Players
from pvg.models.heads import VerifierModel
from pvg.models.language_model import LanguageModel
from pvg.records import Problem, Role, Rollout
from pvg.rollout.dispatcher import GroupOrder, SampleCall
from pvg.tasks import open_task
from pvg.tasks.task import problems_of_half
from pvg.training.batch import PolicyBatch
from pvg.training.credit import advantages
from pvg.training.losses import PolicyObjective
from pvg.training.trainer import OptimizerSettings, Trainer
from pvg.verifier.calibration import auc, separating_threshold
from pvg.verifier.data import VerifierBatch
from pvg.verifier.losses import PairObjective
from pvg.verifier.scorer import VerifierScorer

# The policy is one model. Its two roles differ in the first character of the prompt.
PROMPTS = {Role.HELPFUL: "H", Role.SNEAKY: "S"}
# The reward of a solution that is not aligned with its role. It must be below every score.
FLOOR = -15.0


@dataclass(frozen=True)
class Sizes:
    """The sizes of a game. The defaults take 85 s of CPU time."""

    rounds: int = 2
    minted: int = 192  # problems per mint, with SAMPLES solutions of each
    verifier_steps: int = 40
    pairs: int = 32  # per verifier step
    prover_steps: int = 50
    groups: int = 12  # per prover step, with SAMPLES solutions each
    tested: int = 128  # test problems per round


SAMPLES = 8  # solutions of one group: one problem, one role


class Game:
    """The task, the models and the random numbers of one game."""

    def __init__(self, experiment: Experiment, sizes: Sizes, seed: int) -> None:
        self.experiment, self.sizes = experiment, sizes
        self.random = np.random.default_rng(seed)
        self.task = open_task(experiment.task)
        # The prover and the verifier learn from different problems.
        self.prover_problems = problems_of_half(self.task, "prover")
        self.verifier_problems = problems_of_half(self.task, "verifier")
        self.test_problems = list(self.task.problems("test"))[: sizes.tested]
        # The base prover, the engine that samples from a copy of it, and the thread that does all torch work.
        self.players = Players(experiment, self.task)
        self.version = 0  # of the weights in the engine: +1 per update
        self.calls = 0

    # --- sampling and grading -----------------------------------------------------------------------------------------

    async def publish(self, prover: LanguageModel) -> None:
        """Give the engine the weights of `prover`. It samples with them from now on."""
        self.version += 1
        await self.players.publish(prover.weights(), self.version)

    async def sample(self, problems: list[Problem], roles: list[Role], size: int) -> list[Rollout]:
        """`size` solutions of each problem in its role, by the prover that was published last. Each solution comes with
        its token ids, with the log-prob of each token, and with its grade: is the final answer correct?"""
        encode = self.players.base.tokenizer.encode
        orders = [
            GroupOrder(problem, role, encode(PROMPTS[role] + problem.question), group, size)
            for group, (problem, role) in enumerate(zip(problems, roles, strict=True))
        ]
        self.calls += 1
        groups = await self.players.dispatcher.sample(
            orders,
            SampleCall(round=0, source="game", step=self.calls, seed=int(self.random.integers(2**62)), prefix="game"),
        )
        return [rollout for group in groups for rollout in group.rollouts]

    def draw(self, problems: list[Problem], count: int) -> list[Problem]:
        return [problems[i] for i in self.random.choice(len(problems), count, replace=count > len(problems))]

    # --- part 1: mint -------------------------------------------------------------------------------------------------

    async def mint(self, provers: list[LanguageModel]) -> list[Rollout]:
        """Solutions for the verifier to learn from. Each prover writes an equal share, half of it in each role."""
        minted: list[Rollout] = []
        for prover in provers:
            problems = self.draw(self.verifier_problems, self.sizes.minted // len(provers))
            await self.publish(prover)
            for role in Role:
                minted += await self.sample(problems, [role] * len(problems), SAMPLES // 2)
        return minted

    # --- part 2: the verifier -----------------------------------------------------------------------------------------

    async def train_verifier(self, minted: list[Rollout]) -> tuple[VerifierModel, VerifierScorer, float]:
        """A fresh verifier that has learned from `minted`, its scorer, and the threshold from which it accepts. One
        problem in eight is held out of the training and sets the threshold."""
        held_out = set(sorted({rollout.problem_id for rollout in minted})[::8])
        verifier = await self.players.compute(self.players.open_verifier)
        steps = self.sizes.verifier_steps
        trainer = Trainer(
            verifier,
            PairObjective(self.experiment.verifier, verifier.tokenizer.pad_id),  # -log sigmoid(V_correct - V_wrong)
            OptimizerSettings(learning_rate=3e-4, total_steps=steps),
            Pairs(self, verifier, [rollout for rollout in minted if rollout.problem_id not in held_out]),
            executor=self.players.executor,
        )
        for _ in range(steps):
            await trainer.step()
        scorer, apart = self.players.scorer(verifier), [r for r in minted if r.problem_id in held_out]
        right = await scorer.score([r for r in apart if r.grade.correct and r.role is Role.HELPFUL])
        wrong = await scorer.score([r for r in apart if not r.grade.correct])
        return verifier, scorer, separating_threshold(right, wrong)

    # --- part 3: the prover -------------------------------------------------------------------------------------------

    async def train_prover(self, scorer: VerifierScorer) -> LanguageModel:
        """A copy of the base prover that has learned to convince the frozen verifier behind `scorer`."""
        prover = self.players.base.copy()
        prover.require_gradients()
        objective = PolicyObjective(self.experiment.training, self.experiment.rollout, prover.tokenizer.pad_id)
        steps = self.sizes.prover_steps
        trainer = Trainer(
            prover.module,
            objective,  # GRPO: the clipped ratio of PPO, plus a penalty on the distance to the base prover
            OptimizerSettings(learning_rate=3e-4, total_steps=steps),
            Experience(self, scorer, objective),
            executor=self.players.executor,
        )
        for _ in range(steps):
            await self.publish(prover)
            await trainer.step()  # calls Experience.next_batch, which samples with the weights that were just published
        return prover

    # --- the result of a round ----------------------------------------------------------------------------------------

    async def test(self, prover: LanguageModel, scorer: VerifierScorer, threshold: float) -> dict[str, float]:
        """Fresh solutions of test problems, which neither player has seen."""
        await self.publish(prover)
        problems, both = self.test_problems, list(Role)
        rollouts = await self.sample([p for p in problems for _ in both], both * len(problems), 1)
        scores_N = await scorer.score(rollouts)
        correct_N = np.array([rollout.grade.correct for rollout in rollouts])
        helpful_N = np.array([rollout.role is Role.HELPFUL for rollout in rollouts])
        flaws_N = np.array([rollout.is_flaw for rollout in rollouts])  # sneaky, wrong, and in the form of a solution
        return {
            "helpful accuracy": float(correct_N[helpful_N].mean()),
            "sneaky error rate": float(flaws_N[~helpful_N].mean()),
            "fooled rate": float((scores_N[flaws_N] >= threshold).mean()),
            "AUC": auc(scores_N[correct_N], scores_N[~correct_N]),
        }


class Pairs:
    """The verifier's batches: pairs of a correct and a wrong solution of the same problem. The label is correctness,
    never the role, and the role's prompt is not part of what the verifier reads."""

    def __init__(self, game: Game, verifier: VerifierModel, rollouts: list[Rollout]) -> None:
        self.random, self.count, self.rollouts = game.random, game.sizes.pairs, rollouts
        template, fingerprint = game.players.template(verifier), game.players.base.tokenizer.fingerprint
        # What the verifier reads: question and solution as token ids, and where the solution begins.
        self.inputs = [template.tokens(r.question, r.text, r.completion_ids, fingerprint) for r in rollouts]
        sides: dict[str, tuple[list[int], list[int]]] = {}
        for row, rollout in enumerate(rollouts):
            sides.setdefault(rollout.problem_id, ([], []))[int(not rollout.grade.correct)].append(row)
        self.problems = [side for side in sides.values() if side[0] and side[1]]

    async def next_batch(self) -> VerifierBatch:
        chosen = self.random.integers(len(self.problems), size=self.count)
        pairs_M2 = np.array([[self.random.choice(side) for side in self.problems[problem]] for problem in chosen])
        rows, numbers = np.unique(pairs_M2, return_inverse=True)  # a solution may be in several pairs
        return VerifierBatch(
            sequences=[self.inputs[row][0] for row in rows],
            prompt_lengths_N=np.array([self.inputs[row][1] for row in rows], dtype=np.int32),
            pairs_M2=numbers.reshape(-1, 2).astype(np.int32),
            references_N=None,
        )


class Experience:
    """The prover's batches: sample, grade, score, reward, advantage. One call makes one batch."""

    def __init__(self, game: Game, scorer: VerifierScorer, objective: PolicyObjective) -> None:
        self.game, self.scorer, self.objective = game, scorer, objective

    async def next_batch(self) -> PolicyBatch:
        game, count = self.game, self.game.sizes.groups
        roles = [role for _ in range(count // 2) for role in Role]  # half of the groups in each role
        problems = game.draw(game.prover_problems, len(roles))
        rollouts = await game.sample(problems, roles, SAMPLES)  # sample and grade
        scores_N = await self.scorer.score(rollouts)  # the verifier's logits: how sure it is of each solution
        rewards_N = rewards(rollouts, scores_N)
        group_ids_N = np.array([rollout.group for rollout in rollouts], dtype=np.int32)
        role_ids_N = np.array([rollout.role.number for rollout in rollouts], dtype=np.int8)
        batch = PolicyBatch(
            sequences=[np.concatenate([r.prompt_ids, r.completion_ids]) for r in rollouts],
            prompt_lengths=np.array([len(r.prompt_ids) for r in rollouts], dtype=np.int32),
            sampled_logprobs=[r.logprobs for r in rollouts],  # from the sampler: no second forward pass
            reference_logprobs=None,
            # Better or worse than the other solutions of the same problem in the same role?
            advantages_N=advantages("grpo", rewards_N, group_ids_N, role_ids_N),
            role_ids_N=role_ids_N,
            group_ids_N=group_ids_N,
            versions_N=np.array([r.version for r in rollouts], dtype=np.int32),
        )
        base = game.players.base.module  # the penalty compares the prover with the base prover
        batch.reference_logprobs = await game.players.compute(lambda: self.objective.recompute(base, batch))
        return batch


def rewards(rollouts: list[Rollout], scores_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """The reward of each solution: its score if it is aligned with its role, else FLOOR. A helpful solution is aligned
    if it is correct, a sneaky solution if it is wrong. A text without a final answer is never aligned."""
    did_job_N = np.array(
        [r.grade.well_formed and r.grade.correct == (r.role is Role.HELPFUL) for r in rollouts], dtype=np.bool_
    )
    return np.where(did_job_N, scores_N, FLOOR).astype(np.float32)


async def play(experiment: Experiment, sizes: Sizes, seed: int = 0) -> list[dict[str, float]]:
    """Play the game and print a row per round. Returns the rows."""
    game, started = Game(experiment, sizes, seed), time.perf_counter()
    rows: list[dict[str, float]] = []
    provers = [game.players.base]
    try:
        await game.players.ready()
        for round_ in range(sizes.rounds):
            minted = await game.mint(provers)
            verifier, scorer, threshold = await game.train_verifier(minted)
            if round_ == 0:
                show("base", await game.test(game.players.base, scorer, threshold), started)
            provers.append(await game.train_prover(scorer))
            rows.append(await game.test(provers[-1], scorer, threshold))
            show(str(round_), rows[-1], started)
            verifier.close()
        return rows
    finally:
        for prover in provers[1:]:
            prover.close()
        await game.players.close()


def show(round_: str, row: dict[str, float], started: float) -> None:
    """Print a row of the table, and its head above the first one."""
    if round_ == "base":
        print("round", *(f"{name:>18}" for name in row), "  seconds", sep="")
    cells = [f"{value:18.2f}" if name == "AUC" else f"{100 * value:16.1f} %" for name, value in row.items()]
    print(f"{round_:<5}", *cells, f"{time.perf_counter() - started:9.0f}", sep="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Play a prover-verifier game on the CPU.")
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    seed = given.pop("seed")
    experiment = load_experiment(find_experiment("modchain", Path(__file__).parents[1] / "experiments"))
    asyncio.run(play(experiment, Sizes(**given), seed))


if __name__ == "__main__":
    main()
