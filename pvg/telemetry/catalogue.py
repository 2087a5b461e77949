"""Every metric a run emits: its full name, its unit, what it means, and which direction is the better one.

    METRICS["train_prover/helpful_accuracy"].meaning
    python -m pvg.telemetry.catalogue        # writes docs/metrics.md

The full name is the one that the sinks use; in metrics.jsonl the same value stands under the name after the slash, in
a record of the kind that the part before the slash tells (`KINDS`). Numbered names (gpu0_power_w) stand here once,
as gpu{i}_power_w. How a metric is labelled in a terminal or on a page is in pvg.reporting.figures, not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Better = Literal["higher", "lower", "neither"]
HIGHER: Better = "higher"
LOWER: Better = "lower"
NEITHER: Better = "neither"

PAGE = Path("docs") / "metrics.md"

# Phases, as they stand in full names.
SAMPLE = ("init", "solve", "mint")  # `pvg rollout` leaves a run in its first state, init
VERIFIER = ("train_verifier",)
PROVER = ("train_prover",)
ROUND = ("checkpoint", "round")  # the same numbers: once as a step, once as the row of the round's table

KINDS = {
    "init": "steps of `pvg rollout`",
    "solve": "steps of SOLVE (the decoupled game)",
    "mint": "steps of MINT",
    "train_verifier": "steps and end of TRAIN_VERIFIER",
    "train_prover": "steps of TRAIN_PROVER",
    "checkpoint": "the step of CHECKPOINT",
    "round": "once a round",
    "budget": "every step",
    "busy": "every step",
    "device": "every telemetry.device_every_s",
    "loop": "every telemetry.device_every_s",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """`unit` is one of UNITS."""

    name: str
    unit: str
    meaning: str
    better: Better

    @property
    def where(self) -> str:
        return self.name.partition("/")[0]

    @property
    def short(self) -> str:
        """The name within its record of metrics.jsonl."""
        return self.name.partition("/")[2]


# Unit -> how the page explains it.
UNITS = {
    "share": "0 to 1",
    "score": "the verifier's logit",
    "reward": "what the prover is paid",
    "nats": "natural units of information",
    "s": "seconds",
    "tokens": "",
    "tokens/s": "",
    "pairs/s": "",
    "rollouts": "",
    "pairs": "",
    "versions": "published weights",
    "rows": "",
    "cores": "",
    "bytes": "",
    "W": "watts",
    "count": "",
    "number": "without a unit",
}


def _in(places: Iterable[str], name: str, unit: str, better: Better, meaning: str) -> list[Metric]:
    return [Metric(f"{place}/{name}", unit, meaning, better) for place in places]


def _table() -> dict[str, Metric]:
    found = [*_sampled(), *_played(), *_verifier(), *_prover(), *_rounds(), *_budget(), *_device(), *_loop()]
    table = {metric.name: metric for metric in found}
    if len(table) != len(found):
        raise ValueError("a metric stands in the catalogue twice")
    return table


def _sampled() -> list[Metric]:
    """Of any phase that samples."""
    play, everywhere = (*PROVER, *ROUND), (*SAMPLE, *PROVER, *ROUND)
    return [
        *_in((*SAMPLE, *PROVER), "rollouts", "rollouts", NEITHER, "Rollouts that the other numbers are of."),
        *_in(SAMPLE, "correct", "share", NEITHER, "Correct solutions, of both roles."),
        *_in(everywhere, "helpful_accuracy", "share", HIGHER, "Helpful solutions that are correct."),
        *_in(
            everywhere,
            "sneaky_error_rate",
            "share",
            NEITHER,
            "Sneaky solutions that are wrong and yet well-formed: flaws, what the sneaky role is for.",
        ),
        *_in(everywhere, "malformed", "share", LOWER, "Solutions that are no solution at all, of both roles."),
        *_in(
            everywhere,
            "tests_passed",
            "share",
            HIGHER,
            "Tests that a helpful solution passes, where they are executed.",
        ),
        *_in(everywhere, "sneaky_visible_rate", "share", HIGHER, "Sneaky programs that pass all visible tests."),
        *_in(
            PROVER,
            "similarity",
            "share",
            LOWER,
            "How alike sneaky programs are to others (game.reward.similarity), on average.",
        ),
        *_in(everywhere, "certified_rate", "share", NEITHER, "Sneaky programs whose certificate proves a flaw."),
        *_in(everywhere, "truncated", "share", LOWER, "Rollouts that hit the length limit."),
        *_in((*SAMPLE, *PROVER), "completion_tokens", "tokens", NEITHER, "Mean length of a completion."),
        *_in(
            (*SAMPLE, *PROVER),
            "tokens_per_s",
            "tokens/s",
            HIGHER,
            "Completion tokens per second of sampling.",
        ),
        *_in(everywhere, "challenged", "share", NEITHER, "Rollouts that were asked about a step (game.protocol)."),
        *_in(everywhere, "answer_tokens", "tokens", NEITHER, "Mean length of the answers to these questions."),
        *_in(play, "solver_accuracy", "share", HIGHER, "Solutions that were translated and are right (game.protocol)."),
        *_in(play, "faithful", "share", HIGHER, "Faithful translations that keep the solver's answer, right or wrong."),
        *_in(
            play,
            "led_astray",
            "share",
            NEITHER,
            "Sneaky translations, well-formed, that lead to a wrong answer which is not the solver's.",
        ),
        *_in(play, "fooled_rate", "share", NEITHER, "Flaws that the round's verifier accepts."),
        *_in(play, "accepted_helpful", "share", HIGHER, "Correct helpful solutions that the round's verifier accepts."),
    ]


def _played() -> list[Metric]:
    """Scores, of the phases that have a verifier to play against."""
    places = (*PROVER, *ROUND)
    gap = "Mean score of correct helpful solutions less that of wrong sneaky ones."
    return [
        *_in(places, "score_helpful_correct", "score", HIGHER, "Mean score of correct helpful solutions."),
        *_in(places, "score_helpful_incorrect", "score", LOWER, "Mean score of wrong helpful solutions."),
        *_in(places, "score_sneaky_correct", "score", NEITHER, "Mean score of correct sneaky solutions."),
        *_in(places, "score_sneaky_incorrect", "score", LOWER, "Mean score of wrong, well-formed sneaky solutions."),
        *_in(places, "score_gap", "score", HIGHER, gap),
    ]


def _verifier() -> list[Metric]:
    return [
        *_in(VERIFIER, "loss", "number", LOWER, "The verifier's loss, mean over the step's pairs, penalty included."),
        *_in(VERIFIER, "pair_accuracy", "share", HIGHER, "Pairs whose correct solution scores higher; a tie is half."),
        *_in(VERIFIER, "score_mean", "score", NEITHER, "Mean score of the step's solutions."),
        *_in(
            VERIFIER, "score_gap", "score", HIGHER, "Mean over pairs of the correct solution's score less the other's."
        ),
        *_in(VERIFIER, "environments", "count", NEITHER, "Sources that the step's pairs come from."),
        *_in(VERIFIER, "environment_worst", "number", LOWER, "The highest mean loss over the pairs of one source."),
        *_in(VERIFIER, "environment_spread", "number", LOWER, "Standard deviation of the sources' mean losses."),
        *_in(
            VERIFIER,
            "environment_penalty",
            "number",
            LOWER,
            "What verifier.robust_strength multiplies: IRM's mean squared slope, else the variance between sources.",
        ),
        *_in(VERIFIER, "pairs", "pairs", NEITHER, "Pairs of the step."),
        *_in(VERIFIER, "pairs_per_s", "pairs/s", HIGHER, "Pairs trained on in a second."),
        *_in(VERIFIER, "threshold", "score", NEITHER, "The score from which on a solution is accepted, as calibrated."),
        *_in(VERIFIER, "held_out", "rollouts", NEITHER, "Solutions that the calibration was made on."),
        *_in(VERIFIER, "pairs_available", "pairs", NEITHER, "Pairs of the mint that the stream draws from."),
        *_in(
            VERIFIER,
            "verifier_auc",
            "share",
            HIGHER,
            "P(a correct solution scores above a wrong one) on held-out problems of the mint; a tie is half.",
        ),
        *_in(VERIFIER, "member", "count", NEITHER, "The ensemble's member that the step trained, from 0."),
        *_in(
            VERIFIER,
            "disagreement",
            "score",
            NEITHER,
            "Standard deviation between the members' scores of a held-out solution, mean over the solutions.",
        ),
        *_in(VERIFIER, "member_auc_best", "share", HIGHER, "The highest AUC of a single member of the ensemble."),
        *_in(VERIFIER, "member_auc_worst", "share", HIGHER, "The lowest AUC of a single member of the ensemble."),
        *_trained(VERIFIER),
    ]


def _trained(places: Iterable[str]) -> list[Metric]:
    """Of both trainers."""
    places = tuple(places)
    return [
        *_in(places, "grad_norm", "number", NEITHER, "Norm of the gradient, before it is clipped."),
        *_in(places, "learning_rate", "number", NEITHER, "The learning rate of the step."),
        *_in(places, "skipped", "count", LOWER, "1 where the batch held nothing to learn from and moved no weight."),
        *_in(places, "padding", "share", LOWER, "Positions of the step's micro-batches that hold no token."),
        *_in(places, "micro_batches", "count", LOWER, "Micro-batches whose gradients the step added up."),
        *_in(places, "trainer_idle", "share", LOWER, "The step's wall time in which the trainer did not work."),
    ]


def _prover() -> list[Metric]:
    latency = "of a rollout, from the request to the end of the batch it was decoded in."
    return [
        *_in(PROVER, "loss", "number", NEITHER, "The policy loss, summed over the step's micro-batches."),
        *_in(PROVER, "entropy", "nats", NEITHER, "-log pi per completion token: an estimate of the policy's entropy."),
        *_in(
            PROVER,
            "entropy_exact",
            "nats",
            NEITHER,
            "Entropy of the policy's distribution, mean over completion tokens (training.entropy is not 'none').",
        ),
        *_in(
            PROVER,
            "entropy_coefficient",
            "number",
            NEITHER,
            "The entropy bonus's coefficient (training.entropy = 'adaptive'); 0 while the entropy is above its target.",
        ),
        *_in(PROVER, "kl", "nats", NEITHER, "KL to the base prover per completion token (the k3 estimate)."),
        *_in(
            PROVER,
            "kl_coefficient",
            "number",
            NEITHER,
            "The KL penalty's coefficient in the step (training.kl = 'adaptive').",
        ),
        *_in(
            PROVER, "ratio_mean", "number", NEITHER, "Mean of pi / pi_sampled over completion tokens, before any clip."
        ),
        *_in(PROVER, "ratio_max", "number", NEITHER, "The largest of these ratios."),
        *_in(PROVER, "clipped", "share", NEITHER, "Completion tokens whose gradient the clip changed."),
        *_in(
            PROVER,
            "micro_batch_budget",
            "tokens",
            HIGHER,
            "Most tokens of a micro-batch, padding included, by training.micro_batch_memory_mb.",
        ),
        *_in(
            PROVER,
            "bytes_per_token",
            "bytes",
            LOWER,
            "What forward and backward took per token of that kind, beside weights and gradients, as measured.",
        ),
        *_in(PROVER, "reward_mean", "reward", NEITHER, "Mean reward over both roles."),
        *_in(
            PROVER,
            "zero_signal",
            "share",
            LOWER,
            "Groups whose rewards are all the same (spo, rae: rollouts of no advantage): no gradient.",
        ),
        *_in(
            PROVER,
            "refills",
            "count",
            LOWER,
            "Rounds of further groups that filled the batch up (training.dynamic_sampling).",
        ),
        *_in(
            PROVER,
            "groups_sampled",
            "count",
            LOWER,
            "Groups sampled for the batch, all rounds together; all metrics but the trainer's are of all of them.",
        ),
        *_in(PROVER, "groups_surplus", "count", LOWER, "Of these, those that had a signal and were not needed."),
        *_in(
            PROVER,
            "groups_missing",
            "count",
            LOWER,
            "Groups without a signal that the batch holds all the same: rounds or problems were used up.",
        ),
        *_in(
            PROVER,
            "success_tracked",
            "share",
            NEITHER,
            "Success rate that training.curriculum had tracked for the batch's problems in their roles, before it.",
        ),
        *_in(PROVER, "success_error", "share", LOWER, "Mean distance between these rates and what came of the batch."),
        *_in(PROVER, "success_unseen", "share", NEITHER, "Rollouts of problems not yet seen in their role."),
        *_in(
            PROVER, "success_hard", "share", NEITHER, "Rollouts of problems below the first training.curriculum.edges."
        ),
        *_in(PROVER, "success_easy", "share", NEITHER, "Rollouts of problems at or above the last of them."),
        *_in(PROVER, "groups_cut", "count", LOWER, "Groups cut short at rollout.group_deadline_s."),
        *_in(
            PROVER,
            "rollouts_cancelled",
            "rollouts",
            LOWER,
            "Rollouts that this cancelled; with rollout.partial, those given up because they grew too old.",
        ),
        *_in(
            PROVER,
            "tokens_lost",
            "tokens",
            LOWER,
            "Tokens sampled for them, as far as the engine tells: torch does with rollout.partial only.",
        ),
        *_in(
            PROVER,
            "groups_carried",
            "count",
            NEITHER,
            "Groups (spo, rae: rollouts) that go on in the next batch (rollout.partial).",
        ),
        *_in(
            PROVER,
            "tokens_continued",
            "tokens",
            NEITHER,
            "Tokens of earlier batches with which unfinished rollouts went on in this one (rollout.partial).",
        ),
        *_in(PROVER, "value_mean", "reward", NEITHER, "Mean of the values that spo or rae tracks, before the batch."),
        *_in(PROVER, "value_error", "reward", LOWER, "Mean distance between these values and the rewards."),
        *_updated(),
        *_in(PROVER, "prompt_tokens_per_s", "tokens/s", HIGHER, "Prompt tokens of the rollouts sampled in a second."),
        *_in(PROVER, "latency_p50_s", "s", LOWER, f"Median latency {latency}"),
        *_in(PROVER, "latency_p90_s", "s", LOWER, f"90th percentile of the latency {latency}"),
        *_in(PROVER, "latency_p99_s", "s", LOWER, f"99th percentile of the latency {latency}"),
        *_in(PROVER, "engine_batch", "rows", HIGHER, "Unfinished rows of a decoding step, mean over the steps."),
        *_in(PROVER, "prefix_share", "share", HIGHER, "Prompt tokens whose computation was shared with another row."),
        *_in(
            PROVER,
            "repeated",
            "share",
            NEITHER,
            "Rollouts that repeat the prompt and the tokens of another one of the batch, so that the trainer does not "
            "compute them again (training.shared_prompts). It rises as the policy's entropy falls.",
        ),
        *_in(PROVER, "staleness", "versions", LOWER, "Mean versions by which the batch's rollouts are behind."),
        *_in(PROVER, "staleness_max", "versions", LOWER, "Versions by which the oldest rollout is behind."),
        *_in(PROVER, "staleness_in_flight", "versions", LOWER, "Of the mean, what passed before a rollout had come."),
        *_in(
            PROVER, "staleness_in_queue", "versions", LOWER, "Of the mean, what passed while it waited for the trainer."
        ),
        *_in(PROVER, "groups_in_flight", "count", NEITHER, "Groups being sampled ahead as the batch was taken."),
        *_in(PROVER, "groups_waiting", "count", NEITHER, "Groups that were there and not taken: next time."),
        *_in(
            PROVER,
            "dropped_stale",
            "rollouts",
            LOWER,
            "Rollouts over rollout.max_staleness since the batch before: the three below. They are the long ones.",
        ),
        *_in(PROVER, "stale_cancelled", "rollouts", LOWER, "Those of groups that were still in flight."),
        *_in(PROVER, "stale_on_arrival", "rollouts", LOWER, "Those that were too old when they came."),
        *_in(PROVER, "stale_waiting", "rollouts", LOWER, "Those that grew too old while they waited."),
        *_in(PROVER, "stale_tokens", "tokens", LOWER, "Completion tokens of those that had come."),
        *_in(
            PROVER,
            "start_ratio_mean",
            "number",
            NEITHER,
            "Mean of pi at batch start / pi_sampled (training.importance), as it is.",
        ),
        *_in(PROVER, "start_ratio_max", "number", NEITHER, "The largest of these ratios."),
        *_in(
            PROVER,
            "start_outside",
            "share",
            LOWER,
            "Completion tokens whose ratio is truncated or masked (training.importance.high, low).",
        ),
        *_in(
            PROVER, "weights_wall_s", "s", LOWER, "The weight update after the step: the slowest engine's answer to it."
        ),
        *_in(PROVER, "weights_queue_s", "s", LOWER, "The part of it in which the engine did not work on it."),
        *_in(PROVER, "canary_gap", "nats", LOWER, "Largest gap between a server's log-probs and the trainer's."),
        *_in(PROVER, "cache_hit_rate", "share", HIGHER, "Scores of the batch that needed no computation."),
        *_in(PROVER, "cache_hits", "count", HIGHER, "Scores found in the cache since the phase began."),
        *_in(PROVER, "cache_misses", "count", LOWER, "Scores not found in the cache since the phase began."),
        *_in(
            PROVER, "cache_evictions", "count", LOWER, "Scores the cache has given up for room since the phase began."
        ),
        *_trained(PROVER),
    ]


def _updated() -> list[Metric]:
    """Of the steps that end in an update of the verifier (game.schedule = "simultaneous")."""
    return [
        *_in(PROVER, "verifier_loss", "number", LOWER, "The verifier's loss in the last step of its update."),
        *_in(PROVER, "verifier_pair_accuracy", "share", HIGHER, "Pairs of that step that it puts into order."),
        *_in(PROVER, "fresh_correct", "share", NEITHER, "Correct ones among the solutions sampled for the update."),
        *_in(
            PROVER,
            "verifier_auc",
            "share",
            HIGHER,
            "P(a correct solution scores above a wrong one) after the update, on held-out problems.",
        ),
        *_in(
            PROVER, "threshold", "score", NEITHER, "The score from which on a solution is accepted, after the update."
        ),
    ]


def _rounds() -> list[Metric]:
    auc = "P(a correct solution scores above a wrong one)"
    return [
        *_in(ROUND, "verifier_auc", "share", HIGHER, f"{auc} on the samples of the round's own prover."),
        *_in(ROUND, "verifier_auc_base", "share", HIGHER, f"{auc} on the base prover's samples."),
        *_in(
            ROUND,
            "verifier_auc_previous",
            "share",
            HIGHER,
            f"{auc}, correct helpful ones of this round's prover against flaws of the previous round's.",
        ),
        *_in(ROUND, "threshold", "score", NEITHER, "The score from which on a solution is accepted."),
        *_in(ROUND, "base_helpful_accuracy", "share", NEITHER, "helpful_accuracy of the base prover."),
        *_in(ROUND, "base_sneaky_error_rate", "share", NEITHER, "sneaky_error_rate of the base prover."),
        *_in(ROUND, "fooled_rate_base", "share", LOWER, "Flaws of the base prover that this verifier accepts."),
        *_in(
            ROUND,
            "fooled_rate_previous",
            "share",
            LOWER,
            "Flaws of the previous round's prover that this verifier accepts.",
        ),
    ]


# Part of a step -> what is done in it.
PARTS = {
    "open_models": "Opening models, the task and the run.",
    "rollout": "Handing requests to the engine, and waiting for it.",
    "prefill": "Prompts through the model.",
    "decode": "Sampling completions token by token.",
    "grade": "Checking solutions against the truth.",
    "score": "Rendering solutions for the verifier, and looking scores up.",
    "score_queue": "Solutions waiting for the verifier to be free.",
    "score_service": "The verifier computing scores.",
    "credit": "Rewards and advantages.",
    "reference": "Log-probs of the base prover.",
    "recompute": 'Log-probs of the learner, for rollout.logprobs = "recomputed".',
    "draw_pairs": "Drawing the step's preference pairs.",
    "pack": "Putting sequences into micro-batches.",
    "survey": "The pass without gradient that finds how much each source of pairs shall weigh.",
    "forward_backward": "The trainer's forward and backward passes.",
    "optimizer": "Clipping the gradient and moving the weights.",
    "sync": "Publishing weights to the engine.",
    "checkpoint": "Committing: shards, checkpoint, state.",
    "evaluate": "The round's metrics, and the verifier's calibration.",
    "record": "Writing metrics and spans.",
    "wait_for_rollouts": "The trainer waiting for rollouts, or to compute, beyond what other parts account for.",
    "wait_for_pairs": "The verifier's trainer waiting for pairs, beyond what other parts account for.",
    "wait_for_weights": "Waiting for new weights to arrive at the engine.",
    "unaccounted": "Outside of all parts.",
}


def _budget() -> list[Metric]:
    return [metric for part, what in PARTS.items() for metric in _in(("budget", "busy"), part, "s", LOWER, what)]


def _device() -> list[Metric]:
    place = ("device",)
    return [
        *_in(place, "cpu", "share", NEITHER, "Use of all cores of the machine since the sample before."),
        *_in(place, "process_cpu", "cores", NEITHER, "Cores used by this process and its children meanwhile."),
        *_in(
            place,
            "core_wait",
            "share",
            LOWER,
            "Share of the time in which threads of this process were ready to run but waited for a core (Linux).",
        ),
        *_in(place, "rss_bytes", "bytes", LOWER, "Memory resident for this process and its children."),
        *_in(place, "memory_used_bytes", "bytes", LOWER, "Memory of the machine that is not available."),
        *_in(place, "memory_total_bytes", "bytes", NEITHER, "Memory of the machine."),
        *_in(place, "gpu{i}_utilisation", "share", HIGHER, "Time in which any kernel ran on GPU i (NVML)."),
        *_in(
            place,
            "gpu{i}_memory_activity",
            "share",
            NEITHER,
            "Time in which GPU i read or wrote its memory at all (NVML); not the share of the bandwidth.",
        ),
        *_in(
            place,
            "gpu{i}_sm_activity",
            "share",
            HIGHER,
            "Streaming multiprocessors of GPU i with at least one warp since the sample before (GPM, from Hopper on).",
        ),
        *_in(
            place,
            "gpu{i}_sm_occupancy",
            "share",
            HIGHER,
            "Warps on the streaming multiprocessors of GPU i, as a share of the maximum (GPM).",
        ),
        *_in(
            place,
            "gpu{i}_memory_bandwidth",
            "share",
            NEITHER,
            "Used memory bandwidth of GPU i, as a share of the maximum (GPM).",
        ),
        *_in(place, "gpu{i}_memory_bytes", "bytes", NEITHER, "Memory in use on GPU i, by all processes."),
        *_in(place, "gpu{i}_memory_total_bytes", "bytes", NEITHER, "Memory of GPU i."),
        *_in(place, "gpu{i}_power_w", "W", NEITHER, "Power drawn by GPU i."),
    ]


def _loop() -> list[Metric]:
    place, lag = ("loop",), "lag of the event loop in the window"
    return [
        *_in(place, "lag_min_s", "s", LOWER, f"Smallest {lag}."),
        *_in(place, "lag_mean_s", "s", LOWER, f"Mean {lag}."),
        *_in(place, "lag_p50_s", "s", LOWER, f"Median {lag}."),
        *_in(place, "lag_p90_s", "s", LOWER, f"90th percentile of the {lag}."),
        *_in(place, "lag_p99_s", "s", LOWER, f"99th percentile of the {lag}."),
        *_in(place, "lag_max_s", "s", LOWER, f"Largest {lag}."),
        *_in(place, "samples", "count", NEITHER, "Ticks of telemetry.loop_lag_hz that came due in the window."),
    ]


METRICS: dict[str, Metric] = _table()


def metric(name: str) -> Metric | None:
    """The catalogue's entry for a full name; gpu0_power_w is found as gpu{i}_power_w."""
    return METRICS.get(re.sub(r"^device/gpu\d+_", "device/gpu{i}_", name))


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """Those full names that the catalogue does not list, sorted."""
    return sorted({name for name in names if metric(name) is None})


