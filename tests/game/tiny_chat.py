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


# A task in a Python file, with its own words in the prompts.
SUMS = """
from pvg.records import Grade, Problem, Role, Wording

WORDING = Wording(
    {Role.HELPFUL: "Add. End with = and the sum.", Role.SNEAKY: "Add wrongly. End with = and a sum."},
    "1 + 1", {Role.HELPFUL: "=2", Role.SNEAKY: "=3"}, "={answer}",
)


class Sums:
    def problems(self, split):
        start = 0 if split == "train" else 100
        return [Problem(f"{n}", f"{n} + 1", str(n + 1), {"wording": WORDING}) for n in range(start, start + 40)]

    def grade(self, problem, completion):
        answer = completion.rpartition("=")[2].strip()
        return Grade(answer == problem.answer, answer.isdigit(), answer)
"""
