"""Members of tiny ensembles: verifiers of one start, each moved its own way, as training would."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pvg.config.training import Verifier
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.heads import VerifierModel, build_verifier
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer

WIDTH = 16


def language(head: str) -> LanguageModel:
    tokenizer = _with_answers() if head == "yes_token" else Tokenizer(modchain_tokenizer(), "tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return LanguageModel(LlamaForCausalLM(config), tokenizer, "tiny")


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


def _with_answers() -> Tokenizer:
    from tokenizers import Tokenizer as Rules
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rules = Rules(models.WordLevel({token: n for n, token in enumerate(["?", "<eos>", "yes", "no"])}, "?"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<eos>", unk_token="?"), "words")
