"""The points of a sweep: every combination of the values that its grid lists."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..errors import RecipeError
from ..registry import unknown_key, valid_keys
from .config import CharlmConfig

OWN = ("recipe", "name", "seed", "sweep", "optimizer.learning_rate", "train.runs_dir")
"""Keys that a grid may not list: the sweep sets them itself, or they change no result."""


class Point:
    """One combination of values, and the config that it makes.

    Args:
      values: Values by dotted key.
      config: The run.
    """

    def __init__(self, values: dict[str, Any], config: CharlmConfig):
        self.values, self.config = values, config

    @property
    def start(self) -> float:
        """The learning rate in the middle of the first search."""
        return self.config.start_rate


def make_points(config: CharlmConfig) -> list[Point]:
    """Every point of a config's grid, without those that no model can be: FP8 without scales.

    Raises:
      RecipeError: A key is not one of the config or may not be in a grid, a value does not fit its
        key, or no point is left.
    """
    grid = config.sweep.grid
    known = dict(valid_keys(CharlmConfig))
    for key, values in grid.items():
        if key not in known:
            raise RecipeError(f"sweep.grid: {unknown_key(key, CharlmConfig)}")
        if any(key == own or key.startswith(f"{own}.") for own in OWN):
            raise RecipeError(
                f"sweep.grid: {key} cannot be in a grid; the sweep chooses learning rates and "
                "seeds itself (sweep.start, sweep.seeds); remove the key"
            )
        if not values or len({repr(value) for value in values}) < len(values):
            raise RecipeError(f"sweep.grid: {key}: expected different values; got {values}")
    points = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        tree = config.model_dump()
        for key, value in chosen.items():
            *parents, last = key.split(".")
            node = tree
            for parent in parents:
                node = node[parent]
            node[last] = value
        model = tree["model"]
        if model["precision"] == "fp8" and model["parametrization"] == "regular":
            continue
        try:
            points.append(Point(chosen, CharlmConfig.model_validate(tree)))
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise RecipeError(
                f"sweep.grid: the point {describe(chosen)} is no run: {where}: {problem['msg']}; "
                "change the grid"
            ) from error
    if not points:
        raise RecipeError("sweep.grid: no point is left: regular models have no fp8; add a value")
    return points


def describe(values: Mapping[str, Any]) -> str:
    """A point in a few words, such as `kind=rnn optimizer=sgd`."""
    names = {key: key.removesuffix(".name").rpartition(".")[2] for key in values}
    return " ".join(f"{names[key]}={value}" for key, value in values.items()) or "base"
