"""Programs written to bytes by `jax.export`, and read again."""

from collections.abc import Callable
from typing import Any

import chex
import jax
from jax import export


def assert_is_read_again(state: Any) -> None:
    """Check that a program from state to state computes the same after export."""
    assert_computes_the_same(lambda state: jax.tree.map(lambda x: x * 2, state), state)


def assert_computes_the_same(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Check that a function computes the same after export; `options` are those of `export`."""
    function = jax.jit(function)
    exported = export.export(function, **options)(*args)
    found = export.deserialize(exported.serialize()).call(*args)
    chex.assert_trees_all_equal(found, function(*args))
