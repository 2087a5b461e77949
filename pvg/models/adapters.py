"""Low-rank adapters: a frozen model whose linear layers each learn a small product B A, in peft's format.

    learner = attach_adapters(base, rank=16, alpha=16.0, seed=7)
    learner.require_gradients()  # of the adapters alone
    learner.weights()            # the whole model's tensors, adapters merged in: W + (alpha / rank) B A
    learner.adapter()            # the adapters alone, as peft saves them and vLLM loads them

    shared = attach_adapters(base, rank=16, alpha=16.0, seed=7, shared=True)   # on base's own weights: no copy of them

Nothing is ever switched on or off. A model with adapters is a tree of modules of its own over the frozen weights, and
the model without them another tree over the same weights, in memory once: each forward pass goes through one of them,
whoever else computes in between. With adapters of the prover and of a verifier there are three such trees.

Invariants: whoever reads `weights()` cannot tell an adapted model from one whose weights were all trained; the adapters
at the start are a function of their seed, and change nothing (B is zero); a forward pass sees nobody else's adapters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson
import torch
from torch import Tensor, nn

from pvg.errors import ConfigurationError, MissingRequirementError, install_extra
from pvg.models.language_model import LanguageModel
from pvg.models.low_rank import LowRankAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "default"  # peft can hold several sets of adapters, each under a name; this is the one we have
PREFIX = "base_model.model."  # what peft puts before a module's name in the files it saves


def attach_adapters(
    model: LanguageModel,
    rank: int,
    alpha: float,
    seed: int,
    *,
    shared: bool = False,
    section: Literal["training", "verifier"] = "training",
) -> AdaptedModel:
    """A model with adapters of all of `model`'s linear layers but the output head; the caller closes it.

    It has a copy of the weights, and `model` stays as it is; or with `shared`, the very weights of `model`, which then
    require no gradient and must stay as they are as long as it is open. `section` is of the settings that are to be
    named in messages. Raises MissingRequirementError without peft, ConfigurationError for a rank above the smallest
    side of a layer and for a model that has no such layers or ties one of them to another weight.
    """
    peft = _peft(section)
    layers = tuple(_linear_layers(model.module))
    _check(model, rank, section)
    frozen = model.module if shared else copy.deepcopy(model.module)
    module = _on_the_same_weights(frozen)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted({name.rpartition(".")[2] for name in layers}),
        exclude_modules=_head_names(module) or None,
        base_model_name_or_path=module.name_or_path or model.name,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws weights of its own, which are replaced below
        module = peft.inject_adapter_in_model(config, module, KEY)
    return AdaptedModel(module, frozen, model, layers, _plain_config(config), seed, shared=shared)


def _on_the_same_weights(module: PreTrainedModel) -> PreTrainedModel:
    """A tree of modules and a configuration of its own, whose parameters and buffers are the very same tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


