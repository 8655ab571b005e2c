"""Conversion of trees to ScaledArrays and back, and the statistics from which scales are chosen."""

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from ._cast import cast, narrow, widen
from ._compat import take_as_array
from ._formats import format_of
from ._scale import (
    as_scale,
    bounded_product,
    broadcasts,
    divisor,
    pow2,
    safe_scale,
    scale_near,
    to_float,
)
from ._scaled_array import ScaledArray

Axis = int | Sequence[int] | None


def amax(x: jax.Array, axis: Axis = None) -> jax.Array:
    """Returns the largest magnitude over ``axis``, kept as size-1 dimensions unless axis is None.

    Computed in float32. NaN and infinity propagate. Its gradient is zero.

    Example:
        >>> print(amax(jnp.array([1.0, -3.0])))
        3.0
    """
    return _amax(x, _hashable(axis))


def rms(x: jax.Array, axis: Axis = None) -> jax.Array:
    """Returns sqrt(mean(x**2)) over ``axis``, kept as size-1 dimensions unless axis is None.

    Computed in float32, without overflow or underflow of the squares. Zero for empty input.

    Example:
        >>> print(rms(jnp.full(4, 1e30)))
        1e+30
    """
    return _rms(x, _hashable(axis))


def _hashable(axis: Axis) -> int | tuple[int, ...] | None:
    return tuple(axis) if isinstance(axis, Sequence) else axis


# One program where nothing is traced; traced once for each shape where something is.
@functools.partial(jax.jit, static_argnums=1, inline=True)
def _amax(x: jax.Array, axis: Axis) -> jax.Array:
    x = jnp.abs(widen(x))
    # As integers, which order magnitudes as floats do, and NaN above infinity: of a large array's
    # maximum XLA's CPU backend leaves NaN out.
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    most = jnp.max(bits, axis=axis, keepdims=axis is not None, initial=0)
    return lax.bitcast_convert_type(most, x.dtype)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _rms(x: jax.Array, axis: Axis) -> jax.Array:
    keep, squares_fit = axis is not None, _squares_fit(x.dtype)
    x = widen(x)
    if x.size == 0:
        return jnp.sum(x, axis=axis, keepdims=keep)
    if squares_fit:
        return jnp.sqrt(jnp.mean(jnp.square(x), axis=axis, keepdims=keep))
    unit = scale_near(amax(x, axis))
    return unit * jnp.sqrt(jnp.mean(jnp.square(x / unit), axis=axis, keepdims=keep))


