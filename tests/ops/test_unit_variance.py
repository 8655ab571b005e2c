"""Results and gradients have unit RMS; in `batch_size`, gradients share one constant."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale import batch_size, ops, to_array

from .conformance import data_and_scale, normal


def assert_unit(
    op: Callable[..., Any],
    *shapes: tuple[int, ...],
    unit: Sequence[bool] | None = None,
    bias: float = 0.0,
    seeds: float = np.inf,
    trials: int = 64,
) -> None:
    """Check that output and gradients of standard normal inputs have mean square 1.

    The tolerance is five standard errors of the mean over trials, and over seeds if the op's
    factors are simulated, plus a stated bias.
    """

    def apply(*args: jax.Array) -> jax.Array:
        return data_and_scale(op(*args))[0]

    def trial(cotangent: jax.Array, *args: jax.Array) -> list[jax.Array]:
        y, vjp = jax.vjp(apply, *args)
        cotangent = cotangent if y.ndim else jnp.ones(())
        return [jnp.mean(jnp.square(a)) for a in (y, *vjp(cotangent))]

    out = jax.eval_shape(apply, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    samples = [
        a.astype(np.float32) for a in normal("unit", *((trials, *s) for s in (out.shape, *shapes)))
    ]
    squares = np.asarray(jax.jit(jax.vmap(trial))(*samples))
    for index, square in enumerate(squares):
        if unit is None or unit[index]:
            error = square.std(ddof=1) * (1 / trials + 1 / seeds) ** 0.5
            assert error < 0.03, f"too few samples to tell: array {index}, standard error {error}"
            assert abs(square.mean() - 1) <= 5 * error + bias, (index, square.mean(), error)


def free(op: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return the op without a constraint, so that gradients have unit RMS, too."""
    return functools.partial(op, constraint=None, **options)


def centred(op: Callable[..., Any]) -> Callable[..., Any]:
    """Subtract the mean, because factors only account for the standard deviation."""

    def f(x):
        y = op(x, constraint=None).data
        return y - jax.lax.stop_gradient(y.mean())

    return f


def with_gain(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, gain: op(x, 1 + gain - jax.lax.stop_gradient(gain))


def heads(x, w, b):
    return ops.einsum("btd,dhk->bthk", x, w, b - jax.lax.stop_gradient(b))


KEY, LOOKED_UP = jax.random.key(3), np.random.default_rng(0).integers(0, 64, (8, 32))
FIRST, LAST = (True, False, False, False), (False, True, True)
# op, shapes, options of assert_unit
TABLE: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]], dict[str, Any]]] = {
    "dense": (free(ops.dense), [(4, 8, 24), (24, 16)], {}),
    # Readout's output is meant to shrink with width.
    "readout": (free(ops.readout), [(4, 8, 24), (24, 16)], {"unit": LAST}),
    "matmul": (free(ops.matmul), [(3, 1, 8, 16), (4, 16, 12)], {}),
    # The input gradient has the factor of the forward pass.
    "lora": (ops.lora, [(32, 64), (64, 16), (16, 48)], {"unit": (True, False, True, True)}),
    "einsum": (heads, [(4, 16, 64), (64, 8, 8), (8, 8)], {}),
    "embed": (functools.partial(ops.embed, LOOKED_UP), [(64, 16)], {"unit": LAST}),
    "rotary": (functools.partial(ops.rotary, positions=np.arange(8)), [(8, 4, 16)], {}),
    # Each of the two borders misses 2 of 3 taps at one pixel and 1 at the next.
    "conv": (free(ops.conv, padding="VALID"), [(2, 64, 8), (3, 8, 16)], {"bias": 2 / 64}),
    "add": (free(ops.add), [(32, 32), (32, 32)], {}),
    "add, broadcast": (free(ops.add), [(16, 64), (64,)], {}),
    # The gradients of a weighted sum are the true ones: its weights, whose squares sum to 1.
    "weighted_add": (
        functools.partial(ops.weighted_add, weights=(1, 3)),
        [(32, 32)] * 2,
        {"unit": FIRST},
    ),
    "softmax": (centred(ops.softmax), [(32, 64)], {"bias": 1 / 64}),
    "silu_glu": (free(ops.silu_glu), [(1024,)] * 2, {}),
    "gelu_glu": (free(ops.gelu_glu), [(1024,)] * 2, {}),
    "dropout": (
        functools.partial(ops.dropout, rate=0.6, key=KEY),
        [(4096,)],
        {"bias": 5 * (1.5 / 4096) ** 0.5},
    ),
    # A row of 64 loses up to two of its degrees of freedom in the gradient.
    "layer_norm": (with_gain(ops.layer_norm), [(16, 64), (64,)], {"bias": 3 / 64}),
    "rms_norm": (with_gain(ops.rms_norm), [(16, 64), (64,)], {"bias": 3 / 64}),
    "batch_norm": (with_gain(ops.batch_norm), [(64, 64), (64,)], {"bias": 3 / 64}),
    "group_norm": (
        with_gain(functools.partial(ops.group_norm, num_groups=2)),
        [(16, 128), (128,)],
        {"bias": 3 / 64},
    ),
}
for f in (ops.gelu, ops.silu, ops.tanh, ops.relu, functools.partial(ops.elementwise, jnp.sin)):
    TABLE[f"activation {len(TABLE)}"] = (centred(f), [(32, 64)], {"bias": 1 / 2048})
