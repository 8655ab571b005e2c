"""The mean of tokens: its values, its gradients, and padding, which says nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from recipes.pooling import mean_of_tokens

X = np.random.default_rng(0).normal(size=(4, 9, 5)).astype(np.float32)
MASK = np.arange(9) < np.array([[9], [6], [1], [0]])


def test_the_mean_is_of_unit_size_over_the_tokens_that_count() -> None:
    np.testing.assert_allclose(mean_of_tokens(X), X.mean(1) * 3, rtol=1e-5, atol=1e-6)
    found = mean_of_tokens(X, jnp.asarray(MASK))
    np.testing.assert_allclose(found[1], X[1, :6].mean(0) * 6**0.5, rtol=1e-5)
    np.testing.assert_allclose(found[2], X[2, 0], rtol=1e-6)
    np.testing.assert_array_equal(found[3], np.zeros(5))


def test_gradients_are_the_true_ones_times_the_root_of_time() -> None:
    """One constant for all texts, however many of their tokens count."""
    given = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    for mask in (None, jnp.asarray(MASK)):
        (found,) = jax.vjp(lambda x, mask=mask: mean_of_tokens(x, mask), X)[1](given)
        kept = np.ones(MASK.shape) if mask is None else MASK
        weights = kept / np.sqrt(np.maximum(kept.sum(1, keepdims=True), 1))
        true = given[:, None] * weights[..., None]
        np.testing.assert_allclose(found, 3 * true, rtol=1e-5, atol=1e-6)


def test_padding_is_not_read() -> None:
    padded = jnp.where(MASK[..., None], X, jnp.inf)
    found = jax.value_and_grad(lambda x: mean_of_tokens(x, jnp.asarray(MASK)).sum())(padded)
    assert all(np.isfinite(part).all() for part in found)
