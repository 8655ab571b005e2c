"""Runs a plain model's training under `unitscale.scalify`, where a config asks for it.

Everything here is the identity for a config without `scalify`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from unitscale import as_scaled, to_array
from unitscale.transforms import scalify

from ..config import ScalifyConfig


def scaled(config: ScalifyConfig | None, tree: Any) -> Any:
    """The tree's floating arrays as ScaledArrays of the storage format."""
    return tree if config is None else as_scaled(tree, dtype=jnp.dtype(config.storage))


def fed(config: ScalifyConfig | None, batch: Any) -> Any:
    """A batch as the scalified program takes it: floating arrays are at unit size as they are."""
    return batch if config is None else as_scaled(batch, 1, jnp.dtype(config.storage))


def under(config: ScalifyConfig | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, scalified."""
    return function if config is None else scalify(function, decouple=config.decouple)


def plain(config: ScalifyConfig | None, tree: Any) -> Any:
    """The values of a tree, as float32 arrays."""
    return tree if config is None else to_array(tree)
