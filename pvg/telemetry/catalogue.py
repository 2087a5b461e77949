"""Every metric that a run emits: its full name, unit, meaning, and better direction.

    METRICS["train_prover/helpful_accuracy"].meaning

Sinks use the full name, `place/name`. In metrics.jsonl the same value is under `name`, in a record whose kind the
place determines (`KINDS`). Numbered names (gpu0_power_w) are listed once, as gpu{i}_power_w. Labels for terminals and
pages are in pvg.reporting.formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neither"]
HIGHER: Better = "higher"
LOWER: Better = "lower"
NEITHER: Better = "neither"

# Phases, as they appear in full names.
SAMPLE = ("init", "solve", "mint")  # `pvg rollout` leaves a run in its first phase, init
WARMUP = ("warmup",)
VERIFIER = ("train_verifier",)
PROVER = ("train_prover",)
ROUND = ("checkpoint", "round")  # the same values: once as a step, once as a row of the round's table

KINDS = {
    "init": "steps of `pvg rollout`",
    "warmup": "steps and end of WARMUP",
    "solve": "steps of SOLVE (the decoupled game)",
    "mint": "steps of MINT",
    "train_verifier": "steps and end of TRAIN_VERIFIER",
    "train_prover": "steps of TRAIN_PROVER",
    "checkpoint": "the step of CHECKPOINT",
    "round": "once per round",
    "budget": "every step",
    "busy": "every step",
    "device": "every 5 s",
    "loop": "every 5 s",
    "workers": "every 5 s, by runs with workers",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric; `unit` is one of UNITS."""

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


