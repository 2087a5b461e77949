"""Scores solutions with a verifier that `pvg export` wrote. Needs torch and transformers, but not pvg.

    verifier = ExportedVerifier("DIR")
    score = verifier.score("7+5+8?", "7+5=2;2+8=0;A0")     # the logit that pvg computes
    accepted = score >= verifier.threshold

The folder's config.json has the facts under the key "pvg": head, template, threshold, calibration.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from pvg.models.tokenizer import encoded, filled_ids, holds, plain_ids  # `pvg export` puts their source here

PLACE = "\ue000\ue001"  # stands for a text


class ExportedVerifier:
    """`threshold`: the verifier accepts a solution whose score reaches it."""

    def __init__(self, folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        # From the tokenizer's own model, not transformers' unk_token: byte-level ones have no unknown text.
        backend = self.tokenizer.backend_tokenizer
        self.unknown_text = json.loads(backend.to_str())["model"].get("unk_token")
        self.unknown = None if self.unknown_text is None else backend.token_to_id(self.unknown_text)
        self.facts: dict[str, Any] = AutoConfig.from_pretrained(folder).pvg
        # The implicit head is a language model, and may be compared with another one.
        self.causal, reference = self.facts["head"] == "implicit", Path(folder) / "reference"
        kind: Any = AutoModelForCausalLM if self.causal else AutoModelForSequenceClassification
        folders = [Path(folder), *([reference] if reference.is_dir() else [])]
        self.model, *self.reference = (kind.from_pretrained(each, dtype=dtype).to(device).eval() for each in folders)
        self.threshold: float = self.facts["threshold"]
        self.device = device

    def score(self, question: str, solution: str) -> float:
        """The verifier's logit. Raises ValueError for what `pvg score` refuses: no text, an empty question, characters
        that the tokenizer cannot express, and more tokens than the context has."""
        for name, text in (("question", question), ("solution", solution)):
            if not isinstance(text, str):
                raise ValueError(f"{name!r} is {text!r}, not a text.")
        if not question.strip():
            raise ValueError("'question' is empty.")
        prompt, rest = self.tokens(question, solution)
        size, context = len(prompt) + len(rest), self.model.config.get_text_config().max_position_embeddings
        if size > context:
            raise ValueError(
                f"The solution needs {size} tokens to verify. This exceeds the verifier's context of {context}."
            )
        ids = torch.tensor([prompt + rest], device=self.device)
        with torch.inference_mode():
            if self.causal:
                own, *start = (_logprob(model, ids, len(prompt)) for model in (self.model, *self.reference))
                value = self.facts["beta"] * (own - self.facts["reference"] * sum(start))
            else:
                value = self.model(ids).logits[0, 0].item()
        return float(value + self.facts["score_bias"])

    def probability(self, question: str, solution: str) -> float:
        """The calibrated probability that the solution is correct. Raises ValueError without a calibration."""
        fit = self.facts["calibration"]
        if fit is None:
            raise ValueError("this verifier has no calibration: run `pvg evaluate` before `pvg export`")
        logit = fit["slope"] * self.score(question, solution) + fit["offset"]
        return 0.5 + 0.5 * math.tanh(0.5 * logit)  # the logistic function, without an overflow

    def tokens(self, question: str, solution: str) -> tuple[list[int], list[int]]:
        """The verifier's input in two parts. The implicit head reads its score from the second part."""
        template = self.facts["template"]
        asked, end = template["asks"], [self.tokenizer.eos_token_id]
        if template["style"] == "chat" and self.facts["head"] != "implicit":
            texts = {"question": question, "solution": solution}
            content = re.sub(r"\{(question|solution)\}", lambda place: texts[place[1]], template["frame"])
            return self._chat(f"{content}\n\n{asked}" if asked else content), []
        if template["style"] == "chat":
            return self._chat(question), self._plain(solution) + end
        begin = list(self.tokenizer("a").input_ids)[:1]
        opened = self._plain(f"{question}\n\n" if question and template["style"] == "text" else question)
        opened = begin + opened if begin == [self.tokenizer.bos_token_id] else opened
        return opened, self._plain(solution) + (encoded(self.tokenizer, f"\n{asked}\n") if asked else end)

    def _controls(self) -> frozenset[int]:
        special = [number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special]
        return frozenset(self.facts["template"].get("controls", special))

    def _plain(self, text: str) -> list[int]:
        ends = self.facts["template"].get("end_ids", [self.tokenizer.eos_token_id])
        (found,) = self.tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=False)
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            if token == self.unknown and text[start:end] != self.unknown_text:
                raise ValueError(f"The tokenizer cannot express {text[start:end]!r}, found in {text[:60]!r}.")
        return plain_ids(self.tokenizer, text, self._controls(), tuple(ends))

    def _chat(self, content: str) -> list[int]:
        whole, pieces = self._rendered(content), self._rendered(PLACE).split(PLACE)
        whole, contents = whole if holds(whole, content) else "", [content] * (len(pieces) - 1)
        return filled_ids(self.tokenizer, whole, pieces, contents, self._controls(), self._plain)

    def _rendered(self, content: str) -> str:
        template = self.facts["template"]
        said = [{"type": "text", "text": content}] if template.get("parts") else content
        own = {"chat_template": template.get("chat_template"), "add_generation_prompt": True, "tokenize": False}
        return str(self.tokenizer.apply_chat_template([{"role": "user", "content": said}], **own))


def _logprob(model: Any, ids: torch.Tensor, start: int) -> float:
    """The sum of the log-probs of the tokens from `start`, in nats."""
    logprobs = model(ids).logits[0, start - 1 : -1].float().log_softmax(-1)
    return float(logprobs.gather(1, ids[0, start:, None]).double().sum())
