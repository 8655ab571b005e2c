"""Draw the charts of the README and the site from `results/*.json`.

    python notebooks/charts.py

Text is mid-gray on a transparent background, which can be read on light and on dark pages.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "results", HERE / "docs"
GRAY, PLAIN, QWIX, UNIT = "#808080", "#d9822b", "#2a9d8f", "#6377e0"
STYLE: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), GRAY)
STYLE |= {"xtick.color": GRAY, "ytick.color": GRAY, "axes.titlesize": 10, "font.size": 9}
STYLE |= {"svg.hashsalt": "unitscale", "axes.spines.top": False, "axes.spines.right": False}
# Label, file, table, row, and our goal in percent.
LOSSES = (
    ("FP8, 600 steps, 5 seeds, 2 texts", "parity", -1, "fp8", 0.2),
    ("FP8, 1,200 steps, 5 seeds, 2 texts", "parity-1200", -1, "fp8", 0.2),
    ("FP8, rate 3, 600 steps, 5 seeds, 2 texts", "parity-rate-3", -1, "fp8", 0.2),
    ("FP8, rate 3, 1,200 steps, 8 seeds, 2 texts", "parity-rate-3-1200", -1, "fp8", 0.2),
    *(
        (f"FP8, {text}, 600 steps, 5 seeds", "parity-texts", index, "fp8", 0.2)
        for index, text in enumerate(("articles", "Python", "JSON", "sentences", "plays", "novels"))
    ),
    *(
        (f"FP8, {text}, rate 3, 600 steps, 5 seeds", "parity-texts-rate-3", index, "fp8", 0.2)
        for index, text in enumerate(("articles", "Python", "sentences"))
    ),
    ("FP8, Python, rate 3, 1,200 steps, 5 seeds", "parity-texts-rate-3", 3, "fp8", 0.2),
    *(
        (f"FP8, {text}, 1,200 steps, {n} seeds", "parity-texts-1200", index, "fp8", 0.2)
        for index, (text, n) in enumerate(
            (("plays", 5), ("novels", 3), ("more novels", 5))
            + (("articles", 5), ("Python", 5), ("sentences", 5))
        )
    ),
    *(
        (f"NVFP4, {text}, rate 3, 600 steps, 5 seeds", "parity-nvfp4", index, "nvfp4", 1.0)
        for index, text in enumerate(("plays", "articles", "Python"))
    ),
    ("NVFP4, 2 layers in FP8, plays, rate 3, 5 seeds", "parity-nvfp4", 3, "nvfp4-mixed", 1.0),
    ("FP8, 10,000 steps, 3 seeds, 1 text", "parity-drift", 0, "fp8", 0.2),
    ("FP8, BERT, 4,000 steps, 3 seeds, 1 text", "lms", 0, "fp8", 0.7),
    ("float16, 600 steps, 5 seeds, 2 texts", "parity", -1, "float16", 0.1),
    ("float16, BERT, 4,000 steps, 3 seeds, 1 text", "lms", 0, "float16", 0.2),
    ("scalify in float16, 5 seeds, 1 text", "scalify", 0, "scalify-float16", 0.2),
    ("scalify with FP8 matmuls, 5 seeds, 1 text", "scalify", 0, "scalify-fp8", 0.5),
    ("5 bytes per parameter, 5 seeds, 2 texts", "optim", -1, "6 bytes", 0.2),
    ("4 bytes per parameter, 5 seeds, 2 texts", "optim", -1, "4 bytes", 0.5),
    ("gradients sent in FP8, 5 seeds, 2 texts", "parallel", -1, "float8_e4m3fn", 0.3),
)
PROGRAMS = {"plain-bfloat16": PLAIN, "qwix": QWIX, "fp8-scaled": UNIT}
NAMES = ("plain flax.nnx, bfloat16", "qwix, FP8", "unitscale, FP8, 5 bytes per parameter")
KINDS = ("outputs of layers", "gradients at outputs", "gradients of parameters")


def table(stem: str, which: int | str) -> list[dict[str, Any]]:
    """The rows of one table of a file, by its place or by the start of its title."""
    tables = json.loads((RESULTS / f"{stem}.json").read_text("utf-8"))["tables"]
    if isinstance(which, int):
        return tables[which]["rows"]
    return next(t["rows"] for t in tables if t["title"].startswith(which))


def steps() -> Figure:
    """Step time and peak memory by model size, relative to plain bfloat16."""
    sizes = {"GPT-2 small\nmeasured": table("gpu", "Training step")}
    for size in ("1B", "8B", "13B"):
        rows = table("h200-sizes", f"Training step of a Llama of {size}")
        sizes[f"Llama {size}\nprojected"] = rows
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    titles = ("step time, milliseconds", "peak memory, GiB")
    for axes, title in zip(figure.subplots(1, 2), titles, strict=True):
        for place, (size, rows) in enumerate(sizes.items()):
            values = {}
            for row in rows:
                ms = row.get("measured ms", row.get("projected ms"))
                values[row["program"]] = ms if "time" in title else row["peak MiB"] / 1024
            projected = {"hatch": "////", "alpha": 0.75} if "projected" in size else {}
            for index, (name, color) in enumerate(PROGRAMS.items()):
                height, x = values[name] / values["plain-bfloat16"], place + 0.27 * (index - 1)
                axes.bar(x, height, 0.25, color=color, edgecolor="white", linewidth=0, **projected)
                label = f"{values[name]:.0f}" if values[name] >= 100 else f"{values[name]:.1f}"
                axes.text(x, height + 0.02, label, ha="center", fontsize=7.5)
        axes.set_xticks(range(len(sizes)), sizes, fontsize=8)
        axes.set(title=title, ylim=(0, 1.25), yticks=[0, 0.5, 1], ylabel="relative to plain")
    bars = [Patch(color=color) for color in PROGRAMS.values()]
    figure.legend(bars, NAMES, loc="outside lower center", ncols=3, frameon=False)
    return figure


def losses() -> Figure:
    """Differences of validation loss from the same model in float32, with standard errors."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    for place, (_, stem, which, variant, goal) in enumerate(LOSSES):
        row = next(r for r in table(stem, which) if r.get("variant") == variant)
        middle, error = 100 * row["over reference"], 100 * row["standard error"]
        axes.barh(place, 2 * goal, 0.7, -goal, color=GRAY, alpha=0.18, linewidth=0)
        axes.errorbar(middle, place, xerr=2 * error, color=UNIT, linewidth=1)
        axes.errorbar(middle, place, xerr=error, fmt="o", color=UNIT, linewidth=3, markersize=5)
    axes.axvline(0, color=GRAY, linewidth=1)
    axes.set_yticks(range(len(LOSSES)), [label for label, *_ in LOSSES])
    axes.set(ylim=(len(LOSSES) - 0.5, -0.5), xlabel="difference of validation loss, percent")
    axes.set_title("lower is better; thick: one standard error, thin: two, shaded: our goal")
    return figure


