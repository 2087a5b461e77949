"""Do robust losses or ensembles help a verifier that has learnt enough?

    python -m benchmarks.robust_attacks RUN... --out FILE
    python -m benchmarks.robust_attacks --table FILE [--against NAME]

For each finished game, the program trains verifiers on the mint of one round again: plain, three times as long, with
each robust loss, and ensembles of three plain ones. All see the same mint, and the single ones draw the same pairs.
Then fresh `cgc` attackers attack each verifier, each with another seed. The program appends one JSON line per game and
verifier to FILE, and skips those that are there: use another FILE for another round, or other attackers. With --table
it prints the means, and the differences from one verifier, paired by game. docs/results/robust.md has the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.robust_strengths import auc_of
from pvg.config.experiment import Experiment
from pvg.config.load import load_experiment
from pvg.evaluation.attacks import AttackTarget, attack, sample_attacker
from pvg.evaluation.opened_run import EvaluationContext, OpenedRun
from pvg.evaluation.rounds import ATTACKED
from pvg.evaluation.runner import open_evaluation
from pvg.game.ledger import shards_of
from pvg.game.mixtures import source_weights, sources_for_round
from pvg.game.states import Phase
from pvg.game.verifier_phase import calibration, pair_stream, verifier_trainer
from pvg.models.ensembles import ScoreScales, VerifierEnsemble
from pvg.models.heads import VerifierModel
from pvg.records import Float32, Role, Rollout
from pvg.seeds import seed_for
from pvg.store.pairs import PairView, is_held_out
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards
from pvg.study.measures import MeasuredValue
from pvg.study.statistics import compare, holm
from pvg.telemetry.observer import SilentObserver
from pvg.verifier.backend import ScoringModel
from pvg.verifier.calibration import auc, common_scales, member_scores

# With the strengths that docs/results/robust.md chose. IRM and the mean were the weakest there.
LOSSES: dict[str, tuple[str, ...]] = {
    "none": (),
    "longer": (),
    "vrex": ("verifier.robust={kind='vrex', strength=10.0}",),
    "group_dro": ("verifier.robust={kind='group_dro', strength=1.0}",),
}
ENSEMBLES = ("median", "min")
MEMBERS = 3
ATTACK = ("evaluate.attack_groups=16", "evaluate.attack_error_rate=0.8", "cluster=none", "models.threads=1")


@dataclass
class Mint:
    """The mint of one round of a finished game, and its prover's fresh solutions, from which no verifier learned."""

    round: int
    view: PairView  # without the held-out problems
    held_out: list[Rollout]
    fresh: list[Rollout]

    @classmethod
    def read(cls, reading: OpenedRun, round_: int, held_out: float) -> Mint:
        shards = shards_of(reading.state, round_, Phase.MINT.value)
        view = PairView(
            RolloutShards(reading.directory.path), shards, keep=lambda problem: not is_held_out(problem, held_out)
        )
        minted = [r for r in reading.read_rollouts(round_, Phase.MINT.value) if is_held_out(r.problem_id, held_out)]
        return cls(round_, view, minted, list(reading.read_rollouts(round_, Phase.CHECKPOINT.value)))


def helpful_and_correct(rollouts: Sequence[Rollout]) -> NDArray[np.bool_]:
    return np.array([r.role is Role.HELPFUL and r.grade.correct for r in rollouts], dtype=bool)


async def trained(
    context: EvaluationContext, experiment: Experiment, mint: Mint, draw: int, times: int = 1
) -> VerifierModel:
    """A verifier after its training of `times` as many steps as in the game. `draw` selects its pairs, as the number of
    a member does in an ensemble."""
    players, sources = context.players, sources_for_round(mint.round)
    place = ("pairs", draw) if draw else ("pairs",)
    seed = seed_for(experiment.seed, mint.round, *place)
    stream = pair_stream(experiment.verifier, mint.view, source_weights(experiment.game, sources), seed)
    verifier = await players.compute(lambda: players.open_verifier(mint.round, draw))
    players.experiment = experiment
    try:
        steps = times * experiment.verifier_steps(mint.round)
        trainer = verifier_trainer(players, verifier, stream, sources=len(sources), steps=steps)
        while trainer.steps_done < steps:
            await trainer.step()
    finally:
        players.experiment = context.experiment
    return verifier


