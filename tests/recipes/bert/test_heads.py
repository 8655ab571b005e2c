"""Heads that share an encoder: where the look-up reads, and the constants of their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.bert.heads import Head, mean_loss, rows_of, shares
from tests.gradients import jit
from unitscale import ScaledArray, ops


def test_rows_are_those_at_the_positions() -> None:
    x = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32)
    positions = np.array([[0, 4], [2, 2], [1, 3]])
    found = rows_of(ScaledArray(jnp.asarray(x), jnp.float32(4)), jnp.asarray(positions))
    np.testing.assert_array_equal(found.value, 4 * np.take_along_axis(x, positions[..., None], 1))


def test_the_loss_is_the_mean_over_what_counts() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(4, 3, 7)).astype(np.float32), rng.integers(0, 7, (4, 3))
    where = rng.random((4, 3)) < 0.5
    expected = ops.softmax_cross_entropy(logits, labels, where=where)
    np.testing.assert_allclose(mean_loss(logits, labels, where), expected, rtol=1e-6)
    assert mean_loss(logits, labels, np.zeros((4, 3), bool)) == 0


@pytest.mark.parametrize("counted", [1, 6])
def test_the_constant_of_a_head_is_that_of_its_gradient(counted: int) -> None:
    """However many labels count."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 8, 16)).astype(np.float32)
    kernel = rng.normal(size=(16, 5)).astype(np.float32)
    positions, labels = np.array([[0, 3, 4], [1, 2, 7]]), rng.integers(0, 5, (2, 3))
    where = np.arange(6).reshape(2, 3) < counted

    def ours(x):
        return mean_loss(ops.readout(rows_of(x, positions), kernel), labels, where)

    def plain(x):
        rows = jnp.take_along_axis(x, positions[..., None], 1)
        losses = -jax.nn.log_softmax(rows @ kernel / 16)
        picked = jnp.take_along_axis(losses, labels[..., None], -1)[..., 0]
        return jnp.sum(picked, where=where) / counted

    head = Head(classes=5, rows=6, tokens=16, width=16)
    found, true = jit(jax.grad(ours))(x), jit(jax.grad(plain))(x)
    np.testing.assert_allclose(found, head.constant * true, rtol=1e-5, atol=1e-5)


def test_shares_make_the_constants_equal_and_the_sum_unit() -> None:
    heads = Head(8192, 320, 2048, 256), Head(2, 16, 2048, 256)
    found = shares(heads)
    first, second = (share * head.constant for share, head in zip(found, heads, strict=True))
    assert first == pytest.approx(second)
    assert sum(share**2 for share in found) == pytest.approx(1)
    assert shares(heads[:1]) == (1.0,)
