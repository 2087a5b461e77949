"""Training of both players: one `Trainer`, credit assignment, policy losses.

The path of a prover step: rewards -> `credit.advantages` -> `batch.PolicyBatch` -> `losses.PolicyObjective` (prepare,
split) -> `trainer.Trainer`. The tables are `losses.LOSSES` and `credit.CREDIT`. This file
imports none of them, because batches, metrics and credit need no torch.
"""
