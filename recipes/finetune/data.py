"""A task's records as batches for training, and all that scoring needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
from tokenizers import Tokenizer

from ..batches import Data, Examples
from ..errors import RecipeError
from ..text import SubwordTokenizer, save_tokenizer
from .classification import make_classification_records
from .config import FinetuneConfig
from .pretrained import labels_of, limits_of, tokenizer_of
from .records import Records
from .rows import Dataset, load_classification
from .squad_data import read_squad
from .squad_features import SquadFeatures, make_squad_features, with_answers
from .squad_score import version_of


@dataclass(frozen=True)
class TaskData(Data):
    """Records to train and to score on."""

    train: Records
    scored: Records
    batch_size: int
    tokenizer: Tokenizer
    source: SquadFeatures | Dataset

    @property
    def digest(self) -> str:
        return self.train.digest + self.scored.digest

    @property
    def summary(self) -> str:
        return f"{len(self.train):,} training and {len(self.scored):,} validation records"

    def save(self, folder: Path) -> None:
        save_tokenizer(SubwordTokenizer(self.tokenizer), folder)

    def examples(self, *, training: bool) -> Sequence[Examples]:
        """The arrays of a record, in the order in which the model's loss takes them."""
        source: Any = grain.MapDataset.source(self.train if training else self.scored)
        return [Examples(source.map(lambda record: tuple(record.values())))]


def load_data(config: FinetuneConfig) -> TaskData:
    """Reads and tokenizes the files of a task."""
    _, positions = limits_of(config)
    length = config.data.sequence_length
    if positions is not None and length > positions:
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
                mark_matches=config.squad.mark_matches,
            )
            for path, key in ((data.train, "data.train"), (data.validation, "data.validation"))
        )
        train, scored = features.records, source.records
        version_of(source.questions, config.squad)  # complains before hours of training
        if config.squad.negatives is not None:
            train = with_answers(train, config.squad.negatives, config.seed)
    else:
        source = load_classification(data, config.classification, labels_of(config))
        train, scored = (
            make_classification_records(
                source,
                rows,
                tokenizer,
                sequence_length=length,
                mark_matches=config.classification.mark_matches,
            )
            for rows in (source.train, source.validation)
        )
    if len(train) < data.batch_size:
        raise RecipeError(
            f"data.batch_size: expected at most the {len(train)} records of {data.train}; "
            f"got {data.batch_size}; use more data or a smaller batch"
        )
    return TaskData(train, scored, data.batch_size, tokenizer, source)
