"""Fine-tuning as `recipes.train` sees it."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..errors import RecipeError
from ..hf import save
from ..run.earlier import take_weights
from ..run.evaluate import SCORES, predict
from ..run.monitor import monitored
from .classification import score_classification, write_labels
from .config import FinetuneConfig, pretraining_of
from .data import TaskData, load_data as load_data
from .model import PlainModel, TaskModel
from .pretrained import read_plain
from .rows import Dataset, load_classification
from .squad_features import SquadFeatures
from .squad_predict import predict_answers, write_predictions
from .squad_score import score_predictions, version_of

Model = TaskModel | PlainModel


def build(config: FinetuneConfig) -> Model:
    """The model of a config's task, with the pretrained weights under a head for it."""
    classes = _classes(config)
    if config.plain:
        return PlainModel(read_plain(config, classes).model)
    pretraining = pretraining_of(config.init)
    dropout = pretraining.model.dropout if config.dropout is None else config.dropout
    changes = {"context": pretraining.context, "dropout": dropout}
    shape = pretraining.model.model_copy(update=changes)
    pooling, policy = config.classification.pooling, monitored(config)
    model = TaskModel(shape, classes, pooling, policy=policy, rngs=nnx.Rngs(config.seed))
    take_weights(model, pretraining, needed=("encoder",), wanted=("pooler",))
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
    return (*[tokens] * 3, *[labels] * (2 if config.task == "squad" else 1))


def closing(config: FinetuneConfig, data: TaskData, model: Model, folder: Path) -> Iterator[str]:
    """Where the predictions are; a Hugging Face folder is written again, with what was learned."""
    yield f"predictions are in {folder / 'predictions.json'}, scores in {folder / SCORES}"
    if isinstance(model, PlainModel):
        state = nnx.state(model.bert, nnx.Param)
        labels = data.source.labels if isinstance(data.source, Dataset) else None
        save(read_plain(config, _classes(config)), folder / "pretrained", state, labels)
        yield f"the tuned model as a Hugging Face folder is in {folder / 'pretrained'}"


def scores(config: FinetuneConfig, data: TaskData, model: Model, folder: Path) -> dict[str, float]:
    """Scores by name; SQuAD's as percentages, those of classification as shares of 1.

    Leaves `predictions.json` in the folder.
    """
    batches = data.scored.batches(min(data.batch_size, len(data.scored)))
    inputs = (tuple(batch.values())[:3] for batch in batches)  # without labels
    logits = finite(predict(model, inputs, config.scalify)[: len(data.scored)])
    if isinstance(data.source, SquadFeatures):
        questions, squad = data.source.questions, config.squad
        no_answers = version_of(questions, squad) == "v2.0"
        predictions = predict_answers(data.source, logits, squad, allow_none=no_answers)
        write_predictions(folder, predictions, squad.no_answer_threshold if no_answers else None)
        return score_predictions(questions, predictions, squad)
    rows, labels = data.source.validation, data.source.labels
    write_labels(folder, rows, logits, labels)
    return score_classification(logits.argmax(axis=-1), data.source.ids(rows), len(labels))


def finite(logits: np.ndarray) -> np.ndarray:
    """Scores in float64, in which sums of float32 numbers keep their order."""
    scores = np.asarray(logits, np.float64)
    if not np.isfinite(scores).all():
        raise RecipeError(
            "the scores of the validation data are not finite; lower optimizer.learning_rate, or "
            "choose a policy of wider range",
            exit_code=1,
        )
    return scores
