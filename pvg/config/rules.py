"""Settings that are valid one by one, but cannot work together (`conflicts`), or are probably not intended together
(`warnings_about`). Each sentence says what is wrong, then what to set.
"""

from __future__ import annotations

from collections.abc import Iterator

from pvg.config.game import (
    CgcReward,
    ConsultancyProtocol,
    CriticProtocol,
    DebateProtocol,
    DecoupledProtocol,
    DecoupledReward,
    DirectProtocol,
    Game,
    GatedReward,
    SimultaneousSchedule,
)
from pvg.config.operation import LocalCluster, RayCluster, Serving, has_workers, ranks_of, shards_of
from pvg.config.rollout import TEXTS_FOR_A_TASK, WordedPrompts
from pvg.config.sections import AllSections, value_of
from pvg.config.task import PLAY_ONLY, PlayTask
from pvg.config.training import SOLUTIONS_PER_PROBLEM, Kl, LogprobHead, VerdictHead, Verifier, Warmup

# Sources of models that were not trained with the tags of prompts = "tag". A folder may hold one that was.
WITHOUT_TAGS = ("hf:", "gguf:")


def same_prompt(experiment: AllSections) -> str:
    """Why both roles get one prompt, with a remedy; "" if they do not."""
    prompts = experiment.prompts
    if prompts.kind == "plain":
        return "prompts = 'plain' gives both the same prompt; set it to 'tag', 'chat' or 'text'"
    if not isinstance(prompts, WordedPrompts) or prompts.helpful is None or prompts.helpful != prompts.sneaky:
        return ""
    if prompts.examples is None or any(example.helpful != example.sneaky for example in prompts.examples):
        return ""
    return "prompts.helpful and prompts.sneaky are the same text; change one of them"


def prompt_conflicts(experiment: AllSections) -> Iterator[str]:
    """Texts that no player would read."""
    prompts = experiment.prompts
    if not isinstance(prompts, WordedPrompts):
        return
    own = list(prompts.model_dump(exclude_none=True, include=set(TEXTS_FOR_A_TASK)))
    if own and experiment.task.kind == "play":
        yield f"prompts.{own[0]} has no effect with task.kind = 'play', whose prompts come from the game; leave it out"


def prompt_warnings(experiment: AllSections) -> Iterator[str]:
    prompts, source, task = experiment.prompts.kind, experiment.models.prover.source, experiment.task.kind
    if task == "play":
        return
    if prompts == "tag" and source.startswith(WITHOUT_TAGS):
        yield (
            f"prompts = 'tag' puts only H or S before the question, which models.prover.source = {source!r} has never "
            "learned; set prompts to 'chat', or to 'text' for a base model"
        )
    if prompts == "plain" and 0.0 < experiment.game.sneaky_share < 1.0:
        yield (
            "prompts = 'plain' gives both roles the same prompt; set it to 'chat' or 'text', or game.sneaky_share to 0"
        )


def conflicts(experiment: AllSections) -> Iterator[str]:
    """Combinations that cannot work: one sentence each, with the keys and a remedy."""
    for rule in IMPOSSIBLE:
        yield from rule(experiment)


def reward_conflicts(experiment: AllSections) -> list[str]:
    """The impossible combinations of one reward and the rollouts that it compares. `pvg evaluate` checks its attackers
    with these alone, because an attacker has one role."""
    return list(_deadline(experiment))


# --- batches ---------------------------------------------------------------------------------------------------------


