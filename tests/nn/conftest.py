"""What the layers' tests share: a Monte Carlo check of unit scale."""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.gradients import jit


@pytest.fixture
def assert_rms(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a check of the RMS of a layer's output and input gradient at initialisation.

    A trial draws new parameters, input and cotangent, all from N(0, 1). Trials are independent, so
    the scatter of their mean squares is the tolerance: five standard errors of the mean, and
    ``bias`` where the rule itself is an approximation.
    """

    def check(
        make: Callable[[nnx.Rngs], Callable],
        shape: tuple[int, ...],
        *,
        out: float = 1.0,
        grad: float = 1.0,
        bias: float = 0.0,
        trials: int = 48,
    ) -> None:
        def trial(key):
            init, x_key, y_key = jax.random.split(key, 3)
            x = jax.random.normal(x_key, shape)
            y, vjp = jax.vjp(lambda x: make(nnx.Rngs(init))(x).value, x)
            (dx,) = vjp(jax.random.normal(y_key, y.shape, y.dtype))
            return jnp.mean(y**2), jnp.mean(dx**2)

        seed = zlib.crc32(request.node.name.encode())
        keys = jax.random.split(jax.random.key(seed), trials)
        squares = np.stack(jit(jax.vmap(trial))(keys), axis=-1)
        squares = squares / np.square([out, grad])
        error = squares.std(0, ddof=1) / np.sqrt(trials)
        assert (error < 0.04).all(), f"too few samples to tell: standard errors {error}"
        off = np.abs(squares.mean(0) - 1)
        assert (off <= 5 * error + bias + 1e-5).all(), (squares.mean(0), error)

    return check