for f in (jnp.tanh, jnp.sin):
    rnn = functools.partial(ops.simple_rnn, residual=True, activation=f)
    TABLE[f"simple_rnn of {f.__name__}"] = rnn, [(64, 64)] * 3, {"unit": FIRST}
for tau in (0.1, 3.0):
    branch = functools.partial(ops.residual_add, tau=tau)
    TABLE[f"residual_add of {tau}"] = branch, [(32, 32)] * 2, {}
# On average over the outputs, which have different numbers of inputs.
for window, step in ((1, 2), (3, 2), (5, 3)):
    up, shapes = free(ops.conv_transpose, strides=step), [(2, 64, 8), (window, 8, 16)]
    TABLE[f"conv_transpose of {window} by {step}"] = up, shapes, {"bias": window / 64}
# With windows of 2 and strides of 1, an entry at the border is in one, every other in two.
for step, size, bias in ((1, 64, 2 / 64), (2, 64, 0), (3, 60, 0)):
    pool = free(ops.avg_pool, window_shape=(2, 2), strides=(step, step))
    TABLE[f"avg_pool by {step}"] = pool, [(size, size, 2)], {"bias": bias}
# At this width the logits of attention are normal up to terms of order 1 / d.
for causal in (False, True):
    attend = free(ops.dot_product_attention, is_causal=causal)
    TABLE[f"attention, causal {causal}"] = attend, [(1, 16, 2, 64)] * 3, {"bias": 2 / 64}


OFTEN = {"dense", "einsum", "embed", "conv", "add", "softmax", "silu_glu", "layer_norm"}
OFTEN |= {"attention, causal True", "conv_transpose of 3 by 2", "avg_pool by 3"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.slow) for n in TABLE]
)
def test_unit_variance(name: str) -> None:
    op, shapes, options = TABLE[name]
    assert_unit(op, *shapes, **options)


def smooth(x: Any, w: Any) -> Any:
    return x @ w + jnp.roll(x @ w, 1, axis=0)


def square(pred: Any, target: Any) -> Any:
    return jnp.mean(jnp.square(pred - target))


@pytest.mark.parametrize(
    ("f", "shapes", "unit"),
    [(smooth, [(32, 32), (32, 48)], None), (square, [(256,), (256,)], (False, True, True))],
)
def test_functions_made_ops(f: Any, shapes: Any, unit: Any) -> None:
    example = [np.zeros(shape, np.float32) for shape in shapes]
    op = ops.unit_scaled(f, example, constraint=None, seeds=64)
    assert_unit(op, *shapes, unit=unit, seeds=64)


RNG = np.random.default_rng(0)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


FEW, MANY = drawn(3, 8), drawn(96, 8)
WIDE, FINE = drawn(2, 4, 4, 4), drawn(2, 12, 12, 4)
IDS, MORE = jnp.arange(3) % 16, jnp.arange(96) % 16
COUNTS = jnp.arange(96) % 5 > 0


def of(y: Any) -> jax.Array:
    """Return a loss whose gradients do not cancel when they are summed over items."""
    y = to_array(y)
    return jnp.sum(jnp.sin(y + jnp.arange(y.size).reshape(y.shape) / y.size))


def twice(f: Callable[..., Any], first: Any, second: Any) -> Callable[..., Any]:
    """Check that gradients are proportional, with any constants."""
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


# Functions of a weight: op, the same in plain JAX, two inputs, and the shape of the weight.
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
RARELY = {"einsum", "convolution", "bias", "losses", "mean squares"}


def cosine(a: Any, b: Any) -> float:
    a, b = np.ravel(a), np.ravel(b)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize(
    "names", [RARELY ^ PROGRAMS.keys(), pytest.param(RARELY, marks=pytest.mark.slow)]
)
def test_the_gradient_of_weights_in_two_places_has_the_true_direction(names: set[str]) -> None:
    def run(unit: Any, plain: Any, w: jax.Array) -> Any:
        with batch_size(96):
            named = jax.value_and_grad(unit)(w)
        # Without it, each call has its own constant.
        return named, jax.value_and_grad(plain)(w), jax.grad(unit)(w)

    programs = {name: PROGRAMS[name] for name in sorted(names)}
    table = {n: (functools.partial(run, *fs), w) for n, (*fs, w) in programs.items()}
    for name, ((value, grad), (expected, true), apart) in compute(table).items():
        with entry(name):
            np.testing.assert_allclose(value, expected, rtol=1e-5)
            assert cosine(grad, true) > 1 - 1e-6
            assert cosine(apart, true) < 1 - 1e-4
