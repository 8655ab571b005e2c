"""ScaledArray: low-precision data and the scale that recovers the value."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import _arithmetic as arithmetic
from ._cast import narrow, widen
from ._pow2 import exponent_of, pow2
from ._reductions import Reductions
from ._scale import Scale, as_scale, is_static, to_float


def _expand_blocks(scale: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    for axis, size in enumerate(block):
        if size == 1:
            continue
        # Without total_repeat_length a broadcast, with it a gather.
        repeated = jnp.repeat(scale, size, axis=axis)
        scale = jax.lax.slice_in_dim(repeated, 0, shape[axis], axis=axis)
    return scale


def _check_shapes(data: Any, scale: Scale, block_shape: tuple[int, ...] | None) -> None:
    shape, scale_shape = jnp.shape(data), () if is_static(scale) else jnp.shape(scale)
    if block_shape is None:
        try:
            fits = np.broadcast_shapes(shape, scale_shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"unitscale.ScaledArray: scale must broadcast against data; got data {shape}, "
                f"scale {scale_shape}. Give it size-1 dimensions, or block_shape= for blocks."
            )
        return
    if len(block_shape) != len(shape) or any(b < 1 for b in block_shape):
        raise ValueError(
            "unitscale.ScaledArray: block_shape needs one positive size per dimension of data; got "
            f"data {shape}, block_shape {block_shape}"
        )
    blocks = tuple(-(-n // b) for n, b in zip(shape, block_shape, strict=True))
    if scale_shape != blocks:
        raise ValueError(
            f"unitscale.ScaledArray: data {shape} in blocks of {block_shape} needs a scale of "
            f"shape {blocks}; got {scale_shape}"
        )


@jax.tree_util.register_pytree_with_keys_class
class ScaledArray(Reductions):
    """An array stored as data and a scale: ``value = data * scale``.

    Scaling:
        Cotangents live in data space: the derivative with respect to ``data`` is the ordinary one
        with ``scale`` held constant, and the cotangent of ``scale`` is zero. Operators compute the
        ordinary result in float32, round once, and choose the result's scale statically (products
        multiply scales, sums meet at sqrt(s1**2 + s2**2), reductions over n terms take sqrt(n)).
        What of a scale would leave the normal numbers of float32 moves into the data.

    Args:
        data: array of any floating dtype, kept near RMS 1. 8-bit data gives bfloat16 results.
        scale: None (a plain array), a static 1 or 0 (pruned while tracing), or a number or float
            array that broadcasts against data: per tensor, per channel, per batch item; or one
            entry per block. float32 or float8_e8m0fnu; a power of two makes rescaling exact.
            Entries of an array are positive, which is not checked. An array scale is a leaf of the
            tree: its cotangent is zero, except that e8m0 has no zero and shows NaN there.
        block_shape: block sizes, one per dimension of data, for one scale per block (MX style).

    Raises:
        TypeError: if data is not floating, or scale is not None, a number or a float array.
        ValueError: if scale is negative or its shape does not fit data and block_shape.

    Example:
        >>> x = ScaledArray(jnp.array([1.0, -0.5], jnp.float16), 1024.0)
        >>> print(x.value)
        [1024. -512.]
        >>> x
        ScaledArray(float16[2], scale=1024)
        >>> (x * x).scale
        Array(1.048576e+06, dtype=float32)

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3; Rouhani et al., "Microscaling Data Formats", 2023,
        arXiv 2310.10537 (block scales).
    """

    __slots__ = ("__weakref__", "_block_shape", "_scale", "_scale_is_leaf", "data")

    def __init__(
        self, data: Any, scale: Any = None, *, block_shape: tuple[int, ...] | None = None
    ) -> None:
        if isinstance(data, ScaledArray):
            raise TypeError("unitscale.ScaledArray: data is a ScaledArray already; use rebalance")
        self.data = jnp.asarray(data)
        if not jnp.issubdtype(self.data.dtype, jnp.floating):
            raise TypeError(
                "unitscale.ScaledArray: data must be a floating array; got dtype "
                f"{self.data.dtype}. Cast it first, for example with astype(jnp.float32)."
            )
        scale = as_scale(scale)
        block_shape = None if block_shape is None else tuple(block_shape)
        _check_shapes(self.data, scale, block_shape)
        if not is_static(scale) and 0 < scale.ndim < self.data.ndim:
            # One rank or none: a scale of any other rank was batched by vmap or scan (see `scale`).
            scale = scale.reshape((1,) * (self.data.ndim - scale.ndim) + scale.shape)
        self._scale = scale
        self._scale_is_leaf = not is_static(scale)
        self._block_shape = block_shape if self._scale_is_leaf else None

    @classmethod
    def from_exponent(cls, data: Any, exponent: Any, **kwargs: Any) -> "ScaledArray":
        """Builds a ScaledArray whose scale is exactly ``2**exponent`` (int32).

        Example:
            >>> print(ScaledArray.from_exponent(1.0, -3).value)
            0.125
        """
        exponent = jnp.asarray(exponent)
        if not jnp.issubdtype(exponent.dtype, jnp.integer):
            raise TypeError(
                "unitscale.ScaledArray.from_exponent: exponent must be integers; got dtype "
                f"{exponent.dtype}"
            )
        return cls(data, pow2(exponent), **kwargs)

    # -- pytree ------------------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flattens into data and scale; special scales are part of the structure."""
        key = jax.tree_util.GetAttrKey
        if not self._scale_is_leaf:
            return ((key("data"), self.data),), (self._scale, None)
        children = ((key("data"), self.data), (key("scale"), self._scale))
        return children, ("array", self._block_shape)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "ScaledArray":
        """Rebuilds without checks: JAX unflattens placeholders too."""
        new = object.__new__(cls)
        scale, new._block_shape = aux
        new._scale_is_leaf = scale == "array"  # a placeholder may look like a special scale
        if new._scale_is_leaf:
            new.data, new._scale = children
        else:
            (new.data,), new._scale = children, scale
        return new

    # -- facts -------------------------------------------------------------------------------

    @property
    def scale(self) -> Scale:  # pyright: ignore[reportIncompatibleMethodOverride]
        """None, 1, 0, or an array: a scalar, one per block, or of the rank of data.

        vmap and scan stack items: data (n,) with a scalar scale becomes data (batch, n) with
        scale (batch,), which is returned as (batch, 1).
        """
        scale = self._scale
        if is_static(scale) or self._block_shape is not None:
            return scale
        missing = getattr(self.data, "ndim", 0) - getattr(scale, "ndim", 0)
        if missing <= 0 or scale.ndim == 0 or not hasattr(scale, "reshape"):
            return scale
        return scale.reshape(scale.shape + (1,) * missing)

    @property
    def block_shape(self) -> tuple[int, ...] | None:
        """Block sizes, one per dimension of data; None without blocks."""
        block = self._block_shape
        missing = 0 if block is None else getattr(self.data, "ndim", 0) - len(block)
        return block if missing <= 0 else (1,) * missing + (block or ())

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the data (the value is wider; see `value`)."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.data.size

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale together."""
        scale = 0 if is_static(self.scale) else self.scale.size * self.scale.dtype.itemsize
        return self.data.size * self.data.dtype.itemsize + scale

    @property
    def full_scale(self) -> Scale:
        """The scale in a shape that broadcasts against data: blocks are repeated."""
        if self.block_shape is None or is_static(self.scale):
            return self.scale
        return _expand_blocks(to_float(self.scale), self.shape, self.block_shape)

    @property
    def value(self) -> jax.Array:
        """``data * scale`` in float32; the data itself if the scale is None or 1."""
        return arithmetic.value(self.data, self.full_scale)

    @property
    def exponent(self) -> jax.Array:
        """The scale's exponent, floor(log2(scale)), as int32; exact for powers of two."""
        return exponent_of(to_float(self.scale))

    @property
    def pair(self) -> tuple[jax.Array, Scale]:
        """``(data, scale)`` with the scale broadcastable against data."""
        return self.data, self.full_scale

    def map_data(self, fn: Callable[[jax.Array], Any]) -> "ScaledArray":
        """Returns ``fn(data)`` with the same scale; fn must keep the shape.

        Example:
            >>> print(ScaledArray(jnp.ones(2), 4.0).map_data(jnp.negative).value)
            [-4. -4.]
        """
        return ScaledArray(fn(self.data), self.scale, block_shape=self.block_shape)

    def astype(self, dtype: Any) -> Any:
        """Casts as `jax.Array.astype` does, without saturation (see `unitscale.cast`).

        A floating dtype is that of the result's data. Other dtypes give a plain array of values.
        """
        if jnp.issubdtype(dtype, jnp.floating):
            return self.map_data(lambda data: data.astype(dtype))
        return widen(self.value).astype(dtype)

    def clip(self, min: Any = None, max: Any = None) -> "ScaledArray":
        """Clips values to bounds, at the same scale."""
        scale = self.full_scale
        low, high = (None if b is None else jnp.asarray(b) / to_float(scale) for b in (min, max))
        if arithmetic.is_zero(scale):
            return ScaledArray(jnp.clip(self.value, min, max))
        return self.map_data(lambda data: narrow(jnp.clip(widen(data), low, high), data.dtype))

    def item(self) -> float:
        """Returns the only element as a Python number."""
        return widen(self.value).item()

    def copy(self) -> "ScaledArray":
        """Returns a copy of data at the same scale."""
        return self.map_data(jnp.copy)

    def block_until_ready(self) -> "ScaledArray":
        """Waits for data and scale to be computed."""
        return jax.block_until_ready(self)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.value, dtype=dtype)

    def __repr__(self) -> str:
        data = self.data
        kind = getattr(getattr(data, "dtype", None), "name", type(data).__name__)
        shape = ",".join(map(str, getattr(data, "shape", ())))
        scale = self.scale
        if not is_static(scale):
            concrete = isinstance(scale, (np.ndarray, np.generic, jax.Array))
            if isinstance(scale, Tracer) or not concrete or scale.size != 1:
                scale = f"{getattr(scale, 'dtype', '?')}{list(getattr(scale, 'shape', ()))}"
            else:
                scale = f"{float(np.asarray(scale, np.float32).reshape(())):g}"
        block = "" if self.block_shape is None else f", block_shape={self.block_shape}"
        return f"ScaledArray({kind}[{shape}], scale={scale}{block})"

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)
