"""The picture of a program's scales: a row for each value, or a column where they are many."""

import math
from collections.abc import Sequence
from typing import Any

from ..core import format_of
from ._extras import extra

# Rows that have room for a name.
_ROWS = 60
_COLORS = {False: "tab:blue", True: "tab:orange"}
_FORMATS = ("tab:green", "tab:purple", "tab:brown", "tab:olive", "tab:cyan", "tab:gray")


def plot_scales(records: Sequence[Any]) -> Any:
    """Returns a figure of the RMS and amax of records, on a log2 axis.

    Up to 60 values get a row and a name each; more lie along the horizontal axis in program order.
    The range of each format is shaded, its normal numbers darker than its subnormal ones, and
    stands as a bar of its own below or beside the values.

    Raises:
        ImportError: if matplotlib is not installed.

    Example:
        >>> len(plot_scales([]).axes)
        1
    """
    rows = len(records) <= _ROWS
    names = list(records[0].formats) if records else []
    figure, axes, bars = _figure(len(records), len(names), rows)
    levels = [math.log2(v) for r in records for v in (r.rms, r.amax) if v > 0 and math.isfinite(v)]
    low = min([-8.0, *levels]) - 2
    high = max([4.0, *levels]) + 2
    _shade(axes, bars, names, low, high, rows)
    for backward, color in _COLORS.items():
        label = "backward" if backward else "forward"
        points = [(i, r) for i, r in enumerate(records) if r.backward is backward]
        shown = [(i, r) for i, r in points if r.rms > 0 and math.isfinite(r.amax)]
        places = [i for i, _ in shown]
        rms = [math.log2(r.rms) for _, r in shown]
        amax = [math.log2(r.amax) for _, r in shown]
        if not shown:
            continue
        lines = axes.hlines if rows else axes.vlines
        lines(places, rms, amax, color=color, alpha=0.35, linewidth=2 if rows else 0.8)
        for values, marker, name in ((rms, "o", "RMS"), (amax, "|" if rows else "_", "amax")):
            pair = (values, places) if rows else (places, values)
            axes.plot(
                *pair, marker, color=color, label=f"{label} {name}", markersize=5 if rows else 3
            )
    lost = [
        i
        for i, r in enumerate(records)
        if r.executions and not (r.rms > 0 and math.isfinite(r.amax))
    ]
    if lost:
        edge = [low + 0.5] * len(lost)
        axes.plot(
            *((edge, lost) if rows else (lost, edge)),
            "x",
            color="tab:red",
            markersize=4,
            label="all zero or not finite",
        )
    (axes.axvline if rows else axes.axhline)(0, color="black", linewidth=0.8)
    locator = extra("plot", "matplotlib.ticker").MaxNLocator(integer=True)
    (axes.xaxis if rows else axes.yaxis).set_major_locator(locator)
    if rows:
        bars.set_xlabel("log2 of the value")
        axes.set_xlim(low, high)
        axes.set_ylim(max(len(records), 1) - 0.5, -0.5)
        axes.set_yticks(range(len(records)), [_short(r.label) for r in records], fontsize=8)
        axes.grid(axis="x", alpha=0.25)
    else:
        axes.set_ylabel("log2 of the value")
        axes.set_xlabel("value, in program order")
        axes.set_ylim(low, high)
        axes.set_xlim(-1, len(records))
        axes.grid(axis="y", alpha=0.25)
    marks = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    if marks:
        figure.legend(handles=marks, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _figure(count: int, formats: int, rows: bool) -> tuple[Any, Any, Any]:
    """A figure, the axes of its values, and those of its formats, the same if there are none."""
    figure_class = extra("plot", "matplotlib.figure").Figure
    height = 1.8 + 0.22 * (count + formats) if rows else 4.5
    figure = figure_class(figsize=(8, height), layout="constrained")
    if not formats:
        axes = figure.subplots()
        return figure, axes, axes
    if rows:
        axes, bars = figure.subplots(2, sharex=True, height_ratios=[max(count, 1), formats])
    else:
        axes, bars = figure.subplots(1, 2, sharey=True, width_ratios=[60, formats])
    return figure, axes, bars


def _short(text: str) -> str:
    return text if len(text) <= 48 else "..." + text[-45:]


def _shade(axes: Any, bars: Any, names: list[str], low: float, high: float, rows: bool) -> None:
    """Shades the range of each format, in strips that lie over one another, and draws its bar."""
    span = axes.axvspan if rows else axes.axhspan
    for index, name in enumerate(names):
        fmt = format_of(name)
        color = _FORMATS[index % len(_FORMATS)]
        edges = [math.log2(v) for v in (fmt.smallest_subnormal, fmt.smallest_normal, fmt.max)]
        bottom, normal, top = (min(max(edge, low), high) for edge in edges)
        span(bottom, normal, color=color, alpha=0.04, linewidth=0)
        span(normal, top, color=color, alpha=0.09, linewidth=0, label=name)
        for start, end, alpha in ((bottom, normal, 0.3), (normal, top, 0.8)):
            if rows:
                bars.barh(index, end - start, 0.6, left=start, color=color, alpha=alpha)
            else:
                bars.bar(index, end - start, 0.6, bottom=start, color=color, alpha=alpha)
    if names and rows:
        bars.set_yticks(range(len(names)), names, fontsize=8)
        bars.invert_yaxis()
    elif names:
        bars.set_xticks(range(len(names)), names, rotation=90)
        bars.tick_params(left=False)
