"""Defects of vLLM's CPU build (0.32) that end the engine, mended where they lie. A GPU does not have them."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform


def mend_cpu() -> None:
    """Install the mends, once in each worker process; nothing happens where the platform is another."""
    if current_platform.is_cpu():
        _mend_prompt_logprobs_under_adapters()


def _mend_prompt_logprobs_under_adapters() -> None:
    """Log-probs of a prompt take its logits row by row, but the adapter's part of the logits is looked up with the
    indices of the rows to be sampled: with two requests in a batch their numbers differ, and einsum raises.

    No adapter of pvg's changes the output layer, so there that part is nothing. One that does is refused.
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
