"""What a recipe gives to training: its model, its data, and what to show when it is done.

A recipe is a package with a module `task` of four functions, `build`, `abstract_batch`, `load_data`
and `closing`, which are called here; the key `recipe` of a config is the package's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from flax import nnx

from .config import RunConfig
from .data import Batches


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


def build(config: RunConfig) -> nnx.Module:
    """The model that a config describes, its parameters drawn from `config.seed`.

    Its `loss(*loss_inputs(batch), deterministic=...)` is a float32 scalar.
    """
    return _recipe(config).build(config)


def abstract_batch(config: RunConfig) -> Any:
    """Shapes and dtypes of a training batch, without reading any data."""
    return _recipe(config).abstract_batch(config)


def load_data(config: RunConfig) -> Data:
    """Reads the data that a config names.

    Raises:
      RecipeError: It is missing or unusable.
    """
    return _recipe(config).load_data(config)


def closing(config: RunConfig, data: Data, model: nnx.Module, folder: Path) -> Iterator[str]:
    """Lines to show of a trained model, beside its validation loss.

    Args:
      config: The run.
      data: Its data.
      model: The trained model.
      folder: The run's folder, for files that belong to what is shown.
    """
    yield from _recipe(config).closing(config, data, model, folder)


def _recipe(config: RunConfig) -> Any:
    return importlib.import_module(f".{config.recipe}.task", __package__)
