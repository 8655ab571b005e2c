"""A step of a scaled optimizer, written to bytes and read again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export

from unitscale import optim


def test_a_step_is_read_with_its_state() -> None:
    tx = optim.skip_nonfinite(optim.scaled(optax.adamw(0.1)))
    params = tx.scale_params({"w": jnp.ones((4, 8))})
    state, grads = tx.init(params), {"w": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)}
    for kind in (optax.ScaleByAdamState, optax.EmptyState):
        export.register_namedtuple_serialization(kind, serialized_name=f"optax.{kind.__name__}")
    step, args = jax.jit(tx.step), (params, state, grads)
    allowed = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    exported = export.export(step, disabled_checks=allowed)(*args)
    found, expected = export.deserialize(exported.serialize()).call(*args), step(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(jax.device_get(a), jax.device_get(e))
