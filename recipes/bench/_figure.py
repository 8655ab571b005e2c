"""The plot of the site's first page: where a model's tensors lie in the range of FP8."""

from collections.abc import Mapping
from pathlib import Path

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from unitscale.core import format_of

from ..errors import refused
from ..gpt.config import GPTConfig
from ..gpt.task import build
from ..run.batch import loss_inputs
from ..run.probe import Reading, probe

KINDS = {
    "activations": "outputs of layers",
    "gradients": "gradients at outputs",
    "weights": "gradients of parameters",
}
FORMAT = "float8_e4m3fn"


def readings(config: GPTConfig, tokens: np.ndarray) -> dict[str, Reading]:
    """The RMS of every tensor of a GPT at initialisation: of plain flax.nnx, and of unitscale."""
    plain = {"model": {**config.model.model_dump(), "library": "plain", "residual": {}}}
    optimizer = {"optimizer": {"umup": False}}
    other = GPTConfig.model_validate(config.model_dump() | plain | optimizer)
    found = {}
    for name, one in (("plain flax.nnx", other), ("unitscale", config)):
        found[name] = probe(build(one), *loss_inputs(tokens))
        jax.clear_caches()
    return found


def draw(path: Path, found: Mapping[str, Reading], title: str) -> None:
    """Writes the plot: a panel for each kind of tensor, input to output, RMS in powers of two."""
    fmt = format_of(FORMAT)
    low, high = np.log2([fmt.smallest_subnormal, fmt.max])
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, (kind, label) in zip(panels, KINDS.items(), strict=True):
        axes.axhspan(low, high, color="tab:green", alpha=0.12, linewidth=0)
        for (name, reading), marker in zip(found.items(), "xo", strict=True):
            values = np.array([float(value) for value in getattr(reading, kind).values()])
            shown = values > 0  # a logarithm has no place for the others
            places = np.linspace(0, 1, values.size)[shown]
            axes.plot(places, np.log2(values[shown]), marker, markersize=4, label=name)
        axes.axhline(0, color="grey", linewidth=1)
        axes.set(title=label, xticks=[0, 1], xticklabels=["input", "output"])
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("RMS, powers of two")
    panels[0].text(0.5, high - 0.5, "range of E4M3", ha="center", va="top", color="tab:green")
    panels[-1].legend(loc="lower right")
    figure.suptitle(title)
    with (
        refused(f"--figure: cannot write {path}", "give a file that can be written"),
        # The same drawing gives the same file.
        mpl.rc_context({"svg.hashsalt": "unitscale"}),
    ):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
