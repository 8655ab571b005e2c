"""Fine-tuning as `recipes.train` sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import to_array

from .classification_data import load_classification
from .classification_predict import predict_labels, write_labels
from .classification_score import score_classification
from .config import FinetuneConfig
from .data import INPUTS, LABELS, TaskData, load_task_data
from .model import ClassificationModel, SpanModel
from .pretrained import pretraining_of, take_weights
from .squad_features import SquadFeatures
from .squad_predict import predict_answers, write_predictions
from .squad_score import score_predictions, version_of

Model = SpanModel | ClassificationModel

_SHOWN = {
    "exact": "exact match",
    "exact_match": "exact match",
    "f1": "F1",
    "f1_macro": "macro F1",
    "accuracy": "accuracy",
    "matthews": "Matthews correlation",
}
_SHARES = "classification"  # whose scores are shares of 1; those of SQuAD are percentages


def build(config: FinetuneConfig) -> Model:
    """The model of a config's task, with the pretraining run's weights under a new head."""
    pretraining = pretraining_of(config.init)
    dropout = pretraining.model.dropout if config.dropout is None else config.dropout
    changes = {"context": pretraining.context, "dropout": dropout}
    shape = pretraining.model.model_copy(update=changes)
    rngs = nnx.Rngs(config.seed)
    if config.task == "squad":
        model: Model = SpanModel(shape, policy=config.policy, rngs=rngs)
    else:
        classes = len(load_classification(config.data, config.classification).labels)
        model = ClassificationModel(shape, classes, policy=config.policy, rngs=rngs)
    take_weights(model, config.init)
    return model


def abstract_batch(config: FinetuneConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What the model's loss takes: ids, segments, mask, and the labels of the task."""
    size, length = config.data.batch_size, config.data.sequence_length
    tokens = jax.ShapeDtypeStruct((size, length), jnp.int32)
    labels = jax.ShapeDtypeStruct((size,), jnp.int32)
    return (*[tokens] * len(INPUTS), *[labels] * len(LABELS[config.task]))


def load_data(config: FinetuneConfig) -> TaskData:
    """The files of the config, tokenized as the pretraining run was."""
    return load_task_data(config)


def closing(config: FinetuneConfig, data: TaskData, model: Model, folder: Path) -> Iterator[str]:
    """Scores all validation data, and leaves `predictions.json` in the folder."""
    scores = evaluate(config, data, model, folder)
    unit = "" if config.task == _SHARES else "%"
    shown = [f"{_SHOWN[name]} {scores[name]:.4g}{unit}" for name in _SHOWN if name in scores]
    yield ", ".join(shown)
    yield f"predictions are in {folder / 'predictions.json'}"


def evaluate(
    config: FinetuneConfig, data: TaskData, model: Model, folder: Path
) -> dict[str, float]:
    """Scores by name; SQuAD's as percentages, those of classification as shares of 1.

    Raises:
      OSError: The predictions cannot be written.
    """
    logits = predict(model, data)
    if isinstance(data.source, SquadFeatures):
        features = data.source
        version = version_of(features.questions, config.squad)
        predictions = predict_answers(
            features,
            logits[..., 0],
            logits[..., 1],
            n_best=config.squad.n_best,
            max_answer_length=config.squad.max_answer_length,
            allow_none=version == "v2.0",
        )
        threshold = config.squad.no_answer_threshold if version == "v2.0" else None
        write_predictions(folder, predictions, threshold)
        return score_predictions(features.questions, predictions, config.squad)
    rows, labels = data.source.validation, data.source.labels
    write_labels(folder, rows, logits, labels)
    truth = np.array([row.label for row in rows])
    return score_classification(predict_labels(logits), truth, len(labels))


def predict(model: Model, data: TaskData) -> np.ndarray:
    """Float32 logits of all validation records, dropout off."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def logits(state, inputs):
        found = nnx.merge(graphdef, state)(*inputs, deterministic=True)
        return to_array(found).astype(np.float32)

    batches = data.scored.batches(min(data.batch_size, len(data.scored)))
    parts = [logits(state, tuple(batch[name] for name in INPUTS)) for batch in batches]
    return np.concatenate(jax.device_get(parts))[: len(data.scored)]
