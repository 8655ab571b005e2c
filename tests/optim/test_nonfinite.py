from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from unitscale.core import ScaledArray
from unitscale.optim import apply_updates, scaled, skip_nonfinite

PARAMS = {"w": jnp.linspace(0.5, 2, 6), "b": jnp.ones(2)}
GRADS = {"w": jnp.linspace(-1, 1, 6), "b": jnp.ones(2)}
INNERS = {
    "optax": lambda: optax.adam(0.1),
    "scaled": lambda: scaled(optax.adam(0.1)),
    "stochastic": lambda: scaled(optax.adam(0.1), rounding="stochastic"),
}


def equal(one, other) -> None:
    def plain(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(plain(a), plain(b)), one, other)


def bad(value: float):
    return {**GRADS, "w": GRADS["w"].at[2].set(value)}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", INNERS)
def test_a_bad_step_changes_nothing_and_is_counted(name: str, value: float) -> None:
    tx = skip_nonfinite(INNERS[name]())
    step = jax.jit(tx.step)
    params = tx.scale_params(PARAMS)
    params, state = step(params, tx.init(params), GRADS)
    for count in (1, 2):
        after, state_after = step(params, state, bad(value))
        equal(after, params)
        equal(state_after.inner, state.inner)
        assert (int(state_after.skipped), int(state_after.consecutive)) == (count, count)
        state = state_after
    params, state = step(params, state, GRADS)
    assert (int(state.skipped), int(state.consecutive)) == (2, 0)


@pytest.mark.parametrize("name", INNERS)
def test_good_steps_are_those_of_inner(name: str) -> None:
    inner = INNERS[name]()
    tx = skip_nonfinite(inner)
    params = tx.scale_params(PARAMS)
    mine, state = tx.step(params, tx.init(params), GRADS)
    if name == "optax":
        updates, expected = inner.update(GRADS, inner.init(params), params)
        equal(mine, optax.apply_updates(params, updates))
    else:
        theirs, expected = inner.step(params, inner.init(params), GRADS)
        equal(mine, theirs)
    equal(state.inner, expected)


def test_update_gives_zeros() -> None:
    tx = skip_nonfinite(scaled(optax.adamw(0.1)))
    params = tx.scale_params(PARAMS)
    updates, state = tx.update(bad(np.inf), tx.init(params), params)
    equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))
    equal(apply_updates(params, updates), params)
    assert int(state.skipped) == 1


def test_the_scale_of_a_cotangent_does_not_count() -> None:
    """That of an e8m0 scale, which has no zero, is NaN."""
    tx = skip_nonfinite(scaled(optax.sgd(0.1)))
    w = ScaledArray(jnp.ones(3, jnp.float16), jnp.float32(2).astype(jnp.float8_e8m0fnu))
    grad = jax.grad(lambda w: jnp.sum(w.value))(w)
    assert np.isnan(np.asarray(grad.scale).astype(np.float32))
    updates, state = tx.update(grad, tx.init(w), w)
    assert int(state.skipped) == 0
    np.testing.assert_allclose(updates, -0.1, rtol=1e-6)


def test_apply_if_finite_of_optax_works_inside() -> None:
    tx = scaled(optax.apply_if_finite(optax.adam(0.1), 5))
    params = tx.scale_params(PARAMS)
    params, state = tx.step(params, tx.init(params), GRADS)
    after, state_after = jax.jit(tx.step)(params, state, bad(np.nan))
    np.testing.assert_array_equal(after["w"].value, params["w"].value)
    assert int(state_after.inner.total_notfinite) == 1
    before, after = (s.inner.inner_state[0].mu["w"].value for s in (state, state_after))
    np.testing.assert_array_equal(before, after)


def test_errors() -> None:
    with pytest.raises(TypeError, match="skip_nonfinite: inner must be an optax transformation"):
        skip_nonfinite(optax.adam)  # pyright: ignore[reportArgumentType]
