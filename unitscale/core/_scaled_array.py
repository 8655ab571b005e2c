"""ScaledArray: low-precision data and the scale that recovers the value."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import _arithmetic as arithmetic
from ._pow2 import exponent_of, pow2
from ._scale import Scale, as_scale, is_static, to_float


def _expand_blocks(scale: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    for axis, size in enumerate(block):
        scale = jnp.repeat(scale, size, axis=axis, total_repeat_length=shape[axis])
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
class ScaledArray:
    """An array stored as data and a scale: ``value = data * scale``.

    Scaling:
        Cotangents live in data space: the derivative with respect to ``data`` is the ordinary one
        with ``scale`` held constant, and the cotangent of ``scale`` is zero. Operators compute the
        ordinary result in float32, round once, and choose the result's scale statically (products
        multiply scales, sums meet at sqrt(s1**2 + s2**2), reductions over n terms take sqrt(n)).

    Args:
        data: array of any floating dtype, kept near RMS 1. 8-bit data gives bfloat16 results.
        scale: None (a plain array), a static 1 or 0 (pruned while tracing), or a number or float
            array that broadcasts against data: per tensor, per channel, per batch item; or one
            entry per block. float32 or float8_e8m0fnu; a power of two makes rescaling exact.
        block_shape: block sizes, one per dimension of data, for one scale per block (MX style).

    Raises:
        TypeError: if scale is not None, a number or a float array.
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

    __slots__ = ("__weakref__", "block_shape", "data", "scale")
    __array_priority__ = 200.0  # numpy leaves mixed operators to this class

    data: jax.Array
    scale: Scale
    block_shape: tuple[int, ...] | None

    def __init__(
        self, data: Any, scale: Any = None, *, block_shape: tuple[int, ...] | None = None
    ) -> None:
        if isinstance(data, ScaledArray):
            raise TypeError("unitscale.ScaledArray: data is a ScaledArray already; use rebalance")
        self.data = jnp.asarray(data)
        self.scale = as_scale(scale)
        self.block_shape = None if block_shape is None else tuple(block_shape)
        _check_shapes(self.data, self.scale, self.block_shape)

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
        if is_static(self.scale):
            return ((key("data"), self.data),), (self.scale, self.block_shape)
        children = ((key("data"), self.data), (key("scale"), self.scale))
        return children, ("array", self.block_shape)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "ScaledArray":
        """Rebuilds without checks: JAX unflattens placeholders too."""
        new = object.__new__(cls)
        scale, new.block_shape = aux
        if scale == "array":
            new.data, new.scale = children
        else:
            (new.data,), new.scale = children, scale
        return new

    # -- facts -------------------------------------------------------------------------------

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
            if isinstance(scale, Tracer) or not hasattr(scale, "dtype") or scale.size != 1:
                scale = f"{getattr(scale, 'dtype', '?')}{list(getattr(scale, 'shape', ()))}"
            else:
                scale = f"{float(np.asarray(scale, np.float32).reshape(())):g}"
        block = "" if self.block_shape is None else f", block_shape={self.block_shape}"
        return f"ScaledArray({kind}[{shape}], scale={scale}{block})"

    def __len__(self) -> int:
        return len(self.data)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    # -- operators ---------------------------------------------------------------------------

    def _binary(self, other: Any, fn: Callable[..., Any], swap: bool = False) -> "ScaledArray":
        other = _operand(other)
        if other is None:
            return NotImplemented
        pair = fn(other, self.pair) if swap else fn(self.pair, other)
        return ScaledArray(*pair)

    def _compare(self, other: Any, fn: Callable[..., jax.Array]) -> jax.Array:
        other = _operand(other)
        return NotImplemented if other is None else arithmetic.compare(fn, self.pair, other)

    def __add__(self, other: Any) -> "ScaledArray":
        return self._binary(other, arithmetic.add)

    def __radd__(self, other: Any) -> "ScaledArray":
        return self._binary(other, arithmetic.add, swap=True)

    def __sub__(self, other: Any) -> "ScaledArray":
        return self._binary(other, lambda x, y: arithmetic.add(x, arithmetic.negate(y)))

    def __rsub__(self, other: Any) -> "ScaledArray":
        return self._binary(other, lambda x, y: arithmetic.add(x, arithmetic.negate(y)), swap=True)

    def __mul__(self, other: Any) -> "ScaledArray":
        return self._binary(other, arithmetic.multiply)

    def __rmul__(self, other: Any) -> "ScaledArray":
        return self._binary(other, arithmetic.multiply, swap=True)

    def __truediv__(self, other: Any) -> "ScaledArray":
        return self._binary(other, arithmetic.divide)

    def __rtruediv__(self, other: Any) -> "ScaledArray":
        return self._binary(other, arithmetic.divide, swap=True)

    def __matmul__(self, other: Any) -> "ScaledArray":
        return self._contract(other)

    def __rmatmul__(self, other: Any) -> "ScaledArray":
        return self._contract(other, swap=True)

    def _contract(self, other: Any, swap: bool = False) -> "ScaledArray":
        other = other if isinstance(other, ScaledArray) else ScaledArray(other)
        left, right = (other, self) if swap else (self, other)
        if all(is_static(x.scale) or jnp.size(x.scale) == 1 for x in (left, right)):
            flat = [x.with_scalar_scale() for x in (left, right)]
            return ScaledArray(*arithmetic.matmul(*flat))
        return ScaledArray(*arithmetic.matmul((left.value, None), (right.value, None)))

    def with_scalar_scale(self) -> tuple[jax.Array, Scale]:
        """Returns ``(data, scale)`` with a scalar scale, where the scale has a single entry."""
        scale = self.scale
        return self.data, scale if is_static(scale) else jnp.reshape(scale, ())

    def __pow__(self, exponent: Any) -> "ScaledArray":
        if isinstance(exponent, int):
            return ScaledArray(*arithmetic.power(self.pair, exponent))
        return ScaledArray(self.value**exponent)

    def __neg__(self) -> "ScaledArray":
        return self.map_data(jnp.negative)

    def __pos__(self) -> "ScaledArray":
        return self

    def __abs__(self) -> "ScaledArray":
        return self.map_data(jnp.abs)

    def __eq__(self, other: Any) -> Any:
        return self._compare(other, jnp.equal)

    def __ne__(self, other: Any) -> Any:
        return self._compare(other, jnp.not_equal)

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, jnp.less)

    def __le__(self, other: Any) -> Any:
        return self._compare(other, jnp.less_equal)

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, jnp.greater)

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, jnp.greater_equal)

    __hash__ = None  # type: ignore[assignment]  # unhashable, as jax.Array is

    # -- shape -------------------------------------------------------------------------------

    def _rearrange(self, fn: Callable[[jax.Array], jax.Array]) -> "ScaledArray":
        """Applies a rearrangement of elements to data, and to a scale that is not a scalar."""
        if is_static(self.scale) or jnp.size(self.scale) == 1:
            data, scale = self.with_scalar_scale()
            return ScaledArray(fn(data), scale)
        scale = jnp.broadcast_to(to_float(self.full_scale), self.shape)
        return ScaledArray(fn(self.data), fn(scale))

    def __getitem__(self, index: Any) -> "ScaledArray":
        return self._rearrange(lambda x: x[index])

    def reshape(self, *shape: Any) -> "ScaledArray":
        """Returns the same elements in another shape; a scalar scale stays a scalar."""
        return self._rearrange(lambda x: x.reshape(*shape))

    def transpose(self, *axes: Any) -> "ScaledArray":
        """Permutes the axes of data and scale."""
        return self._rearrange(lambda x: x.transpose(*axes))

    @property
    def T(self) -> "ScaledArray":
        """The transpose."""
        return self.transpose()

    @property
    def mT(self) -> "ScaledArray":
        """The transpose of the last two axes."""
        return self._rearrange(lambda x: x.mT)

    def squeeze(self, axis: Any = None) -> "ScaledArray":
        """Removes axes of size 1."""
        return self._rearrange(lambda x: x.squeeze(axis))

    def swapaxes(self, axis1: int, axis2: int) -> "ScaledArray":
        """Exchanges two axes."""
        return self._rearrange(lambda x: x.swapaxes(axis1, axis2))

    def ravel(self) -> "ScaledArray":
        """Returns the elements in one dimension."""
        return self.reshape(-1)

    def astype(self, dtype: Any) -> "ScaledArray":
        """Casts the data as `jax.Array.astype` does, without saturation; see `unitscale.cast`."""
        return self.map_data(lambda data: data.astype(dtype))

    # -- reductions --------------------------------------------------------------------------

    def sum(self, axis: Any = None, keepdims: bool = False) -> "ScaledArray":
        """Returns the sum; its scale grows by the power of two nearest sqrt(count)."""
        if arithmetic.varies_over(self.full_scale, self.data, axis):
            return ScaledArray(jnp.sum(self.value, axis=axis, keepdims=keepdims))
        return ScaledArray(*arithmetic.reduce_sum(self.pair, axis, keepdims))

    def mean(self, axis: Any = None, keepdims: bool = False) -> "ScaledArray":
        """Returns the mean; data is averaged in float32."""
        return self._reduce(lambda x: jnp.mean(x, axis=axis, keepdims=keepdims), axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> "ScaledArray":
        """Returns the maximum, exactly where the reduced elements share a scale."""
        return self._reduce(lambda x: jnp.max(x, axis=axis, keepdims=keepdims), axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> "ScaledArray":
        """Returns the minimum, exactly where the reduced elements share a scale."""
        return self._reduce(lambda x: jnp.min(x, axis=axis, keepdims=keepdims), axis, keepdims)

    def _reduce(self, fn: Callable[..., jax.Array], axis: Any, keepdims: bool) -> "ScaledArray":
        data, scale = self.pair
        if arithmetic.varies_over(scale, data, axis):
            return ScaledArray(fn(self.value))
        reduced = fn(arithmetic.widen(data)).astype(arithmetic.result_dtype(data))
        return ScaledArray(reduced, arithmetic.reduce_scale(scale, data, axis, keepdims))


def _operand(x: Any) -> tuple[jax.Array, Scale] | None:
    if isinstance(x, ScaledArray):
        return x.pair
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return arithmetic.scalar_pair(x)
    if isinstance(x, (jax.Array, np.ndarray, np.number)):
        return jnp.asarray(x), None
    return None
