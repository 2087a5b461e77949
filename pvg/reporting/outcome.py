"""What a game has shown, in sentences: the numbers of the table of rounds that a reader looks for first."""

from __future__ import annotations

from collections.abc import Mapping

from pvg.reporting.formats import metric_text
from pvg.reporting.run_summary import base_metrics


def outcome(rounds: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Sentences on the roles and the verifier, from the metrics by round. A sentence whose metrics were not measured is
    left out; self-play has none."""
    if not rounds:
        return []
    found = [
        _before_and_after(rounds, "helpful_accuracy", "The helpful role solved {} of new problems"),
        _before_and_after(rounds, "sneaky_error_rate", "The sneaky role was wrong in {} of its solutions"),
        _own_flaws(rounds),
        _previous_flaws(rounds),
    ]
    return [sentence for sentence in found if sentence]


def _before_and_after(rounds: Mapping[int, Mapping[str, float]], metric: str, says: str) -> str:
    number, base = max(rounds), base_metrics(rounds)
    if metric not in rounds[number]:
        return ""
    after = metric_text(metric, rounds[number][metric])
    if metric not in base:
        return f"{says.format(after)} after round {number}."
    return f"{says.format(metric_text(metric, base[metric]))} before the game, and {after} after round {number}."


def _own_flaws(rounds: Mapping[int, Mapping[str, float]]) -> str:
    metric, last = "fooled_rate", max(rounds)
    shares = {number: rounds[number][metric] for number in sorted(rounds) if metric in rounds[number]}
    if last not in shares:
        return ""
    says = f"The verifier of round {last} accepts {metric_text(metric, shares[last])} of these wrong solutions"
    worst = max(shares, key=lambda number: shares[number])
    if worst != last:
        return f"{says}; that of round {worst}, the worst, accepted {metric_text(metric, shares[worst])}."
    return f"{says}." if len(shares) == 1 else f"{says}, the most of all rounds."


def _previous_flaws(rounds: Mapping[int, Mapping[str, float]]) -> str:
    metric = "fooled_rate_previous"
    shares = [metrics[metric] for metrics in rounds.values() if metric in metrics]
    if not shares:
        return ""
    most = metric_text(metric, max(shares))
    return f"Of the previous round's wrong solutions, each new verifier accepted at most {most}."
