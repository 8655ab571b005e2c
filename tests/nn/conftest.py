"""Draw initial parameters with NumPy, because JAX would compile a program for every shape."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import random  # what initializers call; `jax.random.normal` in a test stays JAX's


class _Drawn(np.ndarray):
    """Draw the random numbers of an initializer, before scaling, without JAX."""

    def __mul__(self, deviation: Any) -> Any:
        return jnp.asarray(
            np.multiply(self, np.asarray(deviation), dtype=self.dtype).view(np.ndarray)
        )


@pytest.fixture(scope="module", autouse=True)
def draw_by_numpy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "normal", _outside_of_jit(random.normal))
        patch.setattr(random, "truncated_normal", _outside_of_jit(random.truncated_normal, -2, 2))
        yield


def _outside_of_jit(original: Callable[..., Any], *bounds: float) -> Callable[..., Any]:
    def draw(key: Any, *args: Any, **options: Any) -> Any:
        if isinstance(key, jax.core.Tracer):
            return original(key, *args, **options)
        low, high, shape, dtype = args if bounds else (-np.inf, np.inf, *args)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return rng.normal(size=shape).clip(low, high).astype(dtype).view(_Drawn)

    return draw