async def ensemble_of(context: EvaluationContext, members: Sequence[VerifierModel], kind: str, mint: Mint) -> Any:
    ensemble = VerifierEnsemble(members, kind, ScoreScales.none(len(members)))
    scored = partial(
        member_scores,
        ensemble,
        context.players.template(ensemble),
        token_budget=context.experiment.verifier.score_tokens,
        executor=context.players.executor,
        prover_fingerprint=context.players.base.tokenizer.fingerprint,
    )
    ensemble.scales = common_scales(await scored(mint.held_out))
    return ensemble


async def measured(
    context: EvaluationContext, name: str, verifier: ScoringModel, mint: Mint, attackers: int
) -> dict[str, Any]:
    """AUCs on held-out solutions, in all and of the worst source; on the next prover's; and the attackers' results."""
    scorer = context.players.scorer(verifier)
    held_N, fresh_N = await scorer.score(mint.held_out), await scorer.score(mint.fresh)
    correct_N = np.array([rollout.grade.correct for rollout in mint.held_out], dtype=bool)
    threshold = calibration(
        correct_N, np.array([rollout.role is Role.HELPFUL for rollout in mint.held_out], dtype=bool), held_N
    )["threshold"]
    writers_N = np.array([rollout.source for rollout in mint.held_out])
    by_source = [
        auc_of([mint.held_out[row] for row in rows], held_N[rows])
        for rows in (np.flatnonzero(writers_N == name) for name in sources_for_round(mint.round))
    ]
    solved_N = helpful_and_correct(mint.fresh)
    reference = {"value": float(fresh_N[solved_N].mean())}
    lowest, highest = float(min(held_N.min(), fresh_N.min())), float(max(held_N.max(), fresh_N.max()))
    target = AttackTarget(mint.round, name, threshold, reference, lowest, highest)
    found = [await attacked(context, target, verifier, fresh_N[solved_N], attacker) for attacker in range(attackers)]
    flaws_N = np.array([rollout.is_flaw for rollout in mint.fresh], dtype=bool)
    return {
        "auc_all": auc_of(mint.held_out, held_N),
        "auc_worst": min(by_source),
        "auc_next": auc_of(mint.fresh, fresh_N),
        "fooled_next": float((fresh_N[flaws_N] >= threshold).mean()),
        "attacks": found,
    }


async def attacked(
    context: EvaluationContext, target: AttackTarget, verifier: ScoringModel, solved_N: Float32, attacker: int
) -> dict[str, Any]:
    """The result of an attack, and of the trained attacker on test problems, if there is one: the share of wrong
    solutions, the share of them that the verifier accepts, and their AUC against the scores `solved_N` of correct
    helpful solutions."""
    reseeded = context.experiment.model_copy(update={"seed": 1000 + attacker})
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        opened = await open_evaluation(reseeded, context.ledger, SilentObserver(), asyncio.Event(), stack)
        attacking = replace(opened, folder=folder)
        result = await attack(attacking, target, "cgc", verifier)
        if result["status"] not in ATTACKED:  # such as a training that diverged
            return {"attacker": attacker, **result}
        rollouts = await sample_attacker(attacking, target, "cgc")
        wrong = [rollout for rollout in rollouts if rollout.is_flaw]
        scores_N = await attacking.players.scorer(verifier).score(wrong)
    return {
        "attacker": attacker,
        **result,
        "wrong": len(wrong) / len(rollouts),
        "accepted": float((scores_N >= target.threshold).mean()),
        "auc_attacker": float(auc(solved_N, scores_N)),
    }


