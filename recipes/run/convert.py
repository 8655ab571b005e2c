"""A run continued in other number formats: its state from those it was saved in.

What a step changes has another shape in other formats: a weight is an array or a ScaledArray, a
moment has its own format, delayed scales are there or not. Values are carried over, rounded once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from unitscale import to_array
from unitscale.optim import ScaledTransformation, convert_state

from ..config import RunConfig
from .scaling import plain, scaled

_OPTIMIZER = ("weights", "moments", "rounding", "skip_nonfinite")

FORMAT_KEYS = (
    "policy",
    "scalify",
    "mesh.gradients",
    *(f"optimizer.{name}" for name in _OPTIMIZER),
)
"""The keys of a config that may change, on request, when a run is resumed."""


def formats(config: RunConfig) -> dict[str, Any]:
    """What decides the shape of a run's state beside its model, as JSON values."""
    tree = config.model_dump(mode="json")
    return {
        "policy": tree["policy"],
        "scalify": tree["scalify"],
        "gradients": None if config.mesh is None else config.mesh.gradients,
        "optimizer": {name: tree["optimizer"][name] for name in _OPTIMIZER},
    }


def with_formats(config: RunConfig, saved: dict[str, Any]) -> RunConfig:
    """The config as it was when a state was saved."""
    tree = config.model_dump(mode="json") | {name: saved[name] for name in ("policy", "scalify")}
    tree["optimizer"] |= saved["optimizer"]
    if tree["mesh"] or saved["gradients"]:
        # Devices that shared gradients divided the batch alone; a mesh of one can be that of any.
        tree["mesh"] = {"gradients": saved["gradients"]}
    return type(config).model_validate(tree)


def convert(
    state: Any,
    written: RunConfig,
    config: RunConfig,
    optimizer: Any,
    like: Any,
) -> Any:
    """The state of a run in the formats of its config.

    Args:
      state: A `TrainState`, as it was saved.
      written: The config it was saved under; only its formats may differ.
      config: The config to go on with.
      optimizer: Of that config.
      like: The `TrainState` before the first step under that config.
    """
    source, target = plain(written.scalify, state), plain(config.scalify, like)
    params = to_array(source.params, jnp.float32)
    if isinstance(optimizer, ScaledTransformation):
        params = optimizer.scale_params(params)
    opt_state = convert_state(source.opt_state, optimizer.init(params))
    return scaled(
        config.scalify,
        target._replace(
            params=params,
            rest=_carried(source.rest, target.rest),
            opt_state=opt_state,
            step=source.step,
            auto=target.auto if source.auto is None or target.auto is None else source.auto,
            skips=target.skips if source.skips is None or target.skips is None else source.skips,
        ),
    )


def _carried(source: Any, target: Any) -> Any:
    """The target, with every entry that the source has too taken from there."""
    known = dict(jax.tree_util.tree_leaves_with_path(source))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: known.get(path, leaf), target)
