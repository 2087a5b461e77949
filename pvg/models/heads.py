"""Verifier heads: turn a causal language model into one score (a logit) per problem and solution.

Rows are padded on the right, where a causal model does not look, so no attention mask is needed.

Invariants: a row's score depends only on the row and the weights. Scores are float32 for any model dtype and autocast.
A verifier's version is the digest of `trainable_state`."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pvg.config.training import DataType, LogprobHead, VerdictHead, Verifier
from pvg.errors import ConfigurationError, UsageError
from pvg.extensions import called, resolve
from pvg.models.adapters import round_products
from pvg.models.language_model import LanguageModel, ModelClosedError, digest_weights
from pvg.models.logprobs import (
    check_logits,
    completion_logprobs,
    finish_logits,
    refuse_without_head,
    shared_prompt_logprobs,
)
from pvg.models.shared_prompts import last_hidden, longest_packed, rows_of
from pvg.models.tokenizer import Tokenizer

# Spellings of the two answers to the question of pvg.verifier.data, the most likely first token first.
ANSWERS = (("yes", "no"), ("Yes", "No"), (" yes", " no"), (" Yes", " No"))


class VerifierModel(nn.Module, ABC):
    """A backbone and a head. Owns the language model it was built from; `close` frees it.

    `needs_reference`: scores need the `reference` of a row. It never changes while the verifier is open, so it can be
    computed once per solution. `packs`: rows may be computed without padding, and what they share once, because the
    head calls `_last_hidden`, not the model.
    """

    needs_reference = False
    packs = False
    reads: Literal["scalar", "implicit", "yes_token", "generative"] = (
        "scalar"  # the format in which pvg.verifier.data presents solutions
    )
    _packed = False  # see `forward`
    _loaded: str | None = None  # the version that a frozen one has loaded; "": none yet

    def __init__(self, language_model: LanguageModel) -> None:
        super().__init__()
        self._language_model = language_model
        self.backbone: nn.Module | None = language_model.module

    @property
    def tokenizer(self) -> Tokenizer:
        return self._language_model.tokenizer

    @property
    def max_length(self) -> int:
        """Most tokens of problem plus solution."""
        return self._language_model.max_length

    @property
    def longest_packed(self) -> int:
        """The most tokens of rows that `forward` computes packed; 0 if the head or the model cannot."""
        return longest_packed(self._open_backbone()) if self.packs else 0

    @property
    def closed(self) -> bool:
        return self.backbone is None

    def start_model(self) -> LanguageModel:
        """The language model before training; the caller owns it. With adapters, these are the frozen weights
        themselves."""
        return self._language_model.start()

    def trained_model(self) -> LanguageModel:
        """A copy of the language model as it is now, with adapters merged; the caller closes it."""
        self._open_backbone()
        return self._language_model.copy()

    @property
    def shape(self) -> str:
        """The language model's `LanguageModel.shape`."""
        return self._language_model.shape

    @property
    def device(self) -> torch.device:
        return self._language_model.device

    def forward(
        self,
        input_ids_BL: Tensor,
        lengths_B: Tensor,
        prompt_lengths_B: Tensor,
        reference_B: Tensor | None = None,
        *,
        packed: bool = False,
    ) -> Tensor:
        """scores_B float32 (logits), differentiable. `input_ids_BL` int64, padded on the right.

        The solution is the tokens from `prompt_lengths[b]` to `lengths[b]`. `reference_B` is the result of `reference`
        for these rows; None: computed here if needed. `packed`: the model computes rows without padding, and what
        they have in common once, and the rows are on the CPU. Then the last bits of a score depend on its batch.

        Raises ConfigurationError for rows longer than the model accepts, ModelClosedError after `close`.
        """
        if input_ids_BL.shape[1] > self.max_length:
            raise ConfigurationError(
                f"A problem and its solution take {input_ids_BL.shape[1]} tokens, but the verifier "
                f"{self._language_model.name!r} takes at most {self.max_length}.",
                "Shorten the completions (rollout.max_tokens), or choose a verifier with a longer context.",
            )
        self._packed = packed
        try:
            return self._scores(input_ids_BL, lengths_B, prompt_lengths_B, reference_B)
        finally:
            self._packed = False

    def reference(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, *, packed: bool = False
    ) -> Tensor:
        """The part of a score that training never changes: float32 [B], without a gradient; zeros for most heads.
        `packed`: as in `forward`."""
        return torch.zeros(input_ids_BL.shape[0], dtype=torch.float32, device=input_ids_BL.device)

    def trainable_state(self) -> dict[str, Tensor]:
        """The tensors that training changes, each once, detached but not copied."""
        self._open_backbone()
        return {name: weight.detach() for name, weight in self.named_parameters() if weight.requires_grad}

    def load_trainable_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in the result of `trainable_state`. Loads all tensors or none.

        Raises ConfigurationError for a missing or unknown name, and for a different shape.
        """
        weights = self.trainable_state()
        for name in sorted(weights.keys() ^ tensors.keys()):
            what = "are missing" if name in weights else "hold the unknown"
            raise self._misfit(f"{what} {name!r}")
        for name, weight in weights.items():
            if tensors[name].shape != weight.shape:
                raise self._misfit(f"have {name!r} as {tuple(tensors[name].shape)}, not {tuple(weight.shape)}")
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(tensors[name])
        self._loaded = self._loaded if self._loaded is None else _version_of(tensors)

    def version(self) -> str:
        """A digest of `trainable_state`: names, dtypes, shapes and bytes. Equal weights have equal versions."""
        return _version_of(self.trainable_state()) if self._loaded is None else self._loaded

    def freeze(self, precision: DataType) -> None:
        """Before the only weights that this verifier will have are loaded: keep its linear layers in the `precision` of
        its passes, which would round them alike. Not for adapters, whose layers are others' too."""
        if self.packs:  # another head may use the layers in other ways
            self._loaded = ""
            round_products(self._language_model.module, precision)

    def round_reference(self, precision: DataType) -> None:
        """As `freeze`, for a copy of the weights that training never changes. Most heads have none."""

    def start_elsewhere(self, seed: int) -> None:
        """Draw the head's initial weights from `seed`, so that ensemble members differ. Most heads have fixed initial
        weights; then members differ only in their training data."""

    def share_with(self, other: VerifierModel) -> None:
        """Share what training never changes with `other`, a verifier with the same head and initial weights, to save
        memory. Most heads have nothing to share."""

    def close(self) -> None:
        """Free the weights. A second call does nothing; any other use afterwards raises ModelClosedError."""
        self.backbone = None
        self._language_model.close()

    @abstractmethod
    def _scores(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None
    ) -> Tensor:
        """What `forward` returns, without its checks."""

    def _open_backbone(self) -> Any:
        if self.backbone is None:
            raise ModelClosedError(f"verifier {self._language_model.name!r} is closed")
        return self.backbone

    def _last_hidden(self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor | None = None) -> Tensor:
        """The hidden state of each row's last token: float32 [B, D]. With `prompt_lengths_B`, what rows have in
        common may be computed once."""
        backbone = self._open_backbone()
        if self._packed:
            starts_B = torch.ones_like(lengths_B) if prompt_lengths_B is None else prompt_lengths_B
            return last_hidden(backbone, input_ids_BL, lengths_B, starts_B).float()
        hidden_BLD = backbone.get_decoder()(input_ids=input_ids_BL, use_cache=False).last_hidden_state
        rows_B = torch.arange(input_ids_BL.shape[0], device=input_ids_BL.device)
        return cast(Tensor, hidden_BLD[rows_B, lengths_B - 1].float())

    def _misfit(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"The weights do not fit verifier {self._language_model.name!r}: they {what}.",
            "Load the weights of the same architecture and head.",
        )


