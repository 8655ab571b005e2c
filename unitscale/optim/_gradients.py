"""Gradients as optimizers take them: plain arrays, by value."""

from typing import Any

import jax
import jax.numpy as jnp

from ..core import is_scaled, widen
from ._layout import row_major


def is_leaf(x: Any) -> bool:
    """Whether ``x`` is one entry of a tree of parameters or of what is done to them."""
    return x is None or is_scaled(x)


def wide_gradients(gradients: Any, params: Any) -> Any:
    """Returns gradients in float32, after a check that they are gradients by value.

    Args:
        gradients: tree as ``params``, with a plain array for each parameter, as `unitscale.grad`
            returns it, or None.
        params: tree of ScaledArrays and arrays.

    Raises:
        TypeError: if a gradient is a ScaledArray: `jax.grad` has made it, in data space.
        ValueError: if the trees or shapes differ.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=is_leaf)
    found, other = jax.tree.flatten_with_path(gradients, is_leaf=is_leaf)
    for path, gradient in found:
        if is_scaled(gradient):
            raise TypeError(
                "unitscale.optim: gradients must be plain arrays, by value; got a ScaledArray at "
                f"grads{jax.tree_util.keystr(path)}. Differentiate by unitscale.grad or "
                "unitscale.nn.grad, where jax.grad gives the gradient by the data; values that "
                "scalify returned are to_array(grads)."
            )
    if structure != other:
        raise ValueError(
            f"unitscale.optim: gradients must have the structure of params; got {other}, expected "
            f"{structure}"
        )
    for (path, gradient), weight in zip(found, leaves, strict=True):
        if gradient is not None and jnp.shape(gradient) != jnp.shape(weight):
            raise ValueError(
                "unitscale.optim: gradients must have the shapes of params; got "
                f"{jnp.shape(gradient)} for {jnp.shape(weight)} at "
                f"grads{jax.tree_util.keystr(path)}"
            )
    return jax.tree.unflatten(structure, [_wide(gradient) for _, gradient in found])


def _wide(x: Any) -> Any:
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    # As parameters lie. Left to itself XLA lets a GPU's product write the gradient of a matrix
    # transposed, and then transposes all that the optimizer reads and writes: 46 bytes a parameter
    # in place of 28.
    return row_major(widen(x))
