"""Programs written to bytes by `jax.export`, and read again."""

from typing import Any

import jax
import numpy as np
from jax import export


def assert_is_read_again(state: Any) -> None:
    """A program that takes a state and returns one is read with both, and computes the same."""
    double = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state))
    exported = export.export(double)(state)
    found, expected = export.deserialize(exported.serialize()).call(state), double(state)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e)