def _batch_sizes(experiment: AllSections) -> Iterator[str]:
    training, rollout, verifier = experiment.training, experiment.rollout, experiment.verifier
    rollouts = training.groups * rollout.group_size
    if rollout.group_size == 1 and not training.groupless:
        yield (
            f"rollout.group_size = 1 is too small for training.loss = {training.loss.kind!r}, which subtracts the "
            "mean of the group: every advantage would be 0; set rollout.group_size to 2 or more"
        )
    if rollouts % training.minibatches:
        yield (
            f"training.minibatches = {training.minibatches} does not divide the batch of {rollouts} rollouts "
            f"(training.groups x rollout.group_size)"
        )
    longest = rollout.max_tokens + 1
    for key, budget in (
        ("training.micro_batch_tokens", training.micro_batch_tokens),
        ("verifier.micro_batch_tokens", verifier.micro_batch_tokens),
    ):
        if budget < longest:
            yield (
                f"{key} = {budget} is too small: one solution may need {longest} tokens or more "
                f"(rollout.max_tokens = {rollout.max_tokens} and a prompt); raise it, or lower rollout.max_tokens"
            )
    pairs = (SOLUTIONS_PER_PROBLEM // 2) ** 2
    if verifier.pairing == "problem" and verifier.pairs < pairs:
        yield f"verifier.pairs = {verifier.pairs} is below the {pairs} pairs of one problem; raise it"


def _attacks(experiment: AllSections) -> Iterator[str]:
    window, steps = experiment.evaluate.attack_window, experiment.evaluate.attack_steps
    if experiment.evaluate.attacks and window > steps:
        yield (
            f"evaluate.attack_window = {window} batches do not fit into evaluate.attack_steps = {steps}, so no attack "
            "could succeed; raise the steps, or lower the window"
        )


def _old_logprobs(experiment: AllSections) -> Iterator[str]:
    """What rollout.logprobs = "recomputed" cannot do: older weights."""
    training, rollout = experiment.training, experiment.rollout
    if rollout.logprobs == "sampled":
        return
    only = "rollout.logprobs = 'recomputed' uses only the newest weights; set it to 'sampled'"
    if rollout.prefetch.kind != "none":
        yield f"rollout.prefetch = {rollout.prefetch.kind!r} trains on rollouts of older weights, but {only}"
    if rollout.deadline.kind == "continue":
        yield f"rollout.deadline = 'continue' trains on rollouts of several weights, but {only}"
    if training.importance not in ("auto", "none"):
        yield (
            f"training.importance = {training.importance!r} needs the sampler's log-probs, but rollout.logprobs = "
            "'recomputed' replaces them; set it to 'sampled', or training.importance to 'none'"
        )


# --- deadlines and prefetch ------------------------------------------------------------------------------------------


def _deadline(experiment: AllSections) -> Iterator[str]:
    """Also groups of one, which have the same problem as what a deadline may leave."""
    training, rollout, deadline = experiment.training, experiment.rollout, experiment.rollout.deadline
    reward = experiment.game.reward
    alone = f"game.reward = {reward.kind!r} compares a score with others of its problem and role, but"
    other = "set game.reward to 'cgc', 'goodhart' or 'correctness', or"
    compares = reward.compares and not _pays_votes(experiment.game)
    if rollout.group_size == 1 and training.groupless and compares:
        yield f"{alone} rollout.group_size = 1 leaves no others; {other} raise rollout.group_size"
    if deadline.kind == "none":
        return
    least = deadline.min_rollouts
    cuts_batches = training.groupless and deadline.kind == "cut"
    whole = rollouts_of_deadline(experiment)
    # A deadline of the batch may leave a single rollout of a group, unless it cuts fewer rollouts than that needs.
    may_leave_one = 1 < rollout.group_size <= 1 + whole - least
    if cuts_batches and compares and may_leave_one:
        yield (
            f"{alone} with training.loss = {training.loss.kind!r} rollout.deadline = 'cut' may leave a single one; "
            f"{other} rollout.deadline to 'continue'"
        )
    kept = least if training.groupless or deadline.kind == "continue" else training.groups * least
    if kept < training.minibatches:
        yield (
            f"training.minibatches = {training.minibatches} is above the {kept} rollouts that may be left at "
            "rollout.deadline; lower it"
        )
    if deadline.kind == "continue" and training.router_replay and rollout.engine.kind == "vllm":
        yield (
            "rollout.deadline = 'continue' needs the experts of unfinished rollouts, but vLLM reports them for "
            "complete ones only; set training.router_replay to false, or rollout.deadline to 'cut'"
        )


def rollouts_of_deadline(experiment: AllSections) -> int:
    """The number of rollouts that a deadline is for: those of a group, or those of a batch."""
    training, rollout = experiment.training, experiment.rollout
    of_batch = training.groupless or rollout.deadline.kind == "continue"
    return (training.groups if of_batch else 1) * rollout.group_size


def _prefetch(experiment: AllSections) -> Iterator[str]:
    training, rollout = experiment.training, experiment.rollout
    if rollout.prefetch.kind == "none":
        return
    if rollout.deadline.kind == "continue" or (training.groupless and rollout.deadline.kind == "cut"):
        yield (
            "rollout.prefetch takes the groups that arrive first, so a batch has no deadline; set rollout.deadline or "
            "rollout.prefetch to 'none'"
        )
    if training.dynamic_sampling:
        yield (
            "training.dynamic_sampling samples more groups after a batch has been scored, but rollout.prefetch samples "
            "before that; set one of them off: training.dynamic_sampling = 0 or rollout.prefetch = 'none'"
        )
    if experiment.game.schedule.kind == "simultaneous":
        yield (
            "rollout.prefetch scores rollouts ahead, but game.schedule = 'simultaneous' changes the verifier "
            "meanwhile; set rollout.prefetch to 'none', or game.schedule to 'stackelberg'"
        )


def _dynamic_sampling(experiment: AllSections) -> Iterator[str]:
    training, rollout = experiment.training, experiment.rollout
    if not training.dynamic_sampling:
        return
    if training.groupless:
        yield (
            f"training.dynamic_sampling replaces groups, but training.loss = {training.loss.kind!r} uses none; set it "
            "to 0, or use a loss with groups, such as 'dapo'"
        )
    if rollout.deadline.kind == "continue":
        yield (
            "training.dynamic_sampling fills a batch before training, but rollout.deadline = 'continue' leaves groups "
            "to later batches; set training.dynamic_sampling to 0, or rollout.deadline to 'none' or 'cut'"
        )


# --- models and servers ----------------------------------------------------------------------------------------------


def _trained_layers(experiment: AllSections) -> Iterator[str]:
    training, verifier = experiment.training, experiment.verifier
    trained = {"training": training.adapters.rank}
    if experiment.task.kind != "play":  # self-play has no verifier
        trained["verifier"] = verifier.adapters.rank
    for section, rank in trained.items():
        if experiment.models.dtype != "float32" and not rank:
            yield (
                "models.dtype = 'bfloat16' rounds small updates of trained weights away; set it to 'float32' and "
                f"models.precision to 'bfloat16', or train adapters with {section}.adapters.rank = 16"
            )
    if training.router_replay and training.gradient_checkpointing:
        yield (
            "training.gradient_checkpointing computes layers again after training.router_replay has ended; set one of "
            "them to false"
        )


def _prover_servers(experiment: AllSections) -> Iterator[str]:
    serving, rollout = experiment.serving, experiment.rollout
    if experiment.weights.transport.kind == "lora" and not experiment.training.adapters.rank:
        yield (
            "weights.transport = 'lora' sends adapters, but training.adapters.rank = 0 trains none; set "
            "training.adapters.rank to 16, or weights.transport to 'filesystem'"
        )
    if rollout.engine.kind != "vllm":
        return
    if experiment.merges_adapters and experiment.models.dtype == "bfloat16":
        yield (
            f"weights.transport = {experiment.weights.transport.kind!r} sends servers merged weights, and models.dtype "
            "= 'bfloat16' rounds small updates of adapters away there; set weights.transport to 'lora', or "
            "models.dtype to 'float32'"
        )
    if (cluster := experiment.server_cluster) is not None:
        yield from _servers_on_cluster(cluster, experiment)
        return
    if not serving.servers:
        yield "rollout.engine = 'vllm' needs serving.servers; start one with `pvg serve EXPERIMENT`"
    if shared := sorted(set(serving.servers) & {*serving.verifier_servers, *serving.reference_servers}):
        yield (
            f"{shared[0]} is in serving.servers and also serves the verifier, but a server has one set of weights; "
            "start one server for each"
        )


def _servers_on_cluster(cluster: RayCluster, experiment: AllSections) -> Iterator[str]:
    serving = experiment.serving
    if serving.servers not in ((), Serving().servers):
        yield (
            "cluster = 'ray' starts the prover's servers, but serving.servers names some that run already; leave out "
            "serving.servers, or set cluster to 'none'"
        )
    if cluster.workers == 0:
        yield "cluster.workers = 0 leaves rollout.engine = 'vllm' no server on the cluster; set it to 1 or more"
    if cluster.gpus_per_worker and cluster.gpus_per_worker < serving.tensor_parallel:
        yield (
            f"cluster.gpus_per_worker = {cluster.gpus_per_worker} is below serving.tensor_parallel = "
            f"{serving.tensor_parallel}; raise the first, or lower the second"
        )
    for key in ("trainers", "min_workers", "max_workers"):
        if getattr(cluster, key) is not None:
            yield (
                f"cluster.{key} is for workers, but with rollout.engine = 'vllm' the cluster has only servers; leave "
                "it out"
            )


def _verifier_servers(experiment: AllSections) -> Iterator[str]:
    verifier, serving = experiment.verifier, experiment.serving
    if verifier.engine != "vllm":
        return
    if not serving.verifier_servers:
        yield (
            "verifier.engine = 'vllm' needs serving.verifier_servers; start one with `pvg serve EXPERIMENT --for "
            "verifier`, or set verifier.engine to 'torch'"
        )
    if verifier.head.kind not in ("scalar", "implicit"):
        yield (
            f"verifier.head = {verifier.head.kind!r} runs only with torch; set verifier.engine to 'torch', or "
            "verifier.head to 'implicit' or 'scalar'"
        )
    if serving.reference_servers and not getattr(verifier.head, "reference", 0.0):
        yield (
            f"serving.reference_servers are never asked: verifier.head = {verifier.head.kind!r} subtracts no reference "
            "here; leave them out"
        )
    if shared := set(serving.verifier_servers) & set(serving.reference_servers):
        yield (
            f"{sorted(shared)[0]} is in serving.verifier_servers and in serving.reference_servers, but a server has "
            "one set of weights; start one server for each"
        )
    for several, key, value in (
        (verifier.adapters.rank > 0, "adapters.rank", 0),
        (verifier.ensemble.size > 1, "ensemble", "none"),
    ):
        if several:
            yield (
                f"verifier.{key} cannot be served: a server has one verifier with whole weights; set verifier.engine "
                f"to 'torch', or verifier.{key} to {value!r}"
            )


# --- the game --------------------------------------------------------------------------------------------------------


def _verdicts(experiment: AllSections) -> Iterator[str]:
    """What a generative verifier cannot do, and what only it can do."""
    verifier, cluster = experiment.verifier, experiment.cluster.kind
    if not isinstance(verifier.head, VerdictHead):
        means_nothing = not isinstance(verifier.head, LogprobHead) or verifier.head.reference == 1.0
        if not verifier.steps and means_nothing:
            yield (
                f"verifier.steps = 0 leaves verifier.head = {verifier.head.kind!r} untrained, and its scores mean "
                "nothing; set it to 1 or more, verifier.head to 'generative', or verifier.head.reference to 0"
            )
        return
    without = "verifier.head = 'generative' cannot be combined with"
    for key, value, off in (
        ("verifier.engine", verifier.engine, "torch"),
        ("verifier.ensemble", verifier.ensemble.kind, "none"),
        ("rollout.engine", experiment.rollout.engine.kind, "torch"),
        ("cluster", "none" if cluster == "auto" else cluster, "none"),
    ):
        if value != off:
            yield f"{without} {key} = {value!r}; set {key} to {off!r}"
    if experiment.rollout.group_size == 1 and verifier.steps:
        yield f"{without} rollout.group_size = 1, because GRPO compares verdicts on a solution; set it to 2 or more"
    for key in ("loss", "pairing", "score_penalty"):
        if (value := getattr(verifier, key)) != getattr(Verifier(), key):
            yield f"verifier.{key} = {value!r} has no effect with verifier.head = 'generative'; leave it out"


def _pays_votes(game: Game) -> bool:
    """Whether the protocol pays the prover, in place of `game.reward`."""
    return isinstance(game.protocol, DebateProtocol | ConsultancyProtocol)


def _roles(experiment: AllSections) -> Iterator[str]:
    if experiment.task.kind == "play":  # one role, whose reward is a change in value
        return
    game, reward = experiment.game, experiment.game.reward
    one_role = game.sneaky_share in (0.0, 1.0)
    if reward.opposite_roles and one_role and not _pays_votes(game):
        yield (
            f"game.reward = {reward.kind!r} needs two roles, but game.sneaky_share = {game.sneaky_share} leaves one; "
            "set game.sneaky_share between 0 and 1, or game.reward to 'goodhart' or 'correctness'"
        )
    if reward.opposite_roles and (why := same_prompt(experiment)):
        yield f"game.reward = {reward.kind!r} pays the two roles for opposite things, but {why}"
    if game.stop != "steps" and (game.schedule.kind == "simultaneous" or ranks_of(experiment.cluster)):
        yield (
            f"game.stop = {game.stop!r} goes back to an earlier commit of the prover alone, which game.schedule = "
            "'simultaneous' and cluster.trainer_ranks do not allow; set game.stop to 'steps'"
        )
    if game.stop == "hack_alarm" and experiment.rollout.prefetch.kind != "none":
        yield (
            "game.stop = 'hack_alarm' samples with the newest policy alone, but rollout.prefetch samples ahead; set "
            "rollout.prefetch to 'none', or game.stop to 'steps'"
        )
    if experiment.game.schedule.kind == "simultaneous" and experiment.verifier.ensemble.kind != "none":
        yield (
            f"verifier.ensemble = {experiment.verifier.ensemble.kind!r} trains its members one after another, but "
            "game.schedule = 'simultaneous' trains one verifier while the prover trains; set verifier.ensemble to "
            "'none', or game.schedule to 'stackelberg'"
        )


def _code(experiment: AllSections) -> Iterator[str]:
    task, game = experiment.task.kind, experiment.game
    reward, protocol = game.reward, game.protocol.kind
    if isinstance(reward, GatedReward) and reward.floor >= -reward.similarity_weight:
        yield (
            f"game.reward.floor = {reward.floor} is not below every reward of an aligned solution: the smallest "
            f"is -game.reward.similarity_weight = {-reward.similarity_weight}; lower it"
        )
    if isinstance(reward, GatedReward) and reward.similarity_weight and task != "code":
        yield (
            f"game.reward.similarity_weight = {reward.similarity_weight} compares programs, but task.kind = {task!r} "
            "has none; set it to 0"
        )
    if task == "code" and protocol != "direct":
        yield (
            f"game.protocol = {protocol!r} needs solutions in steps with an answer, but task.kind = 'code' has "
            "programs; set game.protocol to 'direct'"
        )


def _diplomacy(experiment: AllSections) -> Iterator[str]:
    task = experiment.task.kind
    if task == "diplomacy_mini" and isinstance(experiment.prompts, WordedPrompts):
        yield (
            f"prompts = {experiment.prompts.kind!r} has no instructions for task.kind = 'diplomacy_mini', whose "
            "problems are for the embedded models; set it to 'tag'"
        )
    if task == "diplomacy_mini" and isinstance(experiment.game.protocol, CriticProtocol):
        yield (
            "game.protocol = 'critic' writes numbers, which the models of task.kind = 'diplomacy_mini' do not know; "
            "set game.protocol to 'direct' or 'challenge'"
        )
    if task not in ("diplomacy_mini", "diplomacy_plan"):
        return
    if (kind := experiment.game.protocol.kind) in ("decoupled", "consultancy"):  # a plan is its own answer
        yield (
            f"game.protocol = {kind!r} needs an answer besides the plan, which task.kind = {task!r} lacks; set it "
            "to 'direct' or 'challenge'"
        )


def _play(experiment: AllSections) -> Iterator[str]:
    task, training, rollout = experiment.task, experiment.training, experiment.rollout
    if not isinstance(task, PlayTask):
        return
    for key, only in PLAY_ONLY.items():
        value = value_of(experiment, key)
        if value != only:
            yield f"task.kind = 'play' does not support {key} = {value!r}; set it to {only!r}"
    if training.loss.kind == "spo":
        yield (
            "training.loss = 'spo' compares with earlier solutions of a problem, and task.kind = 'play' has none; set "
            "it to 'rae', or to a loss with groups, such as 'grpo'"
        )
    if rollout.engine.kind == "vllm" and "base" in (task.opponent, *task.references):
        yield (
            "task.opponent or task.references = 'base' needs a second engine, but rollout.engine = 'vllm' has servers "
            "for one policy; leave out 'base', or set rollout.engine to 'torch'"
        )


def _protocols(experiment: AllSections) -> Iterator[str]:
    game, reward = experiment.game, experiment.game.reward
    if isinstance(game.protocol, CriticProtocol | DebateProtocol) and experiment.prompts.kind == "plain":
        yield (
            f"prompts = 'plain' gives every voice of game.protocol = {game.protocol.kind!r} one prompt; set it to "
            "'tag', 'chat' or 'text'"
        )
    if not isinstance(game.protocol, DirectProtocol | DecoupledProtocol | ConsultancyProtocol):
        several = f"game.protocol = {game.protocol.kind!r} has several turns"
        if experiment.rollout.deadline.kind == "continue":
            yield f"rollout.deadline = 'continue' needs rollouts of one turn, but {several}; set it to 'none' or 'cut'"
        if experiment.training.router_replay:
            yield f"training.router_replay needs rollouts of one turn, but {several}; set it to false"
    if not isinstance(game.protocol, DecoupledProtocol):
        return
    if not reward.for_translators:
        yield (
            f"game.reward = {reward.kind!r} pays for correctness, but game.protocol = 'decoupled' asks for the "
            "solver's answer or another one; set game.reward to 'decoupled', 'cgc' or 'goodhart'"
        )
    if experiment.prompts.kind == "plain":
        yield (
            "prompts = 'plain' cannot show a translator the solver's solution; set it to 'tag', 'chat' or 'text', or "
            "game.protocol to 'direct'"
        )
    whole = f"game.protocol.solver = {game.protocol.solver!r} is a whole model"
    if game.protocol.solver != "base" and experiment.weights.transport.kind == "lora":
        yield (
            f"{whole}, but weights.transport = 'lora' sends adapters; set weights.transport to 'filesystem', or "
            "game.protocol.solver to 'base'"
        )
    elif game.protocol.solver != "base" and experiment.samples_on_base:
        yield (
            f"{whole}, but with models.dtype = 'bfloat16' the engine loads only adapters; set models.dtype to "
            "'float32', or game.protocol.solver to 'base'"
        )


def _workers(experiment: AllSections) -> Iterator[str]:
    cluster = experiment.cluster
    if not isinstance(cluster, LocalCluster | RayCluster):
        return
    yield from _trainer_ranks(experiment)
    if experiment.server_cluster is not None:
        if (device := experiment.models.device).startswith("cuda:"):
            yield f"Ray reserves the trainer's GPU, so models.device cannot be {device!r}; set it to 'cuda'"
        return
    if isinstance(cluster, RayCluster) and cluster.gpus_per_worker:
        yield (
            f"cluster.gpus_per_worker = {cluster.gpus_per_worker} is for vLLM servers, but with rollout.engine = "
            "'torch' each worker has one GPU if the trainer has one; set it to 0, or rollout.engine to 'vllm'"
        )
    if isinstance(cluster, RayCluster) and cluster.address is not None and shards_of(cluster) is None:
        yield "cluster.address needs cluster.workers, because results depend on their number; set it"
    if not has_workers(cluster):
        if ranks_of(cluster) is None:
            yield f"cluster.workers = 0 leaves nothing to cluster = {cluster.kind!r}; set cluster to 'none'"
        return
    if (device := experiment.models.device) not in ("auto", "cpu", "cuda"):
        yield f"workers of cluster = {cluster.kind!r} cannot use models.device = {device!r}; set it to 'cuda'"
    for key, engine in (
        ("rollout.engine", experiment.rollout.engine.kind),
        ("verifier.engine", experiment.verifier.engine),
    ):
        if engine == "vllm":
            yield f"cluster = {cluster.kind!r} computes with torch, but {key} = 'vllm'; set cluster to 'none'"
    yield from _limits(cluster)
    yield from _trainers(cluster, experiment)


def _limits(cluster: LocalCluster | RayCluster) -> Iterator[str]:
    lowest, highest, shards = cluster.min_workers, cluster.max_workers, cluster.workers
    if lowest is not None and highest is not None and lowest > highest:
        yield (
            f"cluster.min_workers = {lowest} is more than cluster.max_workers = {highest}; "
            "lower the one or raise the other"
        )
    for key, limit in (("min_workers", lowest), ("max_workers", highest)):
        if limit is not None and shards is not None and limit > shards:
            yield (
                f"cluster.{key} = {limit} is more than cluster.workers = {shards}, the number of shards, and a process "
                f"without a shard has nothing to do; set cluster.{key} to {shards} or less, "
                f"or cluster.workers to {limit}"
            )


def _trainers(cluster: LocalCluster | RayCluster, experiment: AllSections) -> Iterator[str]:
    if cluster.trainers is None:
        return
    shards = shards_of(cluster)
    if shards is None or shards <= cluster.trainers:
        yield (
            f"cluster.trainers = {cluster.trainers} needs more workers than that, because the others sample and score; "
            f"set cluster.workers to {cluster.trainers + 1} or more"
        )
    if experiment.rollout.prefetch.kind == "none":
        yield (
            f"cluster.trainers = {cluster.trainers} has an effect only while pvg samples ahead; "
            "set rollout.prefetch to 'fresh' or 'old', or leave out cluster.trainers"
        )


def _trainer_ranks(experiment: AllSections) -> Iterator[str]:
    ranks, training = ranks_of(experiment.cluster), experiment.training
    if ranks is None:
        return
    without = f"cluster.trainer_ranks = {ranks} cannot be combined with"
    if training.router_replay:
        yield f"{without} training.router_replay; set training.router_replay to false"
    if getattr(experiment.cluster, "trainers", None) is not None:
        yield f"{without} cluster.trainers, because workers do not train the prover then; leave out cluster.trainers"
    if experiment.models.device not in ("auto", "cpu", "cuda"):
        yield f"{without} models.device = {experiment.models.device!r}; set models.device to 'cpu' or 'cuda'"


def _warmup(experiment: AllSections) -> Iterator[str]:
    if experiment.warmup.path is None:
        return
    if experiment.task.kind == "play":
        yield (
            "warmup shows solutions of questions, but task.kind = 'play' has no questions; leave out warmup.path, and "
            "set models.prover.source to the prover of another run: run:NAME"
        )
    if experiment.weights.transport.kind == "lora":
        yield (
            "weights.transport = 'lora' sends only adapters, so the servers would not have the warmed prover below "
            "them; set it to 'filesystem', or start from a run that is warm: models.prover.source = 'run:NAME/warmup'"
        )
    if experiment.models.dtype == "bfloat16" and experiment.training.adapters.rank:
        yield (
            "a warm start adds its adapters to weights in models.dtype = 'bfloat16', which rounds small updates away; "
            "set models.dtype to 'float32' and models.precision to 'bfloat16'"
        )


IMPOSSIBLE = (
    *(_verdicts, _batch_sizes, _old_logprobs, _prefetch, _deadline, _prover_servers, _verifier_servers),
    *(_trained_layers, _roles, prompt_conflicts, _dynamic_sampling, _code, _diplomacy, _protocols, _play, _workers),
    *(_warmup, _attacks),
)


# --- settings that work together, but are probably not intended ------------------------------------------------------


def warnings_about(experiment: AllSections) -> list[str]:
    """Combinations that work, but are probably not intended: one sentence each."""
    return [sentence for rule in ODD for sentence in rule(experiment)]


def _switch_warnings(experiment: AllSections) -> Iterator[str]:
    training, warmup, reward = experiment.training, experiment.warmup, experiment.game.reward
    if experiment.task.kind != "play" and isinstance(reward, DecoupledReward) and reward.floor >= 0:
        yield f"game.reward.floor = {reward.floor} is not below every aligned reward; set it below 0"
    if warmup.path is None and warmup != Warmup():
        yield "the settings of [warmup] have no effect without a file; set warmup.path"
    if training.loss.kind == "dapo" and training.kl.coefficient not in (0.0, Kl().coefficient):
        yield "training.kl.coefficient has no effect with training.loss = 'dapo'; set it to 0"
    if experiment.task.kind == "code" and experiment.task.sandbox == "reduced":
        yield (
            "task.sandbox = 'reduced' runs a model's programs with the isolation that this machine has; `pvg doctor` "
            "shows it"
        )
    verifier, head = experiment.verifier, experiment.verifier.head
    for key, used in (("keeps", verifier.keeps != "nothing"), ("ensemble", verifier.ensemble.kind != "none")):
        if used and not verifier.steps:
            yield f"verifier.{key} has no effect with verifier.steps = 0, which trains no verifier"
    if isinstance(head, LogprobHead) and head.reference < 1.0 and isinstance(reward, CgcReward):
        # A nat per token is more than fluent solutions need, and less than unlikely ones.
        low = -head.beta * (1.0 - head.reference) * experiment.rollout.max_tokens
        if reward.floor > low:
            yield (
                f"game.reward.floor = {reward.floor:g} may be above a long solution's score, which ends the game: with "
                f"verifier.head.reference = {head.reference:g} a score is a log-probability; set it to {4 * low:g}"
            )
    if experiment.weights.transport.kind == "nccl":
        yield "weights.transport = 'nccl' is experimental: no GPU has run it; the tested one is 'filesystem'"


def _staleness_warnings(experiment: AllSections) -> Iterator[str]:
    deadline = experiment.rollout.deadline
    if deadline.kind != "none" and rollouts_of_deadline(experiment) <= deadline.min_rollouts:
        yield f"rollout.deadline has no effect: it keeps {deadline.min_rollouts} rollouts, and there are no more"
    training, rollout, prefetch = experiment.training, experiment.rollout, experiment.rollout.prefetch
    separate = getattr(experiment.cluster, "trainers", None) is not None
    if prefetch.kind != "none" and rollout.engine.kind == "torch" and not separate:
        yield (
            "rollout.prefetch gains nothing with rollout.engine = 'torch', which samples in the thread that "
            "trains; set rollout.engine to 'vllm', or rollout.prefetch to 'none'"
        )
    stale = prefetch.kind != "none" or rollout.deadline.kind == "continue"
    if rollout.max_staleness is not None and not stale:
        yield "rollout.max_staleness has no effect without rollout.prefetch or rollout.deadline = 'continue'"
    precision, weights = experiment.models.compute_dtype, training.importance
    weights = rollout.default_importance(precision) if weights == "auto" else weights
    if stale and training.loss.kind == "rloo" and weights == "none":
        yield (
            "training.loss = 'rloo' has no ratio, so stale rollouts count as fresh ones; set training.importance to "
            "'decoupled'"
        )
    if training.minibatches > 1 and training.loss.kind == "rloo":
        yield (
            "training.loss = 'rloo' has no ratio, so later minibatches ignore that the weights have changed; set "
            "training.minibatches to 1, or training.loss to 'grpo'"
        )


def _protocol_warnings(experiment: AllSections) -> Iterator[str]:
    game, training, prover = experiment.game, experiment.training, experiment.models.prover.source
    kind, simultaneous = game.protocol.kind, getattr(game.protocol, "order", "") == "simultaneous"
    answered = kind in ("decoupled", "debate", "consultancy") and not simultaneous
    reads = "critic" if kind == "critic" else "dialogue" if answered else ""
    if reads and prover.startswith("embedded:modchain-") and prover != f"embedded:modchain-{reads}":
        yield (
            f"models.prover.source = {prover!r} has never seen such prompts with a solution or an answer; set it to "
            f"'embedded:modchain-{reads}' for game.protocol = {kind!r}"
        )
    if _pays_votes(game) and game.reward != Game().reward:
        yield f"game.reward = {game.reward.kind!r} has no effect with game.protocol = {kind!r}, which pays votes"
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


def _rank_warnings(experiment: AllSections) -> Iterator[str]:
    whole = ranks_of(experiment.cluster) is not None and not experiment.training.adapters.rank
    if whole and experiment.models.device != "cpu" and experiment.rollout.logprobs == "recomputed":
        yield (
            "rollout.logprobs = 'recomputed' computes on the CPU with cluster.trainer_ranks and all weights, even "
            "if the ranks train on GPUs; set it to 'sampled', or training.adapters.rank above 0"
        )


ODD = (prompt_warnings, _switch_warnings, _staleness_warnings, _protocol_warnings, _rank_warnings)