# Unit -> its explanation on the page.
UNITS = {
    "share": "0 to 1",
    "score": "the verifier's logit",
    "reward": "what the prover receives",
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
    found = [
        *_sampled(),
        *_played(),
        *_warmup(),
        *_verifier(),
        *_prover(),
        *_rounds(),
        *_self_play(),
        *_budget(),
        *_device(),
        *_loop(),
        *_workers(),
    ]
    table = {metric.name: metric for metric in found}
    if len(table) != len(found):
        raise ValueError("the catalogue lists a metric twice")
    return table


def _sampled() -> list[Metric]:
    """Metrics of every phase that samples."""
    play, everywhere = (*PROVER, *ROUND), (*SAMPLE, *PROVER, *ROUND)
    return [
        *_in((*SAMPLE, *PROVER), "rollouts", "rollouts", NEITHER, "Rollouts that the other metrics describe."),
        *_in(SAMPLE, "correct", "share", NEITHER, "Correct solutions, of both roles."),
        *_in(everywhere, "helpful_accuracy", "share", HIGHER, "Helpful solutions that are correct."),
        *_in(
            everywhere,
            "sneaky_error_rate",
            "share",
            NEITHER,
            "Sneaky solutions that are wrong but well-formed (flaws): the aim of the sneaky role.",
        ),
        *_in(everywhere, "malformed", "share", LOWER, "Completions without a readable solution, of both roles."),
        *_in(
            everywhere,
            "tests_passed",
            "share",
            HIGHER,
            "Tests that a helpful solution passes, if tests are executed.",
        ),
        *_in(everywhere, "sneaky_visible_rate", "share", HIGHER, "Sneaky programs that pass all visible tests."),
        *_in(
            PROVER,
            "similarity",
            "share",
            LOWER,
            "Mean similarity of sneaky programs to others (game.reward.similarity).",
        ),
        *_in(everywhere, "certified_rate", "share", NEITHER, "Sneaky programs whose certificate proves a flaw."),
        *_in(everywhere, "truncated", "share", LOWER, "Rollouts that reached the length limit."),
        *_in((*SAMPLE, *PROVER), "completion_tokens", "tokens", NEITHER, "Mean length of a completion."),
        *_in((*SAMPLE, *PROVER), "tokens_per_s", "tokens/s", HIGHER, "Completion tokens per second of sampling."),
        *_in(everywhere, "challenged", "share", NEITHER, "Rollouts with a question about a step (game.protocol)."),
        *_in(everywhere, "answer_tokens", "tokens", NEITHER, "Mean length of the answers to questions about a step."),
        *_in(play, "solver_accuracy", "share", HIGHER, "Translated solutions that are correct (game.protocol)."),
        *_in(play, "faithful", "share", HIGHER, "Faithful translations that keep the solver's answer, correct or not."),
        *_in(
            play,
            "led_astray",
            "share",
            NEITHER,
            "Well-formed sneaky translations with a wrong answer that differs from the solver's.",
        ),
        *_in(play, "fooled_rate", "share", NEITHER, "Flaws that the round's verifier accepts."),
        *_in(play, "accepted_helpful", "share", HIGHER, "Correct helpful solutions that the round's verifier accepts."),
    ]


def _played() -> list[Metric]:
    """Scores, in the phases that have a verifier."""
    places = (*PROVER, *ROUND)
    gap = "Mean score of correct helpful solutions minus that of wrong sneaky ones."
    return [
        *_in(places, "score_helpful_correct", "score", HIGHER, "Mean score of correct helpful solutions."),
        *_in(places, "score_helpful_incorrect", "score", LOWER, "Mean score of wrong helpful solutions."),
        *_in(places, "score_sneaky_correct", "score", NEITHER, "Mean score of correct sneaky solutions."),
        *_in(places, "score_sneaky_incorrect", "score", LOWER, "Mean score of wrong, well-formed sneaky solutions."),
        *_in(places, "score_gap", "score", HIGHER, gap),
    ]


def _self_play() -> list[Metric]:
    """Metrics of `task.kind = "play"`."""
    found = [
        *_in(PROVER, "decisions_trained", "rollouts", NEITHER, "Decisions of the batch with a reward (task.groups)."),
        *_in(PROVER, "legal", "share", HIGHER, "Legal decisions of the policy in self-play."),
        *_in(PROVER, "phases", "count", NEITHER, "Phases of a game after its fork, mean over the games."),
        *_in(PROVER, "cached_starts", "share", NEITHER, "Games that began at a cached state (task.cache_share)."),
    ]
    for who, prefix in (("policy", ""), ("base prover", "base_")):
        for reference in ("random", "greedy", "base")[: 2 if prefix else 3]:
            against = f"in matches against the reference {reference!r}"
            for bound, part in (("", "mean"), ("low_", "lower bound"), ("high_", "upper bound")):
                points, gain = f"{prefix}points_{bound}{reference}", f"{prefix}gain_{bound}{reference}"
                found += _in(ROUND, points, "share", HIGHER, f"Points of the {who} {against}: {part}.")
                found += _in(ROUND, gain, "reward", HIGHER, f"Change in value of the {who}'s seat {against}: {part}.")
            meaning = f"Difference in Elo that the {who}'s points mean, {against}."
            found += _in(ROUND, f"{prefix}elo_{reference}", "number", HIGHER, meaning)
    return found


def _warmup() -> list[Metric]:
    return [
        *_in(WARMUP, "loss", "nats", LOWER, "The loss of the step's batch, mean per token of the solutions."),
        *_in(WARMUP, "loss_before", "nats", LOWER, "The loss of demonstrations before the first step."),
        *_in(WARMUP, "loss_after", "nats", LOWER, "The loss of the same demonstrations after the last step."),
        *_in(WARMUP, "held_out_loss_before", "nats", LOWER, "As loss_before, for demonstrations that are held out."),
        *_in(WARMUP, "held_out_loss_after", "nats", LOWER, "As loss_after, for demonstrations that are held out."),
        *_in(WARMUP, "demonstrations", "count", NEITHER, "Demonstrations to train on."),
        *_in(WARMUP, "held_out", "count", NEITHER, "Demonstrations that are held out."),
        *_in(WARMUP, "tokens", "tokens", NEITHER, "Tokens of the step's solutions."),
        *_trained(WARMUP),
    ]


def _verifier() -> list[Metric]:
    return [
        *_in(VERIFIER, "loss", "number", LOWER, "The verifier's loss with its penalty, mean over the step's pairs."),
        *_in(
            VERIFIER, "pair_accuracy", "share", HIGHER, "Pairs whose correct solution scores higher; ties count half."
        ),
        *_in(VERIFIER, "score_mean", "score", NEITHER, "Mean score of the step's solutions."),
        *_in(
            VERIFIER, "score_gap", "score", HIGHER, "Score of the correct solution minus the other's, mean over pairs."
        ),
        *_in(VERIFIER, "environments", "count", NEITHER, "Sources of the step's pairs."),
        *_in(VERIFIER, "environment_worst", "number", LOWER, "The highest mean loss of a source's pairs."),
        *_in(VERIFIER, "environment_spread", "number", LOWER, "Standard deviation of the sources' mean losses."),
        *_in(
            VERIFIER,
            "environment_penalty",
            "number",
            LOWER,
            "The penalty before verifier.robust.strength: IRM's mean squared slope, or the variance between sources.",
        ),
        *_in(VERIFIER, "pairs", "pairs", NEITHER, "Pairs of the step."),
        *_in(VERIFIER, "pairs_per_s", "pairs/s", HIGHER, "Pairs trained on per second."),
        *_in(VERIFIER, "threshold", "score", NEITHER, "The calibrated score from which a solution is accepted."),
        *_in(VERIFIER, "held_out", "rollouts", NEITHER, "Solutions used for the calibration."),
        *_in(VERIFIER, "pairs_available", "pairs", NEITHER, "Pairs of the mint that training draws from."),
        *_in(
            VERIFIER,
            "verifier_auc",
            "share",
            HIGHER,
            "P(a correct solution scores above a wrong one) on held-out problems of the mint; ties count half.",
        ),
        *_in(VERIFIER, "member", "count", NEITHER, "The ensemble member that the step trained, from 0."),
        *_in(
            VERIFIER,
            "disagreement",
            "score",
            NEITHER,
            "Standard deviation of the members' scores of a held-out solution, mean over the solutions.",
        ),
        *_in(VERIFIER, "member_auc_best", "share", HIGHER, "The highest AUC of a single member of the ensemble."),
        *_in(VERIFIER, "member_auc_worst", "share", HIGHER, "The lowest AUC of a single member of the ensemble."),
        *_trained(VERIFIER),
    ]


def _trained(places: Iterable[str]) -> list[Metric]:
    """Metrics of all trainers."""
    places = tuple(places)
    return [
        *_in(places, "grad_norm", "number", NEITHER, "Norm of the gradient before clipping."),
        *_in(places, "learning_rate", "number", NEITHER, "The learning rate of the step."),
        *_in(places, "skipped", "count", LOWER, "1 if the batch had no gradient and the weights did not change."),
        *_in(places, "padding", "share", LOWER, "Positions of the step's micro-batches that are padding."),
        *_in(places, "micro_batches", "count", LOWER, "Micro-batches of the step."),
        *_in(places, "trainer_idle", "share", LOWER, "Wall time of the step in which the trainer did not work."),
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
            "Coefficient of the entropy bonus (training.entropy = 'adaptive'); 0 above the target.",
        ),
        *_in(PROVER, "kl", "nats", NEITHER, "KL to the base prover per completion token (the k3 estimate)."),
        *_in(
            PROVER,
            "kl_coefficient",
            "number",
            NEITHER,
            "The coefficient of the KL penalty (training.kl = 'adaptive').",
        ),
        *_in(
            PROVER, "ratio_mean", "number", NEITHER, "Mean of pi / pi_sampled over completion tokens, before clipping."
        ),
        *_in(PROVER, "ratio_max", "number", NEITHER, "The largest pi / pi_sampled, before clipping."),
        *_in(PROVER, "clipped", "share", NEITHER, "Completion tokens whose gradient was changed by clipping."),
        *_in(
            PROVER,
            "micro_batch_budget",
            "tokens",
            HIGHER,
            "Maximum tokens per micro-batch, padding included, set by training.micro_batch_memory_mb.",
        ),
        *_in(
            PROVER,
            "bytes_per_token",
            "bytes",
            LOWER,
            "Measured memory of forward and backward per such token, without weights and gradients.",
        ),
        *_in(PROVER, "reward_mean", "reward", NEITHER, "Mean reward over both roles."),
        *_in(
            PROVER,
            "zero_signal",
            "share",
            LOWER,
            "Groups with equal rewards (spo, rae: rollouts with zero advantage), which give no gradient.",
        ),
        *_in(
            PROVER,
            "refills",
            "count",
            LOWER,
            "Additional sampling rounds that filled the batch (training.dynamic_sampling).",
        ),
        *_in(
            PROVER,
            "groups_sampled",
            "count",
            LOWER,
            "Groups sampled for the batch in all rounds. All metrics except the trainer's cover all of them.",
        ),
        *_in(PROVER, "groups_surplus", "count", LOWER, "Sampled groups with a signal that the batch did not need."),
        *_in(
            PROVER,
            "groups_missing",
            "count",
            LOWER,
            "Groups without a signal in the batch, because no rounds or problems were left.",
        ),
        *_in(
            PROVER,
            "success_tracked",
            "share",
            NEITHER,
            "Tracked success rate of the batch's problems in their roles, before the batch (training.curriculum).",
        ),
        *_in(PROVER, "success_error", "share", LOWER, "Mean distance of the tracked rates from the batch."),
        *_in(PROVER, "success_unseen", "share", NEITHER, "Rollouts of problems that are new in their role."),
        *_in(
            PROVER, "success_hard", "share", NEITHER, "Rollouts of problems below the first training.curriculum.edges."
        ),
        *_in(PROVER, "success_easy", "share", NEITHER, "Rollouts of problems at or above the last edge."),
        *_in(PROVER, "groups_cut", "count", LOWER, "Groups cut short at rollout.deadline."),
        *_in(
            PROVER,
            "rollouts_cancelled",
            "rollouts",
            LOWER,
            "Rollouts cancelled at rollout.deadline; with kind continue, rollouts discarded as too old.",
        ),
        *_in(
            PROVER,
            "tokens_lost",
            "tokens",
            LOWER,
            "Tokens sampled for cancelled rollouts, if the engine reports it (torch: only if they continue).",
        ),
        *_in(
            PROVER,
            "groups_carried",
            "count",
            NEITHER,
            "Groups (spo, rae: rollouts) that continue in the next batch (rollout.deadline = continue).",
        ),
        *_in(
            PROVER,
            "tokens_continued",
            "tokens",
            NEITHER,
            "Tokens from earlier batches of rollouts that continue in this batch (rollout.deadline = continue).",
        ),
        *_in(PROVER, "value_mean", "reward", NEITHER, "Mean of the values tracked by spo or rae, before the batch."),
        *_in(PROVER, "value_error", "reward", LOWER, "Mean distance of the tracked values from the rewards."),
        *_updated(),
        *_in(PROVER, "prompt_tokens_per_s", "tokens/s", HIGHER, "Prompt tokens of rollouts per second of sampling."),
        *_in(PROVER, "latency_p50_s", "s", LOWER, f"Median latency {latency}"),
        *_in(PROVER, "latency_p90_s", "s", LOWER, f"90th percentile of the latency {latency}"),
        *_in(PROVER, "latency_p99_s", "s", LOWER, f"99th percentile of the latency {latency}"),
        *_in(PROVER, "engine_batch", "rows", HIGHER, "Unfinished rows per decoding step, mean over the steps."),
        *_in(PROVER, "prefix_share", "share", HIGHER, "Prompt tokens whose computation was shared with another row."),
        *_in(
            PROVER,
            "repeated",
            "share",
            NEITHER,
            "Rollouts whose prompt and tokens equal another one's in the batch, so the trainer does not "
            "compute them again (training.shared_prompts). It rises as the policy's entropy falls.",
        ),
        *_in(PROVER, "staleness", "versions", LOWER, "Mean versions by which the batch's rollouts are behind."),
        *_in(PROVER, "staleness_max", "versions", LOWER, "Versions by which the oldest rollout is behind."),
        *_in(PROVER, "staleness_in_flight", "versions", LOWER, "The part of staleness before rollouts arrived."),
        *_in(PROVER, "staleness_in_queue", "versions", LOWER, "The part of staleness from waiting for the trainer."),
        *_in(PROVER, "groups_in_flight", "count", NEITHER, "Prefetched groups in flight when the batch was taken."),
        *_in(PROVER, "groups_waiting", "count", NEITHER, "Finished groups that were left for the next batch."),
        *_in(
            PROVER,
            "dropped_stale",
            "rollouts",
            LOWER,
            "Rollouts dropped since the previous batch as older than rollout.prefetch.max_staleness, mostly long ones.",
        ),
        *_in(PROVER, "stale_cancelled", "rollouts", LOWER, "Dropped while their group was in flight."),
        *_in(PROVER, "stale_on_arrival", "rollouts", LOWER, "Dropped when they arrived."),
        *_in(PROVER, "stale_waiting", "rollouts", LOWER, "Dropped while they waited for the trainer."),
        *_in(PROVER, "stale_tokens", "tokens", LOWER, "Completion tokens of the dropped rollouts that had arrived."),
        *_in(
            PROVER,
            "start_ratio_mean",
            "number",
            NEITHER,
            "Mean untruncated pi at batch start / pi_sampled (training.importance).",
        ),
        *_in(PROVER, "start_ratio_max", "number", NEITHER, "The largest pi at batch start / pi_sampled."),
        *_in(
            PROVER,
            "start_outside",
            "share",
            LOWER,
            "Completion tokens whose ratio is truncated or masked (training.importance.high, low).",
        ),
        *_in(PROVER, "weights_wall_s", "s", LOWER, "Time of the weight update after the step, on the slowest engine."),
        *_in(PROVER, "weights_queue_s", "s", LOWER, "The part of the update before the engine worked on it."),
        *_in(PROVER, "canary_gap", "nats", LOWER, "Largest gap between a server's log-probs and the trainer's."),
        *_in(PROVER, "cache_hit_rate", "share", HIGHER, "Scores of the batch that needed no computation."),
        *_in(PROVER, "cache_hits", "count", HIGHER, "Scores found in the cache since the phase began."),
        *_in(PROVER, "cache_misses", "count", LOWER, "Scores not found in the cache since the phase began."),
        *_in(PROVER, "cache_evictions", "count", LOWER, "Scores evicted from the full cache since the phase began."),
        *_trained(PROVER),
    ]


