"""Trees of arrays into trees of ScaledArrays, and back."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ._cast import cast, narrow, widen
from ._compat import take_as_array
from ._scale import as_scale, broadcasts, scale_near, to_float
from ._scaled_array import ScaledArray
from ._statistics import rms

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def is_scaled(x: Any) -> "TypeIs[ScaledArray]":
    """Whether ``x`` is a ScaledArray: the `is_leaf` of trees that hold them.

    Example:
        >>> is_scaled(ScaledArray(jnp.ones(2)))
        True
    """
    return isinstance(x, ScaledArray)


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _fitting(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if not broadcasts(scale.shape, shape):
        raise ValueError(
            f"unitscale.as_scaled: scale must broadcast against leaves; got leaf {shape}, scale "
            f"{scale.shape}"
        )
    return scale


def _own_scale(x: jax.Array, stack_axes: int) -> jax.Array:
    """The power of two nearest the RMS of the finite entries, for each item of the stack axes."""
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
        data = x / scale, computed in float32 and cast to ``dtype`` (finite values saturate; to the
        type of the leaf itself only if that is an 8-bit one). By default the scale is the power of
        two nearest the RMS of the finite entries of each leaf, and 1 for an all-zero leaf: what
        happens to be zero now, such as a bias, may learn.

    Args:
        tree: pytree; integer, boolean and key leaves are kept. Leaves that are ScaledArrays
            already are kept if no scale is given (one that items share is repeated for each), else
            moved to it.
        scale: one scale for all leaves, or None.
        dtype: data format; None keeps that of each leaf.
        stack_axes: number of leading axes of each leaf that count its items, such as the layers of
            parameters made by `jax.vmap`. Each item has its own scale, of shape
            ``shape[:stack_axes] + (1, ..., 1)``, so that `jax.lax.scan` and `jax.vmap` map over
            data and scale together.

    Returns:
        The same tree with ScaledArray leaves, each with an array as its scale.

    Raises:
        ValueError: if the scale is negative, zero, or does not broadcast, or a leaf has fewer than
            ``stack_axes`` axes.

    Example:
        >>> tree = as_scaled({"w": jnp.full(3, 1e-6), "steps": 7}, dtype=jnp.float16)
        >>> tree["w"]
        ScaledArray(float16[3], scale=9.53674e-07)
        >>> tree["steps"]
        7
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
            s = _repeated(_fitting(to_float(as_scale(scale)), x.shape), x.shape, stack_axes)
        data = widen(x) / to_float(s)
        return ScaledArray(narrow(data, target) if dtype is None else cast(data, dtype), s)

    return jax.tree.map(convert, tree, is_leaf=is_scaled)


def to_array(tree: Any, dtype: Any = None) -> Any:
    """Replaces every ScaledArray of a tree by its value.

    Args:
        tree: pytree of arrays and ScaledArrays.
        dtype: type of the values; None gives `ScaledArray.value`'s own.

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
