"""Alerts for known failure modes of the game, derived from its metrics. docs/runbook.md explains each kind.

Each check is a pure function of the step's metrics and a short history. An alert is raised when its condition begins to
hold, and again only after the condition has ended. So a long problem gives one alert, not a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pvg.errors import in_percent

EMA_DECAY = 0.8  # averages about the last five batches, so that one unusual batch raises no alert
GOODHART_RISE = 0.15  # rise of the fooled rate over its lowest EMA, while the score gap has closed

OF_ROLES = ("helpful_accuracy", "sneaky_error_rate", "faithful", "led_astray")
# Alerts about a metric that some steps do not have. Such a step does not end the alert.
OF_ONE_METRIC = {"hacking": "hack_evidence", "verifier_at_chance": "verifier_auc", "weights_queue": "weights_queue_s"}
OF_DEBATES = ("debate_contested", "debate_both_wrong", "debate_first_wins", "debate_concessions")
AVERAGED = (*OF_ROLES, *OF_DEBATES, "fooled_rate", "score_gap", "zero_signal", "truncated", "legal", "verifier_mcc")


AlertKind = Literal[
    "agreement",
    "calibration",
    "collapse",
    "concessions",
    "goodharting",
    "hacking",
    "judge_decay",
    "loop_lag_max",
    "loop_lag_p90",
    "loop_lag_p99",
    "nan",
    "seat_bias",
    "source_excluded",
    "stall",
    "truncation",
    "unpaired",
    "verifier_at_chance",
    "weak_critic",
    "weights_queue",
    "zero_signal",
]
# Thresholds, each of an average over about ten batches. With fewer role-aligned samples than COLLAPSE, the verifier
# sees hardly any examples of one kind. With more groups of equal rewards than ZERO_SIGNAL, the prover learns nearly
# nothing. With more rollouts at the length limit than TRUNCATION, most have no final answer.
COLLAPSE, ZERO_SIGNAL, TRUNCATION = 0.1, 0.9, 0.5
# Debates: with fewer contested ones than CONTESTED, the verifier has hardly anything to decide. A seat that wins
# SEAT_BIAS more or less than half of the contested debates wins by its place. With more concessions than CONCEDED, the
# sides follow each other in most debates.
CONTESTED, SEAT_BIAS, CONCEDED = 0.1, 0.3, 0.5
DECAY = 0.2  # fall of the verifier's Matthews correlation below its highest average
JUDGED = 10  # batches after which that average counts: one batch has much noise
WEIGHTS_QUEUE_MS = 1000.0  # an update that waits longer waits behind generation requests
CHANCE_AUC = 0.55  # 0.5 is chance; the difference is the noise of a few hundred held-out solutions


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert. `name` is its kind; docs/runbook.md has a section for every kind."""

    name: AlertKind
    message: str


