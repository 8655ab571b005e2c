"""Weights on inputs of several sizes, and losses over several batches, in one loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import batch_size, ops, to_array

RNG = np.random.default_rng(0)
FEW, MANY = (jnp.asarray(RNG.normal(size=(n, 8)), jnp.float32) for n in (3, 96))
WIDE, FINE = (jnp.asarray(RNG.normal(size=(2, n, n, 4)), jnp.float32) for n in (4, 12))
IDS, MORE = jnp.arange(3) % 16, jnp.arange(96) % 16
COUNTS = jnp.arange(96) % 5 > 0


def weight(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def of(y: Any) -> jax.Array:
    """A loss of numbers whose sum over items does not vanish."""
    y = to_array(y)
    return jnp.sum(jnp.sin(y + jnp.arange(y.size).reshape(y.shape) / y.size))


def by_two(f: Callable[..., Any], first: Any, second: Any) -> Callable[..., Any]:
    """With another constant for each, as nothing but the direction is kept."""
    return lambda w: 30 * of(f(first, w)) + of(f(second, w))


def plain_norm(x: Any, w: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def plain_loss(z: Any, labels: Any, where: Any = None) -> Any:
    losses = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[:, None], -1)[:, 0]
    return jnp.mean(losses, where=where)


def plain_conv(x: Any, w: Any) -> Any:
    return (
        jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        / (9 * 4) ** 0.5
    )


def losses(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w: loss(FEW, w, IDS) + loss(MANY, w, MORE, where=COUNTS)


# Of a weight: with ops, and the same function in plain JAX.
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], jax.Array]] = {
    "dense": (
        by_two(ops.dense, FEW, MANY),
        by_two(lambda x, w: x @ w / 8**0.5, FEW, MANY),
        weight(8, 16),
    ),
    "einsum": (
        by_two(lambda x, w: ops.einsum("bi,io->bo", x, w), FEW, MANY),
        by_two(lambda x, w: x @ w / 8**0.5, FEW, MANY),
        weight(8, 16),
    ),
    "embedding": (
        by_two(ops.embed, IDS, MORE),
        by_two(lambda ids, w: w[ids], IDS, MORE),
        weight(16, 8),
    ),
    "norm": (
        by_two(lambda x, w: ops.layer_norm(x, w), FEW, MANY),
        by_two(plain_norm, FEW, MANY),
        weight(8),
    ),
    "convolution": (
        by_two(ops.conv, WIDE, FINE),
        by_two(plain_conv, WIDE, FINE),
        weight(3, 3, 4, 5),
    ),
    "bias": (
        by_two(lambda x, b: ops.dense(x, jnp.eye(8), b), FEW, MANY),
        by_two(lambda x, b: x / 8**0.5 + b, FEW, MANY),
        weight(8),
    ),
    "losses": (
        losses(lambda x, w, *a, **k: ops.softmax_cross_entropy(ops.dense(x, w), *a, **k)),
        losses(lambda x, w, *a, **k: plain_loss(x @ w / 8**0.5, *a, **k)),
        weight(8, 16),
    ),
    "losses of a readout": (
        losses(lambda x, w, *a, **k: ops.readout_cross_entropy(x, w, *a, **k)),
        losses(lambda x, w, *a, **k: plain_loss(x @ w / 8, *a, **k)),
        weight(8, 16),
    ),
    "mean squares": (
        lambda w: sum(ops.mse_loss(ops.dense(x, w), jnp.ones((len(x), 16))) for x in (FEW, MANY)),
        lambda w: sum(jnp.mean((x @ w / 8**0.5 - 1) ** 2) for x in (FEW, MANY)),
        weight(8, 16),
    ),
}


def cosine(a: jax.Array, b: jax.Array) -> float:
    a, b = jnp.ravel(a), jnp.ravel(b)
    return float(a @ b / jnp.linalg.norm(a) / jnp.linalg.norm(b))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient_of_weights_in_two_places_has_the_true_direction(name: str) -> None:
    unit, plain, w = PROGRAMS[name]

    def named(w: jax.Array) -> Any:
        with batch_size(96):
            return unit(w)

    value, grad = jax.jit(jax.value_and_grad(named))(w)
    expected, true = jax.value_and_grad(plain)(w)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert cosine(grad, true) > 1 - 1e-6
    assert cosine(jax.grad(unit)(w), true) < 1 - 1e-4  # without, each call has its own constant


def test_the_constant_is_that_of_its_batch() -> None:
    w = weight(8, 16)
    with batch_size(96):
        named = jax.grad(lambda w: of(ops.dense(MANY, w)))(w)
    np.testing.assert_array_equal(named, jax.grad(lambda w: of(ops.dense(MANY, w)))(w))


@pytest.mark.parametrize("items", [0, -1, 1.5, True, "many"])
def test_what_is_no_number_of_items(items: Any) -> None:
    with pytest.raises(ValueError, match="items must be"), batch_size(items):
        pass
