"""Whether one learning rate serves every width: u-muP beside the plain parametrization.

    python -m recipes bench transfer --data TEXT

Sweeps `configs/gpt/transfer.yaml`: short runs of a GPT one layer deep, at every width and learning
rate, with unitscale and u-muP and in plain `flax.nnx` with Adam. The same command goes on after the
last finished round, and measures nothing twice. The sweep draws the curves.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from ..sweep import Curve, make_points, read_curves, sweep
from ._runs import ConfigPath, DataPath, Fresh, Overrides
from ._table import JsonPath, Table, publish, within

UMUP_NAME, PLAIN_NAME = "u-muP", "plain"
MOST_RATIO = 2.0
_AXES = {"model.library", "model.width"}

Losses = dict[str, dict[int, dict[float, float]]]
"""Validation loss by parametrization, width and learning rate; infinite where not finite."""


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    data: DataPath = None,
    jobs: Annotated[int, typer.Option(min=1, help="widths trained at the same time")] = 1,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints the best learning rate at each width, and draws the loss over learning rates."""
    path = config or str(CONFIGS / "gpt" / "transfer.yaml")
    words = [*(overrides or ()), *([] if data is None else [f"data.path={data}"])]
    settings = load_kind(GPTConfig, path, words)
    if set(settings.sweep.grid) != _AXES:
        raise RecipeError(
            f"sweep.grid: expected the keys {', '.join(sorted(_AXES))}; got "
            f"{', '.join(settings.sweep.grid) or 'none'}; sweep other grids with recipes sweep"
        )
    folder = sweep(settings, jobs=jobs, fresh=fresh, console=Console())
    notes = [
        f"{settings.train.steps} steps of {path} with {settings.model.layers} layer(s), "
        f"{settings.data.batch_size} x {settings.data.sequence_length} tokens each, seeds "
        f"{settings.sweep.seeds}; loss over {settings.train.eval_batches} validation batches.",
        "best: of the rates tried; vertex: of the parabola through it and its neighbours, in the "
        "logarithm of the rate. Cost: what the smallest width's best rate loses at this width, nan "
        "where that rate was not tried.",
        f"curves in {folder / 'curves.png'}",
    ]
    losses = by_width(read_curves(make_points(settings), folder))
    publish("transfer", [best_rates(losses)], json, notes)


def by_width(curves: Sequence[Curve]) -> Losses:
    """What a sweep found, by parametrization and width."""
    losses: Losses = defaultdict(dict)
    for curve in curves:
        point = curve.point
        umup = point.config.optimizer.umup
        losses[UMUP_NAME if umup else PLAIN_NAME][point.values["model.width"]] = curve.losses
    return losses


def vertex(losses: Mapping[float, float]) -> float:
    """The rate of least loss: of the parabola through the best rate and its neighbours.

    In the logarithm of the rate; the best rate itself where it is the first or last one, or a
    neighbour's loss is not finite.

    Example:
      >>> vertex({0.5: 2.0, 1.0: 1.0, 2.0: 2.0, 4.0: 9.0})
      1.0
    """
    rates = sorted(losses)
    at = min(range(len(rates)), key=lambda i: losses[rates[i]])
    near = rates[max(at - 1, 0) : at + 2]
    values = [losses[rate] for rate in near]
    if len(near) < 3 or not np.isfinite(values).all():
        return rates[at]
    octaves = np.log2(near)
    # A parabola's slope between two points is that in their middle, and changes evenly.
    (falling, rising), (low, high) = (
        np.diff(values) / np.diff(octaves),
        octaves[:2] + np.diff(octaves) / 2,
    )
    if falling == rising:  # three equal losses
        return rates[at]
    return float(2.0 ** (low - (high - low) * falling / (rising - falling)))


def best_rates(losses: Losses) -> Table:
    """The best rate at each width, how far they lie apart, and what one rate for all costs."""
    rows = []
    for name, widths in losses.items():
        best = {width: min(found, key=found.__getitem__) for width, found in widths.items()}
        at_edge = {width: best[width] in (min(f), max(f)) for width, f in widths.items()}
        lowest = {width: vertex(found) for width, found in widths.items()}
        for width, found in widths.items():
            row: dict[str, Any] = {
                "parametrization": name,
                "width": width,
                "loss": found[best[width]],
                "best": best[width],
                "vertex": lowest[width],
                "cost": found.get(best[min(best)], math.nan) / found[best[width]] - 1,
                "at edge": at_edge[width],
            }
            if width == max(widths):
                row["apart"] = max(lowest.values()) / min(lowest.values())
                if name == UMUP_NAME:
                    row["asked"] = f"vertices at most {MOST_RATIO:g} apart, none at an edge"
                    near = within(row["apart"], (None, MOST_RATIO))
                    row["within"] = near and not any(at_edge.values())
            rows.append(row)
    return Table("Learning rate of least validation loss, by width", rows)
