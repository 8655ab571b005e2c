"""Training under a loss scale, which `recipes.train` has no place for: a step, and a short loop.

The automatic rule is that of `flax.training.dynamic_scale`, which is Micikevicius et al., "Mixed
Precision Training", 2018, arXiv 1710.03740, as PyTorch's `GradScaler` and jmp have it: a step whose
gradient is not finite is left out and halves the scale, and N others in a row double it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from rich.console import Console

from ..config import ScalifyConfig
from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..run.batch import loss_inputs
from ..run.checkpoint import Checkpoints
from ..run.evaluate import make_evaluation, mean_loss
from ..run.folder import open_run
from ..run.optimizer import make_optimizer
from ..run.scaling import plain, scaled, under
from ..text import Corpus
from ._runs import Run

Scale = jax.Array | DynamicScale | None
"""What the loss is multiplied by: a constant, a number that follows the gradients, or nothing."""


class LoopState(NamedTuple):
    """What a step changes: parameters, other model state, optimizer, loss scale."""

    params: Any
    rest: Any
    opt_state: Any
    scale: Scale


def automatic(first: float, interval: int) -> DynamicScale:
    """A scale that starts at `first` and doubles after `interval` finite steps in a row."""
    return DynamicScale(
        growth_interval=interval,
        fin_steps=jnp.zeros((), jnp.int32),  # pyright: ignore[reportArgumentType]
        scale=jnp.asarray(first, jnp.float32),  # pyright: ignore[reportArgumentType]
    )


def scaled_gradient(
    loss: Callable[[Any], tuple[jax.Array, Any]], params: Any, scale: Scale
) -> tuple[jax.Array, Any, Any, Scale, jax.Array | None]:
    """Differentiates `loss(params) -> (loss, rest)` with the loss multiplied by a scale.

    Returns:
      The loss, the rest, the gradient divided by the scale again, the scale for the next step, and
      whether the gradient is finite, which is asked of an automatic scale only.
    """
    if isinstance(scale, DynamicScale):
        following, finite, (value, rest), grads = scale.value_and_grad(loss, has_aux=True)(params)
        return value, rest, grads, following, finite
    if scale is None:
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, rest, grads, None, None

    def multiplied(params: Any) -> tuple[jax.Array, Any]:
        value, rest = loss(params)
        return value * scale, (value, rest)

    (_, (value, rest)), grads = jax.value_and_grad(multiplied, has_aux=True)(params)
    return value, rest, jax.tree.map(lambda g: g / scale, grads), scale, None


def make_gradient(graphdef: nnx.GraphDef, scalify: ScalifyConfig | None = None):
    """The compiled gradient without dropout: `(params, rest, batch, scale)`.

    It returns the gradient as float32, the scale for the next step, and whether it is finite.
    """

    def gradient(params, rest, batch, scale):
        def loss(params):
            model = nnx.merge(graphdef, params, rest)
            return model.loss(*loss_inputs(batch), deterministic=True), ()

        _, _, grads, following, finite = scaled_gradient(loss, params, scale)
        return grads, following, finite

    @jax.jit
    def run(params, rest, batch, scale):
        return plain(scalify, under(scalify, gradient)(params, rest, batch, scale))

    return run


def make_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    scalify: ScalifyConfig | None = None,
):
    """The compiled step `(state, batch) -> (state, loss)`: gradient and update, and no checks."""

    def step(state: LoopState, batch: Any) -> tuple[LoopState, jax.Array]:
        def loss(params):
            model = nnx.merge(graphdef, params, state.rest, copy=True)
            value = model.loss(*loss_inputs(batch), deterministic=False)
            return value, nnx.state(model, nnx.Not(nnx.Param))  # the PRNG has moved on

        value, rest, grads, scale, finite = scaled_gradient(loss, state.params, state.scale)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if finite is not None:
            params, opt_state = jax.tree.map(
                functools.partial(jnp.where, finite),
                (params, opt_state),
                (state.params, state.opt_state),
            )
        return LoopState(params, rest, opt_state, scale), value

    return jax.jit(under(scalify, step))


def first_state(
    config: GPTConfig, model: nnx.Module, scale: Scale
) -> tuple[nnx.GraphDef, optax.GradientTransformation, LoopState]:
    """A model's structure, its optimizer, and the state before the first step."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer: Any = make_optimizer(config, params)
    state = LoopState(params, rest, optimizer.init(params), scale)
    return graphdef, optimizer, scaled(config.scalify, state)


def trained_with(
    config: GPTConfig,
    model: nnx.Module,
    scale: Scale,
    corpus: Corpus,
    fresh: bool,
    console: Console,
) -> tuple[Run, Scale]:
    """Trains a model of a config, or reads a run that is complete; one that was stopped restarts.

    Returns:
      The run, its loss over all validation text, and its last loss scale.

    Raises:
      RecipeError: The run's folder cannot be used, or is that of another config or text.
    """
    folder = open_run(config, fresh=fresh)
    graphdef, optimizer, state = first_state(config, model, scale)
    checkpoints = Checkpoints(folder, keep=1)
    try:
        restored = checkpoints.restore(
            state, lambda message: console.print(message, markup=False, highlight=False)
        )
        if restored is None:
            console.print(f"{config.name}: training", markup=False, highlight=False)
            step = make_step(graphdef, optimizer)
            for batch in itertools.islice(corpus.training(config.seed), config.train.steps):
                state, _ = step(state, batch)
            checkpoints.save(config.train.steps, state, {}, {"text": corpus.digest})
        elif restored.facts["text"] != corpus.digest:
            raise RecipeError(
                f"data: it is not what {folder} was trained on; restore the files, change name, or "
                "pass --fresh"
            )
        else:
            state = restored.state
    finally:
        checkpoints.close()
    evaluate = make_evaluation(graphdef)
    loss = mean_loss(evaluate, state.params, state.rest, corpus.validation())
    return Run(config, state.params, state.rest, loss), state.scale
