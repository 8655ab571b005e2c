"""From random-access data to batches: shuffled, repeated and shared out in one place.

A source is what `grain.MapDataset.source` takes: it has a length, and an index gives a tree of
arrays. Training goes on for ever, in an order that the seed decides, from a position that can be
saved. Validation is finite and always the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import grain
import numpy as np

Draw = Callable[[Any, np.random.Generator], Any]
"""What makes an example of an element of the source, by draws from a generator."""


class Examples(NamedTuple):
    """Where examples come from.

    Attributes:
      source: At most 2**32 elements.
      draw: Makes examples of elements, anew every epoch of training and the same ones each time of
        validation; None where elements are examples.
      weight: How many of a training batch come from here, beside those of other sources.
    """

    source: Any
    draw: Draw | None = None
    weight: float = 1.0

    def shuffled(self, seed: int, *, endless: bool = False) -> grain.MapDataset:
        """The examples in an order that the seed decides; endless, in another one every epoch."""
        dataset = grain.MapDataset.source(self.source).shuffle(seed=seed)
        dataset = dataset.repeat() if endless else dataset
        return dataset if self.draw is None else dataset.random_map(self.draw, seed=seed)


class Batches:
    """An endless iterator of training batches whose position can be saved and set."""

    def __init__(self, dataset: Any):
        self._iterator = iter(dataset.to_iter_dataset())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The position as plain JSON values: batches already returned are not returned again."""
        return self._iterator.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` gave."""
        self._iterator.set_state(state)


class Data(ABC):
    """What a run learns from, and is measured on; a subclass says what the examples are."""

    batch_size: int
    """Examples of a batch, over all processes."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Tells whether two runs learn from the same data."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """How much there is to learn from, in words."""

    @property
    def token_size(self) -> float | None:
        """Bytes of validation text that a token stands for; None where it is a byte, or no text."""
        return None

    @abstractmethod
    def examples(self, *, training: bool) -> Sequence[Examples]:
        """What to train on, or to measure on."""

    def save(self, folder: Path) -> None:
        """Leaves in a run's folder what its model is used with, such as the tokenizer."""
        return

    def training(self, seed: int, *, process: int = 0, processes: int = 1) -> Batches:
        """Batches for ever, reshuffled every epoch; each source goes through its own epochs.

        Batch k is the same set of examples for any number of processes, each of which gets its
        share.

        Args:
          seed: Decides the order and the draws; of a longer one, 32 bits count.
          process: Which of the processes asks, from 0.
          processes: Number of processes that share each batch.

        Raises:
          ValueError: The processes do not divide the batch.
        """
        if self.batch_size % processes:
            raise ValueError(
                "recipes.batches.Data: batch_size must be a multiple of processes; got "
                f"{self.batch_size} and {processes}; change data.batch_size"
            )
        found = self.examples(training=True)
        # Drawn before sharing, so that draws go by the place in the order of all.
        endless = [examples.shuffled(seed % 2**32, endless=True) for examples in found]
        dataset = endless[0]
        if len(endless) > 1:
            dataset = grain.MapDataset.mix(endless, [examples.weight for examples in found])
        # Without a remainder: grain rounds the number of endless batches of one up too far.
        share = dataset[process::processes].batch(self.batch_size // processes, drop_remainder=True)
        return Batches(share)

    def validation(self, batches: int | None = None) -> Iterator[Any]:
        """The same batches each time, in an order shuffled once, so that a few are a fair sample.

        What is left over after the last whole batch is not used. Data of fewer examples than a
        batch are one batch.

        Args:
          batches: How many; None for all.
        """
        parts = [examples.shuffled(0) for examples in self.examples(training=False)]
        dataset = parts[0]
        if len(parts) > 1:
            dataset = grain.MapDataset.concatenate(parts).shuffle(seed=0)
        dataset = dataset.batch(min(self.batch_size, len(dataset)), drop_remainder=True)
        count = len(dataset) if batches is None else min(batches, len(dataset))
        return (dataset[index] for index in range(count))
