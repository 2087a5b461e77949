"""`PvgWorker`: what a vLLM worker does with new weights. vLLM mixes it into its own worker class.

vLLM loads new weights layer by layer into the storage that its kernels know (`reload_weights`), and only warns of what
was missing. Here nothing may be missing, a failure leaves a model that can still answer (with whatever it has), and a
defect of vLLM's CPU build is mended: see `_repack_tied_heads`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from .ipc_engine import register
from .mends import mend_cpu

# vLLM imports this module in every worker, before it makes the worker's transfer engine.
register()
mend_cpu()

# What a checkpoint that does not fit its model makes vLLM's loaders raise: their shape checks are assertions.
UNFIT = (AssertionError, AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)


class IncompleteWeights(ValueError):
    """Tensors that the model needs and the files do not hold."""


class PvgWorker:
    """Attributes from vLLM's worker: `model_runner`, `vllm_config`."""

    model_runner: Any
    vllm_config: Any

    def pvg_load_weights(self, files: Sequence[str]) -> str:
        """Load the tensors of these safetensors files; the reason why it failed, empty where it did not.

        After a failure some layers have the new weights and others the old ones.
        """
        with set_current_vllm_config(self.vllm_config):
            try:
                load(self.model_runner, self.vllm_config.model_config, files)
            except UNFIT as error:
                return f"{type(error).__name__}: {error}"[:2000]
        return ""


@torch.no_grad()
def load(runner: Any, model_config: Any, files: Sequence[str]) -> None:
    """Raises what vLLM's loaders raise, IncompleteWeights for what they would only warn of."""
    model = runner.get_model()
    tied = _tied_heads(model)
    try:
        with _complete(model, check=model_config.quantization is None):
            runner.reload_weights(weights_iterator=_tensors(files))
    except BaseException:
        _put_back(model, model_config)
        raise
    finally:
        if current_platform.is_cpu():
            _repack_tied_heads(tied)


def _tensors(files: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor after the other, mapped from its file."""
    for path in files:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)


@contextmanager
def _complete(model: torch.nn.Module, *, check: bool) -> Iterator[None]:
    """While it lasts, `model.load_weights` raises IncompleteWeights where it leaves parameters unloaded.

    Parameters are counted before: a tied output layer is the embedding itself, which no checkpoint must hold twice.
    Quantised models have parameters of their own making, of which vLLM cannot tell either.
    """
    needed = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    original: Any = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loaded = original(weights)
        missing = sorted((needed - set(loaded) if loaded is not None else set()) | _partly_loaded(model))
        if missing and check:
            raise IncompleteWeights(f"{len(missing)} not loaded or not whole: {', '.join(missing[:8])}")
        return loaded

    model.load_weights = load_weights  # type: ignore[assignment]
    try:
        yield
    finally:
        del model.load_weights


def _partly_loaded(model: torch.nn.Module) -> set[str]:
    """Layers that got some of their elements only, such as two of the three matrices of a fused one. Embeddings are
    padded and never get all."""
    found = set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or isinstance(layer, VocabParallelEmbedding) or is_deferred_attention_layer(layer):
            continue
        needed = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        if 0 < info.load_numel < needed:
            found.add(name)
    return found


def _put_back(model: torch.nn.Module, model_config: Any) -> None:
    """End a reload that failed: layers that were not finished get their old tensors back, or they would have none."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    finalize_layerwise_reload(model, model_config)


def _tied_heads(model: torch.nn.Module) -> list[VocabParallelEmbedding]:
    """Output layers whose weight is that of the embedding."""
    first: dict[int, torch.nn.Module] = {}
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    return [module for module in embeddings if first.setdefault(id(module.weight), module) is not module]


def _repack_tied_heads(heads: Iterable[VocabParallelEmbedding]) -> None:
    """On the CPU a linear layer multiplies with a packed copy of its weight, made when the layer was loaded. A tied
    output layer has no tensors of its own, so that a reload passes it by: it would keep the copy of the old ones."""
    for head in heads:
        head.quant_method.process_weights_after_loading(head)
