"""Low-rank adapters: a frozen model whose linear layers each learn a small product B A, in peft's format.

A model with adapters is a separate tree of modules over the frozen weights, and the model without them is another tree
over the same weights, which are in memory once. Each forward pass goes through one tree, so threads do not affect each
other.

Invariants: `weights()` has the same form as for a fully trained model. Initial adapters are a function of their seed
and change nothing (B is zero). A forward pass uses only its own model's adapters."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import orjson
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from pvg.config.training import DataType
from pvg.errors import ConfigurationError, MissingRequirementError
from pvg.installation import install_extra
from pvg.models.compute import added, product, projected
from pvg.models.language_model import LanguageModel, LazyWeights, LowRankAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "default"  # peft names each set of adapters; pvg uses one
PREFIX = "base_model.model."  # peft's prefix of module names in saved files


def attach_adapters(
    model: LanguageModel, rank: int, alpha: float, seed: int, *, section: Literal["training", "verifier"] = "training"
) -> AdaptedModel:
    """Attach adapters to all linear layers of `model` except the output head. The caller closes the result.

    The result uses the weights of `model`, which then require no gradient and must not change while it is open. Error
    messages name the settings of `section`. Raises MissingRequirementError without peft. Raises ConfigurationError if
    the rank is above the smallest side of a layer, the model has no such layers, or one of them is tied to another
    weight.
    """
    peft = _peft(section)
    layers = tuple(linear_layers(model.module))
    _check(model, rank, section)
    # A new tree of modules and a new configuration over the same tensors.
    tensors = [*model.module.parameters(), *model.module.buffers()]
    module = copy.deepcopy(model.module, {id(tensor): tensor for tensor in tensors})
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(layers),
        base_model_name_or_path=module.name_or_path or model.name,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws random weights, which are replaced below
        # In a module without a configuration: for some mixtures of experts, peft changes the names of the layers.
        peft.inject_adapter_in_model(config, nn.ModuleDict({"model": module}), KEY)
    wrapped = {name for name, part in module.named_modules() if hasattr(part, "lora_A")}
    if differ := sorted(wrapped.symmetric_difference(layers)):
        raise ConfigurationError(
            f"peft does not put adapters on the linear layers of model {model.name!r}, such as {differ[0]!r}.",
            f"Set {section}.adapters.rank to 0 to train all weights.",
        )
    return AdaptedModel(module, model, layers, _plain_config(config), seed)


class AdaptedModel(LanguageModel):
    """A LanguageModel with adapters. `weights`, `load_weights`, `copy`, `save` and `fingerprint` refer to the merged
    model, `module` to the one that trains, `start` to the one without adapters."""

    def __init__(
        self,
        module: PreTrainedModel,
        model: LanguageModel,
        layers: tuple[str, ...],
        config: Mapping[str, object],
        seed: int,
    ) -> None:
        """`module` has adapters on the weights of `model`."""
        super().__init__(module, model.tokenizer, model.name)
        self._frozen: PreTrainedModel | None = model.module
        self._layers = layers
        self._config = config
        self._seed = seed
        for _, layer in self._adapted():
            layer.lora_A[KEY].float()  # also on a bfloat16 layer, whose rounding would lose small updates
            layer.lora_B[KEY].float()
        self._start_over()
        self.require_gradients()

    def require_gradients(self) -> None:
        self.module.requires_grad_(False)
        for _, layer in self._adapted():
            layer.lora_A[KEY].requires_grad_(True)
            layer.lora_B[KEY].requires_grad_(True)

    def weights(self) -> Mapping[str, Tensor]:
        """The whole model's weights under their own names, as `with_adapter` gives them. They do not change with
        further training."""
        return self.policy()[0]

    def policy(self) -> tuple[Mapping[str, Tensor], LowRankAdapter | None]:
        adapter = self.adapter()
        return with_adapter(self.start().weights(), adapter), adapter

    def adapter(self) -> LowRankAdapter:
        """A copy of the adapters, which does not change with further training."""
        tensors: dict[str, Tensor] = {}
        for name, layer in self._adapted():
            for side in ("lora_A", "lora_B"):
                tensors[f"{PREFIX}{name}.{side}.weight"] = getattr(layer, side)[KEY].weight.detach().clone()
        return LowRankAdapter(tensors, self._config)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Reset the adapters. Raises ConfigurationError if `tensors` differ from the weights of the model, which it
        shares."""
        weights, first_names = self._named_weights()
        for name, tensor in tensors.items():
            own = weights.get(first_names.get(name, ""))
            if own is None or tensor.shape != own.shape or not torch.equal(own, tensor.to(own.device)):
                raise self._misfit(f"shares its weights with another model, and {name!r} would change them")
        self._start_over()

    def load_adapter(self, adapter: LowRankAdapter) -> None:
        """Copy the matrices that `adapter()` returned, of a model with the same layers and rank."""
        with torch.no_grad():
            for name, layer in self._adapted():
                for side in ("lora_A", "lora_B"):
                    getattr(layer, side)[KEY].weight.copy_(adapter.tensors[f"{PREFIX}{name}.{side}.weight"])

    def load_policy(self, tensors: Mapping[str, Tensor], adapter: LowRankAdapter | None) -> None:
        if adapter is None:
            self.load_weights(tensors)
        else:
            self.load_adapter(adapter)

    def drop_weights(self, larger_than: int = 0) -> bool:
        return False  # they are the frozen model's

    def sampler(self, dtype: torch.dtype | None = None) -> LanguageModel:
        """If the frozen weights have 16 bits, it shares them and has a copy of the adapters: merged weights would be
        rounded."""
        frozen = self.start()
        if frozen.dtype.itemsize > 2:
            return self.copy(dtype)
        rank, alpha = cast(int, self._config["r"]), cast(float, self._config["lora_alpha"])
        twin = attach_adapters(frozen, rank, alpha, self._seed)
        twin.load_adapter(self.adapter())
        twin.module.requires_grad_(False)
        for name, layer in twin._adapted():
            twin.module.set_submodule(name, SampledLinear(layer))
        return twin

    def start(self) -> LanguageModel:
        """The model without adapters, on the same weights."""
        self.module  # noqa: B018 - raises ModelClosedError if closed
        assert self._frozen is not None
        return LanguageModel(self._frozen, self.tokenizer, self.name)

    def close(self) -> None:
        self._frozen = None
        super().close()

    def copy(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> LanguageModel:
        """An independent model with the adapters merged into its weights. Without a `dtype`, and with frozen weights of
        16 bits, it has float32: small updates would be rounded away."""
        frozen = self.start()
        if frozen.dtype.itemsize > 2:
            merged = frozen.copy(dtype, device)
            merged.load_weights(self.weights())
        else:
            merged = frozen.copy(dtype or torch.float32, device)
            merged.load_weights(with_adapter(merged.weights(), self.adapter()))
        merged.require_gradients()
        return merged

    def save(self, directory: Path) -> None:
        with self.copy() as merged:
            merged.save(directory)

    def _named_weights(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The frozen model's."""
        return self.start()._named_weights()

    def _adapted(self) -> Iterator[tuple[str, Any]]:
        """Names and wrapped layers, in the model's order."""
        for name in self._layers:
            yield name, self.module.get_submodule(name)

    def _start_over(self) -> None:
        """Set B to zero, so the model equals the frozen one, and A as nn.Linear does, from the seed on any device."""
        generator = torch.Generator().manual_seed(self._seed)
        with torch.no_grad():
            for _, layer in self._adapted():
                weight_A = layer.lora_A[KEY].weight
                start_A = torch.empty(weight_A.shape, dtype=torch.float32)
                nn.init.kaiming_uniform_(start_A, a=math.sqrt(5), generator=generator)
                weight_A.copy_(start_A)
                layer.lora_B[KEY].weight.zero_()


class SampledLinear(nn.Module):
    """A layer of peft, with its adapters in the dtype of its weights, to which passes in training cast them too."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.base_layer, self.scaling = layer.base_layer, float(layer.scaling[KEY])
        self.lora_A, self.lora_B = (side.to(self.weight.dtype) for side in (layer.lora_A, layer.lora_B))

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self.base_layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        sides = self.lora_A[KEY].weight, self.lora_B[KEY].weight
        y_NO = adapted_product(x.flatten(0, -2), self.weight, self.base_layer.bias, *sides, self.scaling)
        return y_NO.view(*x.shape[:-1], len(self.weight))


def adapted_product(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, A_RI: Tensor, B_OR: Tensor, scaling: float
) -> Tensor:
    """x W^T + b + scaling (x A^T) B^T without a gradient. The adapters' share comes first: added to a product that is
    already rounded, a small one would be lost."""
    y_NO = torch.addmm(B_OR[:, 0], projected(x_NI, A_RI), B_OR.t(), beta=0, alpha=scaling)
    y_NO = added(y_NO, x_NI, weight_OI)
    return y_NO if bias_O is None else y_NO.add_(bias_O)


def _peft(section: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingRequirementError(
            f"Training low-rank adapters ({section}.adapters) needs the package peft: {error}.", install_extra("lora")
        ) from None
    return peft


def linear_layers(module: PreTrainedModel) -> dict[str, nn.Linear]:
    """Those of the language model: no vision tower, no head, no router or gate."""
    parts, head = set(cast(Any, module).get_decoder().modules()), module.get_output_embeddings()
    # Some routers are linear layers that return a tuple; some have one, whose weight they may use without calling it.
    routers = [part for part in parts if re.search(r"Router|Gating$|MoE\w*Gate$", type(part).__name__)]
    parts -= {inner for router in routers for inner in router.modules()}
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
        and part in parts
        and part is not head
        and part.out_features > 1  # the gate of a shared expert has one
    }


def round_products(module: PreTrainedModel, precision: DataType, *, head: bool = False) -> None:
    """Keep the linear layers of frozen weights, and with `head` an output head that is no embedding, in the `precision`
    of all passes, which would round them alike. If one was wider, no weight shares memory with its old values, such as
    a mapped file."""
    dtype: torch.dtype = getattr(torch, precision)
    products = {weight for layer in linear_layers(module).values() for weight in layer.parameters()}
    output = module.get_output_embeddings() if head else None
    if output is not None and output.weight is not module.get_input_embeddings().weight:
        products |= set(output.parameters())
    wide = {weight for weight in products if weight.dtype.itemsize > dtype.itemsize}
    for weight in module.parameters() if wide else ():
        weight.data = weight.data.to(dtype if weight in wide else None, copy=True)


def load_sum(model: LanguageModel, adapter: LowRankAdapter | None) -> None:
    """Load the sum of the weights of `model`, with the values that they have in bfloat16, and of an adapter that was
    trained on these. The model has float32."""
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.copy_(weight.bfloat16())
    if adapter is not None:
        model.load_weights(with_adapter(model.weights(), adapter))


def _check(model: LanguageModel, rank: int, section: str) -> None:
    everything, layers = f"Set {section}.adapters.rank to 0 to train all weights.", linear_layers(model.module)
    if not layers:
        raise ConfigurationError(f"Model {model.name!r} has no linear layers that could carry adapters.", everything)
    names: dict[int, list[str]] = {}
    for name, weight in model.module.state_dict(keep_vars=True).items():
        names.setdefault(id(weight), []).append(name)
    for tied in names.values():
        # An adapter would change only one of them, and merged weights could not hold both.
        if len(tied) > 1 and any(name.removesuffix(".weight") in layers for name in tied):
            raise ConfigurationError(
                f"Model {model.name!r} ties {tied[0]!r} to {tied[1]!r}, but adapters would change only one of them.",
                everything,
            )
    smallest, side = min((min(layer.weight.shape), name) for name, layer in layers.items())
    if rank > smallest:
        raise ConfigurationError(
            f"{section}.adapters.rank = {rank} is larger than {smallest}, the smaller side of {side!r} of model "
            f"{model.name!r}.",
            f"Set it to at most {smallest}, or to 0 to train all weights.",
        )


def with_adapter(weights: Mapping[str, Tensor], adapter: LowRankAdapter) -> LazyWeights:
    """The weights of the model with the adapter: W + (alpha / rank) B A in W's dtype, computed whenever it is read.
    `weights`: of the frozen model."""
    scaling = cast(float, adapter.config["lora_alpha"]) / cast(int, adapter.config["r"])

    def merged(name: str) -> Tensor:
        weight = weights[f"{name}.weight"]
        A_RI, B_OR = (adapter.tensors[f"{PREFIX}{name}.lora_{side}.weight"] for side in "AB")
        with torch.no_grad():
            delta_OI = B_OR.to(weight.device, copy=True) @ A_RI.to(weight.device, copy=True)
            return delta_OI.mul_(scaling).add_(weight).to(weight.dtype)

    end = ".lora_A.weight"
    names = [name.removeprefix(PREFIX).removesuffix(end) for name in adapter.tensors if name.endswith(end)]
    return LazyWeights(weights, {f"{name}.weight": partial(merged, name) for name in names})


def _plain_config(config: Any) -> dict[str, object]:
    """adapter_config.json as peft writes it, in inference mode."""
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    plain: dict[str, object] = orjson.loads(orjson.dumps({**fields, "inference_mode": True}))
    return plain


# Products of adapted layers, in pvg's own layers (pvg.models.shared_prompts): peft casts, scales and adds per layer.


class Adapted(NamedTuple):
    """Linear layers with one input and their adapters, in the dtype of products. `stacked_RI`: the A of all, one below
    the other; `sides`: B [O, rank] of each."""

    layers: Sequence[Any]
    stacked_RI: Tensor
    sides: Sequence[Tensor]

    def __call__(self, x_TI: Tensor, up_TI: Tensor | None = None) -> tuple[Tensor, ...]:
        """x W^T + b + scaling (x A^T) B^T of each layer, [T, O]. With `up_TI`, the input is silu(x) up instead, which
        is not kept for the backward pass."""
        bases = [(layer.base_layer.weight, layer.base_layer.bias) for layer in self.layers]
        fixed = (bases, self.layers[0].scaling[KEY])
        found = _Products.apply(fixed, x_TI, up_TI, self.stacked_RI, *self.sides)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, ...]", found)


def adapted(groups: Sequence[Sequence[nn.Module]], dtype: torch.dtype) -> list[Adapted] | None:
    """`groups` of layers with one input each, their adapters cast together; None if a layer has none."""
    if not all(hasattr(layer, "lora_A") for group in groups for layer in group):
        return None
    matrices, shapes = list[Tensor](), list[Sequence[int]]()
    for group in cast(Any, groups):
        sides_A, sides_B = ([getattr(layer, side)[KEY].weight for layer in group] for side in ("lora_A", "lora_B"))
        matrices += [*sides_A, *sides_B]
        shapes += [(sum(map(len, sides_A)), sides_A[0].shape[1]), *(side.shape for side in sides_B)]
    flat = torch.cat([matrix.flatten() for matrix in matrices]).to(dtype)
    parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    views = (part.view(*shape) for part, shape in zip(parts, shapes, strict=True))
    return [Adapted(group, next(views), [next(views) for _ in group]) for group in groups]


def silu_gradients(grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor, active_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Those of gate and up, from that of silu(gate) up. `active_TI`: silu(gate), which is overwritten."""
    grad_up = active_TI.mul_(grad_TI)
    return torch.ops.aten.silu_backward(grad_TI * up_TI, gate_TI), grad_up


class _Products(torch.autograd.Function):
    """See Adapted. With h = x A^T, y = x W^T + s h B^T: dB = s dy^T h, dh = s dy B, dA = dh^T x, dx = dy W + dh A. W
    and b are frozen."""

    @staticmethod
    def forward(
        ctx: Any, fixed: Any, x_TI: Tensor, up_TI: Tensor | None, stacked_RI: Tensor, *sides: Tensor
    ) -> tuple[Tensor, ...]:
        (bases, scaling), dtype = fixed, stacked_RI.dtype
        ctx.fixed, ctx.dtype = fixed, x_TI.dtype
        x_TI = x_TI.to(dtype)
        input_TI = x_TI if up_TI is None else silu(x_TI) * up_TI
        h_TR = input_TI @ stacked_RI.t()
        ctx.save_for_backward(x_TI, up_TI, h_TR, stacked_RI, *sides)
        found, parts = [], h_TR.split_with_sizes([B_OR.shape[1] for B_OR in sides], 1)
        for (weight, bias), B_OR, part in zip(bases, sides, parts, strict=True):
            y_TO = projected(input_TI, weight.to(dtype), bias if bias is None else bias.to(dtype))
            found.append(y_TO.addmm_(part, B_OR.t(), alpha=scaling))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, up_TI, h_TR, stacked_RI, *sides = ctx.saved_tensors
        bases, scaling = ctx.fixed
        parts = h_TR.split_with_sizes([B.shape[1] for B in sides], 1)
        grads_B = [  # with beta = 0, only the shape of the first argument counts
            torch.addmm(B, grad.t(), h, beta=0, alpha=scaling) for B, grad, h in zip(sides, grads, parts, strict=True)
        ]
        of_h = [grad @ B for B, grad in zip(sides, grads, strict=True)]
        grad_h = of_h[0] if len(of_h) == 1 else torch.cat(of_h, 1)
        active_TI = None if up_TI is None else silu(x_TI)
        input_TI = x_TI if active_TI is None else active_TI * up_TI
        grad_A = torch.addmm(stacked_RI, grad_h.t(), input_TI, beta=0, alpha=scaling)
        del input_TI  # as wide as the layer: at the peak of memory each of them counts
        grad_x, grad_up = None, None
        if ctx.needs_input_grad[1]:
            weights = [weight.to(stacked_RI.dtype) for weight, _ in bases]
            grad_x = product(grads[0], weights[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                grad_x = added(grad_x, grad, weight.t())
            grad_x.addmm_(grad_h, stacked_RI, alpha=scaling)
        if grad_x is not None and active_TI is not None:
            grad_x, grad_up = silu_gradients(grad_x, x_TI, up_TI, active_TI)
        return None, None if grad_x is None else grad_x.to(ctx.dtype), grad_up, grad_A, *grads_B
