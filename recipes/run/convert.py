"""A run continued in other number formats: its state from those it was saved in.

What a step changes has another shape in other formats: a weight is an array or a ScaledArray, a
moment has its own format, delayed scales are there or not. Values are carried over, rounded once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from unitscale import to_array
from unitscale.optim import ScaledTransformation, convert_state
from unitscale.quant import QuantState

from ..config import PrecisionConfig, RunConfig
from .precision import plain, scaled


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


def convert(
    state: Any,
    written: RunConfig,
    config: RunConfig,
    optimizer: Any,
    like: Any,
) -> Any:
    """The state of a run in the formats of its config."""
    source, target = plain(written.precision, state), plain(config.precision, like)
    params = to_array(source.params, jnp.float32)
    if isinstance(optimizer, ScaledTransformation):
        params = optimizer.scale_params(params)
    opt_state = convert_state(source.opt_state, optimizer.init(params))
    return scaled(
        config.precision,
        target._replace(
            params=params,
            rest=_carried(source.rest, target.rest),
            opt_state=opt_state,
            step=source.step,
            auto=_kept(source.auto, target.auto),
            skips=_kept(source.skips, target.skips),
            loss_scale=_kept(source.loss_scale, target.loss_scale),
        ),
    )


def _kept(source: Any, target: Any) -> Any:
    """The source's, where both have it: only some runs do."""
    return target if source is None or target is None else source


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
