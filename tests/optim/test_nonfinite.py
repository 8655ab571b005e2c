import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import scaled
from unitscale.optim import apply_updates, skip_nonfinite

PARAMS = {"w": np.linspace(0.5, 2, 6, dtype=np.float32), "b": np.ones(2, np.float32)}
GRADS = {"w": np.linspace(-1, 1, 6, dtype=np.float32), "b": np.ones(2, np.float32)}
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
    w = np.array(GRADS["w"])
    w[2] = value
    return {**GRADS, "w": w}


@pytest.mark.parametrize("name", INNERS)
def test_a_bad_step_changes_nothing_and_is_counted(name: str) -> None:
    """And a good one is that of inner."""
    inner = INNERS[name]()
    tx = skip_nonfinite(inner)
    step = jax.jit(tx.step)

    @jax.jit
    def first(grads):
        params = tx.scale_params(PARAMS)
        if name == "optax":
            updates, state = inner.update(grads, inner.init(params), params)
            expected = optax.apply_updates(params, updates), state
        else:
            expected = inner.step(params, inner.init(params), grads)
        return tx.step(params, tx.init(params), grads), expected

    (params, state), expected = first(GRADS)
    equal((params, state.inner), expected)
    for count, value in enumerate((np.nan, np.inf, -np.inf), 1):
        after, state_after = step(params, state, bad(value))
        equal((after, state_after.inner), (params, state.inner))
        assert (int(state_after.skipped), int(state_after.consecutive)) == (count, count)
        state = state_after
    _, state = step(params, state, GRADS)
    assert (int(state.skipped), int(state.consecutive)) == (3, 0)


def test_update_gives_zeros() -> None:
    tx = skip_nonfinite(scaled(optax.adamw(0.1)))

    @jax.jit
    def run(grads):
        params = tx.scale_params(PARAMS)
        updates, state = tx.update(grads, tx.init(params), params)
        return params, updates, apply_updates(params, updates), state

    params, updates, after, state = run(bad(np.inf))
    equal(updates, jax.tree.map(np.zeros_like, PARAMS))
    equal(after, params)
    assert int(state.skipped) == 1


def test_apply_if_finite_of_optax_works_inside() -> None:
    tx = scaled(optax.apply_if_finite(optax.adam(0.1), 5))

    @jax.jit
    def run(good, bad):
        params = tx.scale_params(PARAMS)
        params, state = tx.step(params, tx.init(params), good)
        return (params, state), tx.step(params, state, bad)

    (params, state), (after, state_after) = run(GRADS, bad(np.nan))
    equal(after["w"], params["w"])
    assert int(state_after.inner.total_notfinite) == 1
    equal(*(s.inner.inner_state[0].mu["w"] for s in (state, state_after)))


def test_errors() -> None:
    with pytest.raises(TypeError, match="skip_nonfinite: inner must be an optax transformation"):
        skip_nonfinite(optax.adam)  # pyright: ignore[reportArgumentType]
