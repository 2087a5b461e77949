"""`LanguageModel`: one causal language model with its tokenizer, and the one owner of its weights.

Invariant: after `close()` no weight is reachable through the object, and every use of it raises.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.utils import logging

from pvg.errors import ConfigurationError
from pvg.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelClosedError(RuntimeError):
    """A defect of the caller: the model was used after its owner closed it."""


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing bars of its own into pvg's display."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class LanguageModel:
    """Owner of one transformers `*ForCausalLM`, in eval mode. A context manager: leaving it frees the weights.

    Whoever borrows `module` must let go of it before the owner closes: freeing means dropping the last reference.
    """

    tokenizer: Tokenizer
    name: str

    def __init__(self, module: PreTrainedModel, tokenizer: Tokenizer, name: str) -> None:
        self._module: PreTrainedModel | None = module.eval()
        self.tokenizer = tokenizer
        self.name = name

    @property
    def module(self) -> PreTrainedModel:
        if self._module is None:
            raise ModelClosedError(f"model {self.name!r} is closed")
        return self._module

    @property
    def closed(self) -> bool:
        return self._module is None

    @property
    def device(self) -> torch.device:
        return self._any_weight().device

    @property
    def dtype(self) -> torch.dtype:
        return self._any_weight().dtype

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and completion together."""
        return int(self.module.config.max_position_embeddings)

    @property
    def num_parameters(self) -> int:
        """Tied weights count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def shape(self) -> str:
        """Layers, width and vocabulary: what weights must agree in to be of the same model. Servers say it alike."""
        config = self.module.config.get_text_config()
        return f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.vocab_size} tokens"

    def copy(self, dtype: torch.dtype | None = None) -> LanguageModel:
        """Independent weights on the same device, in `dtype` (None: the same); the caller owns the copy."""
        module = copy.deepcopy(self.module)
        return LanguageModel(module if dtype is None else module.to(dtype), self.tokenizer, self.name)

    def start(self) -> LanguageModel:
        """This model as it is now, for good: frozen weights that do not change when these are trained. A copy here;
        where weights are frozen anyway (pvg.models.adapters), these. The caller owns it."""
        frozen = self.copy()
        frozen.module.requires_grad_(False)
        return frozen

    def again(self) -> LanguageModel:
        """The same weights with another owner: they are freed when all of their owners have closed."""
        return LanguageModel(self.module, self.tokenizer, self.name)

    def weights(self) -> dict[str, Tensor]:
        """Every weight once, under its first name, detached but not copied: it changes as the model is trained."""
        return self._named_weights()[0]

    def require_gradients(self) -> None:
        """Make ready for training what is to be trained: all weights."""
        self.module.requires_grad_(True)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the model, cast to its dtype and device. Either all are loaded or none.

        A tied weight may come under any of its names, or under several if they agree. Raises ConfigurationError for
        a name that is missing or unknown, a shape that differs, and names of one tied weight that disagree.
        """
        weights, first_names = self._named_weights()
        accepted: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            first = first_names.get(name)
            if first is None:
                raise self._misfit(f"has no weight {name!r}")
            if tensor.shape != weights[first].shape:
                raise self._misfit(f"wants {name!r} as {tuple(weights[first].shape)}, not {tuple(tensor.shape)}")
            if first in accepted and not torch.equal(accepted[first], tensor):
                raise self._misfit(f"ties {name!r} to {first!r}, but two different tensors were given")
            accepted[first] = tensor
        missing = sorted(weights.keys() - accepted.keys())
        if missing:
            raise self._misfit(f"also needs {missing[0]!r} ({len(missing)} weights are missing)")
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(accepted[name])

    def fingerprint(self) -> str:
        """sha256, in hex, over the names, dtypes, shapes and bytes of the weights, in the order of their names."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.weights().items()):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
            # As bytes: numpy has no bfloat16.
            digest.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def save(self, directory: Path) -> None:
        """A Hugging Face directory (safetensors, config, tokenizer) that `open_model` reads back."""
        with without_progress_bars():
            self._save_module(directory)
        self.tokenizer.save(directory)

    def close(self) -> None:
        """Let go of the weights. Closing twice does nothing."""
        on_cuda = self._module is not None and self.device.type == "cuda"
        self._module = None
        if on_cuda:
            torch.cuda.empty_cache()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _save_module(self, directory: Path) -> None:
        self.module.save_pretrained(directory)

    def _named_weights(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The distinct weights under their first names, and for every name the first name of the same weight."""
        weights: dict[str, Tensor] = {}
        first_names: dict[str, str] = {}
        seen: dict[int, str] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            first = seen.setdefault(id(tensor), name)
            first_names[name] = first
            if first == name:
                weights[name] = tensor.detach()
        return weights, first_names

    def _any_weight(self) -> Tensor:
        weight: Tensor = next(self.module.parameters())
        return weight

    def _misfit(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"The weights do not fit model {self.name!r}: it {what}.", "Load the weights of the same architecture."
        )
