"""Products on a mesh of explicit axes: what JAX asks for, where what is summed over is sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.parallel.devices import explicit_mesh
from unitscale.quant import Block, Contraction, Dynamic, MatmulConfig, contract

SPEC = Contraction("btk", "kn", "btn")
X = np.random.default_rng(0).standard_normal((4, 2, 64)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)
CONFIGS = {
    "none": None,
    "unit": MatmulConfig(),
    "channel": MatmulConfig(strategy=Dynamic(granularity="channel")),
    "blocks": MatmulConfig(strategy=Block(32)),
    "blocks of rows": MatmulConfig(strategy=Block(16, dims=2)),
}


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize(
    ("x_spec", "w_spec"),
    [
        (P("data"), P()),
        (P("data"), P("data")),
        (P("data"), P(None, "model")),
        (P("data", None, "model"), P("model")),
        (P(("data", "model")), P("data")),
    ],
)
def test_value_and_gradients_are_those_of_one_device(x_spec: P, w_spec: P) -> None:
    mesh = explicit_mesh(data=2, model=2)

    def loss(x: Any, w: Any, config: MatmulConfig | None) -> jax.Array:
        return jnp.sum(jnp.sin(contract(x, w, SPEC, config=config, out_dtype=jnp.float32)))

    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, x_spec), jax.device_put(W, w_spec)
        for name, config in CONFIGS.items():
            program = jax.value_and_grad(lambda x, w, c=config: loss(x, w, c), argnums=(0, 1))
            found = jax.jit(program)(x, w)
            for gradient, operand in zip(found[1], (x, w), strict=True):
                assert jax.typeof(gradient).sharding == jax.typeof(operand).sharding, name
            with jax.set_mesh(jax.sharding.Mesh(np.asarray(jax.devices()[:1]), "one")):
                expected = jax.jit(program)(jnp.asarray(X), jnp.asarray(W))
            for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                size = float(np.max(np.abs(e)))
                np.testing.assert_allclose(a, e, rtol=0, atol=1e-4 * size, err_msg=name)
