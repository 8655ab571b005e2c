"""How one array of optimizer state is stored: a ScaledArray, or the root of one."""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core import (
    CastRounding,
    Format,
    ScaledArray,
    cast,
    decode_float8,
    format_of,
    is_float8,
    is_scaled,
    normal_pow2,
    to_float,
    widen,
)
from ._rounding import round_finite
from ._sample import is_sampled, parts
from ._square_root import SquareRoot

if TYPE_CHECKING:
    from typing_extensions import TypeIs

WITHIN_SCALIFY = (
    "Within scalify every ScaledArray is seen as a plain array: scalify the gradients alone, and "
    "call tx.step outside."
)
# Exponents as float32 has them in its bits: of zero, and of what is not finite.
_OF_ZERO, _OF_NAN = 0, 255
_BIAS = 127
# Binades between the largest entry that was seen and the highest of a format: one of 4 or fewer
# bits of exponent, which sees also what it replaces, and one of 5.
_ROOM_OF_FEW_BITS, _ROOM = 1, 10
_ROOM_AFTER_GROWTH = 4
# What is taken for the largest entry where all that was seen is zero.
_OF_UNSEEN = -14


@dataclasses.dataclass(frozen=True)
class Moment:
    """How an array of optimizer state is stored.

    Scaling:
        data = x / scale, or |x|^1/2 / scale with the sign of x if ``root``. The scale is a power of
        two, chosen in every step. An array of up to 2^16 entries, and any by block or in the first
        state, has its largest magnitude in the highest binades of the format; nothing saturates.
        float32 and bfloat16, which have the range of float32, take scale 1.

        The largest magnitude of a larger array is known only after a pass over all that it is
        computed from, which moves as many bytes as half of the step. Its scale is chosen from about
        2^14 of the new entries, evenly spaced, with 2^10 of room in formats of 5 exponent bits
        (float16, e5m2). In those of fewer there is room for twice (e4m3fn: 3.5 times) the largest
        of these and of all that was stored before; an entry that outgrows that in one step
        saturates, and the next steps make room for it. Between two binades (e4m3fn) and 11
        (float16) at the upper end of the format are then not used.

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


def is_stored(x: Any) -> "TypeIs[ScaledArray | SquareRoot]":
    """Whether ``x`` is stored state: the `is_leaf` of trees that hold it."""
    return is_scaled(x) or isinstance(x, SquareRoot)


def _inner(stored: ScaledArray | SquareRoot) -> ScaledArray:
    inner = stored.root if isinstance(stored, SquareRoot) else stored
    if not is_scaled(inner):
        raise ValueError(
            "unitscale.optim.scaled: state must hold ScaledArrays, as tx.init made them; got a "
            f"{type(inner).__name__}. {WITHIN_SCALIFY}"
        )
    return inner


def _largest(x: jax.Array, moment: Moment, block: tuple[int, ...] | None) -> jax.Array:
    """Biased exponents of the largest entries, per array, item or block.

    Those of magnitudes rounded to the format, so that a value which rounds up to a power of two has
    its exponent already, and storing again what was stored changes nothing. A square rounds up as
    its root does where it is half as far from the power of two. Found among the exponents as bytes:
    a reduction that XLA does not fuse into its operand then writes and reads a byte per entry in
    place of a float32.
    """
    bits = format_of(moment.dtype).mantissa_bits - moment.root
    biased = (_magnitude(x) + jnp.uint32(1 << (22 - bits))) >> 23
    biased = jnp.minimum(biased, jnp.uint32(_OF_NAN)).astype(jnp.uint8)
    if block is not None:
        blocks = -(-x.shape[-1] // block[-1])
        padding = [(0, 0)] * (x.ndim - 1) + [(0, blocks * block[-1] - x.shape[-1])]
        biased = jnp.pad(biased, padding).reshape(*x.shape[:-1], blocks, block[-1])
        top = jnp.max(biased, axis=-1, initial=0)
    else:
        top = _max_of_items(biased, moment)
    return top.astype(jnp.int32)


def _biased(x: jax.Array) -> jax.Array:
    """The exponent of a number as it stands in its bits, 0 of a subnormal one."""
    return (_magnitude(x) >> 23).astype(jnp.int32)


def _magnitude(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)


def _with_sign(magnitude: jax.Array, x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(magnitude, jnp.uint32)
    sign = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x80000000)
    return lax.bitcast_convert_type(bits | sign, jnp.float32)


def _reciprocal(power: jax.Array) -> jax.Array:
    """1 / 2^n for -126 <= n <= 126, by an operation that XLA repeats in the kernel that asks."""
    bits = lax.bitcast_convert_type(power, jnp.int32)
    return lax.bitcast_convert_type(jnp.int32(254 << 23) - bits, jnp.float32)


def _axes(ndim: int, moment: Moment) -> tuple[int, ...]:
    """Those that share a scale."""
    return tuple(range(moment.stack_axes, ndim))


def _max_of_items(x: jax.Array, moment: Moment) -> jax.Array:
    items = moment.stack_axes > 0
    return jnp.max(x, axis=_axes(x.ndim, moment) if items else None, initial=0, keepdims=items)


class Seen(NamedTuple):
    """What is known of a large array of state before its next values are.

    Attributes:
        largest: exponents of the largest entries stored; None where there is room without.
        room: binades to keep free above the largest entry that is known.
    """

    largest: jax.Array | None
    room: Any


def look_at(stored: Any) -> tuple[Any, Seen | None]:
    """What is stored, and what `store` is to know of it; None for what takes exact scales."""
    if not is_stored(stored):
        return stored, None
    moment = moment_of(stored)
    inner, fmt = _inner(stored), format_of(moment.dtype)
    axes = _axes(inner.ndim, moment)
    if fmt.exponent_bits >= 8 or moment.block is not None or not is_sampled(inner.shape, axes):
        return stored, None
    if fmt.exponent_bits == format_of(jnp.float16).exponent_bits:
        return stored, Seen(None, _ROOM)
    codes = lax.bitcast_convert_type(inner.data, jnp.uint8) & jnp.uint8(0x7F)
    # All that is computed from its values waits for this. XLA would else find the maximum in the
    # kernel of the new weights, and write the moment, whose scale it is for, in another pass.
    code, scale = lax.optimization_barrier((_max_of_items(codes, moment), inner.scale))
    largest = widen(lax.bitcast_convert_type(code, moment.dtype))
    # The highest binade is reached only where something has outgrown the room.
    grew = largest >= 2.0 ** _highest(fmt)
    seen = Seen(
        _biased(largest * to_float(scale)) - _BIAS,
        jnp.where(grew, _ROOM_AFTER_GROWTH, _ROOM_OF_FEW_BITS),
    )
    inner = ScaledArray(inner.data, scale)
    return SquareRoot(inner) if moment.root else inner, seen


def _shift(
    x: jax.Array, moment: Moment, block: tuple[int, ...] | None, seen: Seen | None
) -> tuple[jax.Array, jax.Array]:
    """Exponents of the scales, and which are of something that is not finite.

    The largest entry is known exactly only once all of x is: to store it then takes a second pass
    over everything that it is computed from. A large array takes it from a sample of x and from
    what was seen before.

    In few operations on small integers: of those of float32 XLA made a kernel more for each array.
    """
    halved = int(moment.root)
    if seen is None:
        top = _largest(x, moment, block)
    else:
        axes = _axes(x.ndim, moment)
        top = jnp.maximum(*(_largest(part, moment, None) for part in parts(x, axes)))
    exponent = (top - _BIAS) >> halved
    if seen is not None and seen.largest is not None:
        exponent = jnp.maximum(exponent, seen.largest)
    nothing = exponent == (_OF_ZERO - _BIAS) >> halved
    lost = exponent >= (_OF_NAN - _BIAS) >> halved
    # The power of two above the largest magnitude goes to the largest one that the format holds.
    above = 1 - _highest(format_of(moment.dtype))
    if seen is None:
        shift = jnp.where(nothing, 0, exponent + above)
    else:
        shift = jnp.where(nothing, _OF_UNSEEN, exponent) + (seen.room + above)
    return jnp.clip(shift, -126, 126), lost


def _highest(fmt: Format) -> int:
    """The exponent of the highest binade of a format."""
    return math.frexp(fmt.max)[1] - 1


def store(
    x: jax.Array,
    moment: Moment,
    rounding: CastRounding,
    key: jax.Array | None,
    seen: Seen | None = None,
) -> ScaledArray | SquareRoot:
    """Rounds an array of state into its format, once.

    Args:
        x: the array.
        moment: how it is stored.
        rounding: of its entries.
        key: for it.
        seen: by `look_at` of what is stored in its place so far; None takes scales from all of x.

    An entry that is not finite, or rounds to 2^128, becomes NaN, as do all of the array (or item,
    or block) whose scale is chosen from it.
    """
    return _stored(x, key, seen, moment=moment, rounding=rounding)


# Traced once for all arrays of a shape: a model has many.
@functools.partial(jax.jit, static_argnames=("moment", "rounding"), inline=True)
def _stored(
    x: jax.Array,
    key: jax.Array | None,
    seen: Seen | None,
    *,
    moment: Moment,
    rounding: CastRounding,
) -> ScaledArray | SquareRoot:
    fmt, x = format_of(moment.dtype), x.astype(jnp.float32)
    y = jnp.sqrt(jnp.abs(x)) if moment.root else x
    if fmt.exponent_bits >= 8:
        y = _with_sign(y, x) if moment.root else y
        stored = ScaledArray(cast(y, fmt, rounding, key, saturate=False))
        return SquareRoot(stored) if moment.root else stored
    block = None if moment.block is None or not x.ndim else (1,) * (x.ndim - 1) + (moment.block,)
    shift, lost = _shift(x, moment, block, seen)
    scale = jnp.where(lost, jnp.nan, normal_pow2(shift))
    y = y * to_float(ScaledArray(x, _reciprocal(scale), block_shape=block).full_scale)
    if moment.root:
        # Asked of the bits of x: XLA may share an array of float32 zeros with other kernels, which
        # then is one more to read.
        y = jnp.where(_magnitude(x) != 0, jnp.maximum(y, fmt.smallest_subnormal), y)
        y = _with_sign(y, x)
    stored = ScaledArray(round_finite(y, fmt, rounding, key), scale, block_shape=block)
    return SquareRoot(stored) if moment.root else stored


def moment_of(stored: ScaledArray | SquareRoot) -> Moment:
    """How an array of state is stored, read from itself."""
    inner = _inner(stored)
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
    inner = _inner(stored)
    if not is_float8(inner.dtype):
        return widen(stored.value)
    x = decode_float8(inner.data) * to_float(inner.full_scale)
    return x * jnp.abs(x) if isinstance(stored, SquareRoot) else x
