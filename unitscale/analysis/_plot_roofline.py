"""The picture of a projection: time by kind, and the places that most time comes from."""

from typing import Any

from ._extras import extra
from ._work import ARITHMETIC, ATTENTION, COLLECTIVES, KINDS, LIBRARY, MEMORY, PRODUCTS

_PLACES = 20
_LABEL = 60
_COLORS = dict.fromkeys(PRODUCTS.values(), "tab:blue") | {
    PRODUCTS["f8"]: "tab:cyan",
    ATTENTION: "tab:green",
    MEMORY: "tab:orange",
    ARITHMETIC: "tab:red",
    COLLECTIVES: "tab:purple",
    LIBRARY: "tab:gray",
}


def plot_roofline(report: Any) -> Any:
    """Returns a figure of projected milliseconds: a bar for each kind, then for each place.

    Args:
        report: a `Roofline`.

    Raises:
        ImportError: if matplotlib is not installed.

    Example:
        >>> import jax
        >>> from unitscale.analysis import roofline
        >>> compiled = jax.jit(jax.lax.neg).lower(jax.numpy.ones(1024)).compile()
        >>> len(plot_roofline(roofline(compiled)).axes)
        2
    """
    kinds = report.by_kind()
    places = [(kind, t) for kind in KINDS for t in report.by_place(kind)]
    places = sorted(places, key=lambda pair: -pair[1].seconds)[:_PLACES]
    figure_class = extra("Roofline.plot", "matplotlib.figure").Figure
    height = 2.0 + 0.25 * (len(kinds) + len(places))
    figure = figure_class(figsize=(9, height), layout="constrained")
    ratios = [max(len(kinds), 1), max(len(places), 1)]
    upper, lower = figure.subplots(2, sharex=False, height_ratios=ratios)
    _bars(upper, [(t.label, t.label, t.seconds) for t in kinds])
    _bars(lower, [(kind, t.label, t.seconds) for kind, t in places])
    upper.set_title(f"projected {report.seconds * 1e3:.3g} ms on {report.device.name}, by kind")
    lower.set_title("projected, by the places that most time comes from")
    lower.set_xlabel("projected ms")
    return figure


def _bars(axes: Any, rows: list[tuple[str, str, float]]) -> None:
    colors = [_COLORS[kind] for kind, _, _ in rows]
    axes.barh(range(len(rows)), [1e3 * seconds for *_, seconds in rows], color=colors)
    names = [name if len(name) <= _LABEL else f"...{name[3 - _LABEL :]}" for _, name, _ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
