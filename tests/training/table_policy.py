"""A policy whose log-probs are written down by hand, and batches for it: shared by the tests of the losses."""

from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch import nn

from pvg.training.batch import PolicyBatch


class TablePolicy(nn.Module):
    """p(token at position t) is row t - 1 of `probabilities`, whatever came before; logits are its parameters.

    Shaped like a transformers causal model as far as pvg.models.logprobs asks: a decoder (the table) and a head (the
    identity).
    """

    def __init__(self, probabilities):
        super().__init__()
        table_LV = torch.as_tensor(probabilities, dtype=torch.float32).log()
        self.table_LV = nn.Parameter(table_LV)
        self.head = nn.Linear(table_LV.shape[1], table_LV.shape[1], bias=False)
        self.head.weight = nn.Parameter(torch.eye(table_LV.shape[1]), requires_grad=False)
        self.config = SimpleNamespace(is_encoder_decoder=False, get_text_config=SimpleNamespace)

    def get_output_embeddings(self):
        return self.head

    def get_decoder(self):
        return self._hidden

    def _hidden(self, input_ids, use_cache):
        rows, length = input_ids.shape
        return SimpleNamespace(last_hidden_state=self.table_LV[:length].expand(rows, -1, -1))

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.head(self._hidden(input_ids, use_cache).last_hidden_state))

    def logprobs(self, batch):
        """Of each row's completion tokens, in float64, by numpy."""
        table_LV = self.table_LV.detach().numpy().astype(np.float64)
        table_LV = table_LV - np.log(np.exp(table_LV).sum(axis=1, keepdims=True))
        return [
            np.array([table_LV[t - 1, row[t]] for t in range(prompt, len(row))])
            for row, prompt in zip(batch.sequences, batch.prompt_lengths, strict=True)
        ]


def policy_batch(sequences, prompt_lengths, advantages, *, groups=None, roles=None, sampled=None, reference=None):
    """A PolicyBatch from lists; log-probs that are not given are 0."""
    rows = len(sequences)

    def columns(values):
        return [np.asarray(row, dtype=np.float32) for row in values]

    silent = [np.zeros(len(row) - prompt) for row, prompt in zip(sequences, prompt_lengths, strict=True)]
    return PolicyBatch(
        sequences=[np.asarray(row, dtype=np.int32) for row in sequences],
        prompt_lengths=np.asarray(prompt_lengths, dtype=np.int32),
        sampled_logprobs=columns(silent if sampled is None else sampled),
        reference_logprobs=None if reference is None else columns(reference),
        advantages_N=np.asarray(advantages, dtype=np.float32),
        role_ids_N=np.asarray([1] * rows if roles is None else roles, dtype=np.int8),
        group_ids_N=np.asarray(range(rows) if groups is None else groups, dtype=np.int32),
        versions_N=np.zeros(rows, dtype=np.int32),
    )


def small_llama(
    vocabulary: int, *, tied: bool = False, dtype: torch.dtype = torch.float32
) -> transformers.LlamaForCausalLM:
    """Two layers of width 32 with random weights, the same at each call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()
