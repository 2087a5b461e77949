"""The measures straight from their formulas: one forward pass of the whole text for each probability, no batches."""

from __future__ import annotations

import math

import torch


def probability(model, prompt: str, before: str, answer: str) -> float:
    """P(answer | prompt, before), token by token."""
    ids = [int(token) for token in [*model.tokenizer.opening(prompt), *model.tokenizer.encode(before)]]
    total = 0.0
    for token in model.tokenizer.encode(answer).tolist():
        with torch.no_grad():
            logits_V = model.module(input_ids=torch.tensor([ids])).logits[0, -1].double()
        total += float(torch.log_softmax(logits_V, 0)[token])
        ids.append(token)
    return math.exp(total)


def js(p: float, q: float) -> float:
    """Jensen-Shannon divergence of two coins, in bits: the mean KL to their mixture."""

    def kl(a: float, b: float) -> float:
        return sum(x * math.log2(x / y) for x, y in ((a, b), (1 - a, 1 - b)) if x > 0)

    middle = (p + q) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


def cir(chances: list[float]) -> float:
    """Of p_0, ..., p_T."""
    steps = len(chances) - 1
    return sum(js(chances[k], chances[steps]) for k in range(1, steps + 1)) / steps


def tts(model, prompt: str, steps: list[str], broken: list[str], cue: str, answer: str, number: int) -> float:
    """Of step `number`, from four separate texts."""

    def s(x: int, c: int) -> float:
        before = "".join((steps if c else broken)[:number])
        return probability(model, prompt, before + (steps if x else broken)[number] + cue, answer)

    return 0.5 * (abs(s(1, 1) - s(0, 1)) + abs(s(1, 0) - s(0, 0)))