def _updated() -> list[Metric]:
    """Metrics of the steps that end in an update of the verifier (game.schedule = "simultaneous")."""
    return [
        *_in(PROVER, "verifier_loss", "number", LOWER, "The verifier's loss in the last step of its update."),
        *_in(PROVER, "verifier_pair_accuracy", "share", HIGHER, "Pairs of that step that it ranks correctly."),
        *_in(PROVER, "fresh_correct", "share", NEITHER, "Correct solutions among those sampled for the update."),
        *_in(
            PROVER,
            "verifier_auc",
            "share",
            HIGHER,
            "P(a correct solution scores above a wrong one) after the update, on held-out problems.",
        ),
        *_in(PROVER, "threshold", "score", NEITHER, "The score from which a solution is accepted, after the update."),
    ]


def _rounds() -> list[Metric]:
    auc = "P(a correct solution scores above a wrong one)"
    return [
        *_in(ROUND, "verifier_auc", "share", HIGHER, f"{auc} on the samples of this round's prover."),
        *_in(ROUND, "verifier_auc_base", "share", HIGHER, f"{auc} on the base prover's samples."),
        *_in(
            ROUND,
            "verifier_auc_previous",
            "share",
            HIGHER,
            f"{auc}, for correct helpful solutions of this round's prover and flaws of the previous round's.",
        ),
        *_in(ROUND, "threshold", "score", NEITHER, "The score from which a solution is accepted."),
        *_in(ROUND, "base_helpful_accuracy", "share", NEITHER, "helpful_accuracy of the base prover."),
        *_in(ROUND, "base_sneaky_error_rate", "share", NEITHER, "sneaky_error_rate of the base prover."),
        *_in(
            ROUND,
            "fooled_rate_at_90",
            "share",
            LOWER,
            "Flaws that pass a threshold which 90% of this prover's correct helpful solutions pass. It measures the "
            "ranking alone; fooled_rate also depends on the threshold, which comes from the mint.",
        ),
        *_in(ROUND, "fooled_rate_base", "share", LOWER, "Flaws of the base prover that this verifier accepts."),
        *_in(
            ROUND,
            "fooled_rate_previous",
            "share",
            LOWER,
            "Flaws of the previous round's prover that this verifier accepts.",
        ),
    ]


