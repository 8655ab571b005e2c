"""Number formats of a run: policies of layers, scalify, and the monitor of saturation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import as_scaled, nn, to_array
from unitscale.nn import AmaxState, Overflow, OverflowMonitor
from unitscale.quant import Static, Unit
from unitscale.transforms import scalify

from ..config import PrecisionConfig, RunConfig


def make_policy(precision: PrecisionConfig) -> nn.Policy:
    """The policy of layers; with a monitor, one whose matmuls count what saturates.

    `Static` scales that nothing moves are 1, as under `Unit`: the numbers are the same.

    Example:
      >>> make_policy(PrecisionConfig(policy="fp8", monitor=1e-4)).matmul.strategy
      Static(scales=None, margin=0)
    """
    policy = nn.as_policy(precision.policy)
    if precision.readout == "gradients":
        policy = policy.with_quantized_readout(gradients_only=True)
    if precision.monitor is not None and policy.matmul and policy.matmul.strategy == Unit():
        matmul = dataclasses.replace(policy.matmul, strategy=Static())
        policy = dataclasses.replace(policy, matmul=matmul)
    return policy.with_quantized_readout() if precision.readout is True else policy


def scalified(precision: PrecisionConfig | None, f: Callable[..., Any]) -> Callable[..., Any]:
    """The function under `unitscale.scalify`, where the config asks for it; so for the others."""
    return scalify(f) if precision and precision.scalify else f


def scaled(precision: PrecisionConfig | None, tree: Any) -> Any:
    """Floating arrays as ScaledArrays of the format of scalify."""
    if not precision or not precision.scalify:
        return tree
    return as_scaled(tree, dtype=jnp.dtype(precision.scalify))


def fed(precision: PrecisionConfig | None, batch: Any) -> Any:
    """A batch as a scalified program takes it: floating arrays are at unit size as they are."""
    if not precision or not precision.scalify:
        return batch
    return as_scaled(batch, 1, jnp.dtype(precision.scalify))


def plain(precision: PrecisionConfig | None, tree: Any) -> Any:
    """The values of a scalified program's tree, as float32 arrays."""
    return to_array(tree) if precision and precision.scalify else tree


def watch_overflow(
    config: RunConfig, graphdef: nnx.GraphDef, state: Any, say: Callable[[str], None]
) -> tuple[Any, dict[str, float]]:
    """Reads what saturated in the last step, and moves scales if the config asks for it.

    Returns:
      The `TrainState`, with the moved scales, and the shares of saturated elements by tensor, named
      `saturated/LAYER.TENSOR`.
    """
    if config.precision.monitor is None:
        return state, {}
    monitor = OverflowMonitor(limit=config.precision.monitor)
    model = nnx.merge(graphdef, state.params, state.rest)
    shares = {f"saturated/{_name(entry)}": entry.share for entry in monitor.read(model)}
    if not config.precision.rebalance:
        return state, shares
    moved = monitor.rebalance(model)
    for entry in moved:
        say(f"{_name(entry)}: {entry.share:.2%} saturated, scale now {entry.scale:g}")
    if moved:
        others = nnx.filter_state(state.rest, nnx.Not(AmaxState))
        rest = nnx.merge_state(nnx.state(model, AmaxState), others)
        state = state._replace(rest=jax.tree.map(_placed, rest, state.rest))
    return state, shares


def _name(entry: Overflow) -> str:
    return f"{entry.layer.rpartition('.')[0]}.{entry.tensor}"


def _placed(new: Any, old: Any) -> Any:
    """Put a new array where the old one was, as the compiled step expects."""
    return new if new is old else jax.device_put(new, old.sharding)
