"""A tokenizer of characters with a chat template, for tests that look at prompts."""

from __future__ import annotations

from tokenizers import Tokenizer as Rules
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pvg.models.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|s|>{{ m.role }}|{{ m.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant|{% endif %}"
)


def chatting(*words: str) -> Tokenizer:
    """`words`: tokens besides the characters."""
    characters = ["<|e|>", "<|s|>", "<unk>", "\n", *map(chr, range(32, 127))]
    rules = Rules(models.WordLevel({token: number for number, token in enumerate(characters)}, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rules.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<|e|>", additional_special_tokens=["<|s|>"])
    fast.add_tokens(list(words))
    fast.chat_template = TEMPLATE
    return Tokenizer(fast, "chatting")
