"""What training changes from step to step, and how it is made and read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from unitscale.optim import ScaledTransformation

from .checkpoint import Checkpoints
from .config import RunConfig
from .configfile import load_run_config
from .errors import RecipeError
from .optimizer import make_optimizer
from .rundir import existing_run
from .scaling import scaled
from .task import build


class TrainState(NamedTuple):
    """All that a step changes: parameters, other model state (PRNG), optimizer, steps done."""

    params: nnx.State
    rest: nnx.State
    opt_state: optax.OptState
    step: jax.Array


def init_state(
    config: RunConfig,
) -> tuple[nnx.GraphDef, optax.GradientTransformation, TrainState]:
    """The model's structure, its optimizer, and the state before the first step."""
    graphdef, params, rest = nnx.split(build(config), nnx.Param, ...)
    optimizer = make_optimizer(config, params)
    if isinstance(optimizer, ScaledTransformation):
        params = optimizer.scale_params(params)
    state = TrainState(params, rest, optimizer.init(params), jnp.zeros((), jnp.int32))
    return graphdef, optimizer, scaled(config.scalify, state)


def load_trained(config: RunConfig, say: Callable[[str], None]) -> tuple[nnx.GraphDef, TrainState]:
    """The model of a run, from its newest whole checkpoint; nothing on disk is changed.

    Args:
      config: Names the run; its model and policy must be the run's.
      say: Called with a line for each damaged checkpoint that was passed over.

    Raises:
      RecipeError: No such run, one of another model, or one without a whole checkpoint.
    """
    folder = existing_run(config)
    trained = load_run_config(folder / "config.yaml")
    length, longest = config.data.sequence_length, trained.longest
    if longest is not None and length > longest:
        raise RecipeError(
            f"data.sequence_length: the run in {folder} learned {longest} positions; got "
            f"{length}; use at most {longest}"
        )
    graphdef, _, state = init_state(trained)
    checkpoints = Checkpoints(folder, read_only=True)
    try:
        restored = checkpoints.restore(state, say)
    finally:
        checkpoints.close()
    if restored is None:
        raise RecipeError(f"name: the run in {folder} has no checkpoint yet; train it first")
    return graphdef, restored.state
