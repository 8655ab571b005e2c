"""A task's records as batches for training, and all that scoring needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
from tokenizers import Tokenizer

from ..batches import Batches, training_batches
from ..errors import RecipeError
from ..text import SubwordTokenizer, save_tokenizer
from .classification import make_classification_records
from .config import FinetuneConfig
from .pretrained import limits_of, tokenizer_of
from .records import Records
from .rows import Dataset, load_classification
from .squad_data import read_squad
from .squad_features import SquadFeatures, make_squad_features, with_answers

Batch = tuple[np.ndarray, ...]
INPUTS = "ids", "segments", "mask"
LABELS = {"squad": ("start", "end"), "classification": ("label",)}


@dataclass(frozen=True)
class TaskData:
    """Records to train and to score on.

    Args:
      train: To train on.
      scored: To score on.
      names: Of a record's arrays, in the order in which the model's loss takes them.
      batch_size: Records per step, over all processes.
      tokenizer: Of the pretrained model.
      source: What `scored` was made of, for scoring.
    """

    train: Records
    scored: Records
    names: tuple[str, ...]
    batch_size: int
    tokenizer: Tokenizer
    source: SquadFeatures | Dataset

    @property
    def digest(self) -> str:
        """Tells whether two runs learn from the same records."""
        return self.train.digest + self.scored.digest

    @property
    def summary(self) -> str:
        """How much there is to learn from, in words."""
        return f"{len(self.train):,} training and {len(self.scored):,} validation records"

    def save(self, folder: Path) -> None:
        """Leaves the tokenizer in the run's folder."""
        save_tokenizer(SubwordTokenizer(self.tokenizer), folder)

    def _tuple(self, record: dict[str, np.ndarray]) -> Batch:
        return tuple(record[name] for name in self.names)

    def training(self, seed: int, *, process: int = 0, processes: int = 1) -> Batches:
        """Shuffled batches for ever; see `recipes.batches.training_batches`."""
        dataset: Any = grain.MapDataset.source(self.train).map(self._tuple)
        return training_batches(
            dataset, seed, self.batch_size, process=process, processes=processes
        )

    def validation(self, batches: int | None = None) -> Iterator[Batch]:
        """Validation batches in order; what is left over after the last whole one is not used."""
        size = min(self.batch_size, len(self.scored))
        whole = itertools.islice(self.scored.batches(size), len(self.scored) // size)
        return map(self._tuple, itertools.islice(whole, batches))


def load_task_data(config: FinetuneConfig) -> TaskData:
    """Reads and tokenizes the files of a task.

    Raises:
      RecipeError: A file is missing or malformed, holds fewer records than a batch, or sequences
        are longer than the positions that the model learned; or there is no tokenizer beside it.
    """
    _, positions = limits_of(config)
    length = config.data.sequence_length
    if length > positions:
        raise RecipeError(
            f"data.sequence_length: the model in {config.init} learned {positions} positions; got "
            f"{length}; use at most {positions}"
        )
    tokenizer, data = tokenizer_of(config), config.data
    if config.task == "squad":
        features, source = (
            make_squad_features(
                read_squad(path, key),
                tokenizer,
                sequence_length=length,
                max_question_length=config.squad.max_question_length,
                stride=config.squad.stride,
            )
            for path, key in ((data.train, "data.train"), (data.validation, "data.validation"))
        )
        train, scored = features.records, source.records
        if config.squad.negatives is not None:
            train = with_answers(train, config.squad.negatives, config.seed)
    else:
        source = load_classification(data, config.classification)
        train, scored = (
            make_classification_records(source, rows, tokenizer, sequence_length=length)
            for rows in (source.train, source.validation)
        )
    if len(train) < data.batch_size:
        raise RecipeError(
            f"data.batch_size: expected at most the {len(train)} records of {data.train}; "
            f"got {data.batch_size}; use more data or a smaller batch"
        )
    names = (*INPUTS, *LABELS[config.task])
    return TaskData(train, scored, names, data.batch_size, tokenizer, source)
