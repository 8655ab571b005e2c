"""What number formats cost under scalify: test accuracy of one classifier in each of them.

    python -m recipes bench mnist configs/mnist/mlp.yaml data.train_images=PATH ...

Trains the config once for each format and seed, all on the same images in the same order.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

import numpy as np
import typer
from rich.console import Console

from ..errors import RecipeError
from ..images.config import Format, MnistConfig
from ..images.train import train
from ..registry import load_any_config
from ._table import JsonPath, Table, publish

COLUMNS = {
    "format": "",
    "mean accuracy": ".4f",
    "least": ".4f",
    "most": ".4f",
    "over plain": "+.4f",
}


def main(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="such as train.epochs=1"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each format, from `seed` on")] = 3,
    fresh: Annotated[bool, typer.Option(help="move earlier runs aside")] = False,
    json: JsonPath = None,
) -> None:
    """Prints the test accuracy by number format."""
    words = list(overrides or ())
    base = _config(config, words)
    accuracies: dict[str, list[float]] = {name: [] for name in get_args(Format)}
    for name, found in accuracies.items():
        for seed in range(base.seed, base.seed + seeds):
            run = [f"format={name}", f"seed={seed}", f"name={base.name}-{name}-{seed}"]
            outcome = train(_config(config, [*words, *run]), fresh=fresh, console=Console())
            if outcome.accuracy is None:
                raise RecipeError(
                    f"stopped by signal {outcome.signal}; run the same command to start again",
                    exit_code=128 + (outcome.signal or 0),
                )
            found.append(outcome.accuracy)
    note = f"{base.train.epochs} epochs of {base.model.kind}, seeds from {base.seed}."
    publish("mnist", [table(accuracies)], json, [note])


def _config(path: str, words: list[str]) -> MnistConfig:
    config = load_any_config(path, words)
    if not isinstance(config, MnistConfig):
        raise RecipeError(
            f"{path}: expected a config of recipe mnist; got recipe {config.recipe}; "
            "start from configs/mnist"
        )
    return config


def table(accuracies: dict[str, list[float]]) -> Table:
    """Mean, least and most accuracy of each format, and its distance to plain float32."""
    rows: list[dict[str, Any]] = [
        {
            "format": name,
            "mean accuracy": float(np.mean(found)),
            "least": min(found),
            "most": max(found),
            "over plain": float(np.mean(found) - np.mean(accuracies["plain"])),
        }
        for name, found in accuracies.items()
    ]
    return Table("Test accuracy by number format", COLUMNS, rows)
