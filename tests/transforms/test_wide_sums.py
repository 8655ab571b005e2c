"""Differences of running, windowed and segment sums have the digits that float32 gives these."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from .law import same_as_float32


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def moving_average(x: Any) -> Any:
    sums = jnp.cumsum(x)
    return (sums[10:] - sums[:-10]) / 10


def decays(x: Any) -> Any:
    """Between places of a sequence, as a state space model has them."""
    sums = jnp.cumsum(-x[:256])
    return jnp.exp(sums[1:] - sums[:-1])


def local_variance(x: Any) -> Any:
    mean = lambda a: lax.reduce_window(a, 0.0, lax.add, (7,), (1,), "VALID") / 7  # noqa: E731
    return mean(x * x) - mean(x) ** 2


def segment_variance(x: Any) -> Any:
    segments = jnp.repeat(jnp.arange(8), 8)
    mean = lambda a: jax.ops.segment_sum(a, segments, 8) / 8  # noqa: E731
    return mean(x * x) - mean(x) ** 2


def hub(x: Any) -> Any:
    return jax.ops.segment_sum(x, jnp.zeros(x.size, jnp.int32), x.size)[:1]


def normalized(x: Any) -> Any:
    """A density that asks that its argument sums to 1."""
    return jax.scipy.stats.dirichlet.logpdf(x / x.sum(), jnp.full(6, 2.0))


def deviation(x: Any) -> Any:
    return x.std(-1) @ jnp.ones(3)


NEAR_ONE = 0.7 + 0.02 * normal(0, 64)
PROGRAMS: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "moving average": (moving_average, np.linspace(0.5, 1.5, 1000)),
    "decays": (decays, np.linspace(0.5, 1.5, 1000)),
    "variance of windows": (local_variance, NEAR_ONE),
    "variance of segments": (segment_variance, NEAR_ONE),
    "a hub": (hub, np.ones(2**17)),
    "shares": (normalized, np.array([0.1, 0.5, 0.7, 0.3, 0.9, 0.2])),
    "a large deviation": (deviation, 1e6 * normal(6, 3, 64)),
    "a small deviation": (deviation, 1e-7 * normal(6, 3, 64)),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_float32(name: str, dtype: Any) -> None:
    program, x = PROGRAMS[name]
    same_as_float32(program, dtype, x)
