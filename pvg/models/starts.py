"""Opens the models that a run trains, as they are at the start of training: the prover of a round, and its verifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from pvg.config.training import Verifier
from pvg.models import open_model
from pvg.models.adapters import attach_adapters
from pvg.models.heads import VerifierModel, build_verifier
from pvg.seeds import seed_for

if TYPE_CHECKING:
    from pvg.config.experiment import Experiment
    from pvg.models.language_model import LanguageModel


class BaseProver(Protocol):
    """The base prover of an experiment: the players of a run (pvg.game.players.Players)."""

    @property
    def experiment(self) -> Experiment: ...

    @property
    def base(self) -> LanguageModel: ...


def open_learner(players: BaseProver, round_: int) -> LanguageModel:
    """The prover at the start of a round's training: a copy of the base, or adapters on the base's own weights. The
    caller closes it. Raises what `attach_adapters` raises."""
    experiment, training = players.experiment, players.experiment.training
    adapters = training.adapters
    if adapters.kind == "none":
        return players.base.copy()
    seed = seed_for(experiment.seed, round_, "adapters")
    return attach_adapters(players.base, adapters.rank, adapters.alpha, seed)


def open_verifier(
    experiment: Experiment,
    device: torch.device,
    base: LanguageModel | None,
    round_: int = 0,
    member: int = 0,
    like: VerifierModel | None = None,
) -> VerifierModel:
    """See `pvg.game.players.Players.open_verifier`. Without `base`, a verifier that adapts it opens its own copy."""
    section, models, place = experiment.verifier, experiment.models, (round_, "verifier-start", member)
    seed = seed_for(experiment.seed, *place)
    if section.adapters.kind == "none":
        model = open_model(models.verifier, device)
    elif base is not None and verifier_is_on_base(experiment):
        model = _with_adapters(section, base, seed)
    else:
        with open_model(models.verifier, device) if like is None else like.start_model() as start:
            model = _with_adapters(section, start, seed)
    # A user's head must draw the same numbers whenever this run opens one, because a version covers only trained
    # tensors.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed_for(experiment.seed, "verifier-head"))
        verifier = build_verifier(section, model)
    if like is not None:
        verifier.share_with(like)
    if member:  # the first member equals a verifier without an ensemble
        verifier.start_elsewhere(seed)
    return verifier


def verifier_is_on_base(experiment: Experiment) -> bool:
    """Whether the verifier is adapters on the base prover's own weights."""
    return experiment.verifier.adapters.kind != "none" and experiment.models.verifier == experiment.models.prover


def _with_adapters(section: Verifier, start: LanguageModel, seed: int) -> LanguageModel:
    adapters = section.adapters
    return attach_adapters(start, adapters.rank, adapters.alpha, seed, section="verifier")
