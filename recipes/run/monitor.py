"""Saturated elements of FP8 tensors as metrics, and scales that move when there are too many."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from unitscale import nn
from unitscale.nn import AmaxState, Overflow, OverflowMonitor
from unitscale.quant import Static, Unit

from ..config import RunConfig
from .state import TrainState


def monitored(config: RunConfig) -> nn.Policy:
    """The policy of a config; with a monitor, one whose products count what saturates.

    `Static` scales that nothing moves are 1, as under `Unit`: the numbers are the same.

    Example:
      >>> policy = monitored(RunConfig(recipe="gpt", name="x", policy="fp8", monitor={}))
      >>> policy.matmul.strategy
      Static(scales=None, margin=0)
    """
    policy = nn.as_policy(config.policy)
    if config.fp8_readout == "gradients":
        policy = policy.with_quantized_readout(gradients_only=True)
    if config.monitor and policy.matmul and policy.matmul.strategy == Unit():
        matmul = dataclasses.replace(policy.matmul, strategy=Static())
        policy = dataclasses.replace(policy, matmul=matmul)
    return policy.with_quantized_readout() if config.fp8_readout is True else policy


def watch_overflow(
    config: RunConfig, graphdef: nnx.GraphDef, state: TrainState, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, float]]:
    """Reads what saturated in the last step, and moves scales if the config asks for it.
    Returns:
      The state, with the moved scales, and the shares of saturated elements by tensor, named
      `saturated/LAYER.TENSOR`.
    """
    if config.monitor is None:
        return state, {}
    monitor = OverflowMonitor(limit=config.monitor.limit)
    model = nnx.merge(graphdef, state.params, state.rest)
    shares = {f"saturated/{_name(entry)}": entry.share for entry in monitor.read(model)}
    if not config.monitor.rebalance:
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
    """As it lay before: the compiled step takes its state from there."""
    return new if new is old else jax.device_put(new, old.sharding)
