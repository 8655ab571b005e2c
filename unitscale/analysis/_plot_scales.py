"""The picture of a program's scales: a row for each value, or a column where they are many."""

import math
from collections.abc import Sequence
from typing import Any

from ..core import format_of
from ._extras import extra

# Rows that have room for a name.
_ROWS = 60
_COLORS = {False: "tab:blue", True: "tab:orange"}


def plot_scales(records: Sequence[Any]) -> Any:
    """Returns a figure of the RMS and amax of records, on a log2 axis.

    Up to 60 values get a row and a name each; more lie along the horizontal axis in program order.
    The range of each format is shaded, its normal numbers darker than its subnormal ones.

    Raises:
        ImportError: if matplotlib is not installed.

    Example:
        >>> len(plot_scales([]).axes)
        1
    """
    figure_class = extra("plot", "matplotlib.figure").Figure
    rows = len(records) <= _ROWS
    size = (9, 1.8 + 0.22 * len(records)) if rows else (13, 5.5)
    figure = figure_class(figsize=size, layout="constrained")
    axes = figure.subplots()
    levels = [math.log2(v) for r in records for v in (r.rms, r.amax) if v > 0 and math.isfinite(v)]
    low = min([-8.0, *levels]) - 2
    high = max([4.0, *levels]) + 2
    _shade(axes, list(records[0].formats) if records else [], low, high, rows)
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
    scale, other = (
        (axes.set_xlabel, axes.set_ylabel) if rows else (axes.set_ylabel, axes.set_xlabel)
    )
    scale("log2 of the value")
    (axes.axvline if rows else axes.axhline)(0, color="black", linewidth=0.8)
    if rows:
        axes.set_xlim(low, high)
        axes.set_ylim(max(len(records), 1) - 0.5, -0.5)
        axes.set_yticks(range(len(records)), [_short(r.label) for r in records], fontsize=8)
        axes.grid(axis="x", alpha=0.25)
    else:
        other("value, in program order")
        axes.set_ylim(low, high)
        axes.set_xlim(-1, len(records))
        axes.grid(axis="y", alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    return figure


def _short(text: str) -> str:
    return text if len(text) <= 48 else "..." + text[-45:]


def _shade(axes: Any, names: list[str], low: float, high: float, rows: bool) -> None:
    """Shades the range of each format, in strips that lie over one another."""
    span = axes.axvspan if rows else axes.axhspan
    for index, name in enumerate(names):
        fmt = format_of(name)
        edges = [math.log2(v) for v in (fmt.smallest_subnormal, fmt.smallest_normal, fmt.max)]
        bottom, normal, top = (min(max(edge, low), high) for edge in edges)
        span(bottom, normal, color=f"C{index + 4}", alpha=0.06, linewidth=0)
        span(normal, top, color=f"C{index + 4}", alpha=0.13, linewidth=0, label=name)
        if low < normal < high:
            place, across = ((normal, 0.98), "x") if rows else ((0.995, normal), "y")
            axes.text(
                *place,
                name,
                transform=getattr(axes, f"get_{across}axis_transform")(),
                rotation=90 if rows else 0,
                va="top" if rows else "bottom",
                ha="left" if rows else "right",
                fontsize=7,
                color=f"C{index + 4}",
            )