def _version_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest_weights(tensors, digest)
    return digest.hexdigest()


class ScalarHead(VerifierModel):
    """V = w . h + b on the hidden state h of the last token. w and b start at 0, so an untrained one scores 0."""

    packs = True

    def __init__(self, language_model: LanguageModel) -> None:
        super().__init__(language_model)
        backbone = self._open_backbone()
        size = backbone.get_input_embeddings().weight.shape[1]
        device = language_model.device
        self.weight_D = nn.Parameter(torch.zeros(size, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        output, embeddings = backbone.get_output_embeddings(), backbone.get_input_embeddings()
        if output is not None and output.weight is not embeddings.weight:
            output.requires_grad_(False)  # affects no score, so it is not part of a version

    def start_elsewhere(self, seed: int) -> None:
        """w ~ N(0, 1 / (D + 1)), the usual start of reward heads since arXiv 1909.08593; equal on all devices."""
        size = self.weight_D.numel()
        start_D = torch.randn(size, generator=torch.Generator().manual_seed(seed)) / math.sqrt(size + 1)
        with torch.no_grad():
            self.weight_D.copy_(start_D)

    def _scores(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None
    ) -> Tensor:
        # A product and a sum, because autocast would round a matrix product to bfloat16.
        hidden_BD = self._last_hidden(input_ids_BL, lengths_B, prompt_lengths_B)
        return (hidden_BD * self.weight_D).sum(1) + self.bias


class ImplicitHead(VerifierModel):
    """V = beta sum_t (log pi_phi(z_t) - w log pi_ref(z_t)) + b over the solution's tokens z_t; b is learned and starts
    at 0.

    pi_ref is the model's own start: a frozen copy, or with adapters the model without them on the same weights. With
    w = 1 it is the implicit reward of PRIME (arXiv 2502.01456) and earlier work, used as a verifier, and an untrained
    one scores 0. With w = 0 there is no reference, as in SimPO (arXiv 2405.14734), which also divides by the length.
    """

    packs = True
    reads = "implicit"

    def __init__(self, language_model: LanguageModel, beta: float, weight: float = 1.0) -> None:
        """`weight`: w."""
        super().__init__(language_model)
        refuse_without_head(language_model.module)
        self.beta, self.weight = beta, weight
        self.needs_reference = weight > 0
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float32, device=language_model.device))
        # Not a submodule, because it is not trained, saved or versioned.
        self._reference_model = language_model.start() if self.needs_reference else None

    @property
    def start(self) -> nn.Module:
        """pi_ref, which only a head with a reference has. Raises ModelClosedError after `close`."""
        assert self._reference_model is not None, "w = 0"
        return cast(nn.Module, self._reference_model.module)

    def reference(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, *, packed: bool = False
    ) -> Tensor:
        """sum_t log pi_ref(z_t) of each row in nats: float32 [B], without a gradient.

        It uses the caller's autocast precision, like the scores, so both sums are equal before training.
        """
        with torch.no_grad():
            return self._summed(self.start, input_ids_BL, lengths_B, prompt_lengths_B, packed)

    def round_reference(self, precision: DataType) -> None:
        if self._reference_model is not None:
            round_products(self._reference_model.module, precision, head=True)

    def share_with(self, other: VerifierModel) -> None:
        if not isinstance(other, ImplicitHead):
            raise TypeError(f"an implicit head cannot share its start with {type(other).__name__}")
        if self._reference_model is not None and other._reference_model is not None:
            self._reference_model.close()
            self._reference_model = other._reference_model.again()

    def close(self) -> None:
        super().close()
        if self._reference_model is not None:
            self._reference_model.close()

    def _scores(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None
    ) -> Tensor:
        rows = (input_ids_BL, lengths_B, prompt_lengths_B)
        logprobs_B = self._summed(self._open_backbone(), *rows, self._packed)
        if self.needs_reference:
            if reference_B is None:
                reference_B = self.reference(*rows, packed=self._packed)
            logprobs_B = logprobs_B - self.weight * reference_B
        return self.beta * logprobs_B + self.bias

    def _summed(
        self, module: nn.Module, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, packed: bool
    ) -> Tensor:
        """The solutions' log-probs under `module`, float32 [B] in nats. The sum is in float64, because rows padded to
        another width are summed in another order, and the result must be the same bits."""
        if packed:
            rows, starts_B = rows_of(input_ids_BL, lengths_B), prompt_lengths_B.numpy()
            logprobs_BL = shared_prompt_logprobs(module, rows, starts_B)
        else:
            logprobs_BL = completion_logprobs(module, input_ids_BL, lengths_B, prompt_lengths_B)
        return logprobs_BL.sum(1, dtype=torch.float64).float()


