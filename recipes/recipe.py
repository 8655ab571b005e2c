"""The interface of recipes: model, data, scores, and lines to print after training.

A recipe is a package `recipes.<name>` with a module `task`, which implements `Recipe`, and a module
`config`, whose subclass of `RunConfig` is listed in `recipes.registry`.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np

from .config import RunConfig


class Examples(NamedTuple):
    """A sequence of elements, a function that draws an example from each, and a mixture weight."""

    source: Any
    draw: Callable[[Any, np.random.Generator], Any] | None = None
    weight: float = 1.0

    def shuffled(self, seed: int, *, endless: bool = False) -> grain.MapDataset:
        dataset = grain.MapDataset.source(self.source).shuffle(seed=seed)
        dataset = dataset.repeat() if endless else dataset
        return dataset if self.draw is None else dataset.random_map(self.draw, seed=seed)


class Data(ABC):
    """The data of a run: endless training batches, which can be resumed, and validation batches."""

    batch_size: int
    """Examples per batch, over all processes."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A hash of the data: runs with the same digest train on the same data."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """The amount of training data, as text."""

    @property
    def token_size(self) -> float | None:
        """Mean bytes per token of the validation text; None if tokens are bytes or not text."""
        return None

    @abstractmethod
    def examples(self, *, training: bool) -> Sequence[Examples]:
        """Return the sources of examples for training or validation."""

    def save(self, folder: Path) -> None:
        """Write the files that the trained model needs, such as a tokenizer, to a run's folder."""
        return

    def training(self, seed: int, *, process: int = 0, processes: int = 1) -> grain.DatasetIterator:
        """Return endless batches, with each source reshuffled in every epoch of its own.

        Batch k is the same for any number of processes; each process gets its share of the rows.
        """
        found = self.examples(training=True)
        # Drawn before the split by process, so that a draw depends on the global index.
        endless = [examples.shuffled(seed % 2**32, endless=True) for examples in found]
        dataset = endless[0]
        if len(endless) > 1:
            dataset = grain.MapDataset.mix(endless, [examples.weight for examples in found])
        # drop_remainder: otherwise grain overflows when it counts endless batches of one example.
        share = dataset[process::processes].batch(self.batch_size // processes, drop_remainder=True)
        return iter(share.to_iter_dataset())

    def validation(self, batches: int | None = None) -> Iterator[Any]:
        """Return the same full batches every time, shuffled, so that a few are representative."""
        parts = [examples.shuffled(0) for examples in self.examples(training=False)]
        dataset = parts[0]
        if len(parts) > 1:
            dataset = grain.MapDataset.concatenate(parts).shuffle(seed=0)
        dataset = dataset.batch(min(self.batch_size, len(dataset)), drop_remainder=True)
        count = len(dataset) if batches is None else min(batches, len(dataset))
        return (dataset[index] for index in range(count))


def loss_inputs(batch: Any) -> tuple[Any, ...]:
    """Return the arguments of `loss`; token windows become inputs and targets."""
    return batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])


class Recipe(Protocol):
    """The functions of a module `recipes.<name>.task`."""

    def build(self, config: Any) -> Any:
        """Build the model that a config describes, with parameters drawn from `config.seed`.

        Its `loss(*loss_inputs(batch), deterministic=...)` is a mean in nats per `config.loss_unit`.
        """
        ...

    def abstract_batch(self, config: Any) -> Any:
        """Return the shapes and dtypes of a training batch."""
        ...

    def load_data(self, config: Any) -> Data:
        """Read the data that a config names; raise RecipeError if it is missing or unusable."""
        ...

    def scores(self, config: Any, data: Any, model: Any, folder: Path) -> dict[str, float]:
        """Return scores other than the loss, by name; details may be written to the folder."""
        ...

    def closing(self, config: Any, data: Any, model: Any, folder: Path) -> Iterator[str]:
        """Yield lines to print after training, besides loss and scores, such as a sample."""
        ...


def no_scores(config: Any, data: Any, model: Any, folder: Path) -> dict[str, float]:
    return {}


def no_closing(config: Any, data: Any, model: Any, folder: Path) -> Iterator[str]:
    return iter(())


def recipe_of(config: RunConfig) -> Recipe:
    """Import the recipe of a config."""
    # By name, because recipes import this module, and a run needs only one of them.
    return importlib.import_module(f"recipes.{config.recipe}.task")  # pyright: ignore[reportReturnType]
