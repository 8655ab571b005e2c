"""Gradients from data space, where JAX computes them, to value space, where moments live."""

from typing import Any

import jax
import jax.numpy as jnp

from ..core import is_scaled, is_static, to_float, widen


def _is_leaf(x: Any) -> bool:
    return x is None or is_scaled(x)


def _value_gradient(gradient: Any, weight: Any) -> Any:
    if not is_scaled(gradient):
        is_floating = hasattr(gradient, "dtype") and jnp.issubdtype(gradient.dtype, jnp.floating)
        return widen(gradient) if is_floating else gradient
    if is_static(gradient.scale) or not is_scaled(weight):
        return widen(gradient.value)
    # The cotangent of a scale is zero, and NaN in e8m0, which has no zero: no scale at all. XLA
    # makes infinity of that NaN where it is a constant of a compiled program.
    own, scale = to_float(gradient.full_scale), to_float(weight.full_scale)
    return widen(gradient.data) * jnp.where((own > 0) & (own < jnp.inf), own, 1 / scale)


def value_gradients(gradients: Any, params: Any) -> Any:
    """Returns gradients with respect to the values of parameters, as float32 arrays.

    Scaling:
        The value is data * scale, so a cotangent of data is divided by the parameter's scale, which
        is exact for a power of two. However a value is split into data and scale, its gradient is
        the same; so a parameter that is rescaled leaves the optimizer's moments alone.

    Args:
        gradients: tree as ``params``. A ScaledArray whose scale is zero is what `jax.grad` returns
            for a ScaledArray: a cotangent of data. Any other ScaledArray and every plain array is
            its own value: a gradient with respect to the value, such as that of a loss of
            ``to_array(params)``.
        params: tree of ScaledArrays and arrays.

    Returns:
        The same tree of plain arrays.

    Raises:
        ValueError: if the trees differ.

    Example:
        >>> from unitscale import ScaledArray
        >>> w = ScaledArray(jnp.ones(2), 4.0)
        >>> loss = lambda w: jnp.sum(3 * w.value)
        >>> print(jax.grad(loss)(w).data, value_gradients(jax.grad(loss)(w), w))
        [12. 12.] [3. 3.]

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_leaf)
    found, other = jax.tree.flatten(gradients, is_leaf=_is_leaf)
    if structure != other:
        raise ValueError(
            "unitscale.optim.value_gradients: gradients must have the structure of params; got "
            f"{other}, expected {structure}"
        )
    for gradient, weight in zip(found, leaves, strict=True):
        if gradient is not None and jnp.shape(gradient) != jnp.shape(weight):
            raise ValueError(
                "unitscale.optim.value_gradients: gradients must have the shapes of params; got "
                f"{jnp.shape(gradient)} for {jnp.shape(weight)}"
            )
    return jax.tree.unflatten(structure, list(map(_value_gradient, found, leaves)))
