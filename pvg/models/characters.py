"""The tokenizers of the embedded models: one token per character; pad and end are the only special tokens.

tokenizer = modchain_tokenizer()
tokenizer.decode(tokenizer.encode("H7+5+8?7+5=2;2+8=0;A0"))
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
# Digits, the symbols of a trace (`7+5=2;2+8=0;A0`), the question mark that ends a prompt, and the two role tags.
CHARACTERS = "0123456789+=;?AHS"
# Provinces, the symbols of a plan (`deg/bf>d?d.;e+d;g.!bd;f.`), the adjudicator's answers (`=+`, `=-`), the role tags.
DIPLOMACY_CHARACTERS = "abcdefgh/>?.;+-=!HS"


def modchain_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(CHARACTERS)


def diplomacy_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(DIPLOMACY_CHARACTERS)


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Ids: pad 0, end 1, then `characters` in order. Other text becomes pad, which pvg's Tokenizer rejects."""
    vocabulary = {token: number for number, token in enumerate([PAD, EOS, *characters])}
    rules = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    rules.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    rules.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=rules, pad_token=PAD, eos_token=EOS, model_max_length=256, clean_up_tokenization_spaces=False
    )
