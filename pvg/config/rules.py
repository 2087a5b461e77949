"""Settings that are valid one by one and cannot work, or are probably not meant, together.

`pvg.config.experiment` asks `impossibilities` and `oddities`; nothing else needs to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pvg import hub
from pvg.config.sections import (
    CompositeReward,
    DecoupledProtocol,
    DecoupledReward,
    GatedReward,
    SimultaneousSchedule,
    SrcReward,
)
from pvg.errors import ConfigurationError
from pvg.extensions import is_reference

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment


def impossibilities(experiment: Experiment) -> list[str]:
    """Combinations of single valid settings that cannot work; each sentence names the keys and a remedy."""
    training, rollout, verifier = experiment.training, experiment.rollout, experiment.verifier
    rollouts = training.groups * rollout.group_size
    longest = rollout.max_tokens + 1
    found = _wrong_hub_ids(experiment)
    if rollout.group_size == 1 and not training.groupless:
        found.append(
            f"rollout.group_size = 1 leaves {training.loss.kind} no group to take a mean of: every advantage would be "
            "0; set rollout.group_size to 2 or more"
        )
    if rollouts % training.minibatches:
        found.append(
            f"training.minibatches = {training.minibatches} does not divide the batch of {rollouts} rollouts "
            f"(training.groups x rollout.group_size)"
        )
    per_step = rollouts // training.minibatches
    micro = training.micro_batch_rollouts
    if micro is not None and micro > per_step:
        found.append(
            f"training.micro_batch_rollouts = {micro} is larger than its batch of {per_step} rollouts; "
            f"set it to at most {per_step}, or leave it out"
        )
    if training.accumulation_steps is not None and training.accumulation_steps > per_step:
        found.append(
            f"training.accumulation_steps = {training.accumulation_steps} would make micro-batches of less than "
            f"one rollout out of {per_step}"
        )
    for key, budget, rows in (
        ("training.micro_batch_tokens", training.micro_batch_tokens, 1),
        ("verifier.micro_batch_tokens", verifier.micro_batch_tokens, 2),
        ("verifier.score_tokens", verifier.score_tokens, 1),
    ):
        if budget < rows * longest:
            what = "one rollout" if rows == 1 else "one pair"
            found.append(
                f"{key} = {budget} is too small: {what} may need {rows * longest} tokens or more "
                f"(rollout.max_tokens = {rollout.max_tokens} and a prompt); raise it or shorten the completions"
            )
    if rollout.logprobs == "sampled" and (rollout.top_p < 1.0 or rollout.top_k > 0) and training.steps > 0:
        found.append(
            "rollout.top_p < 1 or rollout.top_k > 0 samples from a cut distribution that the trainer's policy does "
            'not share; set rollout.logprobs = "recomputed", or sample from the whole distribution'
        )
    if rollout.max_rows > rollout.concurrency:
        found.append(
            f"rollout.max_rows = {rollout.max_rows} can never be filled by rollout.concurrency = "
            f"{rollout.concurrency} requests; lower the one or raise the other"
        )
    most = verifier.solutions_per_problem
    if verifier.pairing == "problem" and verifier.pairs < (most // 2) * (most - most // 2):
        found.append(
            f"verifier.pairs = {verifier.pairs} is below the {(most // 2) * (most - most // 2)} pairs that "
            f"verifier.solutions_per_problem = {most} solutions of one problem form; raise it, or lower that"
        )
    if training.overlong_buffer > rollout.max_tokens:
        found.append(
            f"training.overlong_buffer = {training.overlong_buffer} exceeds rollout.max_tokens = {rollout.max_tokens}"
        )
    for part in (
        _impossible_prefetch,
        _impossible_stragglers,
        _impossible_sampling,
        _impossible_experts,
        _impossible_servers,
        _impossible_dtypes,
        _impossible_verifiers,
        _impossible_roles,
        impossible_learning,
        _impossible_attacks,
        _impossible_code,
        protocol_impossibilities,
    ):
        found += part(experiment)
    return found


def reward_impossibilities(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of the reward, but for what it asks of the game's two roles: an attacker of
    `pvg evaluate` has one, and any of the rewards."""
    return _impossible_stragglers(experiment)