class YesTokenHead(VerifierModel):
    """V = logit of "yes" minus logit of "no" as the token after a question: a generative verifier.

    Applies only these two rows of the output head. Raises ConfigurationError if the tokenizer has no single tokens for
    the two words.
    """

    packs = True
    reads = "yes_token"

    def __init__(self, language_model: LanguageModel) -> None:
        super().__init__(language_model)
        check_logits(language_model.module)
        self.answer_ids = answer_tokens(language_model.tokenizer, language_model.name)

    def _scores(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None
    ) -> Tensor:
        backbone = self._open_backbone()
        head = backbone.get_output_embeddings()
        hidden_BD = self._last_hidden(input_ids_BL, lengths_B, prompt_lengths_B)
        answers = list(self.answer_ids)
        # A product and a sum, because autocast would round a matrix product to bfloat16.
        logits_B2 = (hidden_BD[:, None, :] * head.weight[answers].float()).sum(2)
        if getattr(head, "bias", None) is not None:
            logits_B2 = logits_B2 + head.bias[answers].float()
        logits_B2 = finish_logits(backbone, logits_B2)
        return logits_B2[:, 0] - logits_B2[:, 1]


class GenerativeHead(VerifierModel):
    """Writes a check and a verdict. Its scores are votes, which pvg.verifier.scorer samples: it has no `forward`."""

    reads = "generative"

    def __init__(self, language_model: LanguageModel, head: VerdictHead) -> None:
        super().__init__(language_model)
        refuse_without_head(language_model.module)
        self.head = head

    @property
    def policy(self) -> LanguageModel:
        """The language model that writes and learns. The verifier owns it."""
        self._open_backbone()
        return self._language_model

    @property
    def max_length(self) -> int:
        return self._language_model.max_length - self.head.tokens

    def _scores(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None
    ) -> Tensor:
        raise ConfigurationError(
            "verifier.head = 'generative' samples verdicts, but this work needs a score per forward pass.",
            "Set verifier.head to 'implicit', 'scalar' or 'yes_token'.",
        )


