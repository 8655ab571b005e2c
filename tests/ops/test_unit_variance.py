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
# Groups of different sizes, one of them empty.
GROUPS = ops.Groups(jnp.array([12, 0, 3, 21, 8, 16]), rows=60, groups=6)
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
    "grouped": (functools.partial(ops.grouped_dense, groups=GROUPS), [(60, 16), (6, 16, 16)], {}),
    "max_pool": (
        centred(functools.partial(ops.max_pool, window_shape=(3,), strides=(2,))),
        [(8, 65, 8)],
        {"bias": 2 / 65},
    ),
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
for causal, mult, dim in ((False, 1.0, 64), (True, 1.0, 64), (False, 8.0, 256), (True, 8.0, 256)):
    attend = free(ops.dot_product_attention, is_causal=causal, mult=mult)
    name, bias = f"attention, causal {causal}, mult {mult}", (1 + mult**2 / dim**0.5) * 2 / dim
    TABLE[name] = attend, [(1, 24, 2, dim)] * 3, {"bias": bias}


OFTEN = {"dense", "einsum", "embed", "conv", "add", "softmax", "silu_glu", "layer_norm"}
OFTEN |= {"grouped", "max_pool", "attention, causal True, mult 8.0", "avg_pool by 3"}
OFTEN |= {"conv_transpose of 3 by 2"}


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


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(normal("drawn", shape)[0], jnp.float32)


ITEMS = 96
FEW, MANY = drawn(3, 8), drawn(ITEMS, 8)
IDS = jnp.arange(ITEMS) % 16


def entropy(x: Any, w: Any) -> Any:
    labels = IDS[: len(x)]
    return ops.softmax_cross_entropy(ops.dense(x, w), labels, where=labels > 0)


def chunked(x: Any, w: Any) -> Any:
    labels = IDS[: len(x)]
    return ops.readout_cross_entropy(x, w, labels, where=labels > 0, chunk_size=2)


def squares(x: Any, w: Any) -> Any:
    return ops.mse_loss(ops.dense(x, w), jnp.ones((len(x), 16)))


ROOT = (3 / ITEMS) ** 0.5
# Functions of a weight, its shape, and two inputs with the expected ratios of their gradients.
LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any, tuple[float, float]]] = {
    "dense": (ops.dense, (8, 16), (FEW, MANY), (ROOT, 1)),
    "einsum": (functools.partial(ops.einsum, "bi,io->bo"), (8, 16), (FEW, MANY), (ROOT, 1)),
    # Losses omit the 1 / N of their mean: of 2 and 90 items that count, or of all elements.
    "cross entropy": (entropy, (8, 16), (FEW, MANY), (ROOT * ITEMS / 2, ITEMS / 90)),
    "readout": (chunked, (8, 16), (FEW, MANY), (ROOT * ITEMS / 2, ITEMS / 90)),
    "mean square": (squares, (8, 16), (FEW, MANY), (ROOT * ITEMS / 48, ITEMS / 1536)),
}


@pytest.mark.slow
def test_inside_batch_size_gradients_of_several_calls_have_one_constant() -> None:
    """The constant of a call with so many items; without it, that of the number of items."""

    def run(op: Any, inputs: Any, w: jax.Array) -> Any:
        def results() -> Any:
            loss = lambda w, x: jnp.sum(jnp.sin(to_array(op(x, w))))  # noqa: E731
            return [jax.value_and_grad(loss)(w, x) for x in inputs]

        with batch_size(ITEMS):
            inside = results()
        return inside, results()

    table = {n: (functools.partial(run, op, xs), drawn(*s)) for n, (op, s, xs, _) in LAYERS.items()}
    for name, (inside, apart) in compute(table).items():
        ratios = LAYERS[name][-1]
        for (value, grad), (same, own), ratio in zip(inside, apart, ratios, strict=True):
            with entry(name):
                np.testing.assert_allclose(value, same, rtol=1e-6)
                np.testing.assert_allclose(grad, ratio * np.asarray(own), rtol=1e-5, atol=1e-5)
