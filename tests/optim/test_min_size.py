"""Small arrays of parameters and state, which `scaled` keeps in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import scaled as scaled_of_all
from unitscale import ScaledArray
from unitscale.core import is_scaled
from unitscale.optim import Moment, convert_state, scaled
from unitscale.optim._storage import is_stored

RNG = np.random.default_rng(0)
SHAPES = {"kernel": (64, 64), "thin": (63, 65), "bias": (64,), "gain": ()}
PARAMS = {name: jnp.asarray(RNG.normal(size=s), jnp.float32) for name, s in SHAPES.items()}
GRADS = {name: jnp.asarray(RNG.normal(size=s), jnp.float32) for name, s in SHAPES.items()}
SMALL = ("thin", "bias", "gain")  # 4,095 entries, 64 and 1


def steps(tx: Any, params: Any, count: int = 5) -> tuple[Any, Any]:
    state = tx.init(params)
    for _ in range(count):
        params, state = jax.jit(tx.step)(params, state, GRADS)
    return params, state


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_small_arrays_are_updated_as_in_float32(rounding: str) -> None:
    plain = optax.adamw(0.01)
    tx = scaled(plain, rounding=rounding)
    params, state = steps(tx, tx.scale_params(PARAMS))
    expected, inner = PARAMS, plain.init(PARAMS)
    for _ in range(5):
        updates, inner = jax.jit(plain.update)(GRADS, inner, expected)
        expected = optax.apply_updates(expected, updates)
    adam = state.inner[0]
    for name in SMALL:
        assert params[name].dtype == adam.mu[name].dtype == adam.nu[name].dtype == jnp.float32
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(adam.nu[name], inner[0].nu[name], rtol=1e-6)
    assert params["kernel"].dtype == jnp.float16
    assert all(is_stored(moment["kernel"]) for moment in (adam.mu, adam.nu))


@pytest.mark.parametrize(
    "bias",
    [
        jnp.ones(64, jnp.bfloat16),
        ScaledArray(jnp.ones(64, jnp.float16), 1.0),
        ScaledArray(jnp.full(64, 0.5, jnp.float8_e4m3fn), 2.0),
    ],
)
def test_small_parameters_of_few_bits_become_wide(bias: Any) -> None:
    """In bfloat16 an update of 2^-10 of a gain would be lost."""
    tx = scaled(optax.sgd(2.0**-10))
    params = tx.scale_params({"bias": bias, "count": jnp.arange(3)})
    assert params["count"].dtype == jnp.int32
    params, _ = tx.step(params, tx.init(params), {"bias": jnp.ones(64), "count": None})
    np.testing.assert_array_equal(params["bias"], np.full(64, 1 - 2.0**-10, np.float32))


def test_a_function_of_path_and_role_does_not_see_small_arrays() -> None:
    tx = scaled(optax.sgd(0.1, momentum=0.9), moments=lambda path, role: Moment("bfloat16"))
    trace = tx.init(tx.scale_params(PARAMS)).inner[0].trace
    assert [is_stored(trace[name]) for name in SHAPES] == [True, False, False, False]


def test_all_are_stored_where_none_is_too_small() -> None:
    tx = scaled(optax.adam(0.1), min_size=0)
    params = tx.scale_params(PARAMS)
    assert all(is_scaled(x) for x in params.values())
    tx = scaled(optax.adam(0.1), min_size=4097)
    assert not any(is_scaled(x) for x in tx.scale_params(PARAMS).values())
    steps(tx, PARAMS)


def test_state_that_has_all_stored_goes_on_with_small_arrays_wide() -> None:
    before, after = scaled_of_all(optax.adam(0.1)), scaled(optax.adam(0.1))
    params, state = steps(before, before.scale_params(PARAMS))
    expected = state.inner[0].mu["bias"].value
    params = after.scale_params(params)
    state = convert_state(state, after.init(params))
    np.testing.assert_array_equal(state.inner[0].mu["bias"], expected)
    steps(after, params)


def test_a_donated_step_leaves_the_parameters_it_began_with() -> None:
    tx = scaled(optax.adam(0.1))
    given = jax.tree.map(jnp.copy, PARAMS)
    params = tx.scale_params(given)
    jax.jit(tx.step, donate_argnums=(0, 1))(params, tx.init(params), GRADS)
    assert not any(x.is_deleted() for x in given.values())


def test_errors() -> None:
    for wrong in (-1, 0.5, None):
        with pytest.raises(ValueError, match="min_size must be a number of entries, 0 or more"):
            scaled(optax.sgd(0.1), min_size=wrong)
    tx = scaled(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"Call\s+params = tx\.scale_params"):
        tx.init(PARAMS)
