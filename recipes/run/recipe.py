"""The interface of recipes: a config, a model, its data, and closing lines.

A recipe is a package `recipes.<name>` with a module `config`, whose `RunConfig` says what it can
be told, and a module `task`, which fulfils `Recipe`. `recipes.registry` lists the configs; nothing
else knows recipes by name.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from flax import nnx

from unitscale.nn import set_policies

from ..batches import Data
from ..config import RunConfig
from ..errors import RecipeError


class Recipe(Protocol):
    """The functions of a module `recipes.<name>.task`."""

    def build(self, config: Any) -> nnx.Module:
        """The model that a config describes, its parameters drawn from `config.seed`.

        Its `loss(*loss_inputs(batch), deterministic=...)` is a float32 scalar, a mean in nats per
        `config.loss_unit`.
        """
        ...

    def abstract_batch(self, config: Any) -> Any:
        """Shapes and dtypes of a training batch."""
        ...

    def load_data(self, config: Any) -> Data:
        """Reads the data that a config names.

        Raises:
          RecipeError: It is missing or unusable.
        """
        ...

    def scores(self, config: Any, data: Any, model: Any, folder: Path) -> dict[str, float]:
        """Scores beside the loss, by name; details may be written to the folder."""
        ...

    def closing(self, config: Any, data: Any, model: Any, folder: Path) -> Iterator[str]:
        """Lines to show of a model that was just trained, beside loss and scores."""
        ...


def no_scores(config: Any, data: Any, model: Any, folder: Path) -> dict[str, float]:
    """None: the loss says it all."""
    return {}


def no_closing(config: Any, data: Any, model: Any, folder: Path) -> Iterator[str]:
    """Nothing: loss and scores say it all."""
    return iter(())


def build_model(config: RunConfig) -> nnx.Module:
    """The model of a config, with the policies that single layers have.

    Raises:
      RecipeError: A pattern of `precision.layers` fits no layer, or its policy not the layer.
    """
    model = recipe_of(config).build(config)
    try:
        set_policies(model, config.precision.layers)
    except ValueError as error:
        raise RecipeError(f"precision.layers: {error}") from error
    return model


def recipe_of(config: RunConfig) -> Recipe:
    """The recipe that a config is of."""
    # By name, because recipes are built on this module, and few runs need them all.
    return importlib.import_module(f"recipes.{config.recipe}.task")  # pyright: ignore[reportReturnType]
