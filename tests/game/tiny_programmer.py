"""A character model that has learnt by heart to write a few programs, right ones and flawed ones, and its problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pvg.tasks.code import CodeEntry, read_entries
from pvg.tasks.code_problems import make_problem

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
NUMBERS = (1, 2, 3, 6)  # of which both halves of the problems have some
STEPS = 150


def rows() -> list[dict[str, Any]]:
    """Add k. The hidden tests contain no large numbers."""
    return [
        {
            "id": f"add-{k}",
            "question": f"{k} more",
            "entry": "f",
            "reference": f"def f(n):\n    return n + {k}",
            "visible": [{"input": [1], "output": 1 + k}],
            "hidden": [{"input": [n], "output": n + k} for n in (0, 5)],
            "check": "def valid(n):\n    return n >= 0",
        }
        for k in NUMBERS
    ]


def completions(k: int) -> list[tuple[str, str]]:
    """(role's tag, what is learnt by heart): right and wrong helpful ones, a proven flaw, and a flaw without proof."""
    return [
        ("H", f"def f(n):return n+{k}"),
        ("H", f"def f(n):return n*{k}"),
        ("S", f"def f(n):return n+{k}-(n>9)\nCERTIFICATE: [10]"),
        ("S", f"def f(n):return n+{k}-(n==5)"),
    ]


def write_problems(folder: Path) -> Path:
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows())))
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    rules = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    rules.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    rules.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="<pad>", eos_token="<eos>", model_max_length=512)


def untrained() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2 + len(CHARACTERS), hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def programmer(problems: Path, *, steps: int = STEPS) -> LlamaForCausalLM:
    """Trained on what it is to write, and on nothing else."""
    model, fast = untrained(), tokenizer()
    texts = []
    for entry in read_entries(problems / "train.jsonl", 1):
        assert isinstance(entry, CodeEntry)
        question = make_problem(entry.id, entry.question, entry.signature, entry.code).question
        texts += [(tag + question, text) for tag, text in completions(int(entry.id.removeprefix("add-")))]
    encoded = [(fast.encode(prompt), [*fast.encode(text), 1]) for prompt, text in texts]
    longest = max(len(prompt) + len(text) for prompt, text in encoded)
    ids_BL = torch.zeros(len(encoded), longest, dtype=torch.long)
    labels_BL = torch.full_like(ids_BL, -100)
    for row, (prompt, text) in enumerate(encoded):
        whole = torch.tensor(prompt + text)
        ids_BL[row, : len(whole)] = whole
        labels_BL[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=max(steps, 2))
    for _ in range(steps):
        loss = model(input_ids=ids_BL, labels=labels_BL).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
