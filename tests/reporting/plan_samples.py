"""A run with plans of the mini board, as the task diplomacy_mini grades them."""

from __future__ import annotations

from pathlib import Path

from run_samples import begin, commit, rollout, state, tell

from pvg.records import Grade, Role, Rollout
from pvg.store.run_directory import RunDirectory

THRESHOLD = 0.0


def plan(
    name: str, role: Role, question: str, text: str, refuted: str, score: float | None, *, round_: int = 0
) -> Rollout:
    note = f"refuted by {refuted}" if refuted else ""
    return rollout(
        name,
        role,
        correct=not refuted,
        score=score,
        question=question,
        text=text,
        round=round_,
        source=f"round-{round_:03d}",
        grade=Grade(not refuted, True, text.partition("!")[0], note),
    )


def plans(round_: int = 0) -> list[Rollout]:
    malformed = rollout(
        "broken", Role.SNEAKY, correct=False, score=9.0, question="deg/bf>d?", grade=Grade(False, False, None)
    )
    return [
        plan(f"sound-{round_}", Role.HELPFUL, "abe/df>d?", "ad;b+ad;e+ad", "", 1.25, round_=round_),
        plan(f"fools-{round_}", Role.SNEAKY, "abe/df>d?", "ad;b+ad;ef!d.;fb", "d.;fb", 2.5, round_=round_),
        plan(f"flawed-{round_}", Role.SNEAKY, "adg/be>d?", "a.;d.;gh", "bd;e+bd", -1.5, round_=round_),
        plan(f"modest-{round_}", Role.HELPFUL, "adg/be>d?", "a+d;d.;g+d", "", -0.5, round_=round_),
        malformed,
    ]


FULL_QUESTION = """F1902M
Aus: ~alb bud* /vie
Eng: edi* ~lon* ~nwy* yor /lvp
Fra: ~bel* bur ~gas ~mar* por* ~spa/nc* /bre par
Ger: ~den kie* ruh sil war* /ber mun swe
Rus: mos* ~pru ~sev* ~stp/sc*
Germany
den: bal hel kie nth ska swe
kie: ber den hol mun ruh
ruh: bel bur hol kie mun
Plan orders for Germany that put or keep a unit of Germany in hol, whatever the others order."""


def full_plan_sample(text: str, note: str, correct: bool) -> Rollout:
    """A plan on the full map, as the task diplomacy_plan grades it."""
    grade = Grade(correct, True, text.rsplit("\n", maxsplit=1)[-1], note)
    role = Role.HELPFUL if correct else Role.SNEAKY
    return rollout("full", role, correct=correct, score=1.0, question=FULL_QUESTION, text=text, grade=grade)


def played_plans(root: Path, name: str = "plans", rounds: int = 1) -> RunDirectory:
    run = begin(root, name)
    metrics = {"helpful_accuracy": 0.75, "verifier_auc": 0.75, "threshold": THRESHOLD}
    tell(run, *({"kind": "round", "round": round_, "metrics": metrics} for round_ in range(rounds)))
    shards = {f"checkpoint-{round_:05d}": plans(round_) for round_ in range(rounds)}
    commit(run, state("complete", rounds=[metrics] * rounds), shards)
    return run
