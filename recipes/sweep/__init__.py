"""Sweeps: a learning-rate search at every point of a grid of runs, for any recipe."""

from ._points import (
    Curve as Curve,
    Point as Point,
    Row as Row,
    append_row as append_row,
    by_format as by_format,
    make_points as make_points,
    read_curves as read_curves,
    read_rows as read_rows,
)
from ._sweep import sweep as sweep