def answer_tokens(tokenizer: Tokenizer, name: str) -> tuple[int, int]:
    """The ids of "yes" and "no" in the first spelling of ANSWERS where both are single tokens.

    Raises ConfigurationError if there is none. `name` is the model's name for the message.
    """
    for spellings in ANSWERS:
        try:
            ids = [tokenizer.encode(word) for word in spellings]
        except UsageError:  # a vocabulary without these letters, such as digits only
            continue
        if all(len(found) == 1 for found in ids) and ids[0][0] != ids[1][0]:
            return int(ids[0][0]), int(ids[1][0])
    raise ConfigurationError(
        f'The tokenizer of {name} has no single tokens for "yes" and "no", which verifier.head = "yes_token" needs.',
        'Set verifier.head to "implicit" or "scalar", or choose another models.verifier.',
    )


def _implicit(section: Verifier, language_model: LanguageModel) -> VerifierModel:
    assert isinstance(section.head, LogprobHead)
    return ImplicitHead(language_model, section.head.beta, section.head.reference)


def _generative(section: Verifier, language_model: LanguageModel) -> VerifierModel:
    assert isinstance(section.head, VerdictHead)
    return GenerativeHead(language_model, section.head)


HEADS: dict[str, Callable[[Verifier, LanguageModel], VerifierModel]] = {
    "scalar": lambda section, language_model: ScalarHead(language_model),
    "implicit": _implicit,
    "yes_token": lambda section, language_model: YesTokenHead(language_model),
    "generative": _generative,
}


def build_verifier(section: Verifier, language_model: LanguageModel) -> VerifierModel:
    """The verifier of `section` on `language_model`. It takes ownership: closing the verifier closes the model.

    Raises ConfigurationError if the model does not support the head, and then closes the language model.
    """
    key, name = "verifier.head", section.head.kind
    try:
        verifier = called(key, name, resolve(key, name, HEADS), section, language_model)
        if not isinstance(verifier, VerifierModel):
            raise ConfigurationError(f"{key} = {name!r} gives a {type(verifier).__name__}, not a VerifierModel.")
    except ConfigurationError:
        language_model.close()
        raise
    return verifier


# An ensemble of verifiers that scores like one verifier.


def mean(scores_KN: Tensor) -> Tensor:
    """Sums in a fixed order. A torch reduction may sum in another order for another N."""
    total_N = scores_KN[0]
    for scores_N in scores_KN[1:]:
        total_N = total_N + scores_N
    return total_N / len(scores_KN)


