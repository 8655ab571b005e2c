"""The fine-tuning recipe: model, data and scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, processors

from unitscale import nn, ops

from ..batches import Data, Examples
from ..bert.config import BertModelConfig, Pooling
from ..bert.heads import mean_loss
from ..bert.model import Encoder, Pooler
from ..config import TOKENIZER_FILE
from ..errors import RecipeError
from ..hf import Bert, Pretrained, load, save, shape_of_bert
from ..run.earlier import take_weights
from ..run.evaluate import SCORES, predict
from ..run.monitor import monitored
from ..text import SubwordTokenizer, save_tokenizer
from .classification import (
    Dataset,
    load_classification,
    make_classification_records,
    score_classification,
    write_labels,
)
from .config import FinetuneConfig, pretraining_of
from .records import Records
from .squad import (
    SquadFeatures,
    make_squad_features,
    predict_answers,
    read_squad,
    score_predictions,
    version_of,
    with_answers,
    write_predictions,
)


class TaskModel(nnx.Module):
    """An encoder with a head for `classes` labels, or for the ends of an answer (None)."""

    def __init__(
        self,
        config: BertModelConfig,
        classes: int | None,
        pooling: Pooling = "cls",
        *,
        policy: str | nn.Policy,
        rngs: nnx.Rngs,
    ):
        self.encoder = Encoder(config, policy=policy, rngs=rngs)
        pooled = classes is not None
        self.pooler = Pooler(config.width, pooling, policy=policy, rngs=rngs) if pooled else None
        self.dropout = nn.Dropout(config.dropout, rngs=rngs) if pooled else None
        self.readout = nn.Readout(
            config.width, classes or 2, use_bias=True, policy=policy, rngs=rngs
        )

    def __call__(
        self, ids: jax.Array, segments: jax.Array, mask: jax.Array, *, deterministic: bool = True
    ) -> ops.ArrayLike:
        """Return logits (batch, classes) or (batch, time, 2); `mask` is 1 on tokens."""
        x = self.encoder(ids, segments, mask=mask > 0, deterministic=deterministic)
        if self.pooler is not None and self.dropout is not None:
            x = self.dropout(self.pooler(x, mask > 0), deterministic=deterministic)
        return self.readout(x)

    def loss(
        self,
        ids: jax.Array,
        segments: jax.Array,
        mask: jax.Array,
        *labels: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Return the mean cross entropy of a label (batch,), or of start and end positions."""
        logits = self(ids, segments, mask, deterministic=deterministic)
        if self.pooler is not None:
            return mean_loss(logits, *labels)
        start, end = (mean_loss(logits[..., i], label) for i, label in enumerate(labels))
        return (start + end) / 2


def build(config: FinetuneConfig) -> TaskModel | Bert:
    """Build the model of a config, with pretrained weights and a head for its task."""
    if config.plain:
        model: Any = _read_plain(config).model
        return model
    pretraining = pretraining_of(config.init)
    dropout = pretraining.model.dropout if config.dropout is None else config.dropout
    changes = {"context": pretraining.context, "dropout": dropout}
    shape = pretraining.model.model_copy(update=changes)
    pooling, policy = config.classification.pooling, monitored(config)
    rngs = nnx.Rngs(config.seed)
    model = TaskModel(shape, _classes(config), pooling, policy=policy, rngs=rngs)
    take_weights(model, pretraining, needed=("encoder",), wanted=("pooler",))
    return model


def _read_plain(config: FinetuneConfig) -> Pretrained:
    """Load the Hugging Face folder of a config, with a new head if it has none for the task."""
    return load(
        config.init,
        "question_answering" if config.task == "squad" else "classification",
        new_head=True,
        classes=_classes(config),
        dropout=config.dropout,
        param_dtype=jnp.float32,
        scalify=config.scalify,
        seed=config.seed,
    )


def _classes(config: FinetuneConfig) -> int | None:
    """Return the number of labels; None for question answering."""
    if config.task != "classification":
        return None
    return len(load_classification(config.data, config.classification).labels)


