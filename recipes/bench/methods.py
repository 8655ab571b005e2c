"""Ways to train in float16, on one model: what each loses, what it costs, what is to be chosen.

    python -m recipes bench methods --data TEXT

Trains the GPT of `configs/gpt/parity.yaml` in float16 in plain `flax.nnx` with no loss scale, with
a constant and with an automatic one, with FP8 products whose scales follow their tensors, and under
scalify; and the same GPT in `unitscale.nn`. Seed and data are the same. A run that is complete in
`train.runs_dir` is used as it is, so that runs are shared with `bench parity` and `bench scalify`.
"""

import functools
import re
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx

from unitscale.core import is_scaled
from unitscale.nn import AmaxState

from ..gpt.config import GPTConfig
from ..run.scaling import under
from ..run.state import TrainState, init_state
from ._compare import compare, comparison
from ._runs import ConfigPath, DataPaths, Fresh, Jobs, Overrides, PlainRate, Seeds, Told
from ._table import JsonPath, Table, publish
from ._timing import random_batch
from ._underflow import WHEN, Sample, gradient, lost_gradients

TO_CHOOSE = {
    "loss-scale": "the scale",
    "auto-loss-scale": "first scale, interval, factor",
    "tensor-scaling": "formats, granularity, layers",
}


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    data: DataPaths = None,
    plain_learning_rate: PlainRate = None,
    loss_scale: Annotated[float, typer.Option(min=1.0, help="the constant loss scale")] = 2.0**12,
    growth_interval: Annotated[
        int, typer.Option(min=1, help="finite steps after which an automatic loss scale doubles")
    ] = 200,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints loss, lost gradients, cost and settings of methods to train in float16."""
    entry = comparison("methods")
    own = entry.at_rate(plain_learning_rate)
    own["loss-scale"].append(f"optimizer.loss_scale={loss_scale}")
    own["auto-loss-scale"].append(f"optimizer.loss_scale_interval={growth_interval}")
    found = compare(entry, Told(config, overrides, seeds, fresh, data, jobs), own)
    configs: dict[str, Any] = {name: runs[0] for name, runs in found.configs.items()}
    first = configs[entry.reference]
    sample = Sample.of(first)
    losses, rows, costs = found.table(), [], {}
    for name, row in zip(configs, losses.rows, strict=True):
        lost = {}
        if name != entry.reference:
            for when, one in zip(WHEN, lost_gradients(configs[name], sample), strict=True):
                lost |= {f"lost {when}": one.lost_share}
                lost |= {f"without absent {when}": one.lost_occurring_share}
            costs[name] = cost_of(configs[name])
            jax.clear_caches()
        rows.append({**row, **lost})
    notes = [
        f"Plain models learn at {first.optimizer.learning_rate:g}, unit scaling at the config's "
        "own rate; loss over all validation text. All are float16; tensor scaling: products of "
        "layers in FP8, their scales from amax.",
        "lost: entries of the gradient of all parameters that are zero and in float32 are not, "
        f"over {sample} Automatic: at the first scale without overflow.",
        "reductions: reduce instructions of a compiled step (gradient and update, and no checks "
        f"but those of a loss scale) on {jax.devices()[0].device_kind}. FLOPs: of the step before "
        "XLA optimizes it. numbers kept: what the method carries from step to step.",
    ]
    labels = [entry.label(name) for name in costs]
    found = Table(losses.title, rows, losses.configs)
    publish("methods", [found, added(labels, costs)], json, notes)


class Cost(NamedTuple):
    """Of a compiled step: reductions and operations, and numbers it carries for its scales."""

    reductions: int
    flops: float
    kept: int


def added(labels: list[str], costs: dict[str, Cost]) -> Table:
    """What each method adds to the first, and leaves to be chosen."""
    none, *_ = costs.values()
    rows = [
        {
            "method": label,
            "reductions": cost.reductions - none.reductions,
            "FLOPs": cost.flops / none.flops - 1,
            "numbers kept": cost.kept,
            "to choose": TO_CHOOSE.get(name, "nothing"),
        }
        for label, (name, cost) in zip(labels, costs.items(), strict=True)
    ]
    return Table(f"Added to a step of {none.reductions} reductions, {none.flops:.4g} FLOPs", rows)


def cost_of(config: GPTConfig) -> Cost:
    """Compiles a step of gradient and update alone, and counts."""
    graphdef, optimizer, state = init_state(config)
    settings, differentiate = config.optimizer, gradient(graphdef)

    def step(state: TrainState, batch: Any) -> Any:
        follows, kept = state.loss_scale, (state.params, state.opt_state)
        scale = settings.loss_scale if follows is None else follows.value
        loss, grads = differentiate(state.params, state.rest, batch, scale)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        fresh = optax.apply_updates(state.params, updates), opt_state
        if follows is not None:
            finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
            follows = follows.after(finite, settings.loss_scale_interval)
            fresh = jax.tree.map(functools.partial(jnp.where, finite), fresh, kept)
        return loss, fresh, follows

    lowered = jax.jit(under(config.scalify, step)).lower(state, random_batch(config))
    analysis: Any = lowered.cost_analysis()
    text = lowered.compile().as_text() or ""
    return Cost(len(re.findall(r"\breduce\(", text)), float(analysis["flops"]), kept(state))


def kept(state: TrainState) -> int:
    """Numbers in a state that are there for the sake of scales."""
    amax = jax.tree.leaves((state.loss_scale, nnx.split_state(state.rest, AmaxState, ...)[0]))
    nodes = jax.tree.leaves(state, is_leaf=is_scaled)
    scales = [node.scale for node in nodes if is_scaled(node) and node.scale is not None]
    return sum(np.size(x) for x in (*amax, *scales))
