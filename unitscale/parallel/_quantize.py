"""What every exchange shares: one scale per tensor on all devices, and bits in place of FP8.

XLA may widen FP8 on the wire (a CPU gathers it as float16), so data travels as unsigned integers of
the same bits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import (
    CastRounding,
    Format,
    amax,
    cast,
    exponent_of,
    format_of,
    pow2,
    round_to_pow2,
    widen,
)

AxisName: TypeAlias = str | tuple[str, ...]
"""A mesh axis, or several that count as one: see `all_reduce`."""

_BITS = {1: jnp.uint8, 2: jnp.uint16}
_SMALLEST, _LARGEST = -126, 126  # exponents whose power of two and its inverse are normal numbers


class SharedScale(NamedTuple):
    """A power-of-two scale that all devices agree on.

    Attributes:
        scale: float32; NaN where some device has a value that is not finite.
        inverse: 1 / scale, exact and always finite.
    """

    scale: jax.Array
    inverse: jax.Array


def wire_format(where: str, dtype: Any) -> Format:
    """The format of an exchange: float8, float16, bfloat16 or float32.

    Raises:
        ValueError: for any other.
    """
    fmt = format_of(dtype)
    sizes = (1, 2, 4)
    packed = fmt.dtype is not None and fmt.dtype.name.startswith("float4")
    if fmt.dtype is None or fmt.dtype.itemsize not in sizes or not fmt.signed or packed:
        raise ValueError(
            f"unitscale.parallel.{where}: dtype must be a float8, float16, bfloat16 or float32 "
            f"format; got {fmt.name}"
        )
    return fmt


def wire_dtype(fmt: Format) -> np.dtype:
    """The dtype of a format that `wire_format` returned."""
    assert fmt.dtype is not None, "simulated formats are refused by wire_format"
    return fmt.dtype


def axis_size(where: str, axis_name: AxisName) -> int:
    """Number of devices along the axis.

    Raises:
        ValueError: outside of a program that is mapped over it.
    """
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"unitscale.parallel.{where}: axis_name must be an axis of the surrounding "
            f"jax.shard_map; got {axis_name!r}, which none here has. Call it inside shard_map."
        ) from None


def check_varying(where: str, name: str, leaf: Any, axis_name: AxisName) -> None:
    """Refuses a gradient that JAX has summed over the axis already, where JAX keeps track of it."""

    def varying(x: Any) -> frozenset:
        return jax.typeof(x).manual_axis_type.varying

    names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    tracked = varying(lax.axis_index(axis_name))  # empty under check_vma=False
    if tracked and not names <= varying(leaf):
        raise ValueError(
            f"unitscale.parallel.{where}: {name} must differ between the devices of {axis_name!r}; "
            "got a value that is the same on all: jax.grad with respect to replicated parameters "
            "has summed it. Differentiate with respect to "
            f"jax.lax.pcast(params, {axis_name!r}, to='varying')."
        )


def device_keys(
    where: str, rounding: CastRounding, key: jax.Array | None, axis_name: AxisName, count: int
) -> list[jax.Array | None]:
    """A key per tensor of this device alone, as its rounding must not be that of the others.

    Raises:
        ValueError: for an unknown rounding, or a stochastic one without a key.
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"unitscale.parallel.{where}: rounding must be 'nearest' or 'stochastic'; got "
            f"{rounding!r}"
        )
    if rounding == "nearest":
        return [None] * count
    if key is None:
        raise ValueError(
            f"unitscale.parallel.{where}: rounding='stochastic' needs key=, a jax.random key that "
            "is the same on all devices; got None"
        )
    own = jax.random.fold_in(key, lax.axis_index(axis_name))
    return list(jax.random.split(own, count)) if count else []


def agree(
    leaves: Sequence[jax.Array],
    formats: Sequence[Format],
    mus: Sequence[Any],
    axis_name: AxisName,
) -> list[SharedScale]:
    """One power-of-two scale per tensor, from the largest magnitude on any device.

    Scaling:
        scale = 2^ceil(log2(amax / max)) / mu, with the largest magnitude ``amax`` of all devices
        and ``max`` of the format, so that for mu <= 1 nothing saturates. Formats with the exponents
        of float32 take scale 1, and so does a tensor of zeros, for which XLA may take subnormal
        numbers of float32. mu is rounded down to a power of two.

    One collective of one integer per tensor that needs a scale.
    """
    wanted = [i for i, fmt in enumerate(formats) if fmt.exponent_bits < 8]
    one = jnp.float32(1)
    scales = [SharedScale(one, one)] * len(leaves)
    if not wanted:
        return scales
    largest = jnp.stack([amax(leaves[i]).astype(jnp.float32) for i in wanted])
    # As integers, which order magnitudes as floats do, and NaN above infinity on every backend.
    bits = lax.bitcast_convert_type(largest, jnp.int32) & 0x7FFFFFFF
    largest = lax.bitcast_convert_type(lax.pmax(bits, axis_name), jnp.float32)
    for i, top in zip(wanted, largest, strict=True):
        exponent = exponent_of(round_to_pow2(top / formats[i].max, "up"))
        exponent = jnp.maximum(exponent, _SMALLEST) - exponent_of(jnp.float32(mus[i]))
        exponent = jnp.where(top == 0, 0, jnp.clip(exponent, _SMALLEST, _LARGEST))
        finite = jnp.isfinite(top)
        exponent = jnp.where(finite, exponent, 0)
        scales[i] = SharedScale(jnp.where(finite, pow2(exponent), jnp.nan), pow2(-exponent))
    return scales


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _encode(x: jax.Array, key: jax.Array | None, fmt: Format, rounding: CastRounding) -> jax.Array:
    data = cast(x, fmt, rounding, key, saturate=fmt.exponent_bits < 8)
    return lax.bitcast_convert_type(data, _BITS[data.dtype.itemsize])


def _encode_fwd(x: jax.Array, key: jax.Array | None, fmt: Format, rounding: CastRounding) -> Any:
    raise TypeError(
        "unitscale.parallel: an exchange has no derivative, as bits have none. Differentiate with "
        "respect to what it returns, and exchange the gradients."
    )


_encode.defvjp(_encode_fwd, lambda *_: ())


def encode(
    x: jax.Array, fmt: Format, rounding: CastRounding = "nearest", key: jax.Array | None = None
) -> jax.Array:
    """Rounds data into a format of 8 or 16 bits, saturating, and returns the bits."""
    return _encode(x, key, fmt, rounding)


def decode(bits: jax.Array, fmt: Format) -> jax.Array:
    """The float32 numbers that bits stand for."""
    return widen(lax.bitcast_convert_type(bits, wire_dtype(fmt)))
