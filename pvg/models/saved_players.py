"""Opens a player of another run as a model: `run:RUN[/round-N][/prover|/verifier]`.

A prover's weights are whole. A verifier's are what its training changed: the language model or its adapters, which are
merged here, and a head. Only the language model is the result, because the run that opens it builds its own head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pvg.config.run_ids import parse_run_id, shown_source
from pvg.errors import ConfigurationError, PvgError
from pvg.models.adapters import attach_adapters
from pvg.models.language_model import LanguageModel
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_players import SavedPlayer, find_player

if TYPE_CHECKING:
    from torch import Tensor

    from pvg.config.models import ModelSection

BACKBONE = "backbone."  # marks the language model's tensors in a verifier's (pvg.models.heads.VerifierModel)


def open_saved_player(
    section: ModelSection, device: torch.device, open_base: Callable[[ModelSection, torch.device], LanguageModel]
) -> LanguageModel:
    """The model that `section.source` names. `open_base` opens the model from which that run trained it. The caller
    closes the result.

    Raises the errors of `find_player`, and those of `open_base` with the name of the run.
    """
    saved = find_player(parse_run_id(section.source))
    tensors, _ = read_checkpoint(saved.run.weights, saved.weights)
    with naming_the_run(section.source, saved):
        base = open_base(saved.section.model_copy(update={"dtype": section.dtype}), device)
    try:
        with torch.no_grad():
            model = _prover(base, tensors) if saved.player == "prover" else _verifier(saved, base, tensors)
    except BaseException:
        base.close()
        raise
    return LanguageModel(model.module, model.tokenizer, saved.name)


@contextmanager
def naming_the_run(source: str, saved: SavedPlayer) -> Iterator[None]:
    """Adds to an error about the model that a run trained which source named the run."""
    try:
        yield
    except PvgError as error:
        raise type(error)(
            f"{shown_source(source)} was trained from {saved.section.source!r}: {error.message}", error.remedy
        ) from error


def _prover(base: LanguageModel, tensors: Mapping[str, Tensor]) -> LanguageModel:
    base.load_weights(tensors)
    return base


def _verifier(saved: SavedPlayer, base: LanguageModel, tensors: Mapping[str, Tensor]) -> LanguageModel:
    adapters, start = saved.experiment.verifier.adapters, base
    if adapters.kind != "none":
        start = attach_adapters(base, adapters.rank, adapters.alpha, seed=0, section="verifier")
    weights = dict(start.module.named_parameters())
    own = {name.removeprefix(BACKBONE): tensor for name, tensor in tensors.items() if name.startswith(BACKBONE)}
    if not own or any(name not in weights or weights[name].shape != tensor.shape for name, tensor in own.items()):
        raise ConfigurationError(
            f"The weights {saved.run.weights / saved.weights} do not fit {saved.section.source!r}.",
            "The model that the run trained has changed. Restore it.",
        )
    for name, tensor in own.items():
        weights[name].copy_(tensor)
    return base if start is base else start.copy()
