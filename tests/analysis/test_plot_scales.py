import math

import pytest

from unitscale.analysis import FormatShares, ScaleRecord, Source
from unitscale.analysis._plot_scales import plot_scales

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


@pytest.mark.parametrize("count", [1, 5, 60, 61, 500])
def test_every_value_is_drawn_once(count) -> None:
    figure = plot_scales([record(i, 2.0 ** (i % 7)) for i in range(count)])
    axes, bars = figure.axes
    drawn = {line.get_label(): line for line in axes.get_lines()}
    points = [
        len(drawn[f"{p} RMS"].get_xdata()) for p in ("forward", "backward") if f"{p} RMS" in drawn
    ]
    assert sum(points) == count
    rows = count <= 60
    assert (bars.get_xlabel() if rows else axes.get_ylabel()) == "log2 of the value"
    assert (len(axes.get_yticks()) == count) is rows


def test_levels_are_logarithms() -> None:
    axes, _ = plot_scales([record(0, 0.125), record(2, 8.0)]).axes
    line = next(x for x in axes.get_lines() if x.get_label() == "forward RMS")
    assert list(line.get_xdata()) == [-3.0, 3.0]


def test_formats_are_shaded_to_their_limits() -> None:
    axes, _ = plot_scales([record(0, 2.0**-30), record(2, 2.0**30)]).axes
    shades = {p.get_label(): p for p in axes.patches}
    left, right = shades["float16"].get_extents().transformed(axes.transData.inverted()).intervalx
    assert left == pytest.approx(-14)
    assert right == pytest.approx(math.log2(65504))


@pytest.mark.parametrize("count", [2, 61])
def test_each_format_has_a_bar_with_its_name(count) -> None:
    _, bars = plot_scales([record(i, 2.0**-30) for i in range(count)]).axes
    axis = bars.yaxis if count == 2 else bars.xaxis
    names = [label.get_text() for label in axis.get_ticklabels()]
    assert names == ["float16", "float8_e4m3fn"]
    lengths = [max(p.get_width(), p.get_height()) for p in bars.patches]
    # The subnormal numbers of float16, 10 binades; its normal ones, to the edge of the picture.
    assert lengths[:2] == [10, 14 + 6]


@pytest.mark.parametrize("rms", [0.0, math.inf, math.nan])
def test_what_has_no_logarithm_is_marked(rms) -> None:
    axes, _ = plot_scales([record(0), record(2, rms)]).axes
    line = next(x for x in axes.get_lines() if x.get_label() == "all zero or not finite")
    assert list(line.get_ydata()) == [1]


def test_long_names_are_cut() -> None:
    axes, _ = plot_scales([record(0)]).axes
    assert len(axes.get_yticklabels()[0].get_text()) == 48
