"""Evaluate a model: the loss of batches, outputs to score, and the command `evaluate`."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from unitscale import to_array
from unitscale.nn import AmaxState

from ..batches import loss_inputs
from ..config import PrecisionConfig, RunConfig
from ..errors import write_json
from .folder import run_folder
from .precision import fed, plain, scaled, scalified
from .processes import divided, over
from .recipe import recipe_of
from .state import TrainState, load_checkpoint, with_run_tokenizer

SCORES = "scores.json"
"""The file of scores in a run's folder."""


def make_loss(graphdef: nnx.GraphDef, *, deterministic: bool = True) -> Callable[..., jax.Array]:
    """The loss of a model as a function `(params, rest, batch) -> float32 scalar`."""

    def loss(params: Any, rest: Any, batch: Any) -> jax.Array:
        model: Any = nnx.merge(graphdef, params, rest, copy=True)
        return model.loss(*loss_inputs(batch), deterministic=deterministic)

    return loss


def over_amax(loss: Callable[..., Any], rest: Any) -> tuple[Any, Callable[..., Any]]:
    """Make delayed scales an argument: the scales, and a loss `(params, scales, ...)`.

    Who differentiates by the parameters has to do so by the scales too; otherwise they are never
    updated, and a warning says so.
    """
    amax, others = nnx.split_state(rest, AmaxState, ...)
    return amax, lambda params, amax, *args: loss(params, nnx.merge_state(amax, others), *args)


def make_evaluation(
    graphdef: nnx.GraphDef, precision: PrecisionConfig | None = None, *, mesh: Mesh | None = None
) -> Callable[..., jax.Array]:
    """The compiled loss of one batch, dropout off: `(params, rest, batch) -> float32 scalar`."""
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
    """Concatenated float32 outputs of a model for the inputs of all batches, dropout off."""
    graphdef, state = nnx.split(model)
    state = scaled(precision, state)

    def outputs(state, inputs):
        return nnx.merge(graphdef, state)(*inputs, deterministic=True)

    @jax.jit
    def run(state, inputs):
        found = scalified(precision, outputs)(state, fed(precision, inputs))
        return to_array(found).astype(jnp.float32)

    return np.concatenate(jax.device_get([run(state, batch) for batch in batches]))


def trained_model(config: RunConfig, graphdef: nnx.GraphDef, state: TrainState) -> nnx.Module:
    """The model of a state, with plain arrays."""
    return nnx.merge(graphdef, *plain(config.precision, (state.params, state.rest)))


def save_scores(folder: Path, scores: dict[str, float]) -> dict[str, float]:
    """Write scores, if there are any, to `SCORES` of a run's folder; return them."""
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
    """A loss of a run in words: in nats, and for text in bits, as the literature gives it.

    `size` is bytes of text per token: bits per byte compare runs with different tokenizers.

    Example:
      >>> shown(RunConfig(recipe="gpt", name="a"), 2.0)
      '2.0000 nats per example'
    """
    words = f"{loss:.4f} nats per {config.loss_unit}"
    if config.loss_unit in ("token", "character"):
        bits = loss / math.log(2)
        words += f", {bits:.4f} bits"
        if size is not None:
            words += f", {bits / size:.4f} bits per byte"
    return words


def evaluate(config: RunConfig, say: Callable[[str], None]) -> Iterator[str]:
    """The lines that `python -m recipes evaluate` prints: loss over all validation data, scores."""
    recipe = recipe_of(config)
    graphdef, restored = load_checkpoint(config, say)
    state, data = restored.state, recipe.load_data(with_run_tokenizer(config))
    if restored.facts.get("text", data.digest) != data.digest:
        yield "the data is not what the run was trained on: its loss there is another"
    evaluation = make_evaluation(graphdef, config.precision)
    loss = mean_loss(evaluation, state.params, state.rest, data.validation())
    yield f"step {int(state.step)}  validation loss {shown(config, loss, data.token_size)}"
    model, folder = trained_model(config, graphdef, state), run_folder(config)
    if scores := save_scores(folder, recipe.scores(config, data, model, folder)):
        yield shown_scores(scores)