def median(scores_KN: Tensor) -> Tensor:
    """For an even number of members, the mean of the two in the middle."""
    sorted_KN, middle = scores_KN.sort(dim=0).values, len(scores_KN) // 2
    return sorted_KN[middle] if len(scores_KN) % 2 else (sorted_KN[middle - 1] + sorted_KN[middle]) / 2


# Kinds of `verifier.ensemble`: float64 [K, N] scores of K members -> [N].
AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": mean,
    "median": median,
    "min": lambda scores_KN: scores_KN.amin(dim=0),
}


@dataclass(frozen=True, slots=True, eq=False)
class ScoreScales:
    """Maps the scores of K members to a common scale: slope x score + offset, both float64 [K]."""

    slopes_K: NDArray[np.float64]
    offsets_K: NDArray[np.float64]

    @classmethod
    def none(cls, members: int) -> ScoreScales:
        return cls(np.ones(members), np.zeros(members))

    def applied(self, scores_KN: Tensor) -> Tensor:
        """float64 [K, N]."""
        slopes_K1, offsets_K1 = (
            torch.from_numpy(values_K).to(scores_KN.device)[:, None] for values_K in (self.slopes_K, self.offsets_K)
        )
        return scores_KN.double() * slopes_K1 + offsets_K1


class VerifierEnsemble:
    """Scores like a VerifierModel. Owns its members, which share tokenizer, head and initial weights; `close` frees
    them."""

    def __init__(self, members: Sequence[VerifierModel], aggregation: str, scales: ScoreScales) -> None:
        """`aggregation` is a key of AGGREGATIONS."""
        self.members = tuple(members)
        self.aggregation = aggregation
        self.scales = scales
        self.needs_reference = members[0].needs_reference
        self.reads = members[0].reads

    @property
    def tokenizer(self) -> Tokenizer:
        return self.members[0].tokenizer

    @property
    def max_length(self) -> int:
        """Most tokens of problem plus solution."""
        return self.members[0].max_length

    @property
    def device(self) -> torch.device:
        return self.members[0].device

    @property
    def longest_packed(self) -> int:
        """The most tokens of rows that all members compute packed."""
        return min(member.longest_packed for member in self.members)

    def __call__(self, *inputs: Any, packed: bool = False) -> Tensor:
        """scores_B float32, as `VerifierModel.forward` but without a gradient."""
        return self.aggregated(self.member_scores(*inputs, packed=packed))

    def aggregated(self, scores_KN: Tensor) -> Tensor:
        """Scores float32 [N] from the members' unscaled scores [K, N]."""
        return AGGREGATIONS[self.aggregation](self.scales.applied(scores_KN)).float()

    @torch.no_grad()
    def member_scores(self, *inputs: Any, packed: bool = False) -> Tensor:
        """Unscaled scores float32 [K, B] of each member, of the inputs of `VerifierModel.forward`. The reference is the
        same for all and computed once."""
        *rows, reference_B = (*inputs, None)[:4]
        if reference_B is None and self.needs_reference:
            reference_B = self.reference(*rows, packed=packed)
        return torch.stack([member(*rows, reference_B, packed=packed) for member in self.members])

    def reference(self, *rows: Tensor, packed: bool = False) -> Tensor:
        """As `VerifierModel.reference`. Members share their initial weights, so the first one's is valid for all."""
        first = self.members[0].reference  # that of a head in a user's file may know no packed rows
        return first(*rows, packed=True) if packed else first(*rows)

    def version(self) -> str:
        """A digest of the members' versions in order, their scales and the aggregation."""
        digest = hashlib.blake2b(self.aggregation.encode(), digest_size=16)
        for member in self.members:
            digest.update(f" {member.version()}".encode())
        for values_K in (self.scales.slopes_K, self.scales.offsets_K):
            digest.update(np.ascontiguousarray(values_K, dtype="<f8").tobytes())
        return digest.hexdigest()

    def trainable_state(self) -> dict[str, Tensor]:
        """The ensemble's own tensors, without those of its members: the scales."""
        return {
            "slopes_K": torch.from_numpy(self.scales.slopes_K),
            "offsets_K": torch.from_numpy(self.scales.offsets_K),
        }

    @property
    def closed(self) -> bool:
        return self.members[0].closed

    def close(self) -> None:
        """Free all members. A second call does nothing; any other use afterwards raises ModelClosedError."""
        for member in self.members:
            member.close()
