"""Values and gradients under scalify equal those of the plain function, for the whole table."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

from .agreement import close
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


@pytest.mark.parametrize("names", [*PARTS, LONG])
def test_value_and_gradient(names: list[str]) -> None:
    programs = {name: _plain_and_scaled(_both(ENTRIES[name])) for name in names}
    results = compute({name: (programs[name], *ENTRIES[name].args) for name in names})
    for name, (expected, found) in jax.device_get(results).items():
        for i, scale in enumerate(SCALES):
            with entry(f"{name} at scale {scale}"):
                at = jax.tree.map(operator.itemgetter(i), found)
                close(at, expected, atol=ENTRIES[name].steps * EPSILON)
