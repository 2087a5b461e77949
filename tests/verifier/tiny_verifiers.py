"""Tiny real models, tokenizers and rollouts for the verifier's tests."""

import hashlib
import threading

import numpy as np
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Rules
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pvg.config.training import Verifier
from pvg.models.embedded_training import modchain_tokenizer
from pvg.models.heads import ScalarHead, VerifierModel, build_verifier
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer
from pvg.records import Grade, Role, Rollout, VersionSpan

CHAT = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<|start|>assistant{{ '\n' }}"


def digits_tokenizer() -> Tokenizer:
    return Tokenizer(modchain_tokenizer(), "digits")


def english_tokenizer(chat: str | None = CHAT) -> Tokenizer:
    """Printable characters, the words "yes" and "no", and three special tokens."""
    printable = ["\n", *map(chr, range(32, 127)), "yes", "no"]
    rules = Rules(models.WordLevel({token: number for number, token in enumerate(["<pad>", *printable])}, "<pad>"))
    rules.pre_tokenizer = pre_tokenizers.Split(Regex(r"yes|no|[\s\S]"), "isolated")
    rules.decoder = decoders.Fuse()
    rules.add_special_tokens(["<|eos|>", "<|start|>", "<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="<pad>", eos_token="<|eos|>")
    fast.chat_template = chat
    return Tokenizer(fast, "english")


def beginning_tokenizer() -> Tokenizer:
    """As `english_tokenizer`, and a text begins with <|start|>, as with Gemma and Llama."""
    fast = english_tokenizer()._fast
    fast.bos_token = "<|start|>"
    begin = [("<|start|>", fast.bos_token_id)]
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", pair="<|start|> $A $B", special_tokens=begin
    )
    return Tokenizer(fast, "beginning")


def language_model(
    tokenizer: Tokenizer, seed: int = 0, *, context: int = 96, tied: bool = False, spread: float = 0.3, width: int = 32
) -> LanguageModel:
    """Two layers, by default with weights so large that predictions differ before any training."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
        initializer_range=spread,
        tie_word_embeddings=tied,
    )
    return LanguageModel(LlamaForCausalLM(config), tokenizer, "tiny")


def perturb(model: VerifierModel, scale: float = 0.05, seed: int = 1) -> None:
    """Move every trainable weight away from the start, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.trainable_state().values():
            weight.add_(scale * torch.randn(weight.shape, generator=generator).to(weight.dtype))


def verifier(head: str, seed: int = 0, **options) -> VerifierModel:
    tokenizer = english_tokenizer() if head == "yes_token" else digits_tokenizer()
    model = build_verifier(Verifier(head=head), language_model(tokenizer, seed, **options))
    perturb(model)
    return model


class GatedHead(ScalarHead):
    """A scalar head whose forward passes announce themselves and, once computed, wait for the gate."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.began = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.failure: Exception | None = None

    def _scores(self, *inputs):
        scores = super()._scores(*inputs)
        self.began.release()
        self.gate.acquire()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return scores


def rollout(
    text: str,
    *,
    question: str = "7+5+8?",
    role: Role = Role.HELPFUL,
    prompt_ids: np.ndarray | None = None,
    correct: bool = True,
    number: int = 0,
    source: str = "base",
) -> Rollout:
    tokenizer = digits_tokenizer()
    ids = np.append(tokenizer.encode(text), tokenizer.eos_id).astype(np.int32)
    return Rollout(
        id=f"mint/{hashlib.sha256(f'{question}{text}{number}'.encode()).hexdigest()[:8]}",
        problem_id=f"modchain-10-{question.rstrip('?')}",
        question=question,
        reference="0",
        role=role,
        round=0,
        source=source,
        step=0,
        group=0,
        prompt_ids=tokenizer.encode("H" + question) if prompt_ids is None else prompt_ids,
        completion_ids=ids,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        spans=(VersionSpan(0, 0),),
        finish_reason="stop",
        text=text,
        grade=Grade(correct=correct, well_formed=True),
    )


def random_texts(count: int, seed: int, longest: int = 30) -> list[str]:
    """Distinct solutions of 1 to `longest` characters."""
    rng = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        length = rng.integers(1, longest + 1)
        found["".join(rng.choice(list("0123456789+=;A"), size=length))] = None
    return list(found)
