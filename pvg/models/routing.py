"""Records which experts a mixture-of-experts model chooses while it samples, and replays them in training.

Rounding can change which k experts win. Sampler and trainer would then compute a token with different experts. A replay
fixes the sampler's choice; the current router still weights it, with gradients.

Invariant: models with unknown routers are refused, never replayed wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pvg.errors import ConfigurationError

# Names of transformers' routers end like this. They return (logits [T, experts], weights [T, k], choices [T, k]).
ROUTER = "TopKRouter"
# Set on a module whose routers passed `_check`.
_CHECKED = "_pvg_routers_checked"
_TOLERANCE = 1e-2  # for weights between 0 and 1 in bfloat16


def routers_of(module: nn.Module) -> list[nn.Module]:
    """The routers in layer order. Raises ConfigurationError for a model without routers or with unknown ones."""
    routers = [part for part in module.modules() if type(part).__name__.endswith(ROUTER)]
    if not routers:
        raise ConfigurationError(
            f"{type(module).__name__} is not a mixture of experts, or has routers that pvg does not know.",
            "Set training.router_replay = false.",
        )
    if not module.__dict__.get(_CHECKED):
        _check(module, routers)
        module.__dict__[_CHECKED] = True
    return routers


def number_of_experts(router: nn.Module) -> int:
    return int(cast(Any, router).weight.shape[0])


class ExpertRecorder:
    """Collects the experts that the routers chose; created by `recorded_experts`."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.choices: list[Tensor] = []

    def take(self) -> Tensor:
        """The experts of the last forward pass, int64 [T, layers, k], where T counts all its tokens with padding."""
        if len(self.choices) != self._layers:
            raise RuntimeError(f"{len(self.choices)} of {self._layers} routers chose experts since the last take()")
        experts_TMK = torch.stack(self.choices, dim=1)
        self.choices.clear()
        return experts_TMK


@contextmanager
def recorded_experts(module: nn.Module) -> Iterator[ExpertRecorder]:
    """Call `take` after every forward pass inside this context. Raises what `routers_of` raises."""
    routers = routers_of(module)
    recorder = ExpertRecorder(len(routers))

    def note(_router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        recorder.choices.append(output[2])

    with _hooked(routers, [note] * len(routers)):
        yield recorder


@contextmanager
def replayed_experts(module: nn.Module, experts_TMK: Tensor) -> Iterator[None]:
    """Forward passes inside this context use the experts given as integers [T, layers, k]. Each pass must cover exactly
    T tokens. Raises what `routers_of` raises, and ConfigurationError for experts of another model."""
    routers = routers_of(module)
    k = int(cast(Any, routers[0]).top_k)
    if experts_TMK.shape[1:] != (len(routers), k):
        raise ConfigurationError(
            f"The rollouts have experts of {experts_TMK.shape[1]} layers, {experts_TMK.shape[2]} per token, but "
            f"{type(module).__name__} has {len(routers)} layers of experts and {k} per token.",
            "Sample from the model that is trained.",
        )

    def replay(layer: int) -> Any:
        def instead(
            router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            logits_TX, weights_TK, _ = output
            choices_TK = experts_TMK[:, layer].long()
            return logits_TX, _weights(router, logits_TX, choices_TK).to(weights_TK.dtype), choices_TK

        return instead

    with _hooked(routers, [replay(layer) for layer in range(len(routers))]):
        yield


@contextmanager
def _hooked(routers: list[nn.Module], hooks: list[Any]) -> Iterator[None]:
    handles: list[RemovableHandle] = []
    try:
        for router, hook in zip(routers, hooks, strict=True):
            handles.append(router.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _weights(router: nn.Module, logits_TX: Tensor, choices_TK: Tensor) -> Tensor:
    """The weight of each chosen expert: its probability, normalized over the chosen ones if the router does so."""
    chosen_TK = logits_TX.float().softmax(dim=-1).gather(1, choices_TK)
    return chosen_TK / chosen_TK.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else chosen_TK


def _check(module: nn.Module, routers: list[nn.Module]) -> None:
    """Raises ConfigurationError unless a forward pass calls each router once, in order, and `_weights` reproduces the
    router's weights."""
    asked: list[nn.Module] = []
    understood: list[bool] = []

    def look(router: nn.Module, _inputs: Any, output: Any) -> None:
        asked.append(router)
        fits = isinstance(output, tuple) and len(output) == 3 and hasattr(router, "top_k")
        if fits:
            logits_TX, weights_TK, choices_TK = output
            fits = weights_TK.shape == choices_TK.shape and logits_TX.shape[1:] == (number_of_experts(router),)
        if fits:
            gap_TK = (_weights(router, logits_TX, choices_TK) - weights_TK.float()).abs()
            fits = bool(gap_TK.max() <= _TOLERANCE)
        understood.append(fits)

    model = cast(Any, module)
    weight = model.get_input_embeddings().weight
    ids_12 = torch.arange(2, device=weight.device)[None] % weight.shape[0]
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    with torch.no_grad(), _hooked(routers, [look] * len(routers)):
        model(input_ids=ids_12, use_cache=False)
    for part, training in modes:
        part.training = training
    if [id(router) for router in asked] != [id(router) for router in routers] or not all(understood):
        raise ConfigurationError(
            f"{type(module).__name__} chooses its experts in a way that pvg does not know.",
            "Set training.router_replay = false.",
        )
