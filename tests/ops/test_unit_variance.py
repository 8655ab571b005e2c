"""Results and gradients of standard normal inputs have mean square 1."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops

from .conformance import data_and_scale, normal


def assert_unit(
    op: Callable[..., Any],
    *shapes: tuple[int, ...],
    unit: Sequence[bool] | None = None,
    bias: float = 0.0,
    trials: int = 64,
) -> None:
    """Output and gradients of standard normal inputs have mean square 1.

    The tolerance is five standard errors of the mean over trials, plus a stated bias.
    """

    def apply(*args: jax.Array) -> jax.Array:
        return data_and_scale(op(*args))[0]

    def trial(cotangent: jax.Array, *args: jax.Array) -> list[jax.Array]:
        y, vjp = jax.vjp(apply, *args)
        return [jnp.mean(jnp.square(a)) for a in (y, *vjp(cotangent))]

    out = jax.eval_shape(apply, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    samples = [
        a.astype(np.float32) for a in normal("unit", *((trials, *s) for s in (out.shape, *shapes)))
    ]
    squares = np.asarray(jax.jit(jax.vmap(trial))(*samples))
    for index, square in enumerate(squares):
        if unit is None or unit[index]:
            error = square.std(ddof=1) / np.sqrt(trials)
            assert error < 0.03, f"too few samples to tell: array {index}, standard error {error}"
            assert abs(square.mean() - 1) <= 5 * error + bias, (index, square.mean(), error)


def free(op: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The op without a constraint, so that gradients are unit too."""
    return functools.partial(op, constraint=None, **options)


def centred(op: Callable[..., Any]) -> Callable[..., Any]:
    """Factors divide by the standard deviation, and leave the mean where it is."""

    def f(x):
        y = op(x, constraint=None).data
        return y - jax.lax.stop_gradient(y.mean())

    return f


def with_gain(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, gain: op(x, 1 + gain - jax.lax.stop_gradient(gain))


def heads(x, w, b):
    return ops.einsum("btd,dhk->bthk", x, w, b - jax.lax.stop_gradient(b))


KEY, IDS = jax.random.key(3), np.random.default_rng(0).integers(0, 64, (8, 32))
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
    "embed": (functools.partial(ops.embed, IDS), [(64, 16)], {"unit": LAST}),
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
# Of windows of 2 at strides of 1, an entry at the border is in one, every other in two.
for step, size, bias in ((1, 64, 2 / 64), (2, 64, 0), (3, 60, 0)):
    pool = free(ops.avg_pool, window_shape=(2, 2), strides=(step, step))
    TABLE[f"avg_pool by {step}"] = pool, [(size, size, 2)], {"bias": bias}
# At this width the logits of attention are normal up to terms of order 1 / d.
for causal in (False, True):
    attend = free(ops.dot_product_attention, is_causal=causal)
    TABLE[f"attention, causal {causal}"] = attend, [(1, 16, 2, 64)] * 3, {"bias": 2 / 64}


@pytest.mark.parametrize("name", TABLE)
def test_unit_variance(name: str) -> None:
    op, shapes, options = TABLE[name]
    assert_unit(op, *shapes, **options)
