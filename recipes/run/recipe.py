"""What a recipe is: a config, a model, its data, and what to say of it when it is trained.

A recipe is a package `recipes.<name>` with a module `config`, whose `RunConfig` says what it can
be told, and a module `task`, which fulfils `Recipe`. `recipes.registry` lists the configs; nothing
else knows recipes by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from flax import nnx

from ..batches import Batches
from ..config import RunConfig

PACKAGE = __name__.removesuffix(".run.recipe")


class Data(Protocol):
    """What a run learns from, and is measured on."""

    @property
    def digest(self) -> str:
        """Tells whether two runs learn from the same data."""
        ...

    @property
    def summary(self) -> str:
        """How much there is, in words."""
        ...

    def save(self, folder: Path) -> None:
        """Leaves in a run's folder what its model is used with, such as the tokenizer."""
        ...

    def training(self, seed: int, *, process: int = 0, processes: int = 1) -> Batches:
        """Shuffled batches for ever, the share of one of the processes."""
        ...

    def validation(self, batches: int | None = None) -> Iterator[Any]:
        """Validation batches, the same ones each time; all of them for None."""
        ...


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
        """What is measured beside the loss, by name; what it was measured on may go to the folder.

        Args:
          config: The run.
          data: Its data.
          model: The trained model.
          folder: The run's folder.
        """
        ...

    def closing(self, config: Any, data: Any, model: Any, folder: Path) -> Iterator[str]:
        """Lines to show of a model that was just trained, beside loss and scores."""
        ...


def recipe_of(config: RunConfig) -> Recipe:
    """The recipe that a config is of."""
    # By name, because recipes are built on this module, and few runs need them all.
    return importlib.import_module(f"{PACKAGE}.{config.recipe}.task")  # pyright: ignore[reportReturnType]
