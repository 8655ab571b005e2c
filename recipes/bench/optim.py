"""Measure bytes, step time and validation loss of 16- and 8-bit optimizer state.

    python -m recipes bench optim --data TEXT

Measures bytes and times on the weights and optimizer state of GPT-2 small, and the loss by training
`configs/gpt/parity.yaml` in each set of formats. `--config` replaces both models.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from flax import nnx

from unitscale.core import is_scaled
from unitscale.optim import scaled

from ..describe import bytes_of
from ..gpt.config import GPTConfig
from ..gpt.task import build
from ..registry import CONFIGS, load_kind
from ..run.state import init_state
from . import runs
from .step import SHAPES, advancing, time_ratio

_SIX = ("precision.weights=float16", "precision.moments=[float8_e4m3fn,float16]")
VARIANTS = {
    "float32": ("precision.policy=float32",),
    "6-bytes": _SIX,
    "6-bytes-stochastic": (*_SIX, "precision.rounding=stochastic"),
    "4-bytes": (
        "precision.weights=float16",
        "precision.moments=[float8_e4m3fn,float8_e4m3fn]",
        "precision.rounding=stochastic",
    ),
}
BOUNDS = {"6-bytes": 0.002, "6-bytes-stochastic": 0.002, "4-bytes": 0.005}
MOST_BYTES = {"6-bytes": 6.0, "6-bytes-stochastic": 6.0, "4-bytes": 4.0}
MOST_TIME = 1.2


def main(
    overrides: runs.Overrides = None,
    config: runs.ConfigPath = None,
    data: runs.DataPaths = None,
    rounds: Annotated[int, typer.Option(min=2, help="timed steps of each optimizer")] = 20,
    seeds: runs.Seeds = 1,
    jobs: runs.Jobs = 1,
    fresh: runs.Fresh = False,
    json: runs.JsonPath = None,
) -> None:
    """Print bytes per parameter, step time relative to optax, and validation loss by format."""
    path = config or str(CONFIGS / "gpt" / "gpt2-small.yaml")
    shape = () if config else SHAPES["gpt2-small"]
    base = load_kind(GPTConfig, path, shape)
    rows = [bytes_per_parameter(path, shape, name) for name in VARIANTS]
    tables = [runs.Table("Bytes per parameter", rows)]
    rows = [step_time(base, rounds, donated) for donated in (False, True)]
    tables.append(runs.Table("Step of AdamW in 6 bytes, relative to optax in float32", rows))
    told = runs.Told(config, overrides, seeds, fresh, data, jobs)
    tables += runs.compare(VARIANTS, told).tables("Validation loss", BOUNDS)
    notes = ["Bytes: weights and optimizer state, with scales, without gradients."]
    runs.publish("optim", tables, json, notes)


def bytes_per_parameter(path: str, shape: tuple[str, ...], name: str) -> dict[str, Any]:
    """Measure the bytes of weights and optimizer state per parameter, from arrays."""
    _, _, state = init_state(load_kind(GPTConfig, path, [*shape, *VARIANTS[name]]))
    count = sum(x.size for x in jax.tree.leaves(state.params, is_leaf=is_scaled))
    weights, moments = (bytes_of(tree) / count for tree in (state.params, state.opt_state))
    row = {"formats": name, "parameters": count, "weights": weights, "state": moments}
    row["together"] = round(weights + moments, 3)  # rounds away the scales
    return row | (runs.asked(row["together"], MOST_BYTES[name]) if name in MOST_BYTES else {})


def step_time(config: GPTConfig, rounds: int, donated: bool) -> dict[str, Any]:
    """Compare the step time of the 6-byte optimizer with that of optax."""
    params = nnx.as_pure(nnx.state(build(config), nnx.Param))
    grads = jax.tree.map(lambda x: 1e-3 * jnp.cos(x), params)
    optimizer = optax.adamw(1e-3)
    ours = scaled(optimizer)

    def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def stepping(step: Any, params: Any, state: Any) -> Any:
        compiled = jax.jit(step, donate_argnums=(0, 1) if donated else ())
        # A copy, because donated arrays are deleted.
        start = jax.tree.map(jnp.copy, (params, state))
        return advancing(lambda carry, _: (compiled(*carry, grads), ()), start)

    narrow = ours.scale_params(params)
    first = stepping(ours.step, narrow, ours.init(narrow))
    found = time_ratio(first, stepping(update, params, optimizer.init(params)), rounds)
    row = {"buffers": "donated" if donated else "new", **found}
    return row | runs.asked(found["ratio"], MOST_TIME)
