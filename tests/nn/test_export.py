"""Layers and caches of attention in programs that `jax.export` writes to bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import unitscale
from tests.exported import assert_is_read_again
from unitscale import nn
from unitscale.nn import KVCache


def test_a_program_is_read_with_its_cache() -> None:
    assert_is_read_again(KVCache.create(1, 4, 2, 8, jnp.float16))


def test_layers_of_any_batch() -> None:
    """Gradients alone depend on how many items there are."""
    rngs = nnx.Rngs(0)
    layers = nn.Dense(8, 8, rngs=rngs), nn.LayerNorm(8, rngs=rngs), nn.Readout(8, 4, rngs=rngs)
    model = nnx.Sequential(*layers)
    signature = jax.ShapeDtypeStruct(export.symbolic_shape("batch, 8"), jnp.float32)
    program = jax.jit(lambda x: model(x).value)
    with pytest.raises(
        TypeError, match=r"rules\.dense: batch .* inside unitscale\.batch_size\(n\)"
    ):
        export.export(program)(signature)
    with unitscale.batch_size(1):
        exported = export.export(program)(signature)
    x = jnp.linspace(-1.0, 1.0, 24).reshape(3, 8)
    np.testing.assert_allclose(exported.call(x), program(x), rtol=1e-6)
