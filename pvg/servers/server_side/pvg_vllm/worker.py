"""`PvgWorker`: how a vLLM worker loads new weights. vLLM mixes it into its own worker class.

vLLM's `reload_weights` loads layer by layer into the memory that its kernels use, and only warns about missing tensors.
Here missing tensors are errors, a failed load leaves a model that still answers (with old and new weights mixed), and a
bug of vLLM's CPU build is worked around (`_repack_tied_heads`).
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

# What vLLM's loaders raise for a checkpoint that does not fit its model; their shape checks are assertions.
LOAD_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)


class IncompleteWeights(ValueError):
    """The files lack tensors that the model needs."""


class PvgWorker:
    """A mixin. vLLM's worker provides `model_runner`, `vllm_config` and `device`."""

    device: torch.device
    model_runner: Any
    vllm_config: Any

    def pvg_gpu(self) -> str:
        """The UUID of this worker's GPU."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def pvg_load_weights(self, files: Sequence[str]) -> str:
        """Load the tensors of these safetensors files. Returns the reason of a failure, or "" on success.

        After a failure some layers have the new weights and others the old ones.
        """
        with set_current_vllm_config(self.vllm_config):
            try:
                load(self.model_runner, self.vllm_config.model_config, files)
            except LOAD_ERRORS as error:
                return f"{type(error).__name__}: {error}"[:2000]
        return ""


@torch.no_grad()
def load(runner: Any, model_config: Any, files: Sequence[str]) -> None:
    """Raises what vLLM's loaders raise, and IncompleteWeights where they would only warn."""
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
    """The tensors one by one, memory-mapped from their files."""
    for path in files:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


@contextmanager
def _complete(model: torch.nn.Module, *, check: bool) -> Iterator[None]:
    """Inside this context `model.load_weights` raises IncompleteWeights if it leaves parameters unloaded.

    Parameters are listed before: a tied output layer is the embedding itself, which a checkpoint need not hold twice.
    Quantized models create further parameters. vLLM has no information about these, so they are unchecked.
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
    """Layers that got only some of their elements, such as two of the three matrices of a fused one. Embeddings are
    skipped, because they are padded and never get all."""
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
    """End a failed reload: unfinished layers get their old tensors back, because otherwise they would have none."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    finalize_layerwise_reload(model, model_config)


def _tied_heads(model: torch.nn.Module) -> list[VocabParallelEmbedding]:
    """Output layers that share the weight of the embedding."""
    first: dict[int, torch.nn.Module] = {}
    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    return [module for module in embeddings if first.setdefault(id(module.weight), module) is not module]


def _repack_tied_heads(heads: Iterable[VocabParallelEmbedding]) -> None:
    """On the CPU, a linear layer multiplies with a packed copy of its weight, made at load time. A tied output layer
    has no tensors in the file, so a reload skips it and would leave the copy of the old weights."""
    for head in heads:
        head.quant_method.process_weights_after_loading(head)


# --- workarounds for bugs of vLLM's CPU build (0.32) that crash the engine; GPU builds do not have them --------------


def work_around_cpu_bugs() -> None:
    """Install the workarounds, once per worker process. Does nothing on other platforms."""
    if current_platform.is_cpu():
        _work_around_prompt_logprobs()


def _work_around_prompt_logprobs() -> None:
    """Log-probs of a prompt compute its logits for all rows, but the adapter's part uses the indices of the rows to
    sample. With two requests in a batch these numbers differ, and einsum raises.

    pvg's adapters never change the output layer, so their part of the logits is zero. Others raise NotImplementedError.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    original = PunicaWrapperCPU.add_lora_logits

    def add_lora_logits(
        self: Any, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, **options: Any
    ) -> Any:
        if x.numel() // x.shape[-1] == self.sampler_indices.shape[0]:
            return original(self, y, x, lora_a_stacked, lora_b_stacked, scale, **options)
        if lora_b_stacked.count_nonzero():
            raise NotImplementedError("log-probs of prompts under an adapter of the output layer, on a CPU")
        return None

    PunicaWrapperCPU.add_lora_logits = add_lora_logits


work_around_cpu_bugs()  # vLLM imports this module in every worker
