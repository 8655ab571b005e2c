"""What a sweep found: a table of the best losses, and plots over learning rates and formats."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from ..run.folder import flatten
from ._points import Point, in_words, key_of
from ._rows import read_rows

LIBRARY, POLICY, WIDE = "model.library", "precision.policy", "float32"
_LINES = 12  # that a legend names
ByFormat = dict[str, dict[tuple[str, str], float]]
"""Least losses by model and by (library, policy)."""


class Curve(NamedTuple):
    """The losses of a point by learning rate: those of its seeds; infinite where one diverged."""

    point: Point
    runs: dict[float, tuple[float, ...]]

    @property
    def losses(self) -> dict[float, float]:
        """Means over seeds."""
        return {rate: sum(found) / len(found) for rate, found in self.runs.items()}

    @property
    def best(self) -> float:
        """The learning rate of least loss."""
        losses = self.losses
        return min(losses, key=losses.__getitem__)

    @property
    def seeds(self) -> tuple[float, ...]:
        """The losses of seeds at that rate."""
        return self.runs[self.best]

    @property
    def least(self) -> float:
        return self.losses[self.best]


def read_curves(points: Sequence[Point], folder: Path) -> list[Curve]:
    """What a folder has of points, without rates that lack a seed and points that have no rate."""
    runs: dict[str, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_rows(folder):
        if row.loss is not None:
            runs[key_of(row.point)][row.learning_rate][row.seed] = row.loss
    curves = []
    for point in points:
        seeds = point.config.sweep.seeds
        whole = {
            rate: tuple(found[seed] for seed in seeds)
            for rate, found in sorted(runs[key_of(point.settings)].items())
            if set(seeds) <= set(found)
        }
        if whole:
            curves.append(Curve(point, whole))
    return curves


def by_format(curves: Sequence[Curve]) -> ByFormat:
    """The least loss of each model, in each of its formats."""
    return {
        model: {formats: curve.least for formats, curve in found.items()}
        for model, found in curves_by_format(curves).items()
    }


def curves_by_format(curves: Sequence[Curve]) -> dict[str, dict[tuple[str, str], Curve]]:
    """The curves of each model, by (library, policy)."""
    found: dict[str, dict[tuple[str, str], Curve]] = defaultdict(dict)
    for curve in curves:
        known = flatten(curve.point.config.model_dump())
        values = curve.point.values.items()
        model = in_words({k: value for k, value in values if k not in (LIBRARY, POLICY)})
        found[model][known.get(LIBRARY, ""), known[POLICY]] = curve
    return found


def paired(losses: ByFormat, formats: tuple[str, str]) -> list[tuple[float, float]]:
    """Losses in FP32 and in a format, of the models that converge in FP32."""
    wide = (formats[0], WIDE)
    both = [(x[wide], x[formats]) for x in losses.values() if wide in x and formats in x]
    return [pair for pair in both if math.isfinite(pair[0])]


def report(points: Sequence[Point], folder: Path) -> list[str]:
    """Writes `results.md`, `curves.png` and `scatter.png`; returns the lines of a summary."""
    curves = read_curves(points, folder)
    losses = by_format(curves)
    columns = sorted({formats for found in losses.values() for formats in found})
    head = ["model", *(_name(column) for column in columns)]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for model, found in losses.items():
        cells = (f"{found[column]:.4f}" if column in found else "" for column in columns)
        lines.append(" | ".join([model, *cells]))
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    unit = points[0].config.loss_unit
    _plot_curves(curves, folder / "curves.png", unit)
    pairs = {
        column: paired(losses, column)
        for column in columns
        if column[1] != WIDE and (column[0], WIDE) in columns
    }
    if pairs:
        _plot_scatter(pairs, folder / "scatter.png", unit)
    return [*(_summary(column, found) for column, found in pairs.items()), f"results in {folder}"]


def _name(formats: tuple[str, str]) -> str:
    return " ".join(formats).strip()


def _summary(formats: tuple[str, str], pairs: list[tuple[float, float]]) -> str:
    gaps = [narrow - wide for wide, narrow in pairs if math.isfinite(narrow)]
    text = f"{_name(formats)}: {len(pairs) - len(gaps)} of {len(pairs)} models diverge"
    if not gaps:
        return text
    mean, worst = sum(gaps) / len(gaps), max(gaps)
    return f"{text}; over {WIDE}, mean {mean:+.4f}, worst {worst:+.4f} nats"


def _plot_curves(curves: Sequence[Curve], path: Path, unit: str) -> None:
    """Draws loss over learning rate: a panel for each value of the grid's first key."""
    panels: dict[str, list[tuple[str, Curve]]] = defaultdict(list)
    for curve in curves:
        first, *rest = curve.point.values.items() or [("", "")]
        panels[in_words(dict([first])) if first[0] else ""].append((in_words(dict(rest)), curve))
    if not panels:
        return
    figure = Figure(figsize=(1 + 5 * len(panels), 4.5), layout="constrained", dpi=120)
    axes_of = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, lines) in zip(axes_of, panels.items(), strict=True):
        for index, (label, curve) in enumerate(lines):
            finite = {rate: x for rate, x in curve.losses.items() if math.isfinite(x)}
            if finite:
                colour = f"C{index % 10}"
                axes.plot(*zip(*finite.items(), strict=True), "o-", color=colour, label=label, ms=4)
                axes.plot(curve.best, curve.least, "*", color=colour, ms=14)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="learning rate", title=title)
        axes.grid(alpha=0.3)
        if axes.has_data() and len(lines) <= _LINES:
            axes.legend()
    axes_of[0].set_ylabel(f"validation loss (nats per {unit})")
    figure.savefig(path)


def _plot_scatter(pairs: dict[Any, list[tuple[float, float]]], path: Path, unit: str) -> None:
    """Draws the loss in narrow formats against that in FP32, a point a model.

    Losses that are not finite stand on the upper edge.
    """
    finite = [x for found in pairs.values() for pair in found for x in pair if math.isfinite(x)]
    if not finite:
        return
    low, high = min(finite), max(finite)
    margin = 0.05 * (high - low) or 0.1
    low, high = low - margin, high + margin
    figure = Figure(figsize=(6.5, 6), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.plot([low, high], [low, high], color="grey", linewidth=1, label="equal")
    for (formats, found), marker in zip(pairs.items(), "o^sv" * len(pairs), strict=False):
        lost = sum(not math.isfinite(narrow) for _, narrow in found)
        label = _name(formats) + (f" ({lost} diverged, at the top)" if lost else "")
        wide, narrow = [w for w, _ in found], [min(n, high) for _, n in found]
        axes.scatter(wide, narrow, marker=marker, alpha=0.6, label=label, clip_on=False, zorder=3)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel=f"validation loss in {WIDE} (nats per {unit})", ylabel="in narrow formats")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path)
