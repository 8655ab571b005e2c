"""Runs a plain model's training under `unitscale.scalify`, where a config asks for it.

Everything here is the identity for a config without `scalify`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from unitscale import as_scaled, to_array
from unitscale.core import ScaledArray, is_scaled
from unitscale.transforms import scalify

from ..config import ScalifyConfig


def scaled(config: ScalifyConfig | None, tree: Any) -> Any:
    """The tree's floating arrays as ScaledArrays of the storage format.

    A scale is an array also where the value is zero, as it is after the first step: so that one
    compiled step serves all.
    """
    if config is None:
        return tree
    return jax.tree.map(
        lambda leaf: (
            ScaledArray(leaf.data, jnp.asarray(leaf.scale or 1, jnp.float32))
            if is_scaled(leaf) and isinstance(leaf.scale, int)
            else leaf
        ),
        as_scaled(tree, dtype=jnp.dtype(config.storage)),
        is_leaf=is_scaled,
    )


def fed(config: ScalifyConfig | None, batch: Any) -> Any:
    """A batch as the scalified program takes it: floating arrays are at unit size as they are."""
    return batch if config is None else as_scaled(batch, 1, jnp.dtype(config.storage))


def under(config: ScalifyConfig | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, scalified."""
    return function if config is None else scalify(function)


def plain(config: ScalifyConfig | None, tree: Any) -> Any:
    """The values of a tree, as float32 arrays."""
    return tree if config is None else to_array(tree)
