"""Weights on their way from a trainer to the engines."""

from pvg.weights.update import SyncTiming, WeightUpdate

__all__ = ["SyncTiming", "WeightUpdate"]
