"""The recipe finetune: model, data and scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, processors

from unitscale import nn, ops

from ..bert.config import BertModelConfig, Pooling
from ..bert.model import Encoder, Pooler, mean_loss
from ..config import TOKENIZER_FILE
from ..errors import RecipeError
from ..hf import Bert, Pretrained, load, save, shape_of
from ..recipe import Data, Examples
from ..run.folder import SCORES
from ..run.state import make_policy, take_weights
from ..run.step import predict
from ..text import SubwordTokenizer, require_vocab, save_tokenizer
from . import data as files, scores as scoring
from .config import FinetuneConfig, pretraining_of


class TaskModel(nnx.Module):
    """An encoder with a head for `classes` labels, or (None) for start and end of an answer."""

    def __init__(
        self, config: BertModelConfig, classes: int | None, pooling: Pooling, **options: Any
    ):
        width, pooled, rngs = config.width, classes is not None, options["rngs"]
        self.encoder = Encoder(config, **options)
        self.pooler = Pooler(width, pooling, **options) if pooled else None
        self.dropout = nn.Dropout(config.dropout, rngs=rngs) if pooled else None
        self.readout = nn.Readout(width, classes or 2, use_bias=True, **options)

    def __call__(self, ids, segments, mask, *, deterministic: bool = True) -> ops.ArrayLike:
        """Return logits (batch, classes) or (batch, time, 2); `mask` is 1 on tokens."""
        x = self.encoder(ids, segments, mask=mask > 0, deterministic=deterministic)
        if self.pooler is not None and self.dropout is not None:
            x = self.dropout(self.pooler(x, mask > 0), deterministic=deterministic)
        return self.readout(x)

    def loss(self, ids, segments, mask, *labels, deterministic: bool = True) -> jax.Array:
        """Return the mean cross entropy of labels (batch,), or of start and end positions."""
        logits = self(ids, segments, mask, deterministic=deterministic)
        if self.pooler is not None:
            return mean_loss(logits, *labels)
        start, end = (mean_loss(logits[..., i], label) for i, label in enumerate(labels))
        return (start + end) / 2


def build(config: FinetuneConfig) -> TaskModel | Bert:
    """Build the model of a config, with pretrained weights and a head for its task."""
    if config.plain:
        return cast("Bert", _read_plain(config).model)
    pretraining = pretraining_of(config.init)
    dropout = pretraining.model.dropout if config.dropout is None else config.dropout
    changes = {"context": pretraining.context, "dropout": dropout}
    shape = pretraining.model.model_copy(update=changes)
    options = {"policy": make_policy(config.precision), "rngs": nnx.Rngs(config.seed)}
    model = TaskModel(shape, _classes(config), config.classification.pooling, **options)
    take_weights(model, pretraining, needed=("encoder",), wanted=("pooler",))
    return model


def _read_plain(config: FinetuneConfig) -> Pretrained:
    """Load the Hugging Face folder of a config, with a new head if it lacks one for the task."""
    return load(
        config.init,
        "question_answering" if config.task == "squad" else "classification",
        new_head=True,
        classes=_classes(config),
        dropout=config.dropout,
        param_dtype=jnp.float32,
        precision=config.precision,
        seed=config.seed,
    )


def _classes(config: FinetuneConfig) -> int | None:
    """Return the number of labels; None for question answering."""
    if config.task == "squad":
        return None
    return len(files.load_classification(config.data, config.classification).labels)


def abstract_batch(config: FinetuneConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of the loss's inputs: ids, segments, mask, and labels of the task."""
    size, length = config.data.batch_size, config.data.sequence_length
    tokens = jax.ShapeDtypeStruct((size, length), jnp.int32)
    labels = jax.ShapeDtypeStruct((size,), jnp.int32)
    return (*[tokens] * 3, *[labels] * (2 if config.task == "squad" else 1))


