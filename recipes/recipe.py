"""The interface of recipes: a model, its data in batches, scores, and closing lines.

A recipe is a package `recipes.<name>` with a module `task`, which fulfils `Recipe`, and a module
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
    """A sequence of elements, of which `draw` makes examples, and its share of a batch."""

    source: Any
    draw: Callable[[Any, np.random.Generator], Any] | None = None
    weight: float = 1.0

    def shuffled(self, seed: int, *, endless: bool = False) -> grain.MapDataset:
        dataset = grain.MapDataset.source(self.source).shuffle(seed=seed)
        dataset = dataset.repeat() if endless else dataset
        return dataset if self.draw is None else dataset.random_map(self.draw, seed=seed)


class Data(ABC):
    """The data of a run: endless training, which can be resumed, and finite validation."""

    batch_size: int
    """Examples of a batch, over all processes."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Identifies the data: runs with the same digest learn from the same."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """The amount of training data, in words."""

    @property
    def token_size(self) -> float | None:
        """Bytes of validation text per token; None if a token is a byte, or there is no text."""
        return None

    @abstractmethod
    def examples(self, *, training: bool) -> Sequence[Examples]:
        """The sources to train on, or to validate on."""

    def save(self, folder: Path) -> None:
        """Write what using the model needs, such as the tokenizer, to a run's folder."""
        return

    def training(self, seed: int, *, process: int = 0, processes: int = 1) -> grain.DatasetIterator:
        """Endless batches, reshuffled every epoch; each source goes through its own epochs.

        Batch k is the same for any number of processes, each of which gets its share.
        """
        found = self.examples(training=True)
        # Drawn before sharing, so that draws depend on the position among all examples.
        endless = [examples.shuffled(seed % 2**32, endless=True) for examples in found]
        dataset = endless[0]
        if len(endless) > 1:
            dataset = grain.MapDataset.mix(endless, [examples.weight for examples in found])
        # Without a remainder: grain rounds the number of endless batches of one up too far.
        share = dataset[process::processes].batch(self.batch_size // processes, drop_remainder=True)
        return iter(share.to_iter_dataset())

    def validation(self, batches: int | None = None) -> Iterator[Any]:
        """The same whole batches each time, at most so many, shuffled once so that few are fair."""
        parts = [examples.shuffled(0) for examples in self.examples(training=False)]
        dataset = parts[0]
        if len(parts) > 1:
            dataset = grain.MapDataset.concatenate(parts).shuffle(seed=0)
        dataset = dataset.batch(min(self.batch_size, len(dataset)), drop_remainder=True)
        count = len(dataset) if batches is None else min(batches, len(dataset))
        return (dataset[index] for index in range(count))


def loss_inputs(batch: Any) -> tuple[Any, ...]:
    """The arguments of `loss`: a batch that is a tuple, or ids and targets of its windows."""
    return batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])


class Recipe(Protocol):
    """The functions of a module `recipes.<name>.task`."""

    def build(self, config: Any) -> Any:
        """The model that a config describes, its parameters drawn from `config.seed`.

        Its `loss(*loss_inputs(batch), deterministic=...)` is a mean in nats per `config.loss_unit`.
        """
        ...

    def abstract_batch(self, config: Any) -> Any:
        """Shapes and dtypes of a training batch."""
        ...

    def load_data(self, config: Any) -> Data:
        """Read the data that a config names; raise a RecipeError if it is missing or unusable."""
        ...

    def scores(self, config: Any, data: Any, model: Any, folder: Path) -> dict[str, float]:
        """Scores beside the loss, by name; details may be written to the folder."""
        ...

    def closing(self, config: Any, data: Any, model: Any, folder: Path) -> Iterator[str]:
        """Lines to show of a model that was just trained, beside loss and scores."""
        ...


def no_scores(config: Any, data: Any, model: Any, folder: Path) -> dict[str, float]:
    return {}


def no_closing(config: Any, data: Any, model: Any, folder: Path) -> Iterator[str]:
    return iter(())


def recipe_of(config: RunConfig) -> Recipe:
    """The recipe that a config is of."""
    # By name, because recipes are built on this module, and few runs need them all.
    return importlib.import_module(f"recipes.{config.recipe}.task")  # pyright: ignore[reportReturnType]