def _impossible_attacks(experiment: Experiment) -> list[str]:
    """Impossible settings of `pvg evaluate`. They are refused before hours of training, not after."""
    section = experiment.evaluate
    if not section.attacks or section.attack_window <= section.attack_steps:
        return []
    return [
        f"evaluate.attack_window = {section.attack_window} batches do not fit into evaluate.attack_steps = "
        f"{section.attack_steps}, so no attack could succeed; raise the steps, or lower the window"
    ]


def _impossible_prefetch(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of rollouts that are sampled ahead and of stale ones."""
    training, rollout, found = experiment.training, experiment.rollout, []
    if rollout.prefetch and training.groupless and rollout.group_deadline_s is not None:
        found.append(
            f"rollout.group_deadline_s cuts whole batches with training.loss = {training.loss.kind!r}, and "
            "rollout.prefetch keeps none together: it takes what is there first and waits for no straggler; leave "
            "rollout.group_deadline_s out"
        )
    if rollout.prefetch and rollout.logprobs == "recomputed":
        found.append(
            f"rollout.prefetch = {rollout.prefetch} trains on rollouts of older weights, and rollout.logprobs = "
            "'recomputed' knows only the newest; set it to 'sampled', or rollout.prefetch to 0"
        )
    return found


def _impossible_stragglers(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of deadlines and of groups of one."""
    training, rollout, game = experiment.training, experiment.rollout, experiment.game
    found = []
    if rollout.group_size == 1 and training.groupless and game.reward.kind in ("src", "decoupled"):
        found.append(
            f"game.reward = {game.reward.kind!r} compares a score with those of the same problem and role, and "
            "rollout.group_size = 1 leaves it none: every reward would be the same; take 'cgc', 'goodhart' or "
            "'correctness', or raise rollout.group_size"
        )
    found += _impossible_partial(experiment)
    if rollout.group_deadline_s is None:
        return found
    of_batch = training.groupless or rollout.partial
    whole = _rollouts_of_deadline(experiment)
    # Without groups the deadline is the batch's: of a group it may leave one, unless fewer are cut than that takes.
    may_leave_one = 1 < rollout.group_size <= 1 + whole - rollout.min_group
    if training.groupless and not rollout.partial and game.reward.kind in ("src", "decoupled") and may_leave_one:
        found.append(
            f"game.reward = {game.reward.kind!r} compares a score with those of the same problem and role, and "
            f"rollout.group_deadline_s may leave it none with training.loss = {training.loss.kind!r}, whose batch "
            "it cuts wherever it is late; take 'cgc', 'goodhart' or 'correctness', or set rollout.partial to true"
        )
    if rollout.min_group > whole:
        found.append(
            f"rollout.min_group = {rollout.min_group} is more than the {whole} rollouts that rollout.group_deadline_s "
            f"is for; set it to at most {whole}"
        )
    if rollout.min_group == 1 and not training.groupless and not rollout.partial:
        found.append(
            f"rollout.min_group = 1 may leave {training.loss.kind} a group of one, which teaches nothing; set it to 2 "
            "or more"
        )
    least = rollout.min_group if of_batch else training.groups * rollout.min_group
    if least < training.minibatches:
        found.append(
            f"training.minibatches = {training.minibatches} does not fit the {least} rollouts that may be left at "
            "rollout.group_deadline_s; lower it, or raise rollout.min_group"
        )
    return found


def _rollouts_of_deadline(experiment: Experiment) -> int:
    """How many rollouts rollout.min_group is a part of: a group's, or a batch's."""
    training, rollout = experiment.training, experiment.rollout
    groups = training.groups if training.groupless or rollout.partial else 1
    return groups * rollout.group_size


def _impossible_partial(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of rollouts that are continued under the next version."""
    rollout = experiment.rollout
    found: list[str] = []
    if not rollout.partial:
        return found
    if rollout.prefetch:
        found.append(
            f"rollout.partial = true cuts what is in flight when a batch ends, and with rollout.prefetch = "
            f"{rollout.prefetch} it goes on under new versions anyway; set rollout.partial to false"
        )
    if rollout.routed_experts and rollout.engine == "vllm":
        found.append(
            "rollout.partial = true needs the experts of the tokens that a rollout was cut after, and vLLM tells "
            "rollout.routed_experts of whole completions only; set one of them to false"
        )
    if rollout.group_deadline_s is None:
        found.append(
            "rollout.partial = true continues what a deadline has cut, and there is none; set "
            "rollout.group_deadline_s, or rollout.partial to false"
        )
    if rollout.logprobs == "recomputed":
        found.append(
            "rollout.partial = true continues under other weights than a rollout began with, and rollout.logprobs = "
            "'recomputed' knows only the newest; set it to 'sampled', or rollout.partial to false"
        )
    return found


def _impossible_sampling(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of the prover's servers."""
    serving, found = experiment.serving, []
    if experiment.weights.transport == "lora" and not experiment.training.lora_rank:
        found.append(
            "weights.transport = 'lora' brings adapters to servers, and training.lora_rank = 0 trains none; set it to "
            "16, say, or weights.transport to 'filesystem'"
        )
    if experiment.rollout.engine != "vllm":
        return found
    if not serving.servers:
        found.append("rollout.engine = 'vllm' needs serving.servers; start one with `pvg serve EXPERIMENT`")
    if serving.connections is not None and serving.connections < experiment.rollout.concurrency:
        found.append(
            f"serving.connections = {serving.connections} are too few for rollout.concurrency = "
            f"{experiment.rollout.concurrency}: requests would wait for a connection; leave it out, or lower the "
            "concurrency"
        )
    others = {*serving.verifier_servers, *serving.reference_servers}
    if shared := sorted(set(serving.servers) & others):
        found.append(
            f"{shared[0]} is in serving.servers and serves the verifier too: a server has one set of weights; start "
            "one for each"
        )
    return found


def _impossible_experts(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of mixtures of experts."""
    training, rollout, found = experiment.training, experiment.rollout, []
    if training.router_replay and not rollout.routed_experts:
        found.append(
            "training.router_replay needs the experts that rollouts were sampled with; set rollout.routed_experts to "
            "true"
        )
    if training.router_replay and training.gradient_checkpointing:
        found.append(
            "training.gradient_checkpointing computes layers again in the backward pass, where training.router_replay "
            "is over; set one of them to false"
        )
    if rollout.routed_experts and rollout.engine == "vllm" and not experiment.serving.prefix_caching:
        found.append(
            "rollout.routed_experts needs vLLM's prefix cache, with which it keeps them; set serving.prefix_caching to "
            "true"
        )
    return found


def _impossible_servers(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of the verifier's servers."""
    verifier, found = experiment.verifier, []
    if verifier.engine == "vllm" and not experiment.serving.verifier_servers:
        found.append(
            "verifier.engine = 'vllm' needs serving.verifier_servers; start one with `pvg serve EXPERIMENT --for "
            "verifier` and name it there, or set verifier.engine to 'torch'"
        )
    if verifier.engine == "vllm" and verifier.head not in ("scalar", "implicit"):
        found.append(
            f"verifier.head = {verifier.head!r} is computed by torch only; set verifier.engine to 'torch', or "
            "verifier.head to 'implicit' or 'scalar'"
        )
    shared = set(experiment.serving.verifier_servers) & set(experiment.serving.reference_servers)
    if verifier.engine == "vllm" and shared:
        found.append(
            f"{sorted(shared)[0]} is both in serving.verifier_servers and in serving.reference_servers: a server has "
            "one set of weights; start one for each"
        )
    return found


def _impossible_dtypes(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, weights that are trained and cannot be. Below adapters they are frozen."""
    trained = {
        "prover": (experiment.training.lora_rank == 0, "training"),
        "verifier": (experiment.verifier.lora_rank == 0, "verifier"),
    }
    found = []
    for player, (all_weights, section) in trained.items():
        dtype = getattr(experiment.models, player).dtype
        if dtype != "float32" and all_weights:
            found.append(
                f"models.{player}.dtype = {dtype!r} holds weights that cannot be trained: small updates vanish in "
                f"their rounding; set it to 'float32', and {section}.precision"
                f"{' and rollout.dtype' if player == 'prover' else ''} to 'bfloat16', or train adapters alone "
                f"({section}.lora_rank)"
            )
    return found


def _impossible_verifiers(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of ensembles and adapters."""
    verifier, found = experiment.verifier, []
    if verifier.engine == "vllm" and verifier.lora_rank:
        found.append(
            f"verifier.lora_rank = {verifier.lora_rank} trains adapters, and verifier.engine = 'vllm' brings whole "
            "weights to servers; set the latter to 'torch', or verifier.lora_rank to 0"
        )
    if verifier.engine == "vllm" and verifier.ensemble > 1:
        found.append(
            f"verifier.ensemble = {verifier.ensemble} needs as many sets of weights, and servers hold one verifier at "
            "a time; set verifier.engine to 'torch', or verifier.ensemble to 1"
        )
    return found


def _impossible_roles(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of the game itself."""
    game, prompts = experiment.game, experiment.rollout.prompts
    two_role_rewards = ("src", "cgc", "decoupled", "gated", "composite")
    one_role, two_role_reward = game.sneaky_share in (0.0, 1.0), game.reward.kind in two_role_rewards
    found = []
    if two_role_reward and one_role:
        found.append(
            f"game.reward = {game.reward.kind!r} is for two roles, but game.sneaky_share = {game.sneaky_share} leaves "
            "one; set it between 0 and 1, or take 'goodhart' or 'correctness'"
        )
    if two_role_reward and prompts == "plain":
        found.append(
            f"game.reward = {game.reward.kind!r} pays the two roles for opposite things, but rollout.prompts = 'plain' "
            "gives both the same prompt; set it to 'tag' or 'chat'"
        )
    if game.stop.kind == "score_parity" and one_role:
        found.append(
            "game.stop = 'score_parity' compares the scores of both roles, but game.sneaky_share = "
            f"{game.sneaky_share} leaves one; set game.stop to 'steps'"
        )
    if game.mint_samples < 2:
        found.append("game.mint_samples must be at least 2: a pair needs a correct and an incorrect solution")
    return found


def _impossible_code(experiment: Experiment) -> list[str]:
    """Of the impossible combinations, those of solutions that are executed, and of the rewards made for them."""
    game, found = experiment.game, []
    if experiment.task.kind == "code" and experiment.rollout.grading == "loop":
        found.append(
            "task.kind = 'code' runs programs for seconds, and rollout.grading = 'loop' lets everything else wait for "
            "them; set that to 'thread'"
        )
    reward = game.reward
    if isinstance(reward, GatedReward) and reward.floor >= -reward.similarity_weight:
        found.append(
            f"game.reward.floor = {reward.floor} is not below every reward of an open gate, of which the least is "
            f"-game.reward.similarity_weight = {-reward.similarity_weight}; lower it"
        )
    if (
        isinstance(reward, GatedReward | CompositeReward)
        and reward.similarity_weight
        and experiment.task.kind != "code"
    ):
        found.append(
            f"game.reward.similarity_weight = {reward.similarity_weight} compares programs, and task.kind = "
            f"{experiment.task.kind!r} has none; set it to 0"
        )
    return found


def _odd_code(experiment: Experiment) -> list[str]:
    """Of the oddities, those of solutions that are executed, and of the rewards made for them."""
    game, found = experiment.game, []
    if experiment.task.kind == "code" and experiment.task.sandbox == "reduced":
        found.append(
            "task.sandbox = 'reduced' runs programs that a model wrote with the isolation there is (`pvg doctor` tells)"
        )
    if game.reward.kind == "composite":
        found.append(
            "game.reward = 'composite' may pay a convincing solution that fails some tests more than an aligned one "
            "(by design); 'gated' never does"
        )
    return found


def oddities(experiment: Experiment) -> list[str]:
    """Rewards that prefer a misaligned solution (pvg/game/rewards.py), and settings without an effect."""
    game, training = experiment.game, experiment.training
    found = []
    reward = game.reward
    if isinstance(reward, SrcReward):
        found.append(
            "game.reward = 'src' pays an aligned solution below its group's mean no more than a misaligned one "
            "(by design); 'cgc' never does"
        )
        if reward.misaligned >= 0:
            found.append(f"game.reward.misaligned = {reward.misaligned} pays what src should punish; set it below 0")
    if isinstance(reward, DecoupledReward) and reward.floor >= 0:
        found.append(f"game.reward.floor = {reward.floor} is not below every aligned reward; set it below 0")
    if reward.kind == "cgc" and training.overlong_buffer:
        found.append(
            "training.overlong_buffer takes up to 1 from a reward: an aligned one may fall below game.reward.floor"
        )
    if experiment.verifier.pairing == "random" and "solutions_per_problem" in experiment.verifier.model_fields_set:
        found.append("verifier.solutions_per_problem has no effect on verifier.pairing = 'random'")
    if training.lora_alpha != type(training).model_fields["lora_alpha"].default and training.lora_rank == 0:
        found.append("training.lora_alpha has no effect on training.lora_rank = 0, which trains all weights")
    if experiment.rollout.decoding == "module" and "batching" in experiment.rollout.model_fields_set:
        found.append("rollout.batching has no effect on rollout.decoding = 'module', which decodes whole batches")
    asked = experiment.rollout.shared_attention and "shared_attention" in experiment.rollout.model_fields_set
    if experiment.rollout.decoding == "module" and asked:
        found.append("rollout.shared_attention has no effect on rollout.decoding = 'module'; set that to 'lean'")
    if training.blocked_layers and (missing := _missing_for_blocks(experiment)):
        found.append(f"training.blocked_layers has no effect without {' and '.join(missing)}")
    found += _odd_attacks(experiment)
    found += _idle_servers(experiment)
    found += _odd_verifiers(experiment)
    found += _odd_code(experiment)
    found += protocol_oddities(experiment)
    rollout = experiment.rollout
    found += _odd_prefetch(experiment)
    if rollout.group_deadline_s is not None and rollout.min_group == _rollouts_of_deadline(experiment):
        whole = "batch" if training.groupless or rollout.partial else "group"
        found.append(f"rollout.group_deadline_s has no effect: rollout.min_group is the whole {whole}")
    if "partial_versions" in rollout.model_fields_set and not rollout.partial:
        found.append("rollout.partial_versions has no effect on rollout.partial = false")
    if training.loss.kind == "dapo" and "kl" in training.model_fields_set and training.kl.kind == "fixed":
        found.append("training.kl has no effect on training.loss = 'dapo'; set it to 'none'")
    return found


def _odd_attacks(experiment: Experiment) -> list[str]:
    """Of the oddities, attacks that `pvg evaluate` refuses. A run that is never evaluated needs none."""
    section, minibatches = experiment.evaluate, experiment.training.minibatches
    if not section.attacks or section.attack_window * minibatches <= section.attack_steps:
        return []
    return [
        f"`pvg evaluate` will refuse the attacks: evaluate.attack_window = {section.attack_window} batches of "
        f"{minibatches} steps each do not fit into evaluate.attack_steps = {section.attack_steps}; raise the steps, or "
        "lower the window"
    ]


def _wrong_hub_ids(experiment: Experiment) -> list[str]:
    """Hub ids of the wrong form. This sends no request to the hub."""
    found = []
    for key, source in hub.hub_ids(experiment):
        try:
            hub.parse(source)
        except ConfigurationError as error:
            found.append(f"{key}: {error.message} {error.remedy}".rstrip("."))
        if key == "task.path" and experiment.task.kind != "gsm8k":
            found.append(f"{key} = {source!r}: only task.kind = 'gsm8k' reads a dataset of the hub")
    return found


def _odd_verifiers(experiment: Experiment) -> list[str]:
    """Of the oddities, those of ensembles and adapters."""
    verifier, models, found = experiment.verifier, experiment.models, []
    if verifier.lora_alpha != type(verifier).model_fields["lora_alpha"].default and verifier.lora_rank == 0:
        found.append("verifier.lora_alpha has no effect on verifier.lora_rank = 0, which trains all weights")
    if verifier.lora_rank and models.verifier != models.prover and models.verifier.source == models.prover.source:
        found.append(
            "models.verifier and models.prover name one source in two dtypes, so that its weights are in memory twice; "
            "make them alike"
        )
    if verifier.ensemble == 1:
        for key, without_effect in (("aggregation", verifier.aggregation != "mean"), ("bag", verifier.bag < 1.0)):
            if without_effect:
                found.append(f"verifier.{key} has no effect on verifier.ensemble = 1; set that to 3 or more")
    if verifier.ensemble == 2 and verifier.aggregation == "median":
        found.append("verifier.aggregation = 'median' of verifier.ensemble = 2 members is their mean; take 3 or more")
    return found


def _missing_for_blocks(experiment: Experiment) -> list[str]:
    """What pvg.models.blocked_layers needs of the settings and has not. (What of the model, it says itself.)"""
    training = experiment.training
    needed = {
        "training.fused_layers = true": training.fused_layers,
        "training.shared_prompts = true": training.shared_prompts,
        "training.precision = 'float32'": training.precision == "float32",
    }
    return [setting for setting, there in needed.items() if not there]


def _odd_prefetch(experiment: Experiment) -> list[str]:
    """Of the oddities, those of rollouts that are sampled ahead and of stale ones."""
    training, rollout, found = experiment.training, experiment.rollout, []
    if rollout.prefetch and rollout.engine == "torch":
        found.append(
            "rollout.prefetch gains nothing on rollout.engine = 'torch': it samples in the thread that trains; take "
            "'vllm', or leave it 0"
        )
    if rollout.prefetch and rollout.staleness_budget < rollout.prefetch:
        found.append(
            f"rollout.max_staleness = {rollout.staleness_budget} drops most of what rollout.prefetch = "
            f"{rollout.prefetch} samples ahead; raise it to {rollout.prefetch + 1}, or lower that"
        )
    stale = rollout.prefetch or rollout.partial
    if stale and training.loss.kind == "rloo" and training.importance.kind == "none":
        found.append(
            "training.loss = 'rloo' has no ratio: stale rollouts count as if they were fresh; set training.importance "
            "to 'decoupled'"
        )
    if not rollout.prefetch and "prefer" in rollout.model_fields_set:
        found.append("rollout.prefer has no effect on rollout.prefetch = 0, which leaves no choice")
    if not rollout.prefetch and rollout.max_staleness is not None:
        found.append("rollout.max_staleness has no effect on rollout.prefetch = 0: nothing is ever stale")
    if not stale and training.importance.kind in ("decoupled", "unweighted"):
        found.append(
            f"training.importance = {training.importance.kind!r} has no effect on rollout.prefetch = 0: nothing is "
            "ever stale"
        )
    return found


def _idle_servers(experiment: Experiment) -> list[str]:
    """Of the oddities, servers that nobody will ask, and what only servers know."""
    serving, verifier, found = experiment.serving, experiment.verifier, []
    if experiment.rollout.engine == "torch" and experiment.rollout.deadline_s is not None:
        found.append("rollout.deadline_s has no effect on rollout.engine = 'torch'")
    if verifier.engine == "torch":
        for key in ("verifier_servers", "reference_servers"):
            if getattr(serving, key):
                found.append(f"serving.{key} has no effect on verifier.engine = 'torch'; set that to 'vllm'")
    elif serving.reference_servers and verifier.head != "implicit":
        found.append(f"serving.reference_servers has no effect on verifier.head = {verifier.head!r}")
    return found


# The part of pvg.config.rules that is about what the prover's trainer learns from, and how: baselines, which
# problems and groups a batch holds, importance weights, and coefficients that are adapted.


def impossible_learning(experiment: Experiment) -> list[str]:
    """Combinations that cannot work; each sentence names the keys and a remedy."""
    return [*_impossible_dynamic(experiment), *_impossible_importance(experiment), *_impossible_control(experiment)]


def _impossible_dynamic(experiment: Experiment) -> list[str]:
    training, rollout = experiment.training, experiment.rollout
    found: list[str] = []
    if not training.dynamic_sampling:
        return found
    if training.groupless:
        found.append(
            f"training.dynamic_sampling replaces groups without a signal, and training.loss = {training.loss.kind!r} "
            "has no groups; set it to 0, or take a loss that has, such as 'dapo'"
        )
    if rollout.group_size == 1:
        found.append(
            "training.dynamic_sampling replaces groups whose rewards are all the same, and of rollout.group_size = 1 "
            "every group is one; raise rollout.group_size"
        )
    if rollout.prefetch:
        found.append(
            f"training.dynamic_sampling asks for further groups when a batch has been scored, and rollout.prefetch = "
            f"{rollout.prefetch} samples before anybody knows; set rollout.prefetch to 0"
        )
    if rollout.partial:
        found.append(
            "training.dynamic_sampling fills a batch up before it is trained on, and rollout.partial = true leaves "
            "groups to later batches; set one of them to false"
        )
    return found


def _impossible_importance(experiment: Experiment) -> list[str]:
    kind = experiment.training.importance.kind
    if kind == "none" or experiment.rollout.logprobs != "recomputed":
        return []
    return [
        f"training.importance = {kind!r} compares the policy with the sampler, whose log-probs "
        "rollout.logprobs = 'recomputed' replaces; set that to 'sampled', or training.importance to 'none'"
    ]


def _impossible_control(experiment: Experiment) -> list[str]:
    training = experiment.training
    if training.kl.kind != "adaptive" or training.loss.kind != "dapo":
        return []
    return ["training.kl = 'adaptive' has nothing to adapt: training.loss = 'dapo' has no KL term; set it to 'none'"]


# Of the settings that cannot work together, or are probably not meant, those of protocols and schedules.
#
# pvg.config.rules asks both functions.

TRANSLATORS_REWARDS = ("decoupled", "cgc", "goodhart")


def protocol_impossibilities(experiment: Experiment) -> list[str]:
    """Each sentence names the keys and a remedy."""
    return [
        *_impossible_schedule(experiment),
        *_impossible_solver(experiment),
        *_impossible_challenge(experiment),
        *_impossible_programs(experiment),
    ]


def _impossible_programs(experiment: Experiment) -> list[str]:
    protocol = experiment.game.protocol.kind
    if experiment.task.kind != "code" or protocol == "direct":
        return []
    return [
        f"game.protocol = {protocol!r} is for solutions in steps that end with an answer, and task.kind = 'code' has "
        "programs; set game.protocol to 'direct'"
    ]


def _impossible_challenge(experiment: Experiment) -> list[str]:
    rollout, found = experiment.rollout, list[str]()
    if experiment.game.protocol.kind != "challenge":
        return found
    if rollout.partial:
        found.append(
            "rollout.partial = true continues completions of one turn, and game.protocol = 'challenge' has several; "
            "set rollout.partial to false"
        )
    if rollout.routed_experts:
        found.append(
            "rollout.routed_experts works for completions of one turn, and game.protocol = 'challenge' has several; "
            "set rollout.routed_experts to false"
        )
    if experiment.training.overlong_buffer:
        found.append(
            "training.overlong_buffer counts towards rollout.max_tokens, which game.protocol = 'challenge' gives the "
            "solution alone; set it to 0"
        )
    return found


def _impossible_solver(experiment: Experiment) -> list[str]:
    game, found = experiment.game, list[str]()
    if not isinstance(game.protocol, DecoupledProtocol):
        return found
    kind = game.reward.kind
    if kind not in TRANSLATORS_REWARDS and not is_reference(kind):  # a user's may know translations
        found.append(
            f"game.reward = {kind!r} pays for correct and incorrect solutions, and game.protocol = 'decoupled' asks "
            "for the solver's answer or another; set game.reward to 'decoupled', 'cgc' or 'goodhart'"
        )
    if experiment.rollout.prompts == "plain":
        found.append(
            "rollout.prompts = 'plain' has no prompt that shows a translator the solver's solution; set it to 'tag' or "
            "'chat', or game.protocol to 'direct'"
        )
    if game.protocol.solver != "base" and experiment.weights.transport == "lora":
        found.append(
            f"game.protocol.solver = {game.protocol.solver!r} is a whole model, and weights.transport = 'lora' brings "
            "adapters alone; set that to 'filesystem', or game.protocol.solver to 'base'"
        )
    return found


def _impossible_schedule(experiment: Experiment) -> list[str]:
    if experiment.game.schedule.kind != "simultaneous":
        return []
    if experiment.verifier.ensemble > 1:
        return [
            f"verifier.ensemble = {experiment.verifier.ensemble} has members that are trained one after the other, and "
            "game.schedule = 'simultaneous' trains one verifier beside the prover; set verifier.ensemble to 1, or "
            "game.schedule to 'stackelberg'"
        ]
    if experiment.rollout.prefetch:
        return [
            f"rollout.prefetch = {experiment.rollout.prefetch} scores rollouts ahead, and game.schedule = "
            "'simultaneous' changes the verifier meanwhile; set rollout.prefetch to 0, or game.schedule to "
            "'stackelberg'"
        ]
    return []


def protocol_oddities(experiment: Experiment) -> list[str]:
    """Settings without an effect."""
    game = experiment.game
    found = []
    if game.protocol.kind == "decoupled" and experiment.models.prover.source == "embedded:modchain-prover":
        found.append(
            "models.prover.source = 'embedded:modchain-prover' was never shown a solution in its prompt and writes "
            "none behind it; take 'embedded:modchain-dialogue' for game.protocol = 'decoupled'"
        )
    batches = experiment.training.steps // experiment.training.minibatches
    schedule = game.schedule
    if isinstance(schedule, SimultaneousSchedule) and batches < schedule.every:
        found.append(
            f"game.schedule.every = {schedule.every} is more than the {batches} batches of a round: the verifier is "
            "never updated"
        )
    return found
