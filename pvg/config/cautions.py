"""Settings that work together, but are probably not intended.

`pvg.config.experiment` calls `warnings_about`. Each sentence says what is odd, then what to set.
"""

from __future__ import annotations

from collections.abc import Iterator

from pvg.config.game import DecoupledReward, SimultaneousSchedule
from pvg.config.prompt_rules import prompt_warnings
from pvg.config.rollout import SamplingAhead, TorchSampling
from pvg.config.rules import rollouts_of_deadline
from pvg.config.sections import AllSections
from pvg.config.training import FixedKl


def warnings_about(experiment: AllSections) -> list[str]:
    """Combinations that work, but are probably not intended: one sentence each."""
    return [sentence for rule in ODD for sentence in rule(experiment)]


def _reward_warnings(experiment: AllSections) -> Iterator[str]:
    """Rewards that prefer a misaligned solution (pvg/game/rewards.py)."""
    reward = experiment.game.reward
    if experiment.task.kind == "play":  # its reward is a change in value
        return
    if isinstance(reward, DecoupledReward) and reward.floor >= 0:
        yield f"game.reward.floor = {reward.floor} is not below every aligned reward; set it below 0"
    if reward.kind == "cgc" and experiment.training.overlong_buffer:
        yield (
            "training.overlong_buffer subtracts up to 1 from a reward: an aligned one may fall below game.reward.floor"
        )
    if reward.kind == "composite":
        yield (
            "game.reward = 'composite' may pay a convincing solution that fails some tests more than an aligned one "
            "(by design); 'gated' never does"
        )


def _switch_warnings(experiment: AllSections) -> Iterator[str]:
    training, engine = experiment.training, experiment.rollout.engine
    if isinstance(engine, TorchSampling) and engine.decoding == "module" and engine.batching != "auto":
        yield (
            "rollout.engine.batching has no effect with rollout.engine.decoding = 'module', which decodes whole batches"
        )
    if training.loss == "dapo" and isinstance(training.kl, FixedKl) and training.kl != FixedKl():
        yield "training.kl has no effect with training.loss = 'dapo'; set it to 'none'"
    if experiment.task.kind == "code" and experiment.task.sandbox == "reduced":
        yield (
            "task.sandbox = 'reduced' runs a model's programs with the isolation that this machine has; `pvg doctor` "
            "shows it"
        )
    section, minibatches = experiment.evaluate, experiment.training.minibatches
    if section.attacks and section.attack_window * minibatches > section.attack_steps:
        yield (
            f"`pvg evaluate` will refuse the attacks: evaluate.attack_window = {section.attack_window} batches of "
            f"{minibatches} steps each do not fit into evaluate.attack_steps = {section.attack_steps}; raise the "
            "steps, or lower the window"
        )


def _server_warnings(experiment: AllSections) -> Iterator[str]:
    serving, verifier, models = experiment.serving, experiment.verifier, experiment.models
    if experiment.weights.transport.kind == "nccl":
        yield "weights.transport = 'nccl' is experimental: no GPU has run it; the tested one is 'filesystem'"
    if verifier.engine == "torch":
        for key in ("verifier_servers", "reference_servers"):
            if getattr(serving, key):
                yield f"serving.{key} has no effect with verifier.engine = 'torch'; set that to 'vllm'"
    elif serving.reference_servers and verifier.head.kind != "implicit":
        yield f"serving.reference_servers has no effect with verifier.head = {verifier.head.kind!r}"
    same_source = models.verifier.source == models.prover.source
    if verifier.adapters.kind != "none" and models.verifier != models.prover and same_source:
        yield (
            "models.verifier and models.prover have one source but two dtypes, so its weights are in memory twice; set "
            "both to the same dtype"
        )


def _staleness_warnings(experiment: AllSections) -> Iterator[str]:
    training, rollout, prefetch = experiment.training, experiment.rollout, experiment.rollout.prefetch
    if isinstance(prefetch, SamplingAhead):
        if rollout.engine.kind == "torch":
            yield (
                "rollout.prefetch gains nothing with rollout.engine = 'torch', which samples in the thread that "
                "trains; set rollout.engine to 'vllm', or rollout.prefetch to 'none'"
            )
        if prefetch.staleness_budget < prefetch.batches:
            yield (
                f"rollout.prefetch.max_staleness = {prefetch.staleness_budget} drops most of what "
                f"rollout.prefetch.batches = {prefetch.batches} samples ahead; raise it to {prefetch.batches + 1}, or "
                "lower the batches"
            )
    stale = prefetch.kind != "none" or rollout.deadline.kind == "continue"
    if stale and training.loss == "rloo" and training.importance == "none":
        yield (
            "training.loss = 'rloo' has no ratio, so stale rollouts count as fresh ones; set training.importance to "
            "'decoupled'"
        )
    if training.minibatches > 1 and training.loss == "rloo":
        yield (
            "training.loss = 'rloo' has no ratio, so later minibatches ignore that the weights have changed; set "
            "training.minibatches to 1, or training.loss to 'grpo'"
        )
    if not stale and training.importance in ("decoupled", "unweighted"):
        yield (
            f"training.importance = {training.importance!r} has no effect without rollout.prefetch: no rollout is stale"
        )
    deadline = rollout.deadline
    if deadline.kind != "none" and deadline.min_rollouts == rollouts_of_deadline(experiment):
        whole = "batch" if training.groupless or deadline.kind == "continue" else "group"
        yield f"rollout.deadline has no effect: rollout.deadline.min_rollouts is the whole {whole}"


def _protocol_warnings(experiment: AllSections) -> Iterator[str]:
    game, training = experiment.game, experiment.training
    if game.protocol.kind == "decoupled" and experiment.models.prover.source == "embedded:modchain-prover":
        yield (
            "models.prover.source = 'embedded:modchain-prover' has never seen a solution in its prompt; set it to "
            "'embedded:modchain-dialogue' for game.protocol = 'decoupled'"
        )
    verifier = experiment.models.verifier.source
    if game.protocol.kind == "challenge" and verifier.startswith("embedded:modchain-") and "dialogue" not in verifier:
        yield (
            f"models.verifier.source = {verifier!r} has never seen an answer to a question, and accepts many flaws; "
            "set it to 'embedded:modchain-dialogue' for game.protocol = 'challenge'"
        )
    batches = training.steps // training.minibatches
    if isinstance(game.schedule, SimultaneousSchedule) and batches < game.schedule.every:
        yield (
            f"game.schedule.every = {game.schedule.every} is more than the {batches} batches of a round, so the "
            "verifier is never updated"
        )


ODD = (prompt_warnings, _reward_warnings, _switch_warnings, _server_warnings, _staleness_warnings, _protocol_warnings)
