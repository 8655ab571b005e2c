"""What every row of the table has to obey."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

from .table import Entry

SCALES = (1.0, 2.0**12, 2.0**-12)
# Most of the time goes into compiling; the code that comes out runs once.
QUICK = {"xla_backend_optimization_level": 0}
EPSILON = float(np.finfo(np.float32).eps)


def _objective(entry: Entry) -> Any:
    """A scalar that depends on every element of a function's results."""

    def objective(*args: Any) -> Any:
        total = 0.0
        for leaf in jax.tree.leaves(entry.function(*args)):
            leaf = jnp.where(jnp.isfinite(leaf), leaf, 0.0) if leaf.dtype.kind == "f" else leaf
            if leaf.dtype.kind == "f":
                total += jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape))
        return total

    return objective


def _both(entry: Entry) -> Any:
    if not entry.differentiable:
        return entry.function
    numbers = tuple(range(len(entry.args)))
    gradient = jax.grad(_objective(entry), argnums=numbers)
    return lambda *args: (entry.function(*args), gradient(*args))


def close(actual: Any, expected: Any, steps: float, what: str) -> None:
    """Compares trees, relative to the largest finite element, as rounding is."""
    expected, actual = jax.tree.leaves(expected), jax.tree.leaves(actual)
    assert len(expected) == len(actual)
    for e, a in zip(expected, actual, strict=True):
        e, a = np.asarray(e), np.asarray(a)
        assert e.shape == a.shape, what
        if e.dtype.kind not in "fc":
            np.testing.assert_array_equal(a, e, err_msg=what)
            continue
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(e), err_msg=what)
        finite = np.isfinite(e)
        np.testing.assert_array_equal(a[~finite], e[~finite].astype(a.dtype), err_msg=what)
        size = np.max(np.abs(e[finite]), initial=0.0)
        error = np.max(np.abs(a[finite] - e[finite]), initial=0.0)
        assert error <= steps * EPSILON * size + 1e-30, f"{what}: {error / size / EPSILON} epsilons"


def check(entry: Entry) -> None:
    """The law: the scalified value and gradient are the plain ones, whatever the input scales."""
    program = _both(entry)
    expected = jax.jit(program, compiler_options=QUICK)(*entry.args)

    def scaled(scale: jax.Array, *args: jax.Array) -> Any:
        return to_array(scalify(program)(*(ScaledArray(a / scale, scale) for a in args)))

    compiled = jax.jit(scaled, compiler_options=QUICK)
    for scale in SCALES:
        actual = compiled(jnp.float32(scale), *entry.args)
        close(actual, expected, entry.steps, f"{entry.name} at scale {scale}")


def law(entries: list[Entry]) -> Any:
    """Parametrizes a test by the entries of a table."""
    return pytest.mark.parametrize("entry", entries, ids=lambda e: e.name)