class AdaptedModel(LanguageModel):
    """A LanguageModel with adapters. `weights`, `load_weights`, `copy`, `save` and `fingerprint` speak of the merged
    model; `module` is the one that trains, `start` the one without them."""

    def __init__(
        self,
        module: PreTrainedModel,
        frozen: PreTrainedModel,
        model: LanguageModel,
        layers: tuple[str, ...],
        config: Mapping[str, object],
        seed: int,
        *,
        shared: bool,
    ) -> None:
        """`module` has adapters on the weights of `frozen`; `model` is where these come from."""
        super().__init__(module, model.tokenizer, model.name)
        self._frozen: PreTrainedModel | None = frozen
        self._shared = shared
        self._layers = layers
        self._config = config
        self._seed = seed
        for _, layer in self._adapted():
            layer.lora_A[KEY].float()  # also beside a bfloat16 layer: small updates would vanish in its rounding
            layer.lora_B[KEY].float()
        self._start_over()
        self.require_gradients()

    def require_gradients(self) -> None:
        self.module.requires_grad_(False)
        for _, layer in self._adapted():
            layer.lora_A[KEY].requires_grad_(True)
            layer.lora_B[KEY].requires_grad_(True)

    def weights(self) -> dict[str, Tensor]:
        """The whole model's weights under their own names. Those of adapted layers are computed anew by each call, so
        they do not change with further training; the others are the frozen model's."""
        tensors = super().weights()
        for name, layer in self._adapted():
            tensors[f"{name}.weight"] = _merged(layer)
        return tensors

    def adapter(self) -> LowRankAdapter:
        """A copy of the adapters: it does not change with further training."""
        tensors: dict[str, Tensor] = {}
        for name, layer in self._adapted():
            for side in ("lora_A", "lora_B"):
                tensors[f"{PREFIX}{name}.{side}.weight"] = getattr(layer, side)[KEY].weight.detach().clone()
        return LowRankAdapter(tensors, self._config)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the frozen model and start the adapters over. Shared weights take only what they hold:
        another's raise ConfigurationError."""
        if self._shared:
            self._check_unchanged(tensors)
        else:
            super().load_weights(tensors)
        self._start_over()

    def start(self) -> LanguageModel:
        """The model without its adapters, on the same weights."""
        self.module  # noqa: B018 - ModelClosedError
        assert self._frozen is not None
        return LanguageModel(self._frozen, self.tokenizer, self.name)

    def close(self) -> None:
        self._frozen = None
        super().close()

    def copy(self, dtype: torch.dtype | None = None) -> LanguageModel:
        """A model of its own without adapters: they are merged into its weights."""
        module = copy.deepcopy(self.module)
        for name in self._layers:
            layer: Any = module.get_submodule(name)
            layer.base_layer.weight.data = _merged(layer)
            module.set_submodule(name, layer.base_layer)
        del module.peft_config
        module.requires_grad_(True)
        return LanguageModel(module if dtype is None else module.to(dtype), self.tokenizer, self.name)

    def _check_unchanged(self, tensors: Mapping[str, Tensor]) -> None:
        weights, first_names = self._named_weights()
        for name, tensor in tensors.items():
            first = first_names.get(name)
            if first is None or tensor.shape != weights[first].shape or not torch.equal(weights[first], tensor):
                raise self._misfit(f"has its weights from another model, which {name!r} would change")

    def _save_module(self, directory: Path) -> None:
        with self.copy() as merged:
            merged._save_module(directory)

    def _named_weights(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Of the frozen model, under the names it had before peft wrapped its layers."""
        own_names: dict[str, str] = {}
        added: set[str] = set()
        for name, layer in self._adapted():
            for part, _ in layer.base_layer.named_parameters():
                own_names[f"{name}.base_layer.{part}"] = f"{name}.{part}"
            added |= {f"{name}.{side}.{KEY}.weight" for side in ("lora_A", "lora_B")}
        weights, first_names = super()._named_weights()
        return (
            {own_names.get(name, name): tensor for name, tensor in weights.items() if name not in added},
            {own_names.get(n, n): own_names.get(f, f) for n, f in first_names.items() if n not in added},
        )

    def _adapted(self) -> Iterator[tuple[str, Any]]:
        """The names and the wrapped layers, in the model's order."""
        for name in self._layers:
            yield name, self.module.get_submodule(name)

    def _start_over(self) -> None:
        """B zero, so that the model is the frozen one; A as nn.Linear begins, from the seed whatever the device."""
        generator = torch.Generator().manual_seed(self._seed)
        with torch.no_grad():
            for _, layer in self._adapted():
                weight_A = layer.lora_A[KEY].weight
                start_A = torch.empty(weight_A.shape, dtype=torch.float32)
                nn.init.kaiming_uniform_(start_A, a=math.sqrt(5), generator=generator)
                weight_A.copy_(start_A)
                layer.lora_B[KEY].weight.zero_()


def _peft(section: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingRequirementError(
            f"Training low-rank adapters ({section}.lora_rank) needs the package peft: {error}.",
            install_extra("lora"),
        ) from None
    return peft


def _head_names(module: PreTrainedModel) -> list[str]:
    head = module.get_output_embeddings()
    return [name for name, part in module.named_modules() if part is head and head is not None]


def _linear_layers(module: PreTrainedModel) -> dict[str, nn.Linear]:
    heads = _head_names(module)
    return {n: part for n, part in module.named_modules() if isinstance(part, nn.Linear) and n not in heads}


def _check(model: LanguageModel, rank: int, section: str) -> None:
    everything, layers = f"Set {section}.lora_rank = 0 to train all weights.", _linear_layers(model.module)
    if not layers:
        raise ConfigurationError(f"Model {model.name!r} has no linear layers that could carry adapters.", everything)
    names: dict[int, list[str]] = {}
    for name, weight in model.module.state_dict(keep_vars=True).items():
        names.setdefault(id(weight), []).append(name)
    for tied in names.values():
        # An adapter would change the one and not the other, and merged weights could not tell them apart.
        if len(tied) > 1 and any(name.removesuffix(".weight") in layers for name in tied):
            raise ConfigurationError(
                f"Model {model.name!r} ties {tied[0]!r} to {tied[1]!r}, which adapters would pull apart.", everything
            )
    smallest, side = min((min(layer.weight.shape), name) for name, layer in layers.items())
    if rank > smallest:
        raise ConfigurationError(
            f"{section}.lora_rank = {rank} is larger than {smallest}, the smaller side of {side!r} of model "
            f"{model.name!r}.",
            f"Set it to at most {smallest}, or to 0 to train all weights.",
        )


def _merged(layer: Any) -> Tensor:
    """W + (alpha / rank) B A of a layer that peft wrapped, in W's dtype."""
    with torch.no_grad():
        weight: Tensor = layer.base_layer.weight
        delta: Tensor = layer.get_delta_weight(KEY)
        return (weight.float() + delta).to(weight.dtype)


def _plain_config(config: Any) -> dict[str, object]:
    """adapter_config.json as peft writes it: for use, no longer for training."""
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    plain: dict[str, object] = orjson.loads(orjson.dumps({**fields, "inference_mode": True}))
    return plain
