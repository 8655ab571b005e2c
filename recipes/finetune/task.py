"""Fine-tuning as `recipes.train` sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import to_array

from ..atomic import write_whole
from ..config import ScalifyConfig
from ..monitor import monitored
from ..rundir import run_folder
from ..scaling import plain, scaled, under
from ..state import TrainState
from .classification_data import load_classification
from .classification_predict import predict_labels, write_labels
from .classification_score import score_classification
from .config import FinetuneConfig
from .data import INPUTS, LABELS, TaskData, load_task_data
from .model import ClassificationModel, SpanModel
from .plain import PlainModel, read_plain, save_plain
from .pretrained import pretraining_of, take_weights
from .squad_features import SquadFeatures
from .squad_predict import predict_answers, write_predictions
from .squad_score import score_predictions, version_of

Model = SpanModel | ClassificationModel | PlainModel

SCORES = "scores.json"
"""The file of scores in a run's folder, as `evaluate` returns them."""

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
    """The model of a config's task, with the pretrained weights under a head for it."""
    if config.plain:
        return PlainModel(read_plain(config, _classes(config)).model)
    pretraining = pretraining_of(config.init)
    dropout = pretraining.model.dropout if config.dropout is None else config.dropout
    changes = {"context": pretraining.context, "dropout": dropout}
    shape = pretraining.model.model_copy(update=changes)
    policy, rngs = monitored(config), nnx.Rngs(config.seed)
    classes = _classes(config)
    if classes is None:
        model: Model = SpanModel(shape, policy=policy, rngs=rngs)
    else:
        model = ClassificationModel(shape, classes, policy=policy, rngs=rngs)
    take_weights(model, config.init)
    return model


def _classes(config: FinetuneConfig) -> int | None:
    """How many labels there are to choose from, if that is the task."""
    if config.task != "classification":
        return None
    return len(load_classification(config.data, config.classification).labels)


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
    """The scores; a Hugging Face folder is written again, with what was learned."""
    yield from _scores(config, data, model, folder)
    if isinstance(model, PlainModel):
        save_plain(config, _classes(config), model, folder / "pretrained")
        yield f"the tuned model as a Hugging Face folder is in {folder / 'pretrained'}"


def score(
    config: FinetuneConfig, data: TaskData, graphdef: nnx.GraphDef, state: TrainState
) -> Iterator[str]:
    """Scores a trained run on all validation data, as `closing` does, for `evaluate`."""
    model = nnx.merge(graphdef, *plain(config.scalify, (state.params, state.rest)))
    yield from _scores(config, data, model, run_folder(config))


def _scores(config: FinetuneConfig, data: TaskData, model: Model, folder: Path) -> Iterator[str]:
    """Scores all validation data; leaves `predictions.json` and `scores.json` in the folder."""
    scores = evaluate(config, data, model, folder)
    write_whole(folder / SCORES, json.dumps(scores, indent=1) + "\n")
    unit = "" if config.task == _SHARES else "%"
    shown = [f"{_SHOWN[name]} {scores[name]:.4g}{unit}" for name in _SHOWN if name in scores]
    yield ", ".join(shown)
    yield f"predictions are in {folder / 'predictions.json'}, scores in {folder / SCORES}"


def evaluate(
    config: FinetuneConfig, data: TaskData, model: Model, folder: Path
) -> dict[str, float]:
    """Scores by name; SQuAD's as percentages, those of classification as shares of 1.

    Raises:
      OSError: The predictions cannot be written.
    """
    logits = predict(model, data, config.scalify)
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


def predict(model: Model, data: TaskData, scalify: ScalifyConfig | None = None) -> np.ndarray:
    """Float32 logits of all validation records, dropout off; of a plain model under scalify."""
    graphdef, state = nnx.split(model)
    state = scaled(scalify, state)

    def logits(state, inputs):
        return nnx.merge(graphdef, state)(*inputs, deterministic=True)

    @jax.jit
    def run(state, inputs):
        return to_array(under(scalify, logits)(state, inputs)).astype(np.float32)

    batches = data.scored.batches(min(data.batch_size, len(data.scored)))
    parts = [run(state, tuple(batch[name] for name in INPUTS)) for batch in batches]
    return np.concatenate(jax.device_get(parts))[: len(data.scored)]
