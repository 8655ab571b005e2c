"""How one array of optimizer state is stored: a ScaledArray, or the root of one."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import (
    CastRounding,
    ScaledArray,
    cast,
    format_of,
    is_scaled,
    pow2,
    to_float,
    widen,
)
from ._float8 import decode, encode, has_fast_path

if TYPE_CHECKING:
    from typing_extensions import TypeIs


@dataclasses.dataclass(frozen=True)
class Moment:
    """How an array of optimizer state is stored.

    Scaling:
        data = x / scale, or |x|^1/2 / scale with the sign of x if ``root``. The scale is a power of
        two, fresh in every step, that brings the largest magnitude into the highest binades of the
        format; nothing saturates. float32 and bfloat16, which have the range of float32, take
        scale 1.

        The root halves the exponents, so that the format covers twice as many binades: in
        float8_e4m3fn 2^34 between the largest and the smallest second moment. Its relative error
        is at most ``eps`` (2^-3 for e4m3, 2^-10 for float16), twice that of the root, and that of
        an Adam step, which divides by the root, ``eps`` / 2. What would round to zero is stored as
        the smallest value: a second moment that vanishes before the first would make the step
        explode.

    Attributes:
        dtype: float8, float16, bfloat16 or float32.
        root: whether the square root is stored.
        block: number of entries along the last axis that share a scale; None for one per array.
        stack_axes: number of leading axes of which each item has its own scale, if not by block.

    Raises:
        ValueError: if the dtype is not one of those, or block is not positive.

    Example:
        >>> Moment("e4m3fn", root=True).dtype.name
        'float8_e4m3fn'

    References:
        Peng et al., "FP8-LM", 2023, arXiv 2310.18313, section 2.2 (the formats of the moments).
    """

    dtype: Any
    root: bool = False
    block: int | None = None
    stack_axes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", storable("Moment", "dtype", self.dtype))
        if self.block is not None and not (isinstance(self.block, int) and self.block > 0):
            raise ValueError(
                "unitscale.optim.Moment: block must be a positive number of entries or None; got "
                f"{self.block!r}"
            )


def storable(where: str, name: str, dtype: Any) -> Any:
    """Returns the dtype of a format that weights and moments may be stored in."""
    dtype = format_of(dtype).dtype
    signed = dtype is not None and format_of(dtype).signed
    if dtype is None or not signed or dtype.itemsize > 4 or dtype.name.startswith("float4"):
        raise ValueError(
            f"unitscale.optim.{where}: {name} must be a float8, float16, bfloat16 or float32 "
            f"format; got {name} {dtype if dtype is not None else 'of a simulated format'}"
        )
    return dtype


@jax.tree_util.register_pytree_with_keys_class
class SquareRoot:
    """A non-negative array, stored as the ScaledArray of its square root.

    Attributes:
        root: the square root, with the sign of the value, should that be negative.

    Example:
        >>> print(SquareRoot(ScaledArray(jnp.array([3.0, 0.5]), 2.0)).value)
        [36.  1.]
    """

    __slots__ = ("root",)

    def __init__(self, root: ScaledArray) -> None:
        self.root = root

    @property
    def value(self) -> jax.Array:
        """``root.value**2``, with the sign of the root, in float32."""
        root = widen(self.root.value)
        return root * jnp.abs(root)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.root.shape

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale together."""
        return self.root.nbytes

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flattens into the root."""
        return ((jax.tree_util.GetAttrKey("root"), self.root),), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "SquareRoot":
        """Rebuilds without checks: JAX unflattens placeholders too."""
        new = object.__new__(cls)
        (new.root,) = children
        return new

    def __repr__(self) -> str:
        return f"SquareRoot({self.root!r})"


def is_stored(x: Any) -> "TypeIs[ScaledArray | SquareRoot]":
    """Whether ``x`` is stored state: the `is_leaf` of trees that hold it."""
    return is_scaled(x) or isinstance(x, SquareRoot)


def _top_exponents(
    x: jax.Array, bits: int, block: tuple[int, ...] | None, stack_axes: int
) -> jax.Array:
    """Biased exponents of the largest magnitudes, per array, item or block.

    0 for zeros, 255 for NaN.

    Those of magnitudes rounded to ``bits`` of mantissa, so that a value which rounds up to a power
    of two has its exponent already, and storing again what was stored changes nothing. Found among
    the exponents as bytes: a reduction that XLA does not fuse into its operand then writes and
    reads a byte per entry in place of a float32.
    """
    magnitude = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    biased = (magnitude + jnp.uint32(1 << (22 - bits))) >> 23
    biased = jnp.minimum(biased, jnp.uint32(255)).astype(jnp.uint8)
    if block is not None:
        blocks = -(-x.shape[-1] // block[-1])
        padding = [(0, 0)] * (x.ndim - 1) + [(0, blocks * block[-1] - x.shape[-1])]
        biased = jnp.pad(biased, padding).reshape(*x.shape[:-1], blocks, block[-1])
    if block is not None:
        return jnp.max(biased, axis=-1, initial=0).astype(jnp.int32)
    axes = tuple(range(stack_axes, x.ndim)) if stack_axes else None
    return jnp.max(biased, axis=axes, initial=0, keepdims=stack_axes > 0).astype(jnp.int32)


def store(
    x: jax.Array, moment: Moment, rounding: CastRounding, key: jax.Array | None
) -> ScaledArray | SquareRoot:
    """Rounds an array of state into its format, once.

    An array (or item, or block) with an entry that is not finite becomes NaN, whole, as not every
    format can say which entry it was.
    """
    fmt, x = format_of(moment.dtype), x.astype(jnp.float32)
    y = jnp.copysign(jnp.sqrt(jnp.abs(x)), x) if moment.root else x
    if fmt.exponent_bits >= 8:
        stored = ScaledArray(cast(y, fmt, rounding, key, saturate=False))
        return SquareRoot(stored) if moment.root else stored
    block = None if moment.block is None or not x.ndim else (1,) * (x.ndim - 1) + (moment.block,)
    # A square rounds up as its root does where it is half as far from the power of two.
    top = _top_exponents(x, fmt.mantissa_bits - moment.root, block, moment.stack_axes)
    exponent = jnp.floor_divide(top - 127, 2) if moment.root else top - 127
    # The power of two above the largest magnitude goes to the largest one that the format holds.
    shift = jnp.clip(exponent + 1 - (math.frexp(fmt.max)[1] - 1), -126, 126)
    shift = jnp.where(top == 0, 0, shift)
    scale = jnp.where(top == 255, jnp.nan, pow2(shift))
    y = y * to_float(ScaledArray(x, pow2(-shift), block_shape=block).full_scale)
    if moment.root:
        smallest = jnp.copysign(jnp.float32(fmt.smallest_subnormal), y)
        y = jnp.where((jnp.abs(y) < fmt.smallest_subnormal) & (x != 0), smallest, y)
    fast = rounding == "nearest" and has_fast_path(moment.dtype)
    data = encode(y, moment.dtype) if fast else cast(y, fmt, rounding, key)
    stored = ScaledArray(data, scale, block_shape=block)
    return SquareRoot(stored) if moment.root else stored


def moment_of(stored: ScaledArray | SquareRoot) -> Moment:
    """How an array of state is stored, read from itself."""
    inner = stored.root if isinstance(stored, SquareRoot) else stored
    block = None if inner.block_shape is None else inner.block_shape[-1]
    return Moment(inner.dtype, isinstance(stored, SquareRoot), block, stack_axes_of(inner))


def stack_axes_of(x: Any) -> int:
    """The number of leading axes of which each item of a ScaledArray has its own scale.

    Example:
        >>> stack_axes_of(ScaledArray(jnp.ones((3, 4, 4)), jnp.ones((3, 1, 1))))
        1
    """
    if not is_scaled(x) or x.scale is None or x.block_shape is not None:
        return 0
    shape = jnp.shape(x.scale)
    count = max((axis + 1 for axis, n in enumerate(shape) if n > 1), default=0)
    return count if shape[:count] == x.shape[:count] else 0


def load(stored: Any) -> Any:
    """The float32 array that was stored; anything else is returned as it is."""
    if not is_stored(stored):
        return stored
    inner = stored.root if isinstance(stored, SquareRoot) else stored
    if not has_fast_path(inner.dtype):
        return widen(stored.value)
    x = decode(inner.data) * to_float(inner.full_scale)
    return x * jnp.abs(x) if isinstance(stored, SquareRoot) else x
