"""What 16- and 8-bit optimizers cost and save: bytes, validation loss, step time.

    python -m recipes bench optim --data TEXT

Bytes are those of the arrays of a GPT-2 small and its optimizer state. The loss is that of
`configs/gpt/parity.yaml`, trained once for each set of formats with the same seed and data. A run
that is complete in `train.runs_dir` is used as it is, and one that was stopped is resumed.
"""

from collections.abc import Callable
from pathlib import Path
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
from ._compare import compare, comparison, configs_of
from ._runs import ConfigPath, DataPaths, Fresh, Jobs, Overrides, Seeds, Told
from ._table import JsonPath, Table, asked, publish
from ._timing import compared, interleaved

GPT2_SMALL = str(CONFIGS / "gpt" / "gpt2-small.yaml")
GPT2 = ("model.vocab=50257", "model.tied_readout=true")
MOST_BYTES = {"6-bytes": 6.0, "6-bytes-stochastic": 6.0, "4-bytes": 4.0}
MOST_TIME = 1.2
DIGITS = 3  # of bytes per parameter: scales, one per array, are less


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    large: Annotated[
        str, typer.Option(help="the model whose bytes and steps are measured")
    ] = GPT2_SMALL,
    data: DataPaths = None,
    rounds: Annotated[int, typer.Option(min=4, help="timed steps of each optimizer")] = 20,
    loss: Annotated[bool, typer.Option(help="also train for the validation loss")] = True,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints bytes per parameter, step time over optax, and validation loss by format."""
    shape = GPT2 if large == GPT2_SMALL else ()
    tables = [
        count_bytes(large, shape),
        step_times(load_kind(GPTConfig, large, list(shape)), rounds),
    ]
    notes = [
        f"Bytes are counted from the arrays of {Path(large).name}; state is all of the optimizer's,"
        " scales and counters included. Without gradients.",
        f"A step is the update of all parameters and its application, float32 gradients, {rounds} "
        "rounds in turns. Donated: parameters and state are updated in place. Ratios are medians "
        "over rounds.",
    ]
    if loss:
        # The float32 run is that of `bench parity`.
        told = Told(config, overrides, seeds, fresh, data, jobs)
        tables += compare(comparison("optim"), told).tables()
    publish("optim", tables, json, notes)


def count_bytes(path: str, shape: tuple[str, ...] = ()) -> Table:
    """Bytes of weights and state per parameter, from live arrays."""
    entry, rows = comparison("optim"), []
    for name in entry.variants:
        (config,) = configs_of(entry, Told(path, list(shape)), name)
        _, _, state = init_state(config)
        count = sum(x.size for x in jax.tree.leaves(state.params, is_leaf=is_scaled))
        weights, moments = (bytes_of(tree) / count for tree in (state.params, state.opt_state))
        row: dict[str, Any] = {
            "formats": entry.label(name),
            "parameters": count,
            "weights": weights,
            "state": moments,
            "together": weights + moments,
        }
        if name in MOST_BYTES:
            row |= asked(round(weights + moments, DIGITS), most=MOST_BYTES[name])
        rows.append(row)
        del state
    return Table("Bytes per parameter", rows)


def step_times(config: GPTConfig, rounds: int) -> Table:
    """Optimizer steps of the 6-byte formats over those of plain optax, in turns."""
    params = nnx.as_pure(nnx.state(build(config), nnx.Param))
    grads = jax.tree.map(lambda x: 1e-3 * jnp.cos(x), params)
    plain = optax.adamw(1e-3)
    ours = scaled(plain)

    def update(params, state, grads):
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rows = []
    for donated in (False, True):
        scaled_params = ours.scale_params(params)
        first = _stepper(ours.step, scaled_params, ours.init(scaled_params), grads, donated)
        second = _stepper(update, params, plain.init(params), grads, donated)
        row = compared("scaled", "optax", interleaved(first, second, rounds), MOST_TIME)
        rows.append({"buffers": "donated" if donated else "new", **row})
        del first, second
    return Table("Time of an AdamW step, 6-byte formats over float32 optax", rows)


def _stepper(
    step: Callable[..., tuple[Any, Any]], params: Any, state: Any, grads: Any, donated: bool
) -> Callable[[], object]:
    """A function that takes one step further and waits for it."""
    compiled = jax.jit(step, donate_argnums=(0, 1) if donated else ())
    # A copy: what is donated is gone, and both rows begin with the same parameters.
    carry = jax.tree.map(jnp.copy, (params, state))

    def advance() -> object:
        nonlocal carry
        carry = jax.block_until_ready(compiled(*carry, grads))
        return carry

    return advance
