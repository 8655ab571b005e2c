"""The mean over tokens: values, gradients, and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.pooling import mean_of_tokens

X = np.random.default_rng(0).normal(size=(4, 9, 5)).astype(np.float32)
GIVEN = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
MASK = np.arange(9) < np.array([[9], [6], [1], [0]])


@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_is_unit_scaled_and_its_gradient_true_times_one_constant(masked: bool) -> None:
    kept = MASK if masked else np.ones_like(MASK)
    x = np.where(kept[..., None], X, np.inf)
    weights = (kept / np.sqrt(np.maximum(kept.sum(1, keepdims=True), 1)))[..., None]
    found, pullback = jax.vjp(lambda x: mean_of_tokens(x, jnp.asarray(MASK) if masked else None), x)
    np.testing.assert_allclose(found, (X * weights).sum(1), rtol=1e-5, atol=1e-6)
    # The root of time, however many tokens count.
    true = GIVEN[:, None] * weights
    np.testing.assert_allclose(pullback(GIVEN)[0], 9**0.5 * true, rtol=1e-5, atol=1e-6)
