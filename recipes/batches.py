"""From random-access data to batches: shuffled, repeated and shared out in one place.

A source is what `grain.MapDataset.source` takes: it has a length, and an index gives a tree of
arrays. Training goes on for ever, in an order that the seed decides, from a position that can be
saved. Validation is finite and always the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import grain
import numpy as np

Draw = Callable[[Any, np.random.Generator], Any]
"""What makes an example of an element of the source, by draws from a generator."""


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


def training_batches(
    source: Any,
    seed: int,
    size: int,
    *,
    weights: Sequence[float] | None = None,
    draw: Draw | None = None,
    process: int = 0,
    processes: int = 1,
) -> Batches:
    """Batches for ever, reshuffled every epoch.

    Batch k is the same set of elements for any number of processes, each of which gets its share.

    Args:
      source: At most 2**32 elements; with `weights`, several such sources.
      seed: Decides the order and the draws; of a longer one, 32 bits count.
      size: Elements of a batch, over all processes.
      weights: How many elements each source gives beside those of the others. Each goes through its
        own epochs.
      draw: Makes examples of elements; it draws anew every epoch.
      process: Which of the processes asks, from 0.
      processes: Number of processes that share each batch.

    Raises:
      ValueError: The processes do not divide the batch.
    """
    if size % processes:
        raise ValueError(
            f"recipes.batches.training_batches: size must be a multiple of processes; got {size} "
            f"and {processes}; change data.batch_size"
        )
    seed %= 2**32
    endless = [
        grain.MapDataset.source(one).shuffle(seed=seed).repeat()
        for one in ([source] if weights is None else source)
    ]
    dataset = endless[0] if weights is None else grain.MapDataset.mix(endless, weights)
    if draw is not None:  # before sharing, so that draws go by the place in the order of all
        dataset = dataset.random_map(draw, seed=seed)
    # Without a remainder: grain rounds the number of endless batches of one up too far.
    shares = dataset[process::processes].batch(size // processes, drop_remainder=True)
    return Batches(shares)


def validation_batches(
    source: Any, size: int, count: int | None = None, *, draw: Draw | None = None
) -> Iterator[Any]:
    """The same batches each time, in an order shuffled once, so that a few are a fair sample.

    What is left over after the last whole batch is not used.

    Args:
      source: As for training.
      size: Elements of a batch; all of a source that has fewer.
      count: How many batches; None for all.
      draw: Makes examples of elements, the same ones each time.
    """
    dataset = grain.MapDataset.source(source).shuffle(seed=0)
    if draw is not None:
        dataset = dataset.random_map(draw, seed=0)
    dataset = dataset.batch(min(size, len(source)), drop_remainder=True)
    count = len(dataset) if count is None else min(count, len(dataset))
    return (dataset[index] for index in range(count))


class Data(ABC):
    """What a run learns from, and is measured on; a subclass says what the examples are."""

    batch_size: int
    """Examples of a batch, over all processes."""
    weights: Sequence[float] | None = None
    """Of the sources to train on, where there are several."""

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
    def examples(self, *, training: bool) -> tuple[Any, Draw | None]:
        """The source to train on, or to measure on, and what draws examples of its elements.

        With `weights` there are as many sources to train on.
        """

    def save(self, folder: Path) -> None:
        """Leaves in a run's folder what its model is used with, such as the tokenizer."""
        return

    def training(self, seed: int, *, process: int = 0, processes: int = 1) -> Batches:
        """Shuffled batches for ever, the share of one of the processes."""
        source, draw = self.examples(training=True)
        share = {"process": process, "processes": processes}
        return training_batches(
            source, seed, self.batch_size, weights=self.weights, draw=draw, **share
        )

    def validation(self, batches: int | None = None) -> Iterator[Any]:
        """Validation batches, the same ones each time; all of them for None."""
        source, draw = self.examples(training=False)
        return validation_batches(source, self.batch_size, batches, draw=draw)
