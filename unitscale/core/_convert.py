"""Conversion of trees to ScaledArrays and back, and statistics for choosing scales."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from ._arithmetic import (
    MAX_EXPONENT,
    as_scale,
    bounded_product,
    broadcasts,
    divisor,
    safe_scale,
    scale_near,
    to_float,
)
from ._compat import take_as_array
from ._formats import (
    Format,
    cast,
    check_choice,
    format_of,
    is_floating,
    narrow,
    normal_pow2,
    pow2,
    widen,
)
from ._scaled_array import ScaledArray, is_scaled, value_of

Axis = int | tuple[int, ...] | None
RescaleStrategy = Literal["rms", "amax", "mse"]
"""The statistic that determines a new scale; see `rescale`."""

# -- statistics ------------------------------------------------------------------------------


# Compiled once per shape when called on arrays, and inlined when traced.
@partial(jax.jit, static_argnames="axis", inline=True)
def amax(x: jax.Array, axis: Axis = None) -> jax.Array:
    """Return the largest magnitude over ``axis``; unless it is None, axes are kept with size 1.

    It is computed in float32. NaN and infinity propagate. The gradient is zero.
    """
    x, keep = lax.stop_gradient(widen(x)), axis is not None
    if jax.default_backend() == "cpu":
        # XLA's CPU backend ignores NaN in the maximum of a large array, but not in a sum. It
        # compiles both in a tenth of the time of a maximum of integers (jax 0.10.2).
        largest = jnp.max(jnp.abs(x), axis=axis, keepdims=keep, initial=0)
        total = jnp.sum(jnp.square(x), axis=axis, keepdims=keep)
        return jnp.where(jnp.isnan(total), total, largest)
    # Integers order magnitudes as floats do, with NaN above infinity.
    bits = lax.bitcast_convert_type(jnp.abs(x), f"int{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(jnp.max(bits, axis, keepdims=keep, initial=0), x.dtype)


def exponent_to_fit(largest: jax.Array, fmt: Format) -> jax.Array:
    """Return the least k in -126 ... 126 with ``largest <= fmt.max * 2**k``, 0 < largest < inf."""
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32)
    top = int(np.asarray(fmt.max, np.float32).view(np.int32))
    # Adding this makes mantissas above that of fmt.max carry into the exponent.
    exponent = (bits + ((1 << 23) - 1 - (top & 0x7FFFFF))) >> 23
    return jnp.clip(exponent - (top >> 23), -MAX_EXPONENT, MAX_EXPONENT)


def scale_to_fit(largest: jax.Array, fmt: Format, margin: int = 0) -> jax.Array:
    """Return the least power-of-two scale at which an amax fits; 1 if it is 0, infinite or NaN."""
    exponent = exponent_to_fit(largest, fmt)
    if margin:
        exponent = jnp.minimum(exponent + margin, MAX_EXPONENT)
    usable = (largest > 0) & (largest < jnp.inf)
    return lax.stop_gradient(jnp.where(usable, normal_pow2(exponent), jnp.float32(1)))


@partial(jax.jit, static_argnames="axis", inline=True)
def rms(x: jax.Array, axis: Axis = None) -> jax.Array:
    """Return sqrt(mean(x**2)) over ``axis``; unless it is None, axes are kept with size 1.

    It is computed in float32, without overflow or underflow of squares. Empty input gives zero.
    """
    keep = axis is not None
    # float32 has the range for squares of formats with up to 5 exponent bits.
    squares_fit = is_floating(x) and jnp.finfo(x.dtype).nexp <= 5
    x = widen(x)
    if x.size == 0:
        return jnp.sum(x, axis=axis, keepdims=keep)
    if squares_fit:
        return jnp.sqrt(jnp.mean(jnp.square(x), axis=axis, keepdims=keep))
    unit = scale_near(amax(x, axis))
    return unit * jnp.sqrt(jnp.mean(jnp.square(x / unit), axis=axis, keepdims=keep))


def _best_scale(x: jax.Array, fmt: Format, axis: Axis) -> jax.Array:
    """Return the power of two s near the RMS that minimizes the error of rounding x / s."""
    center = scale_near(rms(x, axis))
    unit = widen(x) / center

    def error(exponent):
        step = pow2(exponent)
        rounded = widen(cast(unit / step, fmt)) * step
        return jnp.mean(jnp.square(rounded - unit), axis=axis, keepdims=axis is not None)

    exponents = jnp.arange(-24, 25)
    errors = lax.map(error, exponents)
    # Values that the format represents exactly have error 0 at many scales: choose the nearest.
    tie_break = jnp.abs(exponents).reshape((-1,) + (1,) * (errors.ndim - 1))
    is_best = ~(errors > jnp.min(errors, axis=0))
    best = jnp.argmin(jnp.where(is_best, tie_break, jnp.iinfo(jnp.int32).max), axis=0)
    return center * pow2(exponents[best])


# -- other scales for the same values --------------------------------------------------------


def rebalance(x: Any, s: Any) -> ScaledArray:
    """Divide the data by ``s`` and multiply the scale by it, which keeps the value.

    Scaling:
        Exact if ``s`` is a power of two and the data stays within the range of its format.

    Args:
        x: array or ScaledArray.
        s: positive number or array that broadcasts against ``x``, or with block scales against the
            scale of ``x``. Entries that are not positive and finite count as 1.

    Returns:
        ScaledArray of the same shape and data dtype.

    Raises:
        ValueError: if ``s`` is a number that is not positive and finite, or does not broadcast.

    Example:
        >>> x = rebalance(jnp.array([256.0, 512.0], jnp.float16), 256.0)
        >>> print(x.data, x.scale)
        [1. 2.] 256.0
    """
    if isinstance(s, (int, float, np.number)) and not 0 < s < float("inf"):
        raise ValueError(f"unitscale.rebalance: s must be positive and finite; got {s!r}")
    x = x if is_scaled(x) else ScaledArray(x)
    s = lax.stop_gradient(safe_scale(divisor(jnp.asarray(s, jnp.float32))))
    shape = x.shape if x.block_shape is None else jnp.shape(x.scale)
    if not broadcasts(s.shape, shape):
        raise ValueError(
            f"unitscale.rebalance: s must broadcast against {shape}; got shape {s.shape}"
        )
    if x.block_shape is not None:
        s = jnp.broadcast_to(s, shape)
    scale, rest = bounded_product(x.scale, s)

    def full(part: Any) -> Any:
        return to_float(ScaledArray(x.data, part, block_shape=x.block_shape).full_scale)

    data = widen(x.data) / full(s)
    if not isinstance(rest, int):
        data = data * full(rest)
    return ScaledArray(data.astype(x.dtype), scale, block_shape=x.block_shape)


def rescale(
    x: Any, strategy: RescaleStrategy = "rms", *, dtype: Any = None, axis: Axis = None
) -> ScaledArray:
    """Change the scale to a power of two chosen from statistics of the data.

    Scaling:
        "rms" brings the RMS of the data close to 1; "amax" brings the largest magnitude just below
        the maximum of ``dtype``; "mse" minimizes mean((cast(x / s, dtype) * s - x)**2). All-zero
        data keeps its scale.

    Args:
        x: array or ScaledArray.
        strategy: "rms", "amax" or "mse".
        dtype: target format of "amax" and "mse"; by default the dtype of the data.
        axis: axes that share one scale; None for one scale per tensor.

    Returns:
        ScaledArray with the same value and data dtype, except that data beyond the range of its
        dtype saturates. Block scales are replaced.

    Example:
        >>> x = rescale(jnp.array([3e-6, -4e-6]))
        >>> print(float(x.scale) == 2.0**-18)
        True
    """
    check_choice("unitscale.rescale", "strategy", strategy, RescaleStrategy)
    x = x if is_scaled(x) else ScaledArray(x)
    if x.size == 0:
        return x
    target = format_of(x.dtype if dtype is None else dtype)
    # The new scale replaces block scales, so compute statistics of the value.
    wide = x.map_data(widen) if x.block_shape is None else ScaledArray(value_of(x))
    if strategy == "rms":
        s = scale_near(rms(wide.data, axis))
    elif strategy == "amax":
        s = scale_to_fit(amax(wide.data, axis), target)
    else:
        s = _best_scale(wide.data, target, axis)
    return cast(rebalance(wide, s), x.dtype)


# -- trees -----------------------------------------------------------------------------------


def as_scaled(tree: Any, scale: Any = None, dtype: Any = None, *, stack_axes: int = 0) -> Any:
    """Replace every floating leaf of a tree by a ScaledArray with the same value.

    Scaling:
        data = x / scale, computed in float32 and cast to ``dtype``. Finite values saturate (if
        ``dtype`` is None, only in 8-bit formats). By default the scale is the power of two nearest
        to the RMS of the finite entries of each leaf; 1 for an all-zero leaf, such as an initial
        bias.

    Args:
        tree: pytree; integer, boolean and key leaves are kept. ScaledArrays keep their scale if
            ``scale`` is None.
        scale: one scale for all leaves, or None to compute one for each.
        dtype: data format; None keeps the format of each leaf.
        stack_axes: number of leading axes that stack items, such as layers stacked by `jax.vmap`.
            Each item gets its own scale, of shape ``shape[:stack_axes] + (1, ..., 1)``, so that
            `jax.lax.scan` and `jax.vmap` map over data and scale together.

    Returns:
        The same tree with `ScaledArray` leaves.

    Raises:
        ValueError: if the scale is not positive or does not broadcast, or if a leaf has fewer than
            ``stack_axes`` axes.

    Example:
        >>> tree = as_scaled({"w": jnp.full(3, 1e-6), "steps": 7}, dtype=jnp.float16)
        >>> tree["w"]
        ScaledArray(float16[3], scale=9.53674e-07)
        >>> layers = as_scaled(jnp.ones((3, 2, 2)), stack_axes=1)
        >>> jax.lax.scan(lambda x, w: (x @ w.value, w.scale.shape), jnp.ones(2), layers)[0]
        Array([8., 8.], dtype=float32)
    """
    given = None if scale is None else to_float(as_scale(scale))

    def convert(x: Any) -> Any:
        if not (is_scaled(x) or isinstance(x, float) or is_floating(x)):
            return x
        x = x if is_scaled(x) else jnp.asarray(x)
        if stack_axes < 0:
            raise ValueError(f"unitscale.as_scaled: stack_axes must be 0 or more; got {stack_axes}")
        if stack_axes > x.ndim:
            raise ValueError(
                f"unitscale.as_scaled: every leaf must have at least stack_axes={stack_axes} axes; "
                f"got a leaf of shape {x.shape}. Convert such leaves separately."
            )
        if is_scaled(x) and given is None:
            x = _stacked(x, stack_axes)
            return x if dtype is None else cast(x, dtype)
        target = x.dtype
        x = widen(x.value) if is_scaled(x) else widen(x)
        s = _own_scale(x, stack_axes) if given is None else given
        if not broadcasts(s.shape, x.shape):
            raise ValueError(
                "unitscale.as_scaled: scale must broadcast against leaves; got leaf "
                f"{x.shape}, scale {s.shape}"
            )
        data = x / to_float(s)
        data = narrow(data, target) if dtype is None else cast(data, dtype)
        return _stacked(ScaledArray(data, s), stack_axes)

    return jax.tree.map(convert, tree, is_leaf=is_scaled)


def _own_scale(x: jax.Array, stack_axes: int) -> jax.Array:
    """Return the power of two nearest to the RMS of the finite entries of each stacked item."""
    size = rms(jnp.where(jnp.isfinite(x), x, 0), tuple(range(stack_axes, x.ndim)))
    scale = lax.stop_gradient(scale_near(size))
    return scale if stack_axes else jnp.reshape(scale, ())


def _stacked(x: ScaledArray, stack_axes: int) -> ScaledArray:
    """Give each stacked item its own scale."""
    block = x.block_shape
    if stack_axes and block is None:
        scale = jnp.float32(1) if x.scale is None else x.scale
        stack = x.shape[:stack_axes] + (1,) * (x.ndim - stack_axes)
        shape = np.broadcast_shapes(scale.shape, stack)
        if scale.shape == shape and x.scale is not None:
            return x
        return ScaledArray(x.data, jnp.broadcast_to(scale, shape))
    if block is not None and any(size > 1 for size in block[:stack_axes]):
        raise ValueError(
            f"unitscale.as_scaled: blocks must not span stack axes; got blocks of {block}, "
            f"stack_axes={stack_axes}"
        )
    return x


def to_array(tree: Any, dtype: Any = None) -> Any:
    """Replace every ScaledArray of a tree by its value.

    Args:
        tree: pytree of arrays and ScaledArrays.
        dtype: dtype of the values; None keeps the dtype of `ScaledArray.value`.
    """

    def convert(x: Any) -> Any:
        if not is_scaled(x):
            return x
        return x.value if dtype is None else x.value.astype(dtype)

    return jax.tree.map(convert, tree, is_leaf=is_scaled)


def map_values(f: Callable[..., Any], *trees: Any) -> Any:
    """Map a function over the leaves of trees, with ScaledArrays replaced by their values.

    `jax.tree.map` treats data and scale of a ScaledArray as two leaves, so averages, norms or sums
    computed leaf by leaf would be wrong.

    Args:
        f: function of one leaf of each tree; it gets ScaledArrays as float32 values.
        *trees: trees of the same structure; a ScaledArray may match an array in another tree.

    Example:
        >>> a, b = ScaledArray(jnp.ones(2), 1.0), ScaledArray(jnp.ones(2), 8.0)
        >>> print(map_values(lambda x, y: (x + y) / 2, {"w": a}, {"w": b})["w"])
        [4.5 4.5]
    """
    return jax.tree.map(f, *(jax.tree.map(value_of, tree, is_leaf=is_scaled) for tree in trees))


# -- ScaledArrays in jax.lax, jax.grad and jax.export ------------------------------------------


def _plain(x: ScaledArray) -> jax.Array:
    if x.scale is None:
        return x.data
    raise ValueError(
        f"unitscale: a plain array is needed here; got {x!r}. Pass its .value, or replace the "
        "function of jax.lax by one of jax.numpy or unitscale.ops, or the flax layer by one of "
        "unitscale.nn, or use unitscale.scalify."
    )


def _plain_loss(x: ScaledArray) -> jax.Array:
    # JAX's initial cotangent is a single array, which does not match a pytree, even of one leaf.
    raise ValueError(
        f"unitscale: a plain array is needed as the loss; got {x!r}. Return its .value, or "
        "differentiate with unitscale.value_and_grad, models with unitscale.nn.value_and_grad."
    )


# jax.numpy and most layers call __jax_array__, but jax.lax and derivatives of jax.nn do not. For
# these, convert a ScaledArray without a scale to its data, and raise for any other.
take_as_array(ScaledArray, _plain, _plain_loss)


def to_json(aux: Any) -> bytes:
    """Serialize the static fields of a pytree node as JSON."""
    return json.dumps(aux).encode()


def from_json(written: bytes) -> Any:
    """Deserialize what `to_json` wrote; lists become tuples."""

    def with_tuples(x: Any) -> Any:
        return tuple(map(with_tuples, x)) if isinstance(x, list) else x

    return with_tuples(json.loads(written))


export.register_pytree_node_serialization(
    ScaledArray,
    serialized_name="unitscale.ScaledArray",
    serialize_auxdata=to_json,
    deserialize_auxdata=from_json,
)