@dataclass
class Alerts:
    """Watches one prover phase. `state()` and `load_state()` preserve it across a resume."""

    two_roles: bool
    averages: dict[str, float] = field(default_factory=dict)
    lowest_fooled: float = math.inf
    highest_mcc: float = -1.0
    judged: int = 0  # batches with a Matthews correlation
    active: set[str] = field(default_factory=set)

    def check(self, metrics: Mapping[str, float], *, new_batch: bool = True) -> list[Alert]:
        """The alerts that begin with this step. The averages count each batch once: pass `new_batch` = False for a
        further step on the same batch."""
        first = not self.averages
        if new_batch:
            self._average(metrics)
        found = self._conditions(metrics, from_the_start=first)
        new = [alert for condition, alert in found.items() if condition not in self.active]
        unknown = {kind for kind, metric in OF_ONE_METRIC.items() if metric not in metrics}
        self.active = set(found) | (self.active & unknown)
        return new

    def state(self) -> dict[str, Any]:
        lowest = None if math.isinf(self.lowest_fooled) else self.lowest_fooled
        state = {"averages": dict(self.averages), "lowest_fooled": lowest}
        state |= {"highest_mcc": self.highest_mcc, "judged": self.judged}
        return state | {"active": sorted(self.active)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.averages = dict(state["averages"])
        self.lowest_fooled = math.inf if state["lowest_fooled"] is None else state["lowest_fooled"]
        self.highest_mcc, self.judged = state["highest_mcc"], state["judged"]
        self.active = set(state["active"])

    def _average(self, metrics: Mapping[str, float]) -> None:
        for name in AVERAGED:
            value = metrics.get(name, math.nan)
            if math.isfinite(value):
                before = self.averages.get(name, value)
                self.averages[name] = EMA_DECAY * before + (1 - EMA_DECAY) * value
        if "fooled_rate" in self.averages:
            self.lowest_fooled = min(self.lowest_fooled, self.averages["fooled_rate"])
        self.judged += math.isfinite(metrics.get("verifier_mcc", math.nan))
        if self.judged >= JUDGED:
            self.highest_mcc = max(self.highest_mcc, self.averages["verifier_mcc"])

    def _conditions(self, metrics: Mapping[str, float], *, from_the_start: bool) -> dict[str, Alert]:
        """The alerts whose conditions hold now, by condition: both roles can collapse, one after the other."""
        start = " from the first step of this phase" if from_the_start else ""
        infinite = [Alert("nan", f"{name} is {value}") for name, value in metrics.items() if math.isinf(value)]
        found = {"nan": infinite[0]} if infinite else {}
        mean = self.averages
        collapses = [("helpful_accuracy", "helpful role writes hardly any correct solutions")]
        if self.two_roles:
            collapses.append(("sneaky_error_rate", "sneaky role writes hardly any wrong solutions"))
        if "faithful" in mean:  # translations: the solver decides what is correct
            collapses = [
                ("faithful", "faithful role hardly keeps the solver's answer any more"),
                ("led_astray", "sneaky role hardly leads to another, wrong answer any more"),
            ]
        for name, what in collapses:
            if mean.get(name, 1.0) < COLLAPSE:
                found[f"collapse {name}"] = Alert("collapse", f"The {what}{start}: {name} is {in_percent(mean[name])}.")
        if mean.get("zero_signal", 0.0) > ZERO_SIGNAL:
            says = f"{in_percent(mean['zero_signal'])} of the groups have equal rewards, so they give no gradient."
            found["zero_signal"] = Alert("zero_signal", says)
        # In self-play, a text at the length limit can be a legal decision: no more are lost than are illegal.
        share = mean.get("truncated", 0.0)
        if min(share, 1.0 - mean.get("legal", 0.0)) > TRUNCATION:
            found["truncation"] = Alert("truncation", f"{in_percent(share)} of the rollouts hit the length limit.")
        rise = mean.get("fooled_rate", 0.0) - self.lowest_fooled
        if mean.get("score_gap", 1.0) <= 0.0 and rise > GOODHART_RISE:
            says = f"The score gap closed while the fooled rate rose by {100 * rise:.0f} points"
            found["goodharting"] = Alert("goodharting", f"{says}: the prover beats the verifier.")
        if mean.get("debate_contested", 1.0) < CONTESTED:
            says = f"Only {in_percent(mean['debate_contested'])} of the debates are contested"
            message = f"{says}; in {in_percent(mean['debate_both_wrong'])} both sides are wrong."
            found["agreement"] = Alert("agreement", message)
        if abs((first := mean.get("debate_first_wins", 0.5)) - 0.5) > SEAT_BIAS:
            message = f"The side that speaks first wins {in_percent(first)} of the contested debates."
            found["seat_bias"] = Alert("seat_bias", message)
        if (share := mean.get("debate_concessions", 0.0)) > CONCEDED:
            message = f"In {in_percent(share)} of the debates, a side that has read the other one gives its answer."
            found["concessions"] = Alert("concessions", message)
        if (mcc := mean.get("verifier_mcc", 1.0)) < self.highest_mcc - DECAY:
            says = f"The verifier's correlation with the truth fell from {self.highest_mcc:.2f} to {mcc:.2f}"
            found["judge_decay"] = Alert("judge_decay", f"{says}: the prover learns to mislead it.")
        if metrics.get("hack_evidence", 0.0) >= 1.0:
            says = f"The grader accepts {in_percent(metrics['hack_rate'])} of the audited solutions"
            found["hacking"] = Alert("hacking", f"{says} against the truth.")
        for alert in (weights_queue(metrics), verifier_at_chance(metrics)):
            if alert is not None:
                found[alert.name] = alert
        return found


def weights_queue(metrics: Mapping[str, float]) -> Alert | None:
    waited_ms, limit = 1e3 * metrics.get("weights_queue_s", 0.0), WEIGHTS_QUEUE_MS
    says = f"A weight update waited {waited_ms:,.0f} ms before the engine worked on it, above {limit:,.0f} ms."
    return Alert("weights_queue", says) if waited_ms > limit else None


def verifier_at_chance(metrics: Mapping[str, float]) -> Alert | None:
    auc = metrics.get("verifier_auc", math.nan)
    says = f"The verifier cannot tell correct from wrong solutions: its AUC is {auc:.2f}, and 0.5 is chance."
    return Alert("verifier_at_chance", says) if auc <= CHANCE_AUC else None
