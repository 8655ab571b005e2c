"""What a trained model is worth: its validation loss, and its outputs for whoever scores them."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from unitscale import to_array

from ..atomic import write_json
from ..config import PrecisionConfig, RunConfig
from .batch import make_loss
from .placement import divided, over
from .precision import fed, plain, scaled, scalified

SCORES = "scores.json"
"""The file of scores in a run's folder."""
_IN_BITS = ("token", "character")  # whose losses the literature gives in bits too


def make_evaluation(
    graphdef: nnx.GraphDef, precision: PrecisionConfig | None = None, *, mesh: Mesh | None = None
) -> Callable[..., jax.Array]:
    """The compiled loss of one batch, dropout off: `(params, rest, batch) -> float32 scalar`.

    The devices of a mesh share its work.
    """

    loss = make_loss(graphdef)

    @jax.jit
    def evaluate(params, rest, batch):
        batch = fed(precision, divided(batch, mesh))
        with over(mesh):
            return plain(precision, scalified(precision, loss)(params, rest, batch))

    return evaluate


def mean_loss(evaluate: Callable[..., jax.Array], params, rest, batches: Iterable) -> float:
    """Mean loss over batches of one size, in nats; waits for the device once."""
    losses = [evaluate(params, rest, batch) for batch in batches]
    return float(jnp.mean(jnp.stack(losses)))


def predict(
    model: nnx.Module, batches: Iterable[tuple[Any, ...]], precision: PrecisionConfig | None = None
) -> np.ndarray:
    """Float32 outputs of a model for the inputs of all batches, one after another, dropout off."""
    graphdef, state = nnx.split(model)
    state = scaled(precision, state)

    def outputs(state, inputs):
        return nnx.merge(graphdef, state)(*inputs, deterministic=True)

    @jax.jit
    def run(state, inputs):
        found = scalified(precision, outputs)(state, fed(precision, inputs))
        return to_array(found).astype(jnp.float32)

    return np.concatenate(jax.device_get([run(state, batch) for batch in batches]))


def save_scores(folder: Path, scores: dict[str, float]) -> dict[str, float]:
    """Leaves scores, if there are any, in `SCORES` of a run's folder; returns them."""
    if scores:
        write_json(folder / SCORES, scores)
    return scores


def shown_scores(scores: dict[str, float]) -> str:
    """Scores in words.

    Example:
      >>> shown_scores({"f1": 91.25, "exact_match": 84.0})
      'f1 91.25, exact match 84'
    """
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in scores.items())


def shown(config: RunConfig, loss: float, size: float | None = None) -> str:
    """A loss of a run in words.

    Args:
      config: Of the run.
      loss: In nats per `config.loss_unit`.
      size: Bytes of text that a token stands for, or None: with them the losses of runs with
        different tokenizers compare.

    Example:
      >>> shown(RunConfig(recipe="gpt", name="a"), 2.0)
      '2.0000 nats per example'
    """
    bits = loss / math.log(2)
    if config.loss_unit not in _IN_BITS:
        return f"{loss:.4f} nats per {config.loss_unit}"
    unit = f", {bits:.4f} bits"
    if size is not None:
        unit += f", {bits / size:.4f} bits per byte"
    return f"{loss:.4f} nats per {config.loss_unit}{unit}"
