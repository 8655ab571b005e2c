"""ScaledArray: low-precision data and the scale that recovers the value."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import _arithmetic as arithmetic
from ._cast import narrow, widen
from ._compat import mirror_asked_for
from ._scale import (
    Scale,
    as_scale,
    check_shapes,
    expand_blocks,
    exponent_of,
    pow2,
    to_float,
)


def operator(fn: Callable[..., arithmetic.Pair], aligned: bool = False) -> tuple[Any, Any]:
    """Makes an operator and its reflection; ``aligned`` if it brings operands to one scale."""

    def apply(self: Any, other: Any, swap: bool = False) -> Any:
        own = self.pair
        pair = arithmetic.operand(other, beside=own[1] if aligned else None)
        if pair is None:
            return NotImplemented
        return type(self)(*(fn(pair, own) if swap else fn(own, pair)))

    return apply, lambda self, other: apply(self, other, swap=True)


def comparison(fn: Callable[..., jax.Array]) -> Any:
    """Makes a comparison of values, with a plain array as its result."""

    def compare(self: Any, other: Any) -> jax.Array:
        pair = arithmetic.operand(other, beside=(own := self.pair)[1])
        return NotImplemented if pair is None else arithmetic.compare(fn, own, pair)

    return compare


def of_value(name: str) -> Any:
    """Makes a method that calls the method of `jax.Array` of this name on the value."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(arithmetic.summable(self.value), name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"As `jax.Array.{name}`, of the value; the result is a plain one."
    return method


class At:
    """The helper behind ``x.at[index]``, which reads or updates the elements at an index."""

    __slots__ = ("_index", "_x")

    def __init__(self, x: Any, index: Any = None) -> None:
        self._x = x
        self._index = index

    def __getitem__(self, index: Any) -> "At":
        return At(self._x, index)

    def get(self, *, mode: Any = None, fill_value: Any = None, **options: Any) -> Any:
        """Returns ``x[index]``; arguments are those of JAX, and ``fill_value`` is a value."""
        if fill_value is None:
            return self._x._rearrange(
                lambda x: x.at[self._index].get(mode=mode, **options),
                lambda scale: scale.at[self._index].get(mode="clip", **options),
            )
        data, scale = self._pair("get", fill_value)
        found = self.get(mode=mode, **options)
        inside = jnp.ones(self._x.shape, bool).at[self._index]
        inside = inside.get(mode=mode, fill_value=False, **options)
        fill = arithmetic.at_scale(data, scale, found.full_scale, widen(found.data).dtype)
        return found.map_data(lambda x: jnp.where(inside, x, narrow(fill, x.dtype)))

    def set(self, values: Any, **options: Any) -> Any:
        """Returns x with the elements at the index replaced."""
        return self._update("set", values, options)

    def add(self, values: Any, **options: Any) -> Any:
        """Returns x with values added at the index; repeated indices add up."""
        return self._update("add", values, options)

    def subtract(self, values: Any, **options: Any) -> Any:
        """Returns x with values subtracted at the index; repeated indices add up."""
        return self._update("subtract", values, options)

    def min(self, values: Any, **options: Any) -> Any:
        """Returns x with the smaller of its elements at the index and of the values there."""
        return self._update("min", values, options)

    def max(self, values: Any, **options: Any) -> Any:
        """Returns x with the larger of its elements at the index and of the values there."""
        return self._update("max", values, options)

    def multiply(self, values: Any, **options: Any) -> Any:
        """Returns x with the elements at the index multiplied by values."""
        value = arithmetic.value(*self._pair("multiply", values))
        return self._x.map_data(
            lambda x: narrow(widen(x).at[self._index].multiply(widen(value), **options), x.dtype)
        )

    def _pair(self, name: str, values: Any) -> arithmetic.Pair:
        pair = arithmetic.operand(values)
        if pair is None:
            raise TypeError(
                f"unitscale.ScaledArray.at[...].{name}: expected a real array, ScaledArray or "
                f"number; got {type(values).__name__}"
            )
        return pair

    def _update(self, name: str, values: Any, options: dict[str, Any]) -> Any:
        data, scale = self._pair(name, values)
        target = self._x.full_scale
        if arithmetic.varies_over(self._x.data, target, None):
            target = jnp.broadcast_to(to_float(target), self._x.shape)
            target = target.at[self._index].get(mode="clip")
        else:
            target = arithmetic.scalar_scale(target)
        update = arithmetic.at_scale(data, scale, target, widen(self._x.data).dtype)

        def updated(old: jax.Array) -> jax.Array:
            at = widen(old).at[self._index]
            return narrow(getattr(at, name)(update, **options), np.dtype(old.dtype))

        return self._x.map_data(updated)


