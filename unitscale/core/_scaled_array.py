"""ScaledArray: low-precision data with a scale that recovers the value."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from . import _arithmetic as arithmetic
from ._arithmetic import Scale, as_scale, to_float
from ._compat import reflected_method
from ._formats import is_floating, widen

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def operator(fn: Callable[..., arithmetic.Pair], aligned: bool = False) -> tuple[Any, Any]:
    """Return an operator and its reflected form; set ``aligned`` for sums and differences."""

    def apply(self: Any, other: Any, swap: bool = False) -> Any:
        own = self.pair
        pair = arithmetic.operand(other, beside=own[1] if aligned else None)
        if pair is None:
            return NotImplemented
        return ScaledArray(*(fn(pair, own) if swap else fn(own, pair)))

    return apply, lambda self, other: apply(self, other, swap=True)


def comparison(fn: Callable[..., jax.Array]) -> Any:
    """Return a comparison operator; its result is a plain array."""

    def compare(self: Any, other: Any) -> jax.Array:
        pair = arithmetic.operand(other, beside=(own := self.pair)[1])
        return NotImplemented if pair is None else arithmetic.compare(fn, own, pair)

    return compare


def reduction(fn: Callable[..., jax.Array]) -> Any:
    """Return a reduction method; its result has no scale if the scale varies along the axes."""

    def reduce(
        self: Any, axis: Any = None, keepdims: bool = False, **options: Any
    ) -> "ScaledArray":
        data, scale = self.pair
        options = {name: option for name, option in options.items() if option is not None}
        if options or arithmetic.varies_over(data, scale, axis):
            value = arithmetic.summable(self.value)
            return ScaledArray(fn(value, axis=axis, keepdims=keepdims, **options))
        if fn is jnp.sum:
            return ScaledArray(*arithmetic.reduce_sum(self.pair, axis, keepdims))
        reduced = fn(widen(data), axis=axis, keepdims=keepdims)
        scale = arithmetic.reduce_scale(scale, axis, keepdims)
        return ScaledArray(reduced.astype(arithmetic.result_dtype(data)), scale)

    reduce.__name__ = fn.__name__
    reduce.__doc__ = f"Like `jax.Array.{fn.__name__}`; with options, the result has no scale."
    return reduce


def of_value(name: str) -> Any:
    """Return a method that calls the `jax.Array` method of this name on the value."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(arithmetic.summable(self.value), name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"Call `jax.Array.{name}` on the value; the result has no scale."
    return method