# Part of a step -> the work in it.
PARTS = {
    "open_models": "Opening models, the task and the run.",
    "rollout": "Sending requests to the engine, and waiting for it.",
    "prefill": "The model's forward pass over prompts.",
    "decode": "Sampling completions token by token.",
    "grade": "Checking solutions against the reference answers or tests.",
    "score": "Rendering solutions for the verifier, and looking up cached scores.",
    "score_queue": "Solutions waiting for a free verifier.",
    "score_service": "The verifier computing scores.",
    "credit": "Rewards and advantages.",
    "reference": "Log-probs of the base prover.",
    "recompute": 'Log-probs of the learner, for rollout.logprobs = "recomputed".',
    "draw_pairs": "Drawing the step's preference pairs.",
    "pack": "Packing sequences into micro-batches.",
    "survey": "The pass without gradient that computes the weight of each source of pairs.",
    "forward_backward": "The trainer's forward and backward passes.",
    "optimizer": "Clipping the gradient and updating the weights.",
    "sync": "Publishing weights to the engine.",
    "checkpoint": "Committing: shards, checkpoint, state.",
    "evaluate": "The round's metrics, and the verifier's calibration.",
    "record": "Writing metrics and spans.",
    "wait_for_rollouts": "The trainer waiting for rollouts or for the compute thread, without time in other parts.",
    "wait_for_pairs": "The verifier's trainer waiting for pairs, without time in other parts.",
    "wait_for_demonstrations": "The trainer of the warm start waiting for its batch, without time in other parts.",
    "wait_for_weights": "Waiting for new weights to arrive at the engine.",
    "unaccounted": "Time outside all parts.",
}


