"""A verifier head: a linear map of the mean hidden state of the solution's tokens; `scalar` reads the last token."""

import torch
from torch import Tensor, nn

from pvg.config.training import Verifier
from pvg.models.heads import VerifierModel
from pvg.models.language_model import LanguageModel


class MeanHead(VerifierModel):
    """V = w . mean_t h_t + b over the solution's tokens t. w and b start at 0: untrained, every solution scores 0."""

    reads = "implicit"  # problem, solution and end token, with the position of the solution

    def __init__(self, section: Verifier, language_model: LanguageModel) -> None:
        super().__init__(language_model)
        size = language_model.module.get_input_embeddings().weight.shape[1]
        self.weight_D = nn.Parameter(torch.zeros(size, device=language_model.device))
        self.bias = nn.Parameter(torch.zeros((), device=language_model.device))

    def _scores(
        self, input_ids_BL: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, reference_B: Tensor | None
    ) -> Tensor:
        decoder = self._open_backbone().get_decoder()
        hidden_BLD = decoder(input_ids=input_ids_BL, use_cache=False).last_hidden_state.float()
        positions_L = torch.arange(input_ids_BL.shape[1], device=input_ids_BL.device)
        of_solution_BL = (positions_L >= prompt_lengths_B[:, None]) & (positions_L < lengths_B[:, None])
        # Sum in float64, so that a row has the same bits at any padding width.
        sums_BD = (hidden_BLD * of_solution_BL[:, :, None]).sum(1, dtype=torch.float64)
        means_BD = (sums_BD / of_solution_BL.sum(1, keepdim=True).clamp_min(1)).float()
        return (means_BD * self.weight_D).sum(1) + self.bias
