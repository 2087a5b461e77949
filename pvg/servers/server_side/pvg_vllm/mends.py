"""Workarounds for bugs of vLLM's CPU build (0.32) that crash the engine. GPU builds do not have them."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform


def mend_cpu() -> None:
    """Install the workarounds, once per worker process. Does nothing on other platforms."""
    if current_platform.is_cpu():
        _mend_prompt_logprobs_under_adapters()


def _mend_prompt_logprobs_under_adapters() -> None:
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
