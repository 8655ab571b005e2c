"""Values and gradients under scalify equal those of the plain function, for the whole table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

from .table import ENTRIES, Entry

SCALES = (1.0, 2.0**12, 2.0**-12)
EPSILON = float(np.finfo(np.float32).eps)
QUICK = [name for name, entry in ENTRIES.items() if not entry.slow]
PARTS = [QUICK[i : i + 32] for i in range(0, len(QUICK), 32)]
LONG = pytest.param([name for name in ENTRIES if name not in QUICK], marks=pytest.mark.slow)


def _both(entry: Entry) -> Any:
    """Return the gradient of a scalar that depends on all elements of the results, and results."""

    def objective(*args: Any) -> Any:
        total, results = 0.0, entry.function(*args)
        for leaf in jax.tree.leaves(results):
            if leaf.dtype.kind == "f":
                leaf = jnp.where(jnp.isfinite(leaf), leaf, 0.0)
                total += jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape))
        return total, results

    if not entry.grad:
        return entry.function
    return jax.grad(objective, argnums=tuple(range(len(entry.args))), has_aux=True)


def _plain_and_scaled(program: Any) -> Any:
    def scaled(scale: jax.Array, args: Any) -> Any:
        return to_array(scalify(program)(*(ScaledArray(a / scale, scale) for a in args)))

    return lambda *args: (
        program(*args),
        jax.lax.map(lambda scale: scaled(scale, args), jnp.asarray(SCALES)),
    )


def close(actual: Any, expected: Any, steps: float) -> None:
    """Compare arrays relative to the largest finite element."""
    assert expected.shape == actual.shape
    if expected.dtype.kind not in "fc":
        np.testing.assert_array_equal(actual, expected)
        return
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(actual), finite)
    np.testing.assert_array_equal(actual[~finite], expected[~finite].astype(actual.dtype))
    size = np.max(np.abs(expected[finite]), initial=0.0)
    atol = steps * EPSILON * size + 1e-30
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=0, atol=atol)


@pytest.mark.parametrize("names", [*PARTS, LONG])
def test_value_and_gradient(names: list[str]) -> None:
    programs = {name: _plain_and_scaled(_both(ENTRIES[name])) for name in names}
    results = compute({name: (programs[name], *ENTRIES[name].args) for name in names})
    for name, (expected, found) in jax.device_get(results).items():
        for i, scale in enumerate(SCALES):
            with entry(f"{name} at scale {scale}"):
                for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                    close(np.asarray(a[i]), np.asarray(e), ENTRIES[name].steps)
