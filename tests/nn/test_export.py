"""What layers and many devices keep, in programs that `jax.export` writes to bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from unitscale.nn import KVCache
from unitscale.parallel import AutoScale, ParallelState
from unitscale.quant import Delayed, QuantState, Static

KEPT = {
    "cache": lambda: KVCache.create(1, 4, 2, 8, jnp.float16),
    "delayed": lambda: QuantState.create(Delayed(history=3, use="latest")),
    "static": lambda: QuantState.create(Static()),
    "automatic scale": lambda: AutoScale.create({"w": jnp.ones(3)}, recovery=7),
    "many devices": lambda: ParallelState({"w": jnp.ones(3)}, jnp.zeros(3)),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_program_is_read_with_what_it_keeps(name: str) -> None:
    state = KEPT[name]()
    double = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state))
    exported = export.export(double)(state)
    found = export.deserialize(exported.serialize()).call(state)
    expected = double(state)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e)
