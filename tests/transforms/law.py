"""What every row of the table has to obey."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import chunks, compute, entry
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

from .table import Entry

SCALES = (1.0, 2.0**12, 2.0**-12)
# Properties of a test: how many entries it asked for, and one for each that obeyed.
ASKED, HELD = "entries of the law", "an entry that obeys"
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


def _plain_and_scaled(program: Any) -> Any:
    def scaled(scale: jax.Array, args: Any) -> Any:
        return to_array(scalify(program)(*(ScaledArray(a / scale, scale) for a in args)))

    return lambda *args: (
        program(*args),
        jax.lax.map(lambda scale: scaled(scale, args), jnp.asarray(SCALES)),
    )


def law(entries: list[Entry]) -> Any:
    """The test that scalified values and gradients are the plain ones, whatever the scales."""
    table = {e.name: e for e in entries}
    assert len(table) == len(entries), "names of entries are distinct"

    @pytest.mark.parametrize("names", chunks(table))
    def test_value_and_gradient(names: list[str], record_property: Any) -> None:
        record_property(ASKED, len(names))
        programs = {name: _plain_and_scaled(_both(table[name])) for name in names}
        results = compute({name: (programs[name], *table[name].args) for name in names})
        for name, (expected, found) in jax.device_get(results).items():
            for i, scale in enumerate(SCALES):
                with entry(f"{name} at scale {scale}"):
                    close([x[i] for x in jax.tree.leaves(found)], expected, table[name].steps, name)
            record_property(HELD, 1)

    return test_value_and_gradient


def same_as_float32(
    table: dict[str, tuple[Any, Any]], dtype: Any, rtol: float | None = None, atol: float = 2e-4
) -> None:
    """Compares scalified programs on a 16-bit array with float32 on the same values.

    By default two roundings are allowed; ``atol`` is relative to the largest element.
    """
    rtol = 2 * float(jnp.finfo(dtype).eps) if rtol is None else rtol
    given = {n: as_scaled(jnp.asarray(x, jnp.float32), dtype=dtype) for n, (_, x) in table.items()}
    results = compute({n: (scalify(f), given[n]) for n, (f, _) in table.items()})
    for name, (program, _) in table.items():
        right = jax.jit(program)(to_array(given[name], jnp.float32))
        found = to_array(results[name], jnp.float32)
        for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            with entry(name):
                np.testing.assert_allclose(a, e, rtol=rtol, atol=atol * np.abs(e).max())
