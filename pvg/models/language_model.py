"""`LanguageModel`: one causal language model with its tokenizer, and the only owner of its weights.

Invariant: after `close()` no weight is reachable through the object, and every use of it raises.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import orjson
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from pvg.errors import Closing, ConfigurationError
from pvg.models.compute import leave_in_files, return_freed_memory
from pvg.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


# The record of a model's low-rank adapters, made by `pvg.models.adapters`.


@dataclass(frozen=True, slots=True)
class LowRankAdapter:
    """Adapters in peft's format. `tensors` by peft's names: float32 lora_A.weight [rank, in] and lora_B.weight [out,
    rank]. `config`: the content of adapter_config.json."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, object]


@dataclass(frozen=True, eq=False)
class LazyWeights(Mapping[str, Tensor]):
    """Weights of which some are computed whenever they are read: read one at a time, they are in memory one at a time.
    `kept`: a tensor of the same shape and dtype for each name, which is the weight unless `computed` has the name."""

    kept: Mapping[str, Tensor]
    computed: Mapping[str, Callable[[], Tensor]]

    def __getitem__(self, name: str) -> Tensor:
        return self.computed[name]() if name in self.computed else self.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


UNLIMITED = 2**31 - 1  # tokens


class ModelClosedError(RuntimeError):
    """A bug in the caller: it used a model after closing it."""


LOADING = threading.RLock()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars into pvg's display. One thread at a time: loading sets defaults of
    the whole process, such as torch's device."""
    with LOADING:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()


def context_of(config: Any) -> int:
    """Most tokens of a row. A model without a table of positions (BLOOM, Mamba) says none and has no limit."""
    text = config.get_text_config()
    known = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return int(next((length for length in known if length), UNLIMITED))


