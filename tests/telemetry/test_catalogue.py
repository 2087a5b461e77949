"""The catalogue of metrics, and the page that is written from it."""

from pvg.reporting.formats import MetricDisplay, metric_display
from pvg.telemetry import catalogue
from pvg.telemetry.catalogue import LABELS, METRICS, UNITS, metric


def test_every_entry_is_whole() -> None:
    for name, entry in METRICS.items():
        assert name == entry.name == f"{entry.where}/{entry.short}"
        assert entry.where in catalogue.KINDS
        assert entry.unit in UNITS
        assert entry.better in ("higher", "lower", "neither")
        assert entry.meaning.endswith((".", ")."))
        assert "|" not in entry.meaning  # it would end a cell of the page


def test_reports_show_metrics_by_their_unit_and_direction() -> None:
    assert set(LABELS) <= {entry.short for entry in METRICS.values()}
    assert metric_display("verifier_auc") == MetricDisplay("verifier AUC", "auc", True)
    assert metric_display("tokens_per_s") == MetricDisplay("tokens/s", "rate", True)
    assert metric_display("malformed") == MetricDisplay("malformed", "share", False)
    assert metric_display("a_new_one") == MetricDisplay("a new one", "number", None)


def test_unknown_names_have_no_entry() -> None:
    unknown = ["train_prover/lose", "loss", "device/gpu_power_w", "mint/loss"]
    assert [name for name in ["train_prover/loss", "device/gpu3_power_w", *unknown] if not metric(name)] == unknown
