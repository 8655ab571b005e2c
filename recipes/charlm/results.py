"""What a sweep found: a table of the best losses, and the scatter plot of the paper."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .grid import Point, describe
from .rows import Row, key_of

SERIES = {
    ("regular", "float16"): ("regular FP16", "o", "tab:red"),
    ("unit", "float16"): ("unit FP16", "o", "tab:blue"),
    ("unit", "fp8"): ("unit FP8", "^", "tab:green"),
}
"""Label, marker and colour of what is drawn against the FP32 loss of the same parametrization."""

_FORMATS = ("model.parametrization", "model.precision")
Best = dict[str, dict[tuple[str, str], float]]


def best_losses(points: Sequence[Point], rows: Sequence[Row]) -> Best:
    """The least loss over learning rates, by model and by (parametrization, precision).

    A loss is the mean over seeds; rates that lack a seed are left out.
    """
    runs: dict[str, dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row.loss is not None:
            runs[key_of(row.point)][row.learning_rate][row.seed] = row.loss
    best: Best = defaultdict(dict)
    for point in points:
        seeds, model = point.config.sweep.seeds, point.config.model
        means = [
            sum(found[seed] for seed in seeds) / len(seeds)
            for found in runs[key_of(point.values)].values()
            if set(seeds) <= set(found)
        ]
        if means:
            rest = {key: value for key, value in point.values.items() if key not in _FORMATS}
            best[describe(rest)][model.parametrization, model.precision] = min(means)
    return best


def report(points: Sequence[Point], rows: Sequence[Row], folder: Path) -> list[str]:
    """Writes `results.md` and `scatter.png`; returns the lines of a summary."""
    best = best_losses(points, rows)
    columns = sorted({kind for losses in best.values() for kind in losses})
    head = ["model", *(" ".join(column) for column in columns)]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for name, losses in best.items():
        lines.append(" | ".join([name, *(_text(losses.get(column)) for column in columns)]))
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    plot_scatter(best, folder / "scatter.png")
    return [*(_summary(best, kind) for kind in SERIES if kind in columns), f"results in {folder}"]


def _text(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _pairs(best: Best, kind: tuple[str, str]) -> list[tuple[float, float]]:
    """(FP32 loss, loss in the format) of every model that has both."""
    wide = (kind[0], "float32")
    return [(x[wide], x[kind]) for x in best.values() if wide in x and kind in x]


def _summary(best: Best, kind: tuple[str, str]) -> str:
    pairs = [(wide, narrow) for wide, narrow in _pairs(best, kind) if math.isfinite(wide)]
    failed = sum(not math.isfinite(narrow) for _, narrow in pairs)
    gaps = [narrow - wide for wide, narrow in pairs if math.isfinite(narrow)]
    label = SERIES[kind][0]
    if not gaps:
        return f"{label}: {failed} of {len(pairs)} models diverge"
    return (
        f"{label}: {failed} of {len(pairs)} models diverge; over FP32, mean "
        f"{sum(gaps) / len(gaps):+.4f}, worst {max(gaps):+.4f} nats"
    )


def plot_scatter(best: Best, path: Path) -> None:
    """Draws the loss in a narrow format against the loss in FP32, a point a model.

    Losses that are not finite stand on the upper edge.
    """
    series: dict[Any, list[tuple[float, float]]] = {
        kind: [pair for pair in _pairs(best, kind) if math.isfinite(pair[0])] for kind in SERIES
    }
    finite = [v for pairs in series.values() for pair in pairs for v in pair if math.isfinite(v)]
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.subplots()
    if finite:
        low, high = min(finite), max(finite)
        margin = 0.05 * (high - low) or 0.1
        low, high = low - margin, high + margin
        axes.plot([low, high], [low, high], color="grey", linewidth=1, label="equal")
        for kind, pairs in series.items():
            if not pairs:
                continue
            label, marker, colour = SERIES[kind]
            lost = sum(not math.isfinite(y) for _, y in pairs)
            if lost:
                label += f" ({lost} diverged, at the top)"
            axes.scatter(
                [x for x, _ in pairs],
                [y if math.isfinite(y) else high for _, y in pairs],
                marker=marker,
                color=colour,
                alpha=0.6,
                label=label,
                clip_on=False,
                zorder=3,
            )
        axes.set(xlim=(low, high), ylim=(low, high))
        axes.legend(loc="lower right")
    axes.set(
        xlabel="validation loss in FP32 (nats per character)",
        ylabel="validation loss in FP16 or FP8",
        aspect="equal",
    )
    axes.grid(alpha=0.3)
    with matplotlib.rc_context({"savefig.dpi": 120}):
        figure.savefig(path)
