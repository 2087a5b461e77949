"""Weights on their way from a trainer to the engines."""

from pvg.weights.update import Adapter, SyncTiming, WeightUpdate

__all__ = ["Adapter", "SyncTiming", "WeightUpdate"]
