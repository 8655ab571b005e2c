"""Shared scales against their definition in NumPy; bits that come back; refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.parallel.devices import on_each
from unitscale.core import format_of
from unitscale.parallel._collectives import agree, axis_size, decode, encode, wire_format

DEVICES = 4


@functools.cache
def agreed(dtype: str, mu: Any) -> Any:
    def f(x):
        return tuple(agree([x], [format_of(dtype)], [mu], "data")[0])

    return on_each(f, DEVICES, (P(), P()))


def shared_scale(rows: np.ndarray, dtype: str, mu: Any = 1.0) -> tuple[np.ndarray, np.ndarray]:
    scale, inverse = agreed(dtype, mu)(rows)
    return np.asarray(scale), np.asarray(inverse)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
@pytest.mark.parametrize("largest", [448.0, 449.0, 1e-30, 3e38, 0.7, 2.0**-126])
@pytest.mark.parametrize("mu", [1.0, 4.0, 0.3])
def test_scale_is_the_smallest_power_of_two_that_fits(
    dtype: str, largest: float, mu: float
) -> None:
    rows = np.zeros((DEVICES, 3), np.float32)
    rows[2, 1] = -largest  # one device alone has it
    rows[1, 0] = largest / 2
    scale, inverse = shared_scale(rows, dtype, mu)
    wanted = np.ceil(np.log2(float(np.float32(largest)) / format_of(dtype).max))
    exponent = np.clip(max(wanted, -126) - np.floor(np.log2(mu)), -126, 126)
    assert scale == 2.0**exponent
    assert inverse == 2.0**-exponent


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
def test_scale_of_what_is_not_finite_is_nan(bad: float) -> None:
    rows = np.ones((DEVICES, 3), np.float32)
    rows[3, 2] = bad
    scale, inverse = shared_scale(rows, "float8_e4m3fn")
    assert np.isnan(scale)
    assert np.isfinite(inverse)


def test_zeros_and_wide_formats_take_scale_one() -> None:
    rows = np.zeros((DEVICES, 3), np.float32)
    assert shared_scale(rows, "float8_e4m3fn") == (1, 1)
    assert shared_scale(rows + 1e30, "bfloat16") == (1, 1)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_bits_come_back(name: str) -> None:
    fmt = format_of(name)
    assert fmt.dtype is not None
    size = fmt.dtype.itemsize
    codes = np.arange(2 ** (8 * size), dtype=np.dtype(f"uint{8 * size}"))
    wanted = codes.view(fmt.dtype).astype(np.float32)
    wanted = wanted[np.isfinite(wanted)]
    bits = encode(jnp.asarray(wanted), fmt)
    assert bits.dtype == codes.dtype
    # XLA takes subnormal numbers of bfloat16, which are those of float32, for zeros.
    keep = (np.abs(wanted) >= 2.0**-126) | (wanted == 0)
    np.testing.assert_array_equal(np.asarray(decode(bits, fmt))[keep], wanted[keep])


def test_bits_saturate() -> None:
    fmt = format_of("float8_e5m2")
    big = jnp.array([1e9, -1e9, jnp.nan])
    np.testing.assert_array_equal(decode(encode(big, fmt), fmt), [fmt.max, -fmt.max, np.nan])


def test_bits_have_no_derivative() -> None:
    fmt = format_of("float8_e4m3fn")
    with pytest.raises(TypeError, match="an exchange has no derivative"):
        jax.grad(lambda x: jnp.sum(decode(encode(x, fmt), fmt)))(jnp.ones(3))


@pytest.mark.parametrize("dtype", ["E4M3", "float4_e2m1fn", "float8_e8m0fnu", "float64"])
def test_formats_that_cannot_be_sent(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"parallel\.f: dtype must be a float8, float16, bfloat"):
        wire_format("f", dtype)


def test_outside_of_shard_map() -> None:
    with pytest.raises(ValueError, match="axis_name must be an axis of the surrounding"):
        axis_size("f", "data")
