"""The state of a step on many devices, in programs that `jax.export` writes to bytes."""

import jax.numpy as jnp

from tests.exported import assert_is_read_again
from unitscale.parallel import AutoScale, ParallelState


def test_the_state_of_a_step() -> None:
    params = {"w": jnp.ones(3)}
    auto = AutoScale.create(params, recovery=7)
    assert_is_read_again(auto)
    assert_is_read_again(ParallelState(params, jnp.zeros(3), auto))
