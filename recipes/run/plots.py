"""Plots of a run, drawn from what is in its folder and from a probe of its model."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from .metrics import read_metrics
from .probe import Reading


def plot_loss(folder: Path, *, per: str) -> Path:
    """Draws `loss.png` from `metrics.jsonl`: training and validation loss by step."""
    rows = read_metrics(folder / "metrics.jsonl")
    figure = Figure(figsize=(7, 4.5), layout="constrained", dpi=120)
    axes = figure.subplots()
    for name, style in (("loss", "-"), ("validation_loss", "o-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "), markersize=4)
    axes.set(xlabel="step", ylabel=f"loss (nats per {per})", title=folder.name)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    figure.savefig(path := folder / "loss.png")
    return path


def plot_rms(folder: Path, readings: Mapping[str, Reading]) -> Path:
    """Draws `rms.png`: RMS of layers' outputs, of gradients there, and of weight gradients."""
    first = next(iter(readings.values()))
    kinds = {
        "activations": "output of each layer",
        "gradients": "gradient at each layer's output",
        "weights": "gradient of each parameter",
    }
    height = 1.5 + 0.16 * max(len(getattr(first, kind)) for kind in kinds)
    figure = Figure(figsize=(16, max(4.0, height)), layout="constrained", dpi=120)
    for axes, (kind, title) in zip(figure.subplots(1, 3), kinds.items(), strict=True):
        names = list(getattr(first, kind))
        for (label, reading), marker in zip(readings.items(), "oxs^", strict=False):
            values = np.array([float(getattr(reading, kind)[name]) for name in names])
            shown = np.isfinite(values) & (values > 0)  # a log axis has no place for the others
            axes.plot(values[shown], np.flatnonzero(shown), marker, label=label, markersize=5)
        axes.set_xscale("log", base=2)
        axes.axvline(1.0, color="grey", linewidth=1)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set(xlabel="RMS", title=title)
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()  # the same in all
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
    figure.suptitle(folder.name)
    figure.savefig(path := folder / "rms.png")
    return path
