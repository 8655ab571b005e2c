"""The computed signal-to-noise ratio against samples that are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compilation import USUAL_EMITTER
from tests.refusals import refuses
from unitscale import cast
from unitscale.analysis import snr
from unitscale.core import format_of
from unitscale.quant import Block, dequantize, quantize

DRAWS = 2**17
X = np.random.default_rng(0).normal(size=DRAWS).astype(np.float32)
# Errors of the draws vary by their own size: five deviations of a mean of so many, in decibels.
# Where few values carry the error, in the tails, their kurtosis does: those scales are left out.
DECIBELS = 5 * 4.34 * (6 / DRAWS) ** 0.5

FORMATS = ["float16", "bfloat16", "e5m2", "e4m3fn", "e4m3fnuz", "e2m3", "e2m1"]


@pytest.fixture(scope="module")
def rounded():
    return jax.jit(cast, static_argnums=1, compiler_options=USUAL_EMITTER)


def simulated(x, y) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(10 * np.log10(np.mean(x**2) / np.mean((x - y) ** 2)))


@pytest.mark.parametrize("name", [*FORMATS, "E4M3"])
def test_simulation(name, rounded) -> None:
    f = format_of(name)
    low, high = np.log2(f.smallest_subnormal), np.log2(f.max)
    # In the subnormal range, around 1, and where most values saturate.
    for exponent in (max(low + 1, -100), max(low + 3, -1.5), min(high + 1.0, 100)):
        x = (X * np.float32(2.0**exponent)).astype(np.float32)
        assert snr(name, 2.0**exponent) == pytest.approx(
            simulated(x, rounded(x, name)), abs=DECIBELS
        )


@pytest.mark.parametrize(("name", "scale"), [("e4m3fn", 0.7), ("e2m1", 2.0**-9)])
def test_blocks(name, scale) -> None:
    x = jnp.asarray(X.reshape(-1, 32) * scale)
    dtype = {"e2m1": "float4_e2m1fn"}.get(name, name)
    found = dequantize(quantize(x, dtype, Block(32)))
    assert snr(name, scale, block=32) == pytest.approx(simulated(x, found), abs=DECIBELS)


def test_the_middle_of_a_format_has_the_noise_of_its_mantissa() -> None:
    """Between powers of two the error is uniform: 6.02 dB for each bit of every format."""
    ratio = snr("float32", 1.0)
    for name in ("float16", "bfloat16", "E5M10"):
        bits = 23 - format_of(name).mantissa_bits
        assert snr(name, 1.0) == pytest.approx(ratio - 20 * bits * np.log10(2), abs=1e-2)


def test_limits() -> None:
    # All values become zero, so that the noise is the signal.
    assert snr("e2m1", 2.0**-40) == pytest.approx(0.0, abs=1e-9)
    found = snr("e4m3fn", 2.0 ** np.arange(-12, 14).reshape(2, 13))
    assert found.shape == (2, 13)
    best = found.ravel()[8:14]
    assert np.ptp(best) < 0.5
    assert found.ravel()[-1] < 2


test_bad_input = refuses(
    [
        (ValueError, lambda: snr("e8m0", 1.0), "e8m0"),
        (ValueError, lambda: snr("int8", 1.0), "format"),
        (ValueError, lambda: snr("e4m3fn", 0.0), "scales"),
        (ValueError, lambda: snr("e4m3fn", [1.0, np.inf]), "scales"),
        (ValueError, lambda: snr("e4m3fn", 1.0, block=0), "block"),
    ]
)
