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
        _before_and_after(rounds, "helpful_accuracy", "of the helpful role's solutions were correct"),
        _before_and_after(rounds, "sneaky_error_rate", "of the sneaky role's solutions were wrong (flaws)"),
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
        return f"{after} {says} after round {number}."
    return f"{metric_text(metric, base[metric])} {says} before the game, and {after} after round {number}."


def _own_flaws(rounds: Mapping[int, Mapping[str, float]]) -> str:
    metric, last = "fooled_rate", max(rounds)
    shares = {number: rounds[number][metric] for number in sorted(rounds) if metric in rounds[number]}
    if last not in shares:
        return ""
    says = f"The verifier of round {last} accepted {metric_text(metric, shares[last])} of its round's flaws."
    worst = max(shares, key=lambda number: shares[number])
    most = metric_text(metric, shares[worst])
    if most == metric_text(metric, shares[last]):
        return says
    return f"{says} The highest share was {most}, in round {worst}."


def _previous_flaws(rounds: Mapping[int, Mapping[str, float]]) -> str:
    metric = "fooled_rate_previous"
    shares = [metrics[metric] for metrics in rounds.values() if metric in metrics]
    if not shares:
        return ""
    return f"Each new verifier accepted at most {metric_text(metric, max(shares))} of the previous round's flaws."
