"""ScaledArrays of every dtype and kind of scale, and their values in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unitscale.core import ScaledArray, format_of

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
KINDS = ["none", "one", "tensor", "e8m0", "channel", "row", "block"]
SHAPE = (4, 6)


def stored(x: Any, dtype: str) -> jax.Array:
    """Make a JAX array by casting in NumPy, because casting with `jnp` compiles a program."""
    return jnp.asarray(np.asarray(x, np.float32).astype(jnp.dtype(dtype)))


def scale_of(kind: str) -> dict[str, Any]:
    """Make arguments of ScaledArray for data of shape SHAPE."""
    powers = 2.0 ** np.arange(-3, 3)
    return {
        "none": {"scale": None},
        "one": {"scale": 1},
        "tensor": {"scale": stored(8, "float32")},
        "e8m0": {"scale": stored(powers[:4, None], "float8_e8m0fnu")},
        "channel": {"scale": stored(powers, "float32")},
        "row": {"scale": stored(powers[:4, None], "float32")},
        "block": {"scale": stored(powers.reshape(2, 3), "float32"), "block_shape": (2, 2)},
    }[kind]


def make(kind: str, dtype: str, seed: int = 0) -> ScaledArray:
    """Draw data away from zero, so that quotients stay in range."""
    x = np.random.default_rng(seed).uniform(0.5, 2, SHAPE)
    sign = np.random.default_rng(seed + 1).choice([-1, 1], SHAPE)
    return ScaledArray(stored(x * sign, dtype), **scale_of(kind))


def exact(x: Any) -> np.ndarray:
    """Return the value in float64, from data and scale."""
    if not isinstance(x, ScaledArray):
        return np.asarray(x).astype(np.float64)
    scale = x.scale
    if scale is None:
        scale = 1
    scale = np.asarray(scale).astype(np.float64)
    if x.block_shape is not None:
        for axis, size in enumerate(x.block_shape):
            scale = np.repeat(scale, size, axis)
        scale = scale[tuple(map(slice, x.shape))]
    return np.asarray(x.data).astype(np.float64) * scale


def eps(*dtypes: str) -> float:
    """Return the epsilon of the coarsest dtype; 8-bit data gives bfloat16 results."""
    wide = [t if np.dtype(jnp.dtype(t)).itemsize > 1 else "bfloat16" for t in dtypes]
    return float(format_of(jnp.result_type(*wide)).eps)


def assert_close(got: Any, expected: np.ndarray, eps: float, of: float | None = None) -> None:
    """Check that arrays agree within one rounding of each element, or of the largest term `of`."""
    got, expected = exact(got), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    size = np.abs(expected) if of is None else of
    error = np.abs(got - expected)
    assert (error <= eps * size + 2.0**-140).all(), (error.max(), got, expected)
