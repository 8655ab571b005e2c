"""A cache of attention, in programs that `jax.export` writes to bytes."""

import jax.numpy as jnp

from tests.exported import assert_is_read_again
from unitscale.nn import KVCache


def test_a_program_is_read_with_its_cache() -> None:
    assert_is_read_again(KVCache.create(1, 4, 2, 8, jnp.float16))
