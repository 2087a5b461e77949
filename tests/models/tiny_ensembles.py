"""Members of tiny ensembles: verifiers of one start, each moved its own way, as training would."""

from __future__ import annotations

import torch
from torch import Tensor
from verifier.tiny_verifiers import digits_tokenizer, english_tokenizer, language_model

from pvg.config.training import Verifier
from pvg.models.heads import VerifierModel, build_verifier
from pvg.models.language_model import LanguageModel

WIDTH = 16


def language(head: str) -> LanguageModel:
    tokenizer = english_tokenizer() if head == "yes_token" else digits_tokenizer()
    return language_model(tokenizer, context=64)


def member(head: str, seed: int, like: VerifierModel | None = None) -> VerifierModel:
    """Moved away from the common start by `seed`."""
    model = build_verifier(Verifier(head=head), language(head))  # type: ignore[arg-type]
    if like is not None:
        model.share_with(like)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.trainable_state().values():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return model


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [rows, WIDTH] padded to the right, lengths and prompt lengths."""
    generator = torch.Generator().manual_seed(3)
    ids_BL = torch.randint(2, 19, (rows, WIDTH), generator=generator)
    lengths_B = torch.randint(6, WIDTH + 1, (rows,), generator=generator)
    return ids_BL, lengths_B, torch.full((rows,), 4)
