import math

import pytest

from unitscale.analysis import FormatShares, ScaleRecord, ScaleTrace, Source

NONE = FormatShares(0.0, 0.0, 0.0)


def record(i: int, rms: float = 1.0) -> ScaleRecord:
    return ScaleRecord(
        name=f"value {i}" if i else "a name far longer than fits beside an axis " * 3,
        source=Source("dense", ""),
        primitive="mul",
        scope="",
        backward=i % 2 == 1,
        shape=(2,),
        dtype="float32",
        executions=1,
        rms=rms,
        amax=4 * rms,
        zeros=0.0,
        formats={"float16": NONE, "float8_e4m3fn": NONE},
    )


def plot(*records: ScaleRecord):
    (axes,) = ScaleTrace(records, None).plot().axes
    return axes


@pytest.mark.parametrize("count", [0, 1, 5, 60, 61, 500])
def test_every_value_is_drawn_once(count) -> None:
    axes = plot(*(record(i, 2.0 ** (i % 7)) for i in range(count)))
    drawn = {line.get_label(): line for line in axes.get_lines()}
    points = [
        len(drawn[f"{p} RMS"].get_xdata()) for p in ("forward", "backward") if f"{p} RMS" in drawn
    ]
    assert sum(points) == count
    assert axes.get_ylabel() == "log2 of the value"
    named = "value 1" in [label.get_text() for label in axes.get_xticklabels()]
    assert named == (1 < count <= 60)


def test_levels_are_logarithms() -> None:
    axes = plot(record(0, 0.125), record(2, 8.0))
    line = next(x for x in axes.get_lines() if x.get_label() == "forward RMS")
    assert list(line.get_ydata()) == [-3.0, 3.0]


def test_formats_are_shaded_to_their_limits() -> None:
    axes = plot(record(0, 2.0**-30), record(2, 2.0**30))
    shades = {p.get_label(): p for p in axes.patches}
    low, high = shades["float16"].get_extents().transformed(axes.transData.inverted()).intervaly
    assert low == pytest.approx(-14)
    assert high == pytest.approx(math.log2(65504))
    assert {"float16", "float8_e4m3fn"} <= set(shades)


@pytest.mark.parametrize("rms", [0.0, math.inf, math.nan])
def test_what_has_no_logarithm_is_marked(rms) -> None:
    axes = plot(record(0), record(2, rms))
    line = next(x for x in axes.get_lines() if x.get_label() == "all zero or not finite")
    assert list(line.get_xdata()) == [1]


def test_long_names_are_cut() -> None:
    assert len(plot(record(0)).get_xticklabels()[0].get_text()) == 48