async def game(run: Path, arguments: argparse.Namespace, done: set[tuple[str, str]]) -> None:
    reading = OpenedRun.open(RunDirectory(run))
    steps = f"evaluate.attack_steps={arguments.steps}"
    experiment = load_experiment(run / "experiment.toml", (*ATTACK, steps))
    mint = Mint.read(reading, arguments.round, experiment.verifier.held_out)

    wanted = [name for name in arguments.verifiers if (run.name, name) not in done]

    async def store(name: str, verifier: ScoringModel, context: EvaluationContext) -> None:
        row = await measured(context, name, verifier, mint, arguments.attackers)
        with arguments.out.open("a") as out:
            out.write(json.dumps({"run": run.name, "round": mint.round, "verifier": name, **row}) + "\n")

    async with AsyncExitStack() as stack:
        context = await open_evaluation(experiment, reading, SilentObserver(), asyncio.Event(), stack)
        for name in filter(wanted.__contains__, LOSSES):
            changed = load_experiment(run / "experiment.toml", (*ATTACK, steps, *LOSSES[name]))
            # As many steps as all members of an ensemble together.
            verifier = await trained(context, changed, mint, 0, times=MEMBERS if name == "longer" else 1)
            await store(name, verifier, context)
            verifier.close()
        kinds = list(filter(wanted.__contains__, ENSEMBLES))
        members = [await trained(context, experiment, mint, draw) for draw in range(MEMBERS)] if kinds else []
        for kind in kinds:
            await store(kind, await ensemble_of(context, members, kind, mint), context)
        for member in members:
            member.close()


# --- the table -------------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "AUC, held-out mint": lambda row: row["auc_all"],
    "AUC, worst source": lambda row: row["auc_worst"],
    "AUC, next prover": lambda row: row["auc_next"],
    "flaws accepted, next prover's": lambda row: row["fooled_next"],
    "flaws accepted, attackers'": lambda row: _mean(a["accepted"] for a in row["attacks"] if "accepted" in a),
    "AUC, attackers' flaws": lambda row: _mean(a["auc_attacker"] for a in row["attacks"] if "accepted" in a),
    "attacks that succeed": lambda row: _mean(a["status"] == "found" for a in row["attacks"] if "accepted" in a),
}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def table(rows: Sequence[dict[str, Any]], reference: str) -> list[str]:
    """Markdown: per measure and verifier the mean, and the difference from the verifier `reference` over the games that
    have both. Holm's p is corrected for the verifiers of one measure."""
    lines = [
        f"| measure | verifier | n | mean | difference from {reference} | 95 % interval | games | p | Holm's p |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for measure, read in MEASURES.items():
        values: dict[str, dict[int, MeasuredValue]] = {}
        games = {run: number for number, run in enumerate(sorted({row["run"] for row in rows}))}
        for row in rows:
            if (value := read(row)) is not None:
                values.setdefault(row["verifier"], {})[games[row["run"]]] = MeasuredValue(value)
        compared = {
            kind: compare(values.get(reference, {}), held) for kind, held in values.items() if kind != reference
        }
        adjusted = dict(zip(compared, holm([found.p or 1.0 for found in compared.values()]), strict=True))
        for kind, held in values.items():
            cells = [measure, kind, str(len(held)), f"{statistics.fmean(v.number for v in held.values()):.3f}"]
            if (found := compared.get(kind)) is None or found.difference is None:
                cells += ["–"] * 5
            else:
                cells += [
                    f"{found.difference:+.3f}",
                    "–" if found.low is None else f"{found.low:+.3f} to {found.high:+.3f}",
                    f"{found.up}↑ {found.down}↓",
                    f"{found.p:.3f}",
                    f"{adjusted[kind]:.3f}",
                ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    names = (*LOSSES, *ENSEMBLES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="folders of finished games")
    parser.add_argument("--out", type=Path, help="the file of JSON lines")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of such a file, and end")
    parser.add_argument(
        "--against", default="none", choices=names, metavar="NAME", help="of the differences in a table"
    )
    parser.add_argument("--round", type=int, default=2)
    parser.add_argument("--verifiers", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--attackers", type=int, default=2, help="per verifier")
    parser.add_argument("--steps", type=int, default=200, help="of each attacker")
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(table(read_rows(arguments.table), arguments.against)))
        return
    if not arguments.runs or arguments.out is None:
        parser.error("name the folders of finished games, and --out FILE")
    done = {(row["run"], row["verifier"]) for row in (read_rows(arguments.out) if arguments.out.exists() else [])}
    for run in arguments.runs:
        asyncio.run(game(run, arguments, done))


if __name__ == "__main__":
    main()
