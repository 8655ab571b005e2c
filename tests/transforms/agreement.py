"""Compare scalified programs with plain ones on the same values."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.batching import compute, entry
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

HALF = float(jnp.finfo(jnp.float16).eps)
Program = Callable[..., Any]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def narrow(x: Any, dtype: Any = jnp.float16) -> Any:
    """Store an array, or each of a tuple, with a scale near its RMS."""
    parts = tuple(jnp.asarray(part, jnp.float32) for part in (x if isinstance(x, tuple) else (x,)))
    return as_scaled(parts if isinstance(x, tuple) else parts[0], dtype=dtype)


def scaled(data: Any, scale: Any = 1.0, dtype: Any = jnp.float16) -> ScaledArray:
    return ScaledArray(jnp.asarray(data, dtype), jnp.asarray(scale, jnp.float32))


SCALES = (1.0, 2.0**12, 2.0**-12)


def at_scales(program: Program) -> Program:
    """Compute results from plain arguments, and from arguments with each of `SCALES`."""

    def scaled(scale: jax.Array, args: Any) -> Any:
        return to_array(scalify(program)(*(ScaledArray(a / scale, scale) for a in args)))

    return lambda *args: (
        program(*args),
        jax.lax.map(lambda scale: scaled(scale, args), jnp.asarray(SCALES)),
    )


def close(found: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare trees of arrays; `atol` is relative to the largest finite element of each."""
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert a.shape == e.shape
        if e.dtype.kind not in "fc":
            np.testing.assert_array_equal(a, e)
            continue
        most = atol * np.max(np.abs(e[np.isfinite(e)]), initial=0) + 1e-35 * bool(atol)
        np.testing.assert_allclose(a.astype(e.dtype), e, rtol=rtol, atol=most)


def check(
    table: Mapping[Any, tuple[Any, ...]], rtol: float = 0.0, atol: float = 0.0, **options: Any
) -> None:
    """Compare scalified programs, of functions and their arguments, with plain ones."""

    def both(f: Program) -> Program:
        def run(*args: Any) -> Any:
            plain = f(*to_array(args))
            return plain, to_array(scalify(f, **options)(*args))

        return run

    results = compute({name: (both(f), *args) for name, (f, *args) in table.items()})
    for name, (expected, found) in jax.device_get(results).items():
        with entry(name):
            close(found, expected, rtol, atol)