def _squares_fit(dtype: Any) -> bool:
    """Whether float32 holds the squares of a format: it does with 5 exponent bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nexp <= 5


def optimal_scale(
    x: jax.Array, dtype: Any, axis: Axis = None, *, search: tuple[int, int] = (-24, 24)
) -> jax.Array:
    """Returns the power-of-two scale of least mean squared quantization error for a format.

    It minimizes mean((cast(x / s, dtype) * s - x)**2) over the exponents of ``search``.

    Args:
        x: floating array.
        dtype: target format, as for `cast`.
        axis: axes that share a scale; None for one scale.
        search: first and last exponent tried, relative to the RMS rounded to a power of two.

    Returns:
        float32 scale, with size-1 dimensions where ``axis`` was reduced; 1 for an all-zero tensor.

    Raises:
        ValueError: if the format is unknown or the search range is empty.

    Example:
        >>> print(optimal_scale(jnp.array([1e-5, 2e-5]), "e4m3fn") < 1e-4)
        True
    """
    fmt = format_of(dtype)
    low, high = search
    if low > high:
        raise ValueError(
            f"unitscale.optimal_scale: search must be (low, high), low <= high; got {search}"
        )
    center = scale_near(rms(x, axis))
    unit = widen(x) / center
    keepdims = axis is not None

    def error(exponent):
        step = pow2(exponent)
        rounded = widen(cast(unit / step, fmt)) * step
        return jnp.mean(jnp.square(rounded - unit), axis=axis, keepdims=keepdims)

    exponents = jnp.arange(low, high + 1)
    errors = lax.map(error, exponents)
    # Among equals the exponent nearest to the RMS: exact values have error zero for many scales.
    tie_break = jnp.abs(exponents).reshape((-1,) + (1,) * (errors.ndim - 1))
    is_best = errors == jnp.min(errors, axis=0)
    best = jnp.argmin(jnp.where(is_best, tie_break, jnp.iinfo(jnp.int32).max), axis=0)
    return center * pow2(exponents[best])


if TYPE_CHECKING:
    from typing_extensions import TypeIs


def is_scaled(x: Any) -> "TypeIs[ScaledArray]":
    """Whether ``x`` is a ScaledArray: the ``is_leaf`` of `jax.tree.map`."""
    return isinstance(x, ScaledArray)


RescaleStrategy = Literal["rms", "amax", "mse"]
"""The statistic that a new scale is chosen from: see `rescale`."""


def rebalance(x: Any, s: Any) -> ScaledArray:
    """Moves a factor from data to scale, with the same value: ``data / s`` and ``scale * s``.

    Scaling:
        Exact for a power of two, unless data leaves the range of its format.

    Args:
        x: array or ScaledArray.
        s: positive number or array that broadcasts against the scale of ``x``; entries that are
            zero, infinite or NaN count as 1.

    Returns:
        ScaledArray of the same shape and data dtype.

    Raises:
        ValueError: if ``s`` is a number that is not positive and finite, or does not broadcast.

    Example:
        >>> x = rebalance(jnp.array([256.0, 512.0], jnp.float16), 256.0)
        >>> print(x.data, x.scale)
        [1. 2.] 256.0

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3.
    """
    if isinstance(s, (int, float, np.number)) and not 0 < s < float("inf"):
        raise ValueError(f"unitscale.rebalance: s must be positive and finite; got {s!r}")
    x = x if is_scaled(x) else ScaledArray(x)
    s = jax.lax.stop_gradient(safe_scale(divisor(jnp.asarray(s, jnp.float32))))
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
    """Chooses a power-of-two scale from the statistics of the data, and rebalances to it.

    Scaling:
        "rms" brings the RMS of data nearest to 1; "amax" brings the largest magnitude just below
        the maximum of ``dtype``; "mse" takes the scale of least mean squared error when data is
        cast to ``dtype`` (`optimal_scale`). All-zero data keeps its scale.

    Args:
        x: array or ScaledArray.
        strategy: "rms", "amax" or "mse".
        dtype: the target format of "amax" and "mse"; the dtype of data by default.
        axis: axes that share one scale; None for one per tensor.

    Returns:
        ScaledArray with the same value and data dtype; scales of blocks become one.

    Raises:
        ValueError: if the strategy is unknown.

    Example:
        >>> x = rescale(jnp.array([3e-6, -4e-6]))
        >>> print(float(x.scale) == 2.0**-18)
        True

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3.
    """
    if strategy not in get_args(RescaleStrategy):
        raise ValueError(
            f"unitscale.rescale: strategy must be one of {', '.join(get_args(RescaleStrategy))}; "
            f"got {strategy!r}"
        )
    x = x if is_scaled(x) else ScaledArray(x)
    if x.size == 0:
        return x
    target = format_of(x.dtype if dtype is None else dtype)
    # Blocks give way to the new scale, so their statistics are those of the value.
    data = x.data if x.block_shape is None else widen(x.value)
    if strategy == "rms":
        s = scale_near(rms(data, axis))
    elif strategy == "amax":
        s = scale_near(amax(data, axis) / target.max, "up")
    else:
        s = optimal_scale(data, target, axis)
    if x.block_shape is None:
        return rebalance(x, s)
    return cast(rebalance(data, s), x.dtype)


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _own_scale(x: jax.Array, stack_axes: int) -> jax.Array:
    """The power of two nearest the RMS of the finite entries of each item of the stack axes."""
    x = widen(x)
    size = rms(jnp.where(jnp.isfinite(x), x, 0), tuple(range(stack_axes, x.ndim)))
    scale = jax.lax.stop_gradient(scale_near(size))
    return scale if stack_axes else jnp.reshape(scale, ())


def _repeated(scale: jax.Array, shape: tuple[int, ...], stack_axes: int) -> jax.Array:
    """A scale with one entry for each item of the stack axes."""
    if not stack_axes:
        return scale
    stack = shape[:stack_axes] + (1,) * (len(shape) - stack_axes)
    return jnp.broadcast_to(scale, np.broadcast_shapes(scale.shape, stack))


def _stacked(x: ScaledArray, stack_axes: int) -> ScaledArray:
    block = x.block_shape
    if block is None:
        scale = jnp.float32(1) if x.scale is None else x.scale
        return ScaledArray(x.data, _repeated(scale, x.shape, stack_axes))
    if any(size > 1 for size in block[:stack_axes]):
        raise ValueError(
            f"unitscale.as_scaled: blocks must not reach over stack axes; got blocks of {block}, "
            f"stack_axes={stack_axes}"
        )
    return x


def as_scaled(tree: Any, scale: Any = None, dtype: Any = None, *, stack_axes: int = 0) -> Any:
    """Replaces every floating leaf of a tree by a ScaledArray of the same value.

    Scaling:
        data = x / scale, computed in float32 and cast to ``dtype``; finite values saturate (without
        ``dtype`` only in 8 bits). By default the scale is the power of two nearest the RMS of the
        finite entries of each leaf, and 1 for an all-zero leaf, such as a bias that will learn.

    Args:
        tree: pytree; integer, boolean and key leaves are kept. ScaledArrays are kept if no scale is
            given, else moved to it.
        scale: one scale for all leaves, or None.
        dtype: data format; None keeps that of each leaf.
        stack_axes: number of leading axes that count items, such as the layers of parameters made
            by `jax.vmap`. Each item has its own scale, of shape ``shape[:stack_axes] + (1, ...,
            1)``, so that `jax.lax.scan` and `jax.vmap` map over data and scale together.

    Returns:
        The same tree with ScaledArray leaves, each with an array as its scale.

    Raises:
        ValueError: if the scale is not positive or does not broadcast, or a leaf has fewer than
            ``stack_axes`` axes.

    Example:
        >>> tree = as_scaled({"w": jnp.full(3, 1e-6), "steps": 7}, dtype=jnp.float16)
        >>> tree["w"]
        ScaledArray(float16[3], scale=9.53674e-07)
        >>> layers = as_scaled(jnp.ones((3, 2, 2)), stack_axes=1)
        >>> jax.lax.scan(lambda x, w: (x @ w.value, w.scale.shape), jnp.ones(2), layers)[0]
        Array([8., 8.], dtype=float32)

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3.
    """
    if isinstance(scale, (int, float, np.number)) and not 0 < scale < float("inf"):
        raise ValueError(f"unitscale.as_scaled: scale must be positive and finite; got {scale!r}")

    def convert(x):
        if not (is_scaled(x) or isinstance(x, float) or _is_floating(x)):
            return x
        x = x if is_scaled(x) else jnp.asarray(x)
        if not 0 <= stack_axes <= x.ndim:
            raise ValueError(
                f"unitscale.as_scaled: every leaf must have at least stack_axes={stack_axes} axes; "
                f"got a leaf of shape {x.shape}. Convert such leaves on their own."
            )
        if is_scaled(x) and scale is None:
            x = _stacked(x, stack_axes) if stack_axes else x
            return x if dtype is None else cast(x, dtype)
        target = x.dtype if dtype is None else dtype
        x = x.value if is_scaled(x) else x
        if scale is None:
            s = _own_scale(x, stack_axes)
        else:
            s = to_float(as_scale(scale))
            if not broadcasts(s.shape, x.shape):
                raise ValueError(
                    "unitscale.as_scaled: scale must broadcast against leaves; got leaf "
                    f"{x.shape}, scale {s.shape}"
                )
            s = _repeated(s, x.shape, stack_axes)
        data = widen(x) / to_float(s)
        return ScaledArray(narrow(data, target) if dtype is None else cast(data, dtype), s)

    return jax.tree.map(convert, tree, is_leaf=is_scaled)


def to_array(tree: Any, dtype: Any = None) -> Any:
    """Replaces every ScaledArray of a tree by its value.

    Args:
        tree: pytree of arrays and ScaledArrays.
        dtype: type of the values; None gives that of `ScaledArray.value`.

    Returns:
        The same tree with plain arrays.

    Example:
        >>> print(to_array([ScaledArray(jnp.ones(2), 0.5)])[0])
        [0.5 0.5]
    """

    def convert(x):
        if not is_scaled(x):
            return x
        return x.value if dtype is None else x.value.astype(dtype)

    return jax.tree.map(convert, tree, is_leaf=is_scaled)


def _plain(x: ScaledArray) -> jax.Array:
    if x.scale is None:
        return x.data
    raise ValueError(
        f"unitscale: a plain array is needed here; got {x!r}. Give its .value, or call the "
        "function of jax.numpy, unitscale.ops or unitscale.scalify in place of that of jax.lax, or "
        "the layer of unitscale.nn in place of flax's."
    )


def _plain_loss(x: ScaledArray) -> jax.Array:
    # The cotangent that JAX starts from is one array, and fits no tree, even of one leaf.
    raise ValueError(
        f"unitscale: a plain array is needed as the loss; got {x!r}. Give its .value, or "
        "differentiate by unitscale.value_and_grad, models by unitscale.nn.value_and_grad."
    )


# jax.numpy and most layers call __jax_array__; jax.lax does not, nor do the derivatives of jax.nn,
# which are given a tree of tangents: data alone is all of it only where there is no scale.
take_as_array(ScaledArray, _plain, _plain_loss)


def to_json(aux: Any) -> bytes:
    """Static fields of a dataclass as bytes."""
    return json.dumps(aux).encode()


def from_json(written: bytes) -> Any:
    """The fields again, numbers and strings."""
    return tuple(json.loads(written))


def _from_bytes(written: bytes) -> Any:
    has_scale, block_shape = from_json(written)
    return has_scale, None if block_shape is None else tuple(block_shape)


export.register_pytree_node_serialization(
    ScaledArray,
    serialized_name="unitscale.ScaledArray",
    serialize_auxdata=to_json,
    deserialize_auxdata=_from_bytes,
)