def _budget() -> list[Metric]:
    return [metric for part, what in PARTS.items() for metric in _in(("budget", "busy"), part, "s", LOWER, what)]


def _device() -> list[Metric]:
    place = ("device",)
    return [
        *_in(place, "cpu", "share", NEITHER, "Use of all cores of the machine since the previous sample."),
        *_in(place, "process_cpu", "cores", NEITHER, "Cores used by this process and its children in the same time."),
        *_in(
            place,
            "core_wait",
            "share",
            LOWER,
            "Share of the time in which threads of this process were ready to run but waited for a core (Linux).",
        ),
        *_in(place, "rss_bytes", "bytes", LOWER, "Resident memory of this process and its children."),
        *_in(place, "memory_used_bytes", "bytes", LOWER, "The machine's memory that is not available."),
        *_in(place, "memory_total_bytes", "bytes", NEITHER, "The machine's memory."),
        *_in(place, "gpu{i}_utilisation", "share", HIGHER, "Time in which any kernel ran on GPU i (NVML)."),
        *_in(
            place,
            "gpu{i}_memory_activity",
            "share",
            NEITHER,
            "Time in which GPU i read or wrote its memory (NVML), not the share of the bandwidth.",
        ),
        *_in(
            place,
            "gpu{i}_sm_activity",
            "share",
            HIGHER,
            "Streaming multiprocessors of GPU i with a warp since the previous sample (GPM, Hopper and later).",
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
        *_in(place, "gpu{i}_memory_bytes", "bytes", NEITHER, "Used memory of GPU i, by all processes."),
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
        *_in(place, "samples", "count", NEITHER, "Ticks (ten per second) that were due in the window."),
    ]


def _workers() -> list[Metric]:
    place, busy = ("workers",), "share of the time in which the worker ran or waited for a core"
    return [
        *_in(place, "up", "count", HIGHER, "Workers that are ready."),
        *_in(place, "restarts", "count", LOWER, "Workers of this process that took the place of one that ended."),
        *_in(place, "busy", "share", HIGHER, f"Mean over the workers of the {busy}."),
        *_in(place, "busy_most", "share", NEITHER, "The same of the busiest worker."),
        *_in(place, "busy_least", "share", HIGHER, "The same of the least busy worker."),
        *_in(place, "core_wait", "share", LOWER, "Share of the workers' busy time in which they waited for a core."),
        *_in(place, "ran_s", "s", NEITHER, "Seconds that the workers ran on cores since the previous sample, summed."),
        *_in(place, "waited_s", "s", LOWER, "Seconds that they waited for cores in the same time, summed."),
        *_in(place, "longest_wait_s", "s", LOWER, "The same of the worker that waited longest."),
        *_in(place, "w{i}_up", "count", HIGHER, "1 if worker i is ready. Runs with at most 64 workers have this."),
        *_in(place, "w{i}_busy", "share", HIGHER, f"Worker i: {busy}."),
        *_in(place, "w{i}_restarts", "count", LOWER, "How often the process in place i was replaced."),
    ]


METRICS: dict[str, Metric] = _table()


def metric(name: str) -> Metric | None:
    """The catalogue's entry for a full name; gpu0_power_w matches gpu{i}_power_w."""
    return METRICS.get(re.sub(r"^(device/gpu|workers/w)\d+_", r"\1{i}_", name))


# --- the page ---------------------------------------------------------------------------------------------------------

# Unit of the catalogue -> (how a name may end with it already, Prometheus's suffix). Base units, as Prometheus asks.
PROMETHEUS_SUFFIXES = {
    "share": ("", "_ratio"),
    "s": ("_s", "_seconds"),
    "bytes": ("_bytes", "_bytes"),
    "W": ("_w", "_watts"),
    "nats": ("", "_nats"),
    "cores": ("", "_cores"),
    "rows": ("", "_rows"),
    "versions": ("", "_versions"),
    "tokens": ("_tokens", "_tokens"),
    "tokens/s": ("_per_s", "_per_second"),
    "pairs/s": ("_per_s", "_per_second"),
}
TIMES = ("budget", "busy")  # seconds by part; the phase and the part are labels
PLACES_IN_NAMES = ("round", "device", "loop", "workers")  # they are part of the name; a phase is a label


def exposed_name(name: str) -> str:
    """`train_prover/latency_p50_s` -> `pvg_latency_p50_seconds`; the phase, part, GPU or worker becomes a label."""
    place, _, short = name.partition("/")
    if place in TIMES:
        return f"pvg_{place}_seconds"
    entry = metric(name)
    ending, suffix = PROMETHEUS_SUFFIXES.get(entry.unit if entry is not None else "", ("", ""))
    short = re.sub(r"^w(\d+|\{i\})_", "worker_", re.sub(r"^gpu(\d+|\{i\})_", "gpu_", short))
    own_place = f"{place}_" if place in PLACES_IN_NAMES else ""
    return re.sub(r"\W", "_", f"pvg_{own_place}{short.removesuffix(ending)}{suffix}")
