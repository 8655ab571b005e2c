"""From random-access data to batches: shuffled, repeated and divided among processes.

A source is what `grain.MapDataset.source` takes: it has a length, and an index gives a tree of
arrays. Training is endless, in an order that the seed decides, from a position that can be saved.
Validation is finite and always the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

Draw = Callable[[Any, np.random.Generator], Any]
"""Makes an example of an element of the source, by draws from a generator."""

Batches = grain.DatasetIterator
"""An iterator with `get_state`, its position as JSON values, and `set_state`."""


def loss_inputs(batch: Any) -> tuple[Any, ...]:
    """The arguments of a model's `loss`: a batch that is a tuple, or ids and targets of windows.

    Windows are one array (batch, time + 1); targets are the ids one position further.
    """
    return batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])


class Examples(NamedTuple):
    """A sequence of at most 2**32 examples.

    `draw` makes examples of elements, anew every epoch of training and always the same for
    validation. `weight` is the share of a training batch beside other sources.
    """

    source: Any
    draw: Draw | None = None
    weight: float = 1.0

    def shuffled(self, seed: int, *, endless: bool = False) -> grain.MapDataset:
        """Shuffle the examples by the seed; if endless, in another order every epoch."""
        dataset = grain.MapDataset.source(self.source).shuffle(seed=seed)
        dataset = dataset.repeat() if endless else dataset
        return dataset if self.draw is None else dataset.random_map(self.draw, seed=seed)


class Data(ABC):
    """The training and validation data of a run; a subclass says what the examples are."""

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

    def training(self, seed: int, *, process: int = 0, processes: int = 1) -> Batches:
        """Endless batches, reshuffled every epoch; each source goes through its own epochs.

        Batch k is the same set of examples for any number of processes, each of which gets its
        share. Of the seed 32 bits count.
        """
        if self.batch_size % processes:
            raise ValueError(
                "recipes.batches.Data: batch_size must be a multiple of processes; got "
                f"{self.batch_size} and {processes}; change data.batch_size"
            )
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
        """The same whole batches each time, at most so many, shuffled once so that few are fair.

        Data of fewer examples than a batch is one batch.
        """
        parts = [examples.shuffled(0) for examples in self.examples(training=False)]
        dataset = parts[0]
        if len(parts) > 1:
            dataset = grain.MapDataset.concatenate(parts).shuffle(seed=0)
        dataset = dataset.batch(min(self.batch_size, len(dataset)), drop_remainder=True)
        count = len(dataset) if batches is None else min(batches, len(dataset))
        return (dataset[index] for index in range(count))
