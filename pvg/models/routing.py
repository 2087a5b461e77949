"""Which experts a mixture-of-experts model chooses for each token: recorded while it samples, replayed while it learns.

    with recorded_experts(module) as recorder:
        module(input_ids=ids_BL)
        experts_TMK = recorder.take()        # [B * L tokens, layers, experts per token]
    with replayed_experts(module, experts_TMK):
        module(input_ids=ids_BL)             # the same experts, weighed by today's router

A rounding can change which k experts are the best: sampler and trainer would then compute one token with different
ones, and their log-probs be far apart. A replay takes the sampler's choice and lets the router's own probabilities,
gradients included, weigh it.

Invariant: models whose routers are not understood are refused, never replayed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pvg.errors import ConfigurationError

# transformers' routers carry this in their names, and give (logits [T, experts], weights [T, k], choices [T, k]).
ROUTER = "TopKRouter"
# Set on a module once its routers were found to be understood.
_CHECKED = "_pvg_routers_checked"
_TOLERANCE = 1e-2  # of weights between 0 and 1, in bfloat16


def routers_of(module: nn.Module) -> list[nn.Module]:
    """The routers in the order of their layers. Raises ConfigurationError for a model that has none, or some that pvg
    does not understand."""
    routers = [part for part in module.modules() if type(part).__name__.endswith(ROUTER)]
    if not routers:
        raise ConfigurationError(
            f"{type(module).__name__} is no mixture of experts, or one whose routers pvg does not know.",
            "Set rollout.routed_experts = false.",
        )
    if not module.__dict__.get(_CHECKED):
        _check(module, routers)
        module.__dict__[_CHECKED] = True
    return routers


def number_of_experts(router: nn.Module) -> int:
    return int(cast(Any, router).weight.shape[0])


class ExpertRecorder:
    """What `recorded_experts` gives."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.choices: list[Tensor] = []

    def take(self) -> Tensor:
        """Of the last forward pass: int64 [T, layers, k], T its tokens one behind the other, padding included."""
        if len(self.choices) != self._layers:
            raise RuntimeError(f"{len(self.choices)} routers chose, of {self._layers}")
        experts_TMK = torch.stack(self.choices, dim=1)
        self.choices.clear()
        return experts_TMK


@contextmanager
def recorded_experts(module: nn.Module) -> Iterator[ExpertRecorder]:
    """Every forward pass in here is to be followed by one `take`. Raises what `routers_of` raises."""
    routers = routers_of(module)
    recorder = ExpertRecorder(len(routers))

    def note(_router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        recorder.choices.append(output[2])

    with _hooked(routers, [note] * len(routers)):
        yield recorder


@contextmanager
def replayed_experts(module: nn.Module, experts_TMK: Tensor) -> Iterator[None]:
    """Forward passes in here, each over exactly T tokens, use these experts: integers [T, layers, k]. Raises what
    `routers_of` raises, and ConfigurationError for experts of another model."""
    routers = routers_of(module)
    k = int(cast(Any, routers[0]).top_k)
    if experts_TMK.shape[1:] != (len(routers), k):
        raise ConfigurationError(
            f"The rollouts carry experts of {experts_TMK.shape[1]} layers, {experts_TMK.shape[2]} for each token, and "
            f"{type(module).__name__} has {len(routers)} layers of experts and {k} for each token.",
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
    """How much each chosen expert counts: its probability, or its share of that of all chosen, as the router has it."""
    chosen_TK = logits_TX.float().softmax(dim=-1).gather(1, choices_TK)
    return chosen_TK / chosen_TK.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else chosen_TK


def _check(module: nn.Module, routers: list[nn.Module]) -> None:
    """Raises ConfigurationError where a forward pass does not ask each router once, in order, or where `_weights` are
    not the router's own."""
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
            "Set rollout.routed_experts = false.",
        )
