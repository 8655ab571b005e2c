"""Weights on inputs of several sizes, and losses over several batches, in one loss."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.batching import compute, entry
from unitscale import batch_size, ops, to_array

RNG = np.random.default_rng(0)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


FEW, MANY = drawn(3, 8), drawn(96, 8)
WIDE, FINE = drawn(2, 4, 4, 4), drawn(2, 12, 12, 4)
IDS, MORE = jnp.arange(3) % 16, jnp.arange(96) % 16
COUNTS = jnp.arange(96) % 5 > 0


def of(y: Any) -> jax.Array:
    """A loss of numbers whose sum over items does not vanish."""
    y = to_array(y)
    return jnp.sum(jnp.sin(y + jnp.arange(y.size).reshape(y.shape) / y.size))


def twice(f: Callable[..., Any], first: Any, second: Any) -> Callable[..., Any]:
    """With another constant for each, as nothing but the direction is kept."""
    return lambda w: 30 * of(f(first, w)) + of(f(second, w))


def losses(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w: loss(FEW, w, IDS) + loss(MANY, w, MORE, where=COUNTS)


def plain_dense(x: Any, w: Any) -> Any:
    return x @ w / 8**0.5


def plain_norm(x: Any, w: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def plain_conv(x: Any, w: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    return y / 36**0.5


def plain_loss(z: Any, labels: Any, where: Any = None) -> Any:
    rows = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[:, None], -1)[:, 0]
    return jnp.mean(rows, where=where)


def squares(f: Callable[..., Any], loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w: sum(loss(f(x, w), jnp.ones((len(x), 16))) for x in (FEW, MANY))


def entropy(x: Any, w: Any, *args: Any, **options: Any) -> Any:
    return ops.softmax_cross_entropy(ops.dense(x, w), *args, **options)


# Of a weight: op, the same function in plain JAX, two inputs, and the shape of the weight.
LAYERS: dict[str, tuple[Any, Any, Any, Any, tuple[int, ...]]] = {
    "dense": (ops.dense, plain_dense, FEW, MANY, (8, 16)),
    "einsum": (lambda x, w: ops.einsum("bi,io->bo", x, w), plain_dense, FEW, MANY, (8, 16)),
    "embedding": (ops.embed, lambda ids, w: w[ids], IDS, MORE, (16, 8)),
    "norm": (ops.layer_norm, plain_norm, FEW, MANY, (8,)),
    "convolution": (ops.conv, plain_conv, WIDE, FINE, (3, 3, 4, 5)),
    "bias": (
        lambda x, b: ops.dense(x, jnp.eye(8), b),
        lambda x, b: x / 8**0.5 + b,
        FEW,
        MANY,
        (8,),
    ),
}
PROGRAMS = {
    name: (twice(op, few, many), twice(plain, few, many), drawn(*shape))
    for name, (op, plain, few, many, shape) in LAYERS.items()
}
PROGRAMS["losses"] = (
    losses(entropy),
    losses(lambda x, w, *a, **k: plain_loss(plain_dense(x, w), *a, **k)),
    drawn(8, 16),
)
PROGRAMS["losses of a readout"] = (
    losses(ops.readout_cross_entropy),
    losses(lambda x, w, *a, **k: plain_loss(x @ w / 8, *a, **k)),
    drawn(8, 16),
)
PROGRAMS["mean squares"] = (
    squares(ops.dense, ops.mse_loss),
    squares(plain_dense, lambda y, t: jnp.mean((y - t) ** 2)),
    drawn(8, 16),
)


def cosine(a: Any, b: Any) -> float:
    a, b = np.ravel(a), np.ravel(b)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_the_gradient_of_weights_in_two_places_has_the_true_direction() -> None:
    def run(unit: Any, plain: Any, w: jax.Array) -> Any:
        with batch_size(96):
            named = jax.value_and_grad(unit)(w)
        # Without it, each call has its own constant.
        return named, jax.value_and_grad(plain)(w), jax.grad(unit)(w)

    table = {n: (functools.partial(run, *fs), w) for n, (*fs, w) in PROGRAMS.items()}
    for name, ((value, grad), (expected, true), apart) in compute(table).items():
        with entry(name):
            np.testing.assert_allclose(value, expected, rtol=1e-5)
            assert cosine(grad, true) > 1 - 1e-6
            assert cosine(apart, true) < 1 - 1e-4


def test_the_constant_is_that_of_its_batch() -> None:
    w, f = drawn(8, 16), lambda w: of(ops.dense(MANY, w))
    with batch_size(96):
        named = jax.grad(f)(w)
    np.testing.assert_array_equal(named, jax.grad(f)(w))