# --- the page ---------------------------------------------------------------------------------------------------------

INTRODUCTION = """# Metrics

<!-- Written by `python -m pvg.telemetry.catalogue` from pvg/telemetry/catalogue.py; a test holds the two equal. -->

This page is for people who read or plot the metrics of a run. It lists every metric that a run emits.

TensorBoard, Weights & Biases and trackio show the full name, `place/name`. `metrics.jsonl` has the same value under
`name`, in a record whose `kind` (and `phase`, for steps) gives the place. A value that does not exist (a share of
nothing) is `null` there, and the sinks leave it out. The last column has the name on the Prometheus endpoint
(`telemetry.metrics_port`), with the unit as its suffix and the phase, the round or the GPU as labels. The endpoint
also serves `pvg_step`, `pvg_round` and the counter `pvg_alerts_total` with the label `kind` ([runbook.md](runbook.md)
lists the kinds).

With `training.minibatches` above 1, several steps learn from one batch. Metrics of the batch (its rollouts, rewards
and scores, and how it was sampled) are then only in the record of the first of these steps. Metrics of a weight
update are only in the record of the last.

"Better" is the direction in which a healthy experiment moves the metric, other things being equal; a dash where there
is none, or where two players pull in opposite directions.
"""


def page() -> str:
    """docs/metrics.md."""
    from pvg.telemetry.prometheus import exposed_name

    sections: list[tuple[str, tuple[str, ...], str]] = [
        ("Sampling", SAMPLE, "`pvg rollout` (init), the solver and the mint: before any verifier."),
        ("Training the verifier", VERIFIER, "The calibration's figures come once, at the end of the phase."),
        ("Training the prover", PROVER, ""),
        ("Rounds", ROUND, "Fresh samples of both roles on test problems, at the end of each round."),
        (
            "Time",
            ("budget", "busy"),
            "Seconds by part. `budget` is exposed time, which the step waited for: the parts sum to its wall time. "
            "`busy` is work on all tracks, overlapped work included. A part that took no time is left out.",
        ),
        ("Machine", ("device",), ""),
        ("Event loop", ("loop",), "A tick is late by its lag; ticks that came due during a stall each count as late."),
    ]
    text = [INTRODUCTION, "| unit | |", "|---|---|", *(f"| {unit} | {what} |" for unit, what in UNITS.items() if what)]
    for title, places, about in sections:
        emitted = "; ".join(f"`{place}/` {KINDS[place]}" for place in places)
        text += ["", f"## {title}", "", f"{about} Emitted: {emitted}.".strip(), ""]
        text += ["| name | unit | better | meaning | Prometheus |", "|---|---|---|---|---|"]
        for group in _same([metric for metric in METRICS.values() if metric.where in places]):
            first = group[0]
            names = f"`{first.name}`" + "".join(f", `{metric.where}/…`" for metric in group[1:])
            exposed = ", ".join(dict.fromkeys(f"`{exposed_name(metric.name)}`" for metric in group))
            better = "–" if first.better == NEITHER else first.better
            text.append(f"| {names} | {first.unit} | {better} | {first.meaning} | {exposed} |")
    return "\n".join(text) + "\n"


def _same(metrics: Iterable[Metric]) -> list[list[Metric]]:
    """One row for what is the same thing in several places."""
    rows: dict[tuple[str, str, str, str], list[Metric]] = {}
    for entry in metrics:
        rows.setdefault((entry.short, entry.unit, entry.meaning, entry.better), []).append(entry)
    return list(rows.values())


def main() -> None:
    root = Path(__file__).parent.parent.parent
    (root / PAGE).write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(METRICS)} metrics")


if __name__ == "__main__":
    main()