@jax.tree_util.register_pytree_with_keys_class
class ScaledArray:
    """An array stored as data and a scale: ``value = data * scale``.

    It is immutable. Operators (with real arrays and Python numbers on either side), indexing,
    reshaping and reductions keep the scale; functions of `jax.numpy` take the value.

    Scaling:
        Cotangents live in data space: the derivative with respect to ``data`` holds ``scale``
        constant, and the cotangent of ``scale`` is zero (`jax.grad`); `unitscale.grad`
        differentiates by the
        value. Operators compute in float32, round once, and choose the scale of the result
        statically: products multiply scales, sums use sqrt(s1**2 + s2**2), reductions over n terms
        multiply by sqrt(n). A scale outside the normal numbers of float32 is bounded, and the rest
        multiplies the data. A reduction along which the scale varies has no scale.

    Args:
        data: array of any floating dtype, kept near RMS 1. 8-bit data gives bfloat16 results.
        scale: None (the data is the value), or a positive number or float array that broadcasts
            against data: per tensor, per channel or per item of leading (stack) axes; or one entry
            per block. float32 or float8_e8m0fnu; a power of two makes rescaling exact. Entries of
            an array are not checked.
        block_shape: block sizes, one per dimension of data, for one scale per block (MX style).

    Raises:
        TypeError: if data is not floating, or scale is not None, a number or a float array.
        ValueError: if scale is a number that is not positive, or its shape does not fit.

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

    __slots__ = ("__weakref__", "_block_shape", "_has_scale", "_scale", "data")
    __array_priority__ = 200.0  # numpy leaves mixed operators to this class

    data: jax.Array
    _scale: Scale
    _has_scale: bool
    _block_shape: tuple[int, ...] | None

    def __init__(
        self, data: Any, scale: Any = None, *, block_shape: tuple[int, ...] | None = None
    ) -> None:
        if isinstance(data, ScaledArray):
            raise TypeError("unitscale.ScaledArray: data is a ScaledArray already; use rebalance")
        data = jnp.asarray(data)
        if not jnp.issubdtype(data.dtype, jnp.floating):
            raise TypeError(
                "unitscale.ScaledArray: data must be a floating array; got dtype "
                f"{data.dtype}. Cast it first, for example with astype(jnp.float32)."
            )
        scale = as_scale(scale)
        block_shape = None if block_shape is None else tuple(block_shape)
        check_shapes(data, scale, block_shape)
        if scale is not None and 0 < scale.ndim < data.ndim:
            # One rank or none: a scale of any other rank was batched by vmap or scan (see `scale`).
            scale = scale.reshape((1,) * (data.ndim - scale.ndim) + scale.shape)
        self._set(data=data, _scale=scale, _has_scale=scale is not None, _block_shape=block_shape)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"unitscale.ScaledArray is immutable: {name} cannot be set. Use x.map_data(f) for "
            "other data at the same scale, or ScaledArray(data, scale)."
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"unitscale.ScaledArray is immutable: {name} cannot be deleted")

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
        """Flattens into data and scale; whether there is a scale is part of the structure."""
        key = jax.tree_util.GetAttrKey
        children = ((key("data"), self.data), (key("scale"), self._scale))
        return children[: 1 + self._has_scale], (self._has_scale, self._block_shape)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "ScaledArray":
        """Rebuilds without checks: JAX unflattens placeholders too."""
        has_scale, block_shape = aux
        data, scale = children if has_scale else (*children, None)
        new = object.__new__(cls)
        new._set(data=data, _scale=scale, _has_scale=has_scale, _block_shape=block_shape)
        return new

    def __reduce__(self) -> Any:
        children, aux = self.tree_flatten_with_keys()
        return ScaledArray.tree_unflatten, (aux, [child for _, child in children])

    # -- facts -------------------------------------------------------------------------------

    @property
    def scale(self) -> Scale:
        """None or an array: a scalar, one per block, or of the rank of data.

        vmap and scan stack items: data (n,) with a scalar scale becomes data (batch, n) with
        scale (batch,), which is returned as (batch, 1).
        """
        scale = self._scale
        if scale is None or self._block_shape is not None:
            return scale
        missing = getattr(self.data, "ndim", 0) - getattr(scale, "ndim", 0)
        if missing <= 0 or scale.ndim == 0 or not hasattr(scale, "reshape"):
            return scale
        return scale.reshape(scale.shape + (1,) * missing)

    @property
    def block_shape(self) -> tuple[int, ...] | None:
        """Block sizes, one per dimension that vmap and scan have left; None without blocks."""
        if (block := self._block_shape) is None:
            return None
        missing = getattr(self.data, "ndim", len(block)) - len(block)
        return (1,) * missing + block if missing >= 0 else block[-missing:]

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
        scale = 0 if self._scale is None else self._scale.size * self._scale.dtype.itemsize
        return self.data.size * self.data.dtype.itemsize + scale

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """How the data is laid out over devices; to a tracer ask `jax.typeof` of its data."""
        return self.data.sharding

    @property
    def _committed(self) -> bool:
        """Whether the data is committed to devices; `jnp.zeros_like` then keeps its sharding."""
        return getattr(self.data, "committed", False)

    @property
    def full_scale(self) -> Scale:
        """The scale in a shape that broadcasts against data: blocks are repeated."""
        scale = self.scale
        if self.block_shape is None or scale is None:
            return scale
        return expand_blocks(to_float(scale), self.shape, self.block_shape)

    @property
    def value(self) -> jax.Array:
        """``data * scale`` in float32; the data itself if the scale is None."""
        return arithmetic.value(*self.pair)

    @property
    def exponent(self) -> jax.Array:
        """The scale's exponent, floor(log2(scale)), as int32."""
        return exponent_of(to_float(self.scale))

    @property
    def pair(self) -> arithmetic.Pair:
        """``(data, scale)`` with the scale broadcastable against data."""
        return self.data, self.full_scale

    def __repr__(self) -> str:
        data = self.data
        kind = getattr(getattr(data, "dtype", None), "name", type(data).__name__)
        shape = ",".join(map(str, getattr(data, "shape", ())))
        block = "" if self.block_shape is None else f", block_shape={self.block_shape}"
        scale = self._scale
        if scale is None:
            text = "None"
        elif isinstance(scale, Tracer) or not isinstance(scale, (np.ndarray, jax.Array)):
            text = f"{getattr(scale, 'dtype', '?')}{list(getattr(scale, 'shape', ()))}"
        elif scale.size == 1:
            text = f"{float(np.asarray(scale, np.float32).reshape(())):g}"
        else:
            text = f"{scale.dtype}{list(getattr(self.scale, 'shape', ()))}"
        return f"ScaledArray({kind}[{shape}], scale={text}{block})"

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

    @property
    def __jax_array__(self) -> Callable[[], jax.Array] | None:  # None: x.__radd__(array) answers
        return None if hasattr(self, mirror_asked_for()) else lambda: self.value

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.value, dtype=dtype)

    __bool__, __float__, __int__ = map(of_value, ("__bool__", "__float__", "__int__"))

    def __format__(self, spec: str) -> str:
        return format(widen(self.value), spec) if spec else str(self)

    # -- arithmetic and comparisons ----------------------------------------------------------

    def __pow__(self, exponent: Any) -> "ScaledArray":
        number = isinstance(exponent, (int, float, np.integer, np.floating))
        if number and float(exponent).is_integer():
            return ScaledArray(*arithmetic.power(self.pair, int(exponent)))
        return self._to_the(exponent)

    def __neg__(self) -> "ScaledArray":
        return self.map_data(jnp.negative)

    def __pos__(self) -> "ScaledArray":
        return self

    def __abs__(self) -> "ScaledArray":
        return self.map_data(lambda data: jnp.abs(widen(data)).astype(data.dtype))

    __add__, __radd__ = operator(arithmetic.add, aligned=True)
    __sub__, __rsub__ = operator(arithmetic.subtract, aligned=True)
    __mul__, __rmul__ = operator(arithmetic.multiply)
    __truediv__, __rtruediv__ = operator(arithmetic.divide)
    __matmul__, __rmatmul__ = operator(arithmetic.matmul)
    _to_the, __rpow__ = operator(arithmetic.general_power)

    __eq__ = comparison(jnp.equal)
    __ne__ = comparison(jnp.not_equal)
    __lt__ = comparison(jnp.less)
    __le__ = comparison(jnp.less_equal)
    __gt__ = comparison(jnp.greater)
    __ge__ = comparison(jnp.greater_equal)

    __hash__ = None  # type: ignore[assignment]  # unhashable, as jax.Array is

    # -- elements and axes: the scale moves along with the data ------------------------------

    def _rearrange(self, fn: Callable[..., Any], of_scale: Any = None) -> "ScaledArray":
        """Applies a rearrangement of elements to data, and to a scale that is not a scalar."""
        data, scale = self.pair
        if scale is None or scale.size == 1:
            return ScaledArray(fn(data), arithmetic.scalar_scale(self.scale))
        scale = jnp.broadcast_to(to_float(scale), data.shape)
        return ScaledArray(fn(data), (of_scale or fn)(scale))

    def __getitem__(self, index: Any) -> "ScaledArray":
        return self._rearrange(lambda x: x[index])

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a ScaledArray without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator["ScaledArray"]:
        return (self[i] for i in range(len(self)))

    @property
    def at(self) -> At:
        """Updates as in JAX, of `AtIndex`: ``x.at[i].set(v)``; scale and dtype stay those of x.

        Example:
            >>> x = ScaledArray(jnp.ones(3, jnp.float16), 4.0)
            >>> print(x.at[0].set(8.0).value)
            [8. 4. 4.]
        """
        return At(self)

    def reshape(self, *shape: Any) -> "ScaledArray":
        """Returns the same elements in another shape; a scalar scale stays a scalar."""
        return self._rearrange(lambda x: x.reshape(*shape))

    def squeeze(self, axis: Any = None) -> "ScaledArray":
        """Removes axes of size 1."""
        return self._rearrange(lambda x: x.squeeze(axis))

    def transpose(self, *axes: Any) -> "ScaledArray":
        """Permutes the axes of data and scale; a scale per channel or block stays one."""
        block = self.block_shape
        if block is not None:
            block = np.broadcast_to(0, block).transpose(*axes).shape  # of one number, repeated
        elif self.scale is None or self.scale.ndim == 0:
            return self._rearrange(lambda x: x.transpose(*axes))
        scale = jnp.asarray(self.scale)
        scale = jnp.expand_dims(scale, tuple(range(self.data.ndim - scale.ndim)))
        return ScaledArray(self.data.transpose(*axes), scale.transpose(*axes), block_shape=block)

    @property
    def T(self) -> "ScaledArray":
        """The transpose."""
        return self.transpose()

    def swapaxes(self, axis1: int, axis2: int) -> "ScaledArray":
        """Exchanges two axes."""
        axes = list(range(self.data.ndim))
        axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
        return self.transpose(axes)

    # -- reductions, in float32 --------------------------------------------------------------

    def _reduce(
        self, fn: Callable[..., jax.Array], axis: Any, keepdims: bool, options: dict[str, Any]
    ) -> "ScaledArray":
        data, scale = self.pair
        options = {name: option for name, option in options.items() if option is not None}
        if options or arithmetic.varies_over(data, scale, axis):
            value = arithmetic.summable(self.value)
            return ScaledArray(fn(value, axis=axis, keepdims=keepdims, **options))
        if fn is jnp.sum:
            return ScaledArray(*arithmetic.reduce_sum(self.pair, axis, keepdims))
        reduced = fn(widen(data), axis=axis, keepdims=keepdims)
        scale = arithmetic.reduce_scale(scale, data, axis, keepdims)
        return ScaledArray(reduced.astype(arithmetic.result_dtype(data)), scale)

    def sum(self, axis: Any = None, keepdims: bool = False, **options: Any) -> "ScaledArray":
        """Returns the sum; its scale grows by sqrt(count). With ``options`` that of the value."""
        return self._reduce(jnp.sum, axis, keepdims, options)

    def mean(self, axis: Any = None, keepdims: bool = False, **options: Any) -> "ScaledArray":
        """Returns the mean; data is averaged in float32. ``options`` as of `sum`."""
        return self._reduce(jnp.mean, axis, keepdims, options)

    def max(self, axis: Any = None, keepdims: bool = False, **options: Any) -> "ScaledArray":
        """Returns the maximum, exactly where elements share a scale. ``options`` as of `sum`."""
        return self._reduce(jnp.max, axis, keepdims, options)

    def min(self, axis: Any = None, keepdims: bool = False, **options: Any) -> "ScaledArray":
        """Returns the minimum, exactly where elements share a scale. ``options`` as of `sum`."""
        return self._reduce(jnp.min, axis, keepdims, options)

    # -- what has no scale to keep: methods of the value, with plain results ------------------

    all = of_value("all")
    any = of_value("any")
    argmax = of_value("argmax")
    argmin = of_value("argmin")
    item = of_value("item")
    std = of_value("std")
    tolist = of_value("tolist")
    var = of_value("var")

    def block_until_ready(self) -> "ScaledArray":
        """Waits until data and scale are computed, and returns this array."""
        return jax.block_until_ready(self)
