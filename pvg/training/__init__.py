"""Training both players: one `Trainer`, credit assignment, policy losses.

The path of a prover's step: rewards -> `credit.advantages` -> `batch.PolicyBatch` -> `losses.PolicyObjective` (prepare,
split) -> `trainer.Trainer`. Losses resolve through `losses.LOSSES`, advantages through `credit.CREDIT`, schedules
through `schedule.SCHEDULES`. This file imports none of them: batches, metrics and credit need no torch.
"""
