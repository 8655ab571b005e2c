"""A step of a scaled optimizer, written to bytes and read again."""

import jax.numpy as jnp
import optax
from jax import export

from tests.exported import assert_computes_the_same
from tests.optimizers import scaled
from unitscale import optim


def test_a_step_is_read_with_its_state() -> None:
    tx = optim.skip_nonfinite(scaled(optax.adamw(0.1)))
    params = tx.scale_params({"w": jnp.ones((4, 8))})
    state, grads = tx.init(params), {"w": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)}
    for kind in (optax.ScaleByAdamState, optax.EmptyState):
        export.register_namedtuple_serialization(kind, serialized_name=f"optax.{kind.__name__}")
    allowed = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    assert_computes_the_same(tx.step, params, state, grads, disabled_checks=allowed)
