"""The diagnosis of a run from its log: `diagnose(sources) -> Diagnosis`, and how it looks on a terminal."""

from pvg.reporting.diagnosis.diagnosis import Diagnosis, TimingSummary, diagnose
from pvg.reporting.diagnosis.signatures import SIGNATURES, Evidence, Finding

__all__ = ["SIGNATURES", "Diagnosis", "Evidence", "Finding", "TimingSummary", "diagnose"]
