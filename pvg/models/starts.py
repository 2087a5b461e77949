"""Opens the models that a run trains, as they are at the start of training: the prover of a round, and its verifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from pvg.config.training import Adapters, Models, Verifier
from pvg.models import open_model
from pvg.models.adapters import attach_adapters
from pvg.models.heads import VerifierModel, build_verifier
from pvg.seeds import seed_for

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel


class BaseProver(Protocol):
    """The base prover of a game, and the adapters that train it: the players of a run (pvg.game.players.Players)."""

    seed: int
    adapters: Adapters
    base: LanguageModel


def open_learner(players: BaseProver, round_: int) -> LanguageModel:
    """The prover at the start of a round's training: a copy of the base, or adapters on the base's own weights. The
    caller closes it. Raises what `attach_adapters` raises."""
    adapters = players.adapters
    if adapters.kind == "none":
        return players.base.copy()
    return attach_adapters(players.base, adapters.rank, adapters.alpha, seed_for(players.seed, round_, "adapters"))


def open_verifier(
    section: Verifier,
    models: Models,
    seed: int,
    device: torch.device,
    base: LanguageModel | None,
    round_: int = 0,
    member: int = 0,
    like: VerifierModel | None = None,
) -> VerifierModel:
    """See `pvg.game.players.Players.open_verifier`. `seed`: the run's. Without `base`, a verifier that adapts it opens
    its own copy."""
    head_seed, seed = seed_for(seed, "verifier-head"), seed_for(seed, round_, "verifier-start", member)
    if section.adapters.kind == "none":
        model = open_model(models.verifier, device)
    elif base is not None and verifier_is_on_base(section, models):
        model = _with_adapters(section, base, seed)
    else:
        with open_model(models.verifier, device) if like is None else like.start_model() as start:
            model = _with_adapters(section, start, seed)
    # A user's head must draw the same numbers whenever this run opens one, because a version covers only trained
    # tensors.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(head_seed)
        verifier = build_verifier(section, model)
    if like is not None:
        verifier.share_with(like)
    if member:  # the first member equals a verifier without an ensemble
        verifier.start_elsewhere(seed)
    return verifier


def verifier_is_on_base(section: Verifier, models: Models) -> bool:
    """Whether the verifier is adapters on the base prover's own weights."""
    return section.adapters.kind != "none" and models.verifier == models.prover


def _with_adapters(section: Verifier, start: LanguageModel, seed: int) -> LanguageModel:
    adapters = section.adapters
    return attach_adapters(start, adapters.rank, adapters.alpha, seed, section="verifier")
