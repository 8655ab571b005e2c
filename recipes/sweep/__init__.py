"""Sweeps: every point of a grid of runs, of any recipe, each at its own best learning rate."""

from ._points import Point as Point, make_points as make_points
from ._results import (
    ByFormat as ByFormat,
    Curve as Curve,
    by_format as by_format,
    curves_by_format as curves_by_format,
    paired as paired,
    read_curves as read_curves,
)
from ._rows import Row as Row, append_row as append_row, read_rows as read_rows
from ._sweep import sweep as sweep
