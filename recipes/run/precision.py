"""Number formats of a run: policies, scalify, the monitor of saturation, and conversion.

A run may go on in other number formats; values are then carried over, rounded once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import as_scaled, nn, to_array
from unitscale.nn import AmaxState, Overflow, OverflowMonitor
from unitscale.optim import ScaledTransformation, convert_state
from unitscale.quant import QuantState, Static, Unit
from unitscale.transforms import scalify

from ..config import PrecisionConfig, RunConfig


def make_policy(precision: PrecisionConfig) -> nn.Policy:
    """The policy of layers; with a monitor, one whose matmuls count what saturates.

    `Static` scales that nothing moves are 1, as under `Unit`: the numbers are the same.
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
    """The state with scales moved if asked for, and shares of saturated elements by tensor."""
    if config.precision.monitor is None:
        return state, {}
    monitor = OverflowMonitor(limit=config.precision.monitor)
    model = nnx.merge(graphdef, state.params, state.rest)
    shares = {f"saturated/{_name(entry)}": entry.share for entry in monitor.read(model)}
    moved = monitor.rebalance(model) if config.precision.rebalance else ()
    for entry in moved:
        say(f"{_name(entry)}: {entry.share:.2%} saturated, scale now {entry.scale:g}")
    if moved:
        others = nnx.filter_state(state.rest, nnx.Not(AmaxState))
        rest = nnx.merge_state(nnx.state(model, AmaxState), others)
        # Where the old arrays were, as the compiled step expects.
        rest = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), rest, state.rest)
        state = state._replace(rest=rest)
    return state, shares


def _name(entry: Overflow) -> str:
    return f"{entry.layer.rpartition('.')[0]}.{entry.tensor}"


def formats(config: RunConfig) -> dict[str, Any]:
    """The keys that decide the format of a run's state, as JSON values."""
    precision = config.precision.model_dump(mode="json")
    return {"precision": precision, "skip_nonfinite": config.optimizer.skip_nonfinite}


def with_formats(config: RunConfig, facts: dict[str, Any]) -> RunConfig:
    """The config in the formats that a checkpoint was saved in, as its facts say."""
    saved = facts.get("formats")
    if saved is None:
        return config  # as the oldest ones were
    if "precision" not in saved:  # of an earlier version
        saved = dict(saved)
        optimizer = dict(saved.pop("optimizer"))
        saved["mesh"] = {"gradients": saved.pop("gradients", None)}
        skips = optimizer.pop("skip_nonfinite")
        unknown = {"matmuls", "frozen", "loss_scale", "monitor", "rebalance"}
        own = config.precision.model_dump(include=unknown)
        found = config.upgraded(saved | {"optimizer": optimizer})["precision"]
        saved = {"precision": own | found, "skip_nonfinite": skips}
    precision = PrecisionConfig.model_validate(saved["precision"])
    optimizer = config.optimizer.model_copy(update={"skip_nonfinite": saved["skip_nonfinite"]})
    return config.model_copy(update={"precision": precision, "optimizer": optimizer})


def convert(state: Any, written: RunConfig, config: RunConfig, optimizer: Any, like: Any) -> Any:
    """The state of a run, written in the formats of one config, in those of another."""
    source, target = plain(written.precision, state), plain(config.precision, like)
    params = to_array(source.params, jnp.float32)
    if isinstance(optimizer, ScaledTransformation):
        params = optimizer.scale_params(params)
    # These are there in some runs alone.
    kept = {
        name: getattr(source, name)
        for name in ("auto", "skips", "loss_scale")
        if getattr(source, name) is not None and getattr(target, name) is not None
    }
    converted = target._replace(
        params=params,
        rest=_carried(source.rest, target.rest),
        opt_state=convert_state(source.opt_state, optimizer.init(params)),
        step=source.step,
        **kept,
    )
    return scaled(config.precision, converted)


def _carried(source: Any, target: Any) -> Any:
    """Copy matching entries from `source`; scales of another strategy match none."""
    known = dict(jax.tree_util.tree_leaves_with_path(source, is_leaf=is_amax))

    def entry(path: Any, leaf: Any) -> Any:
        value = known.get(path, leaf)
        if is_amax(leaf):
            return value if value.strategy == leaf.strategy else leaf
        return value if value.dtype == leaf.dtype else value.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(entry, target, is_leaf=is_amax)


def is_amax(node: Any) -> bool:
    """Return True for the scales of one matmul."""
    return isinstance(node, QuantState)
