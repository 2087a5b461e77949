"""What both sides of a comparison work on: the models, and the work in one JSON file beside them.

    folder/model/        a Llama of 0.86M parameters at random weights, with a tokenizer of one token per character; or
                         the experiment's prover
    folder/verifier/     of a game: the experiment's verifier, if it is another one
    folder/work.json     prompts or problems, and every setting that both sides must share

Read by workers of both environments, so nothing here imports pvg or TRL; `make_model` needs transformers.

A worker is a process of one side (see sides.py). Its orders come as lines on stdin, and its answers go as JSON lines to
what was stdout:

    orders = Orders()
    orders.answer({"parameters": 860_032})      # ready
    while orders.wait():
        orders.answer({"step_s": one_step()})
"""

from __future__ import annotations

import json
import math
import os
import re
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# The order of modchain's own characters, and letters up to the vocabulary that gives the model its 860,032 parameters.
CHARACTERS = "0123456789+=;?AHS" + "".join(c for c in string.ascii_lowercase + string.ascii_uppercase if c not in "AHS")
VOCABULARY = 54
PAD, EOS, NEVER = "<pad>", "<eos>", "<never>"
LAYERS, WIDTH, INTERMEDIATE, HEADS, CONTEXT = 4, 128, 384, 4, 128
PARAMETERS = 860_032


def model_folder(folder: Path, of: str = "model") -> Path:
    own = folder / of
    return own if own.exists() else folder / "model"


def write_work(folder: Path, work: dict[str, Any]) -> None:
    (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")


def read_work(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    return found


def make_model(folder: Path, *, stops: bool) -> None:
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
    torch.manual_seed(0)
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


# --- the solutions of a game, and what came out of it ---------------------------------------------------------------

HELPFUL, SNEAKY = "H", "S"
CHAIN = r"^(?:[0-9]\+[0-9]=[0-9];)+A([0-9])$"  # a solution of a chain of sums modulo 10, as DataTask.pattern
# Measure -> pvg's metric of a round.
RESULTS = {
    "helpful_accuracy": "helpful_accuracy",
    "flaws_accepted": "fooled_rate_at_90",
    "verifier_auc": "verifier_auc",
}
ACCEPTED = 0.9  # of the correct helpful solutions, at the threshold for flaws


def graded(pattern: str, answer: str, text: str) -> tuple[bool, bool]:
    """(well-formed, correct): pvg's grade by a pattern. The last line with a match counts, and its group is the
    answer."""
    found = [match for line in text.splitlines() for match in re.finditer(pattern, line.strip())]
    return bool(found), bool(found) and found[-1][1] == answer


def rate_factor(step: int, warmup: int, steps: int) -> float:
    """Of the learning rate in a step (from 0): pvg's linear schedule. That of transformers begins with 0."""
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def results(solutions: Sequence[tuple[str, str, bool, bool]], scores: Sequence[float]) -> dict[str, float]:
    """RESULTS of (a problem's id, role, well-formed, correct), as pvg.game.statistics computes them: the threshold for
    flaws comes from the correct helpful solutions of the other half of the problems."""
    problems, roles, formed, correct = zip(*solutions, strict=True)
    score_N, formed_N, correct_N = np.array(scores), np.array(formed), np.array(correct)
    helpful_N, (_, problem_N) = np.array(roles) == HELPFUL, np.unique(problems, return_inverse=True)
    flaw_N, accepted_N = ~helpful_N & formed_N & ~correct_N, np.full(len(scores), math.nan)
    for half in (0, 1):
        solved = np.sort(score_N[helpful_N & correct_N & (problem_N % 2 != half)])
        if len(solved):
            own_N, threshold = problem_N % 2 == half, solved[len(solved) - math.ceil(ACCEPTED * len(solved) - 1e-9)]
            accepted_N[own_N] = score_N[own_N] >= threshold
    above_CI = score_N[correct_N][:, None] - score_N[~correct_N][None]
    auc = float(np.mean((above_CI > 0) + 0.5 * (above_CI == 0)))
    found = (float(correct_N[helpful_N].mean()), float(accepted_N[flaw_N].mean()), auc)
    return dict(zip(RESULTS, found, strict=True))


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
