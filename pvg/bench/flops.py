"""Floating-point operations that a model's forward pass cannot do without.

    size = ModelSize.of(model)
    size.forward(tokens=9472, predicted=6760, attended=350_464.0)

2 N T + 2 H C + 4 l d S for T tokens that are no padding, of which C get logits: N parameters of the layers, H of the
head, l layers, d = heads x head size, and S pairs of a token and one that it may look at (PaLM, arXiv 2204.02311,
appendix B, which counts the head for all tokens). A backward pass takes twice that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pvg.models.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of the layers (`body`) and of the `head`; `attention` is layers x heads x head size."""

    body: int
    head: int
    attention: int

    @classmethod
    def of(cls, model: LanguageModel) -> ModelSize:
        head = model.module.get_output_embeddings().weight
        table = model.module.get_input_embeddings().weight
        config = model.module.config.get_text_config()
        heads = config.num_attention_heads
        width = int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))
        # Looking a token up in the table costs nothing; where head and table are one, its parameters are counted once.
        body = model.num_parameters - head.numel() - (0 if table is head else table.numel())
        return cls(body, head.numel(), int(config.num_hidden_layers) * width)

    def forward(self, tokens: float, predicted: float, attended: float) -> float:
        """Of one forward pass; see the module."""
        return 2.0 * self.body * tokens + 2.0 * self.head * predicted + 4.0 * self.attention * attended