def digest_weights(weights: Mapping[str, Tensor], digest: Any) -> None:
    """Add names, dtypes, shapes and bytes of the weights, sorted by name, to a digest of hashlib."""
    for name in sorted(weights):
        weight = weights[name]
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        # As bytes: numpy has no bfloat16.
        digest.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class LanguageModel(Closing):
    """Owns one transformers `*ForCausalLM` in eval mode. As a context manager it frees the weights on exit.

    Borrowers of `module` must drop their references before the owner closes it; otherwise the memory is not freed.
    """

    tokenizer: Tokenizer
    name: str

    def __init__(self, module: PreTrainedModel, tokenizer: Tokenizer, name: str) -> None:
        self._module: PreTrainedModel | None = module.eval()
        self.tokenizer = tokenizer
        self.name = name
        self._dropped: dict[torch.UntypedStorage, int] = {}  # memory to take again, and its bytes

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
        """Most tokens of prompt plus completion."""
        return context_of(self.module.config)

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied weights count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def shape(self) -> str:
        """Layers, width and vocabulary, which weights of the same model share. Servers report it in the same form."""
        config = self.module.config.get_text_config()
        return f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.vocab_size} tokens"

    def copy(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> LanguageModel:
        """Independent weights on `device` in `dtype` (None: unchanged). The caller owns the copy."""
        device = device or self.device
        weights = self.module.parameters()  # never both on one device in both dtypes, as deepcopy and `to` would
        copies = {id(w): nn.Parameter(w.detach().to(device, dtype, copy=True), w.requires_grad) for w in weights}
        module = copy.deepcopy(self.module, copies)
        self.rest()
        # Only weights: positions times frequencies of 16 bits are wrong by radians in long rows.
        return LanguageModel(module.to(device=device), self.tokenizer, self.name)

    def move(self, device: torch.device) -> None:
        """Move the weights. What they take of a GPU that they leave is free for other processes."""
        left = self.device
        self.module.to(device)
        if left.type == "cuda" and device.type != "cuda":
            torch.cuda.empty_cache()

    def rest(self) -> None:
        """Take no memory for weights that are as a file has them, until they are read again. Call it when no pass is
        going to read them soon, in the thread that changes weights."""
        leave_in_files(list(self.module.parameters()))

    def sampler(self, dtype: torch.dtype | None = None) -> LanguageModel:
        """A model that samples as this one, and takes new weights by `load_policy`. The caller owns it."""
        return self.copy(dtype)

    def start(self) -> LanguageModel:
        """This model in its current state, as frozen weights that training does not change. This is a copy, unless the
        weights are frozen anyway (pvg.models.adapters). The caller owns it."""
        frozen = self.copy()
        frozen.module.requires_grad_(False)
        return frozen

    def again(self) -> LanguageModel:
        """The same weights with an additional owner. They are freed when all owners have closed."""
        return LanguageModel(self.module, self.tokenizer, self.name)

    def policy(self) -> tuple[Mapping[str, Tensor], LowRankAdapter | None]:
        """What to publish or save: the whole model's tensors, and the adapter if it has one."""
        return self.weights(), None

    def weights(self) -> Mapping[str, Tensor]:
        """Every weight once, under its first name, detached but not copied: it changes with training."""
        return self._named_weights()[0]

    def require_gradients(self) -> None:
        """Enable gradients for the weights to train: all of them."""
        self.module.requires_grad_(True)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the model, cast to its dtype and device. Loads all or none.

        A tied weight may have any of its names, or several if they agree. Raises ConfigurationError for a missing or
        unknown name, a different shape, and names of one tied weight that disagree.
        """
        weights, first_names = self._named_weights()
        accepted: dict[str, str] = {}
        known = tensors.kept if isinstance(tensors, LazyWeights) else tensors
        for name, tensor in known.items():
            first = first_names.get(name)
            if first is None:
                raise self._misfit(f"has no weight {name!r}")
            if tensor.shape != weights[first].shape:
                raise self._misfit(f"needs {name!r} as {tuple(weights[first].shape)}, not {tuple(tensor.shape)}")
            if first in accepted and not torch.equal(known[accepted[first]], tensor):
                raise self._misfit(f"ties {name!r} to {first!r}, but two different tensors were given")
            accepted[first] = name
        missing = sorted(weights.keys() - accepted.keys())
        if missing:
            raise self._misfit(f"also needs {missing[0]!r} ({len(missing)} weights are missing)")
        return_freed_memory(sum(self._dropped.values()))
        while self._dropped:
            storage, size = self._dropped.popitem()
            storage.resize_(size)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(tensors[accepted[name]])

    def load_policy(self, tensors: Mapping[str, Tensor], adapter: LowRankAdapter | None) -> None:
        """Load what another model's `policy` returned."""
        self.load_weights(tensors)

    def drop_weights(self, larger_than: int = 0) -> bool:
        """Free the memory of weights of more than `larger_than` bytes in all, until `load_weights`. Nobody may read
        them meanwhile. Returns whether they have none now. Tensors that share them, such as views, stay valid."""
        weights = self.weights().values()
        if not self._dropped and sum(weight.nbytes for weight in weights) > larger_than:
            for storage in (weight.untyped_storage() for weight in weights):
                if storage.nbytes():
                    self._dropped[storage] = storage.nbytes()
                    storage.resize_(0)
        return bool(self._dropped)

    def fingerprint(self) -> str:
        """sha256 in hex over names, dtypes, shapes and bytes of the weights, sorted by name."""
        digest = hashlib.sha256()
        digest_weights(self.weights(), digest)
        return digest.hexdigest()

    def save(self, directory: Path) -> None:
        """Write a Hugging Face directory (safetensors, config, tokenizer) that `open_model` can read."""
        with without_progress_bars():
            self.module.save_pretrained(directory)
        self.tokenizer.save(directory)

    def description(self, weights_file: str) -> dict[str, bytes]:
        """The files with which transformers opens a folder that has all weights in `weights_file`: config.json, the
        generation settings and the tokenizer, by name."""
        module = self.module
        config = copy.deepcopy(module.config)
        config.architectures, config.dtype = [type(module).__name__], self.dtype
        settings = {**orjson.loads(config.to_json_string()), "transformers_weights": weights_file}
        with TemporaryDirectory() as place:
            folder = Path(place)
            self.tokenizer.save(folder)
            if module.generation_config is not None:
                text = module.generation_config.to_json_string()
                (folder / "generation_config.json").write_text(text, encoding="utf-8")
            (folder / "config.json").write_bytes(orjson.dumps(settings, option=orjson.OPT_INDENT_2))
            return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}

    def close(self) -> None:
        """Drop the weights. A second call does nothing."""
        on_cuda = self._module is not None and self.device.type == "cuda"
        self._module = None
        if on_cuda:
            torch.cuda.empty_cache()

    def _named_weights(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The distinct weights by first name, and for every name the first name of the same weight."""
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


class StreamedModel:
    """The architecture of a model, which computes with any weights that fit. Those of a layer are on `device` only
    while it computes, all others (embedding, norm and head) during the whole pass."""

    def __init__(self, model: LanguageModel, device: torch.device) -> None:
        self.device, self.dtype = device, model.dtype
        tensors: dict[int, Any] = {id(buffer): buffer.to(device, copy=True) for buffer in model.module.buffers()}
        for weight in model.module.parameters():
            tensors[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        self._module = copy.deepcopy(model.module, tensors)
        # The first name in the model of each weight, by its name in its layer, and those of the other weights.
        self._layers, self._outside = dict[nn.Module, dict[str, str]](), dict(model._named_weights()[1])
        for place, part in self._module.named_modules():
            own = [name for name in part.state_dict() if f"{place}.{name}" in self._outside]
            if isinstance(part, GradientCheckpointingLayer) and own:  # not within another layer
                self._layers[part] = {name: self._outside.pop(f"{place}.{name}") for name in own}

    @contextmanager
    def given(self, weights: Mapping[str, Tensor], placed: Callable[[Tensor], Tensor]) -> Iterator[nn.Module]:
        """Meanwhile, the module computes with `weights`. `placed`: makes one of them what lies on the device."""

        def fill(part: nn.Module, *_: object) -> None:
            names = self._layers.get(part, self._outside)
            found = {first: placed(weights[first]) for first in dict.fromkeys(names.values())}
            part.load_state_dict({name: found[first] for name, first in names.items()}, strict=False, assign=True)

        def empty(part: nn.Module, *_: object) -> None:
            part.load_state_dict({name: tensor.to("meta") for name, tensor in part.state_dict().items()}, assign=True)

        with ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(fill).remove)
                stack.callback(layer.register_forward_hook(empty, always_call=True).remove)
            stack.callback(empty, self._module)
            fill(self._module)
            yield self._module