@jax.tree_util.register_pytree_with_keys_class
class ScaledArray:
    """An array stored as data and a scale: ``value = data * scale``.

    It is immutable. Operators (with real arrays and Python numbers on either side), indexing,
    reshaping and reductions return ScaledArrays; functions of `jax.numpy` compute with the value.

    Scaling:
        Operators compute in float32 and round once. The scale of a result does not depend on data:
        products multiply scales, x + y has the larger of two scales, and sums over n terms multiply
        the scale by about sqrt(n). Reductions along axes where the scale varies return no scale.
        Scales are clamped to 2**-126 ... 2**126; the remainder is multiplied into the data.
        `jax.grad` differentiates with respect to the data, `unitscale.grad` with respect to the
        value.

    Args:
        data: array of any floating dtype, kept near RMS 1. 8-bit data gives bfloat16 results.
        scale: None (the data is the value), or a positive number or array (kept in float32,
            float8_e8m0fnu or float8_e4m3fn; entries are not checked). It broadcasts against data
            (one entry per tensor, per channel, or per item of leading stack axes) or has one entry
            per block. With powers of two rescaling is exact.
        block_shape: block sizes, one per dimension of data, for one scale per block (MX style).

    Raises:
        TypeError: if data is not floating, or scale is not None, a number or a real array.
        ValueError: if scale is a number outside 2**-126 ... 2**126, or its shape does not fit.

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
    __array_priority__ = 200.0  # makes NumPy leave mixed operators to this class

    data: jax.Array
    _scale: Scale
    _has_scale: bool
    _block_shape: tuple[int, ...] | None

    def __init__(
        self, data: Any, scale: Any = None, *, block_shape: tuple[int, ...] | None = None
    ) -> None:
        if isinstance(data, ScaledArray):
            raise TypeError("unitscale.ScaledArray: data is already a ScaledArray; use rebalance")
        data = jnp.asarray(data)
        if not is_floating(data):
            raise TypeError(
                "unitscale.ScaledArray: data must be a floating array; got dtype "
                f"{data.dtype}. Cast it first, for example with astype(jnp.float32)."
            )
        scale = as_scale(scale)
        block_shape = None if block_shape is None else tuple(block_shape)
        arithmetic.check_shapes(data, scale, block_shape)
        if scale is not None and 0 < scale.ndim < data.ndim:
            # A scale is a scalar or has the rank of data. Other ranks come from vmap and scan only.
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

    # -- pytree ------------------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flatten into data and scale; the tree structure says whether there is a scale."""
        key = jax.tree_util.GetAttrKey
        children = ((key("data"), self.data), (key("scale"), self._scale))
        return children[: 1 + self._has_scale], (self._has_scale, self._block_shape)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "ScaledArray":
        """Rebuild without checks, because JAX also unflattens placeholders."""
        has_scale, block_shape = aux
        data, scale = children if has_scale else (*children, None)
        new = object.__new__(cls)
        new._set(data=data, _scale=scale, _has_scale=has_scale, _block_shape=block_shape)
        return new

    def __reduce__(self) -> Any:
        children, aux = self.tree_flatten_with_keys()
        return type(self).tree_unflatten, (aux, [child for _, child in children])

    # -- properties --------------------------------------------------------------------------

    @property
    def scale(self) -> Scale:
        """None, or an array: a scalar, one entry per block, or of the same rank as data.

        vmap and scan stack items: data (n,) with a scalar scale becomes data (batch, n) with
        scale (batch,). This property returns that scale as (batch, 1).
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
        """Sizes of blocks, one per present dimension of the data; None without blocks."""
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
        """Dtype of the data. With a scale, the value is float32 or wider."""
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
        """Total bytes of data and scale."""
        parts = [x for x in (self.data, self._scale) if x is not None]
        return sum(x.size * x.dtype.itemsize for x in parts)

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Sharding of the data. Inside `jax.jit`, use `jax.typeof(x.data)` instead."""
        return self.data.sharding

    @property
    def _committed(self) -> bool:
        """Whether the data is committed to devices; `jnp.zeros_like` reads this."""
        return getattr(self.data, "committed", False)

    @property
    def full_scale(self) -> Scale:
        """The scale in a shape that broadcasts against data, with block scales repeated."""
        scale = self.scale
        if scale is None or self.block_shape is None:
            return scale
        scale = to_float(scale)
        for axis, size in enumerate(self.block_shape):
            if size > 1:
                # total_repeat_length would compile to a gather. Explicit mesh axes need a sharding.
                own = jax.typeof(scale).sharding
                scale = jnp.repeat(scale, size, axis, out_sharding=own if any(own.spec) else None)
                scale = lax.slice_in_dim(scale, 0, self.shape[axis], axis=axis)
        return scale

    @property
    def value(self) -> jax.Array:
        """``data * scale`` in float32; the data itself if the scale is None."""
        return arithmetic.value(*self.pair)

    @property
    def pair(self) -> arithmetic.Pair:
        """``(data, scale)``, where the scale broadcasts against data."""
        return self.data, self.full_scale

    def __repr__(self) -> str:
        data, scale = self.data, self._scale
        kind = getattr(getattr(data, "dtype", None), "name", type(data).__name__)
        shape = ",".join(map(str, getattr(data, "shape", ())))
        block = "" if self.block_shape is None else f", block_shape={self.block_shape}"
        concrete = isinstance(scale, (np.ndarray, jax.Array)) and not isinstance(scale, Tracer)
        if scale is None:
            text = "None"
        elif concrete and scale.size == 1:
            text = f"{float(np.asarray(scale, np.float32).reshape(())):g}"
        else:
            scale = self.scale
            text = f"{getattr(scale, 'dtype', '?')}{list(getattr(scale, 'shape', ()))}"
        return f"ScaledArray({kind}[{shape}], scale={text}{block})"

    def map_data(self, fn: Callable[[jax.Array], Any]) -> "ScaledArray":
        """Return a ScaledArray of ``fn(data)`` with the same scale; fn must keep the shape."""
        return ScaledArray(fn(self.data), self.scale, block_shape=self.block_shape)

    def astype(self, dtype: Any) -> Any:
        """Cast like `jax.Array.astype`, without saturation (`unitscale.cast` saturates).

        A floating dtype converts the data. Other dtypes return the value as a plain array.
        """
        if jnp.issubdtype(dtype, jnp.floating):
            return self.map_data(lambda data: data.astype(dtype))
        return widen(self.value).astype(dtype)

    @property
    def __jax_array__(self) -> Callable[[], jax.Array] | None:  # None makes Python use __radd__
        return None if hasattr(self, reflected_method()) else lambda: self.value

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

    # -- elements and axes -------------------------------------------------------------------

    def _rearrange(self, fn: Callable[..., Any]) -> "ScaledArray":
        """Apply a rearrangement of elements to the data, and to the scale unless it is a scalar."""
        data, scale = self.pair
        if scale is None or scale.size == 1:
            return ScaledArray(fn(data), arithmetic.scalar_scale(self.scale))
        return ScaledArray(fn(data), fn(jnp.broadcast_to(to_float(scale), data.shape)))

    def __getitem__(self, index: Any) -> "ScaledArray":
        return self._rearrange(lambda x: x[index])

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a ScaledArray without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator["ScaledArray"]:
        return (self[i] for i in range(len(self)))

    @property
    def at(self) -> Any:
        """`jax.Array.at` of the value: ``x.at[i].set(v)`` returns a plain array."""
        return self.value.at

    def reshape(self, *shape: Any) -> "ScaledArray":
        """Return the same elements in another shape; a scalar scale stays a scalar."""
        return self._rearrange(lambda x: x.reshape(*shape))

    def squeeze(self, axis: Any = None) -> "ScaledArray":
        """Remove axes of size 1."""
        return self._rearrange(lambda x: x.squeeze(axis))

    def transpose(self, *axes: Any) -> "ScaledArray":
        """Permute the axes of data and scale, keeping one scale per channel or block."""
        block = self.block_shape
        if block is not None:
            block = np.broadcast_to(0, block).transpose(*axes).shape  # permutes the block sizes
        elif self.scale is None or self.scale.ndim == 0:
            return self._rearrange(lambda x: x.transpose(*axes))
        scale: Any = self.scale
        return ScaledArray(self.data.transpose(*axes), scale.transpose(*axes), block_shape=block)

    @property
    def T(self) -> "ScaledArray":
        """The transpose."""
        return self.transpose()

    def swapaxes(self, axis1: int, axis2: int) -> "ScaledArray":
        """Exchange two axes."""
        axes = list(range(self.data.ndim))
        axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
        return self.transpose(axes)

    sum, mean, max, min = map(reduction, (jnp.sum, jnp.mean, jnp.max, jnp.min))

    all, any, argmax, argmin = map(of_value, ("all", "any", "argmax", "argmin"))
    item, std, tolist, var = map(of_value, ("item", "std", "tolist", "var"))

    def block_until_ready(self) -> "ScaledArray":
        """Wait until data and scale are computed, and return this array."""
        return jax.block_until_ready(self)


def is_scaled(x: Any) -> "TypeIs[ScaledArray]":
    """Return whether ``x`` is a ScaledArray; pass it as ``is_leaf`` to `jax.tree.map`."""
    return isinstance(x, ScaledArray)


def value_of(x: Any) -> Any:
    """Return the value of a ScaledArray in float32 or wider; anything else unchanged."""
    return widen(x.value) if is_scaled(x) else x


def loss_value(out: Any, has_aux: bool) -> Any:
    """Replace a loss that is a ScaledArray by its value, so that JAX can differentiate it."""
    if not has_aux:
        return value_of(out)
    value, *aux = out  # JAX reports outputs that are not a pair
    return value_of(value), *aux