def abstract_batch(config: FinetuneConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of the loss's inputs: ids, segments, mask, and the labels of the task."""
    size, length = config.data.batch_size, config.data.sequence_length
    tokens = jax.ShapeDtypeStruct((size, length), jnp.int32)
    labels = jax.ShapeDtypeStruct((size,), jnp.int32)
    return (*[tokens] * 3, *[labels] * (2 if config.task == "squad" else 1))


@dataclass(frozen=True)
class TaskData(Data):
    """Training and validation records."""

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
        """Yield the arrays of a record in the order of the loss's arguments."""
        source: Any = grain.MapDataset.source(self.train if training else self.scored)
        return [Examples(source.map(lambda record: tuple(record.values())))]


def load_data(config: FinetuneConfig) -> TaskData:
    """Read and tokenize the files of a task."""
    if config.plain:
        shape = shape_of_bert(config.init)
        vocab, positions, known = shape.vocab, shape.longest, shape.labels
    else:
        pretraining = pretraining_of(config.init)
        vocab, positions, known = pretraining.model.vocab, pretraining.longest, ()
    data, length = config.data, config.data.sequence_length
    if positions is not None and length > positions:
        raise RecipeError(
            f"data.sequence_length: the model in {config.init} learned {positions} positions; got "
            f"{length}; use at most {positions}"
        )
    tokenizer = _tokenizer(config.init, vocab)
    if config.task == "squad":
        settings = config.squad.model_dump(
            include={"max_question_length", "stride", "mark_matches"}
        )
        features, source = (
            make_squad_features(
                read_squad(path, key), tokenizer, sequence_length=length, **settings
            )
            for path, key in ((data.train, "data.train"), (data.validation, "data.validation"))
        )
        train, scored = features.records, source.records
        version_of(source.questions, config.squad)  # complains before hours of training
        if config.squad.negatives is not None:
            train = with_answers(train, config.squad.negatives, config.seed)
    else:
        source = load_classification(data, config.classification, known)
        mark = config.classification.mark_matches
        train, scored = (
            make_classification_records(
                source, rows, tokenizer, sequence_length=length, mark_matches=mark
            )
            for rows in (source.train, source.validation)
        )
    if len(train) < data.batch_size:
        raise RecipeError(
            f"data.batch_size: expected at most the {len(train)} records of {data.train}; "
            f"got {data.batch_size}; use more data or a smaller batch"
        )
    return TaskData(train, scored, data.batch_size, tokenizer, source)


def _tokenizer(folder: str, vocab: int) -> Tokenizer:
    """Read the pretrained model's tokenizer, by default with [CLS] text [SEP] pair [SEP]."""
    tokenizer = SubwordTokenizer.read(Path(folder) / TOKENIZER_FILE, key="init")
    if tokenizer.vocab > vocab:
        raise RecipeError(
            f"init: expected a tokenizer of at most the {vocab} ids of the model in {folder}; got "
            f"{tokenizer.vocab}; put the tokenizer back that it was trained with"
        )
    if tokenizer.inner.post_processor is None:
        tokenizer.inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, tokenizer.id(name)) for name in ("[CLS]", "[SEP]")],
        )
    return tokenizer.inner


def closing(
    config: FinetuneConfig, data: TaskData, model: TaskModel | Bert, folder: Path
) -> Iterator[str]:
    """Say where the predictions are, and write a tuned Hugging Face model to a folder."""
    yield f"predictions are in {folder / 'predictions.json'}, scores in {folder / SCORES}"
    if isinstance(model, Bert):
        labels = data.source.labels if isinstance(data.source, Dataset) else None
        state = nnx.state(model, nnx.Param)
        save(_read_plain(config), folder / "pretrained", state, labels)
        yield f"the tuned model as a Hugging Face folder is in {folder / 'pretrained'}"


def scores(
    config: FinetuneConfig, data: TaskData, model: TaskModel | Bert, folder: Path
) -> dict[str, float]:
    """Return scores by name, SQuAD's in percent; leaves `predictions.json` in the folder."""
    batches = data.scored.batches(min(data.batch_size, len(data.scored)))
    inputs = (tuple(batch.values())[:3] for batch in batches)  # without labels
    # In float64 sums of float32 numbers keep their order.
    logits = np.asarray(predict(model, inputs, config.scalify)[: len(data.scored)], np.float64)
    if not np.isfinite(logits).all():
        raise RecipeError(
            "the scores of the validation data are not finite; lower optimizer.learning_rate, or "
            "choose a policy of wider range",
            exit_code=1,
        )
    if isinstance(data.source, SquadFeatures):
        questions, squad = data.source.questions, config.squad
        no_answers = version_of(questions, squad) == "v2.0"
        predictions = predict_answers(data.source, logits, squad, allow_none=no_answers)
        write_predictions(folder, predictions, squad.no_answer_threshold if no_answers else None)
        return score_predictions(questions, predictions, squad)
    rows, labels = data.source.validation, data.source.labels
    write_labels(folder, rows, logits, labels)
    return score_classification(logits.argmax(axis=-1), data.source.ids(rows), len(labels))