def rms() -> Figure:
    """Where the tensors of a GPT lie in the range of FP8 before the first step."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, label in zip(panels, KINDS, strict=True):
        axes.axhspan(-9, np.log2(448), color="tab:green", alpha=0.15, linewidth=0)
        axes.axhline(0, color=GRAY, linewidth=1)
        for row in (row for row in table("rms", 0) if row["tensors"] == label):
            color, marker = (PLAIN, "x") if row["model"].startswith("plain") else (UNIT, "o")
            values = np.array(row["log2 of RMS"])
            places = np.linspace(0, 1, len(values))
            axes.plot(places, values, marker, color=color, markersize=4, label=row["model"])
        axes.set(title=label, xticks=[0, 1])
        for text, side in zip(axes.set_xticklabels(["input", "output"]), ("left", "right")):
            text.set_horizontalalignment(side)
        axes.grid(axis="y", color=GRAY, alpha=0.3)
    panels[0].set_ylabel("RMS, as a power of two")
    panels[0].text(0.5, 8.2, "range of FP8 (E4M3)", ha="center", va="top", color="#2e9e4f")
    panels[-1].legend(loc="lower right", framealpha=0)
    return figure


if __name__ == "__main__":
    with mpl.rc_context(STYLE):
        for draw in (steps, losses, rms):
            options: dict[str, Any] = {"transparent": True, "metadata": {"Date": None}}
            draw().savefig(DOCS / f"{draw.__name__}.svg", **options)
