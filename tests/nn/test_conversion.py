"""The report of a conversion."""

from unitscale.nn import Conversion, ConversionReport
from unitscale.quant import Dynamic, MatmulConfig

LAYERS = (
    Conversion(
        path="layers.0.up",
        kind="Linear",
        features=(16, 64),
        rule="*.up",
        config=MatmulConfig(cotangent="e5m2", strategy=Dynamic()),
        reason="",
    ),
    Conversion(path="conv", kind="Conv", features=(), rule="", config=None, reason="no rule"),
)


def test_layers_are_told_apart() -> None:
    report = ConversionReport(LAYERS)
    assert report.converted == ("layers.0.up",)
    assert report.skipped == {"conv": "no rule"}


def test_a_report_prints_as_a_table() -> None:
    head, columns, up, conv = str(ConversionReport(LAYERS)).splitlines()
    assert head == "1 of 2 layers converted"
    for text in ("Linear", "16x64", "e4m3fn x e4m3fn, cotangent e5m2, Dynamic(", "*.up"):
        assert text in up
    # Columns stand under one another.
    assert columns.index("class") == up.index("Linear") == conv.index("Conv")
    assert conv.split() == ["conv", "Conv", "no", "rule"]
