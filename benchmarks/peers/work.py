"""What both sides of a comparison work on: one model directory, and the work in one JSON file beside it.

    folder/model/        a Llama of 0.86M parameters at random weights, with a tokenizer of one token per character
    folder/work.json     prompts or solutions, and every setting that both sides must share

Read by workers of both environments, so nothing here imports pvg or TRL; `make_model` needs transformers.

A worker is a process of one side (see sides.py). Its orders come as lines on stdin, and its answers go as JSON lines to
what was stdout:

    orders = Orders()
    orders.answer({"parameters": 860_032})      # ready
    while orders.wait():
        orders.answer({"step_s": one_step()})
"""

from __future__ import annotations

import itertools
import json
import os
import random
import string
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# The order of modchain's own characters, and letters up to the vocabulary that gives the model its 860,032 parameters.
CHARACTERS = "0123456789+=;?AHS" + "".join(c for c in string.ascii_lowercase + string.ascii_uppercase if c not in "AHS")
VOCABULARY = 54
PAD, EOS, NEVER = "<pad>", "<eos>", "<never>"
LAYERS, WIDTH, INTERMEDIATE, HEADS, CONTEXT = 4, 128, 384, 4, 128
PARAMETERS = 860_032
DRAWS = 1000  # attempts to find a new solution


def model_folder(folder: Path) -> Path:
    return folder / "model"


def write_work(folder: Path, work: dict[str, Any]) -> None:
    (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")


def read_work(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    return found


def make_model(folder: Path, *, stops: bool, seed: int = 0) -> None:
    """Write the model and its tokenizer. Without `stops` the end token is one that is never sampled, so all completions
    have the full length, on either side: its logit is about 60 below the others', by a dimension of the hidden states
    that no layer changes."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    end = EOS if stops else NEVER
    tokens = [PAD, EOS, *CHARACTERS[: VOCABULARY - 3], CHARACTERS[VOCABULARY - 3] if stops else NEVER]
    rules = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=PAD))
    rules.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    rules.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rules, pad_token=PAD, eos_token=end, model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=CONTEXT,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=None,
            eos_token_id=tokens.index(EOS) if stops else None,
        )
    )  # fmt: skip
    if not stops:
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 3.0
            model.model.embed_tokens.weight[tokens.index(NEVER), 0] = -3.0
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight[0] = 0.0
                layer.mlp.down_proj.weight[0] = 0.0
    logging.disable_progress_bar()
    model.save_pretrained(model_folder(folder))
    tokenizer.save_pretrained(model_folder(folder))


def peak_gb() -> float:
    """The most memory so far in 10^9 bytes, summed over this process and its children, as Linux counts it."""
    status = [Path(f"/proc/{number}/status").read_text() for number in (os.getpid(), *_children(os.getpid()))]
    return sum(int(text.partition("VmHWM:")[2].split()[0]) for text in status) * 1024 / 1e9


def _children(process: int) -> Iterator[int]:
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            yield from (child, *_children(child))


def reward(completion: str) -> float:
    """A reward that costs nothing and differs within a group: whether the number of zeros is odd."""
    return float(completion.count("0") % 2)


# --- solutions for the verifiers -------------------------------------------------------------------------------------


def solutions(question: str, modulus: int, count: int, rng: random.Random) -> list[tuple[str, bool]]:
    """`count` different solutions of a chain of sums ("7+5+8?"), alternately right and wrong. With modulus 10 all have
    the same length.

    Each adds the terms in a random order; a wrong one also states one sum falsely. Raises ValueError for a chain with
    fewer solutions.
    """
    terms = [int(term) for term in question.rstrip("?").split("+")]
    found: dict[str, bool] = {}
    for correct in itertools.islice(itertools.cycle((True, False)), count):
        for _ in range(DRAWS):
            if (text := _written(terms, modulus, correct, rng)) not in found:
                found[text] = correct
                break
        else:
            raise ValueError(f"{question} has no {count} different solutions")
    return list(found.items())


def _written(terms: list[int], modulus: int, correct: bool, rng: random.Random) -> str:
    first, *rest = rng.sample(terms, len(terms))
    flawed = -1 if correct else rng.randrange(len(rest))
    text, running = "", first
    for place, term in enumerate(rest):
        total = (running + term) % modulus
        if place == flawed:
            total = (total + rng.randrange(1, modulus)) % modulus
        text += f"{running}+{term}={total};"
        running = total
    return f"{text}A{running}"


def pairs_of(problem: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Every pair of a right and a wrong solution of a problem of work.json, as TRL's reward trainer takes them."""
    right = [text for text, correct in problem["solutions"] if correct]
    wrong = [text for text, correct in problem["solutions"] if not correct]
    for chosen, rejected in itertools.product(right, wrong):
        yield {"prompt": problem["question"], "chosen": chosen, "rejected": rejected}


# --- a worker's end of a comparison -----------------------------------------------------------------------------------

SAMPLE, STOP = "sample", "stop"


class Orders:
    """Redirects stdout to stderr, because libraries print, and stdout must contain only answers, one per line."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def answer(self, facts: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()

    def wait(self) -> bool:
        """Block until the next order. True for a sample, False for a stop or if the other process has ended."""
        return sys.stdin.readline().strip() == SAMPLE