@dataclass(frozen=True)
class TaskData(Data):
    """Training and validation records, and the questions or rows that they were made from."""

    train: files.Records
    scored: files.Records
    batch_size: int
    tokenizer: Tokenizer
    source: files.SquadFeatures | files.Dataset

    @property
    def digest(self) -> str:
        return self.train.digest + self.scored.digest

    @property
    def summary(self) -> str:
        return f"{len(self.train):,} training and {len(self.scored):,} validation records"

    def save(self, folder: Path) -> None:
        save_tokenizer(SubwordTokenizer(self.tokenizer), folder)

    def examples(self, *, training: bool) -> Sequence[Examples]:
        source: Any = grain.MapDataset.source(self.train if training else self.scored)
        return [Examples(source.map(lambda record: tuple(record.values())))]


def load_data(config: FinetuneConfig) -> TaskData:
    """Read and tokenize the files of a task."""
    if config.plain:
        shape = shape_of(config.init, "masked_lm")
        vocab, positions, known = shape.vocab, shape.longest, shape.labels
    else:
        pretraining = pretraining_of(config.init)
        vocab, positions, known = pretraining.model.vocab, pretraining.longest, ()
    data, length, mark = config.data, config.data.sequence_length, config.data.mark_matches
    if positions is not None and length > positions:
        raise RecipeError(
            f"data.sequence_length: the model in {config.init} learned {positions} positions; got "
            f"{length}; use at most {positions}"
        )
    tokenizer = _tokenizer(config.init, vocab)
    if config.task == "squad":
        features, source = (
            files.make_squad_features(files.read_squad(path, key), tokenizer, length, mark)
            for path, key in ((data.train, "data.train"), (data.validation, "data.validation"))
        )
        train, scored = features.records, source.records
        if config.squad.negatives is not None:
            train = files.with_answers(train, config.squad.negatives, config.seed)
    else:
        source = files.load_classification(data, config.classification, known)
        train, scored = (
            files.make_classification_records(source, rows, tokenizer, length, mark)
            for rows in (source.train, source.validation)
        )
    if len(train) < data.batch_size:
        raise RecipeError(
            f"data.batch_size: expected at most the {len(train)} records of {data.train}; "
            f"got {data.batch_size}; use more data or a smaller batch"
        )
    return TaskData(train, scored, data.batch_size, tokenizer, source)


def _tokenizer(folder: str, vocab: int) -> Tokenizer:
    """Read the tokenizer in a folder; its template defaults to [CLS] text [SEP] pair [SEP]."""
    tokenizer = SubwordTokenizer.read(Path(folder) / TOKENIZER_FILE, key="init")
    require_vocab(tokenizer, vocab, folder)
    if tokenizer.inner.post_processor is None:
        tokenizer.inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, tokenizer.id(name)) for name in ("[CLS]", "[SEP]")],
        )
    return tokenizer.inner


def closing(config: FinetuneConfig, data: TaskData, model: Any, folder: Path) -> Iterator[str]:
    """Report where predictions and scores are, and write a tuned Hugging Face model."""
    yield f"predictions are in {folder / 'predictions.json'}, scores in {folder / SCORES}"
    if isinstance(model, Bert):
        labels = data.source.labels if isinstance(data.source, files.Dataset) else None
        state = nnx.state(model, nnx.Param)
        save(_read_plain(config), folder / "pretrained", state, labels)
        yield f"the tuned model (Hugging Face format) is in {folder / 'pretrained'}"


def scores(config: FinetuneConfig, data: TaskData, model: Any, folder: Path) -> dict[str, float]:
    """Return scores by name, SQuAD's in percent; write `predictions.json` to the folder."""
    batches = data.scored.batches(min(data.batch_size, len(data.scored)))
    inputs = (tuple(batch.values())[:3] for batch in batches)  # without labels
    # Float64, so that sums of logits are not rounded, which could change their order.
    logits = np.asarray(predict(model, inputs, config.precision)[: len(data.scored)], np.float64)
    if not np.isfinite(logits).all():
        raise RecipeError(
            "the scores of the validation data are not finite; lower optimizer.learning_rate, or "
            "choose a policy of wider range",
            exit_code=1,
        )
    source = data.source
    if isinstance(source, files.Dataset):
        scoring.write_labels(folder, source.validation, logits, source.labels)
        found = logits.argmax(axis=-1)
        return scoring.score_labels(found, source.ids(source.validation), len(source.labels))
    predictions = scoring.predict_answers(source, logits)
    scoring.write_answers(folder, source.questions, predictions)
    return scoring.score_answers(source.questions, predictions)
