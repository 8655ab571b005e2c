"""Training under scalify follows training in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import PARAMS, RUNS, STEPS, X, Y, loss
from unitscale import as_scaled, to_array
from unitscale.core import is_scaled
from unitscale.transforms import scalify


def losses(step: Callable[..., Any], params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    """Return the loss of every step, and the final state."""
    found = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, batch)
        found.append(loss)
    return np.asarray([float(to_array(x)) for x in jax.device_get(found)]), (params, state)


def follows(name: str) -> Any:
    """Train in float32 and float16; return the losses of float32, and the final float16 state."""
    optimizer = RUNS[name].make()
    update = optax.with_extra_args_support(optimizer).update

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        extra = RUNS[name].extra(value, grads, lambda params: loss(params, batch))
        updates, state = update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, value

    params, batch = jax.tree.map(jnp.asarray, (PARAMS, (X, Y)))
    start = params, optimizer.init(params), batch
    plain, _ = losses(jax.jit(step), *start)
    assert plain[-20:].mean() < 0.9 * plain[0], "the plain program trains"
    found, end = losses(jax.jit(scalify(step)), *as_scaled(start, dtype=jnp.float16))
    assert np.all(np.isfinite(found))
    # Means over 20 steps, since two runs that follow each other swing apart.
    exact, ours = (np.asarray(x).reshape(-1, 20).mean(1) for x in (plain, found))
    # The lowest so far, since methods that find their own rate rise again at times of their own.
    ours, exact = map(np.minimum.accumulate, (ours, exact))
    np.testing.assert_allclose(ours[5:], exact[5:], rtol=0.25, atol=0.05 * plain[0])
    return plain, end, step, start


@pytest.mark.slow
def test_adamw_in_float16_and_float32_and_scales_have_a_fixed_point() -> None:
    plain, end, step, start = follows("adamw")
    for x in jax.tree.leaves(end, is_leaf=is_scaled):
        if is_scaled(x) and np.any(x.data):
            assert x.dtype == jnp.float16
            assert np.frexp(x.scale)[0] == 0.5
            # A measured scale is within a factor of 2; one step after it may add another.
            assert 0.25 <= np.sqrt(np.mean(np.square(np.asarray(x.data, np.float64)))) <= 4.0
    exact, _ = losses(jax.jit(scalify(step)), *as_scaled(start))
    np.testing.assert_allclose(exact[:50], plain[:50], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_training_in_float16_follows_float32(name: str) -> None:
    follows(name)
