"""Scales and dtypes of the results of every op, gradients in 8 bits, and refused operands."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale import ops
from unitscale.core import ScaledArray

from .conformance import pulled

KEY, IDS = jax.random.key(3), np.array([2, 0])
dropout = functools.partial(ops.dropout, rate=0.5, key=KEY)
branch = functools.partial(ops.residual_add, tau=0.75)
rotary = functools.partial(ops.rotary, positions=np.arange(3))
embed = functools.partial(ops.embed, IDS)
avg_pool, max_pool = (functools.partial(f, window_shape=(2,)) for f in (ops.avg_pool, ops.max_pool))
group_norm = functools.partial(ops.group_norm, num_groups=2)
GROUPS = ops.Groups(jnp.array([1, 1]), rows=2, groups=2)


def ones(*shape: int, scale: Any = None, dtype: Any = np.float32) -> Any:
    data = np.ones(shape, dtype)
    return data if scale is None else ScaledArray(data, np.asarray(scale, np.float32))


X, W, IMAGE, KERNEL = ones(2, 4), ones(4, 3), (2, 5, 3), ones(3, 3, 4, scale=0.5)
EIGHT, HEADS, ITEMS = ones(2, 4, scale=8), (2, 3, 2, 4), [[[[2]]], [[[4]]]]
# Op, operands, and the scale of the result.
SCALES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "dense of arrays": (ops.dense, (X, W), None),
    "dense": (ops.dense, (ones(2, 4, scale=4), ones(4, 3, scale=0.5)), 2),
    "channels": (ops.dense, (ones(2, 4, scale=4), ones(4, 3, scale=[[1, 2, 4]])), [4, 8, 16]),
    "rows": (ops.dense, (ones(2, 4, scale=[[2], [4]]), W), [2, 4]),
    "gelu": (ops.gelu, (EIGHT,), None),
    "softmax": (ops.softmax, (EIGHT,), None),
    "rms_norm": (ops.rms_norm, (EIGHT,), None),
    "relu": (ops.relu, (EIGHT,), 8),
    "dropout": (dropout, (EIGHT,), 8),
    "glu": (ops.silu_glu, (EIGHT, ones(2, 4, scale=4)), 8),
    "conv": (ops.conv, (ones(*IMAGE, scale=4), KERNEL, ones(4, scale=8)), 2),
    "avg_pool": (avg_pool, (ones(*IMAGE, scale=4),), 4),
    "max_pool": (max_pool, (ones(*IMAGE, scale=4),), 4),
    "embed": (embed, (ones(3, 2, scale=[[1], [2], [8]]),), [8, 1]),
    "rotary": (rotary, (ones(3, 2, 4, scale=8),), 8),
    "sum of arrays": (ops.add, (X, X), None),
    "sum": (ops.add, (EIGHT, EIGHT), 8),  # 128^1/2 = 11.3, rounded
    "sum of one": (ops.add, (EIGHT, X), 8),
    "sum with a number": (lambda x: ops.add(x, 3.0), (EIGHT,), 8),
    "residual": (lambda x: ops.residual(lambda x: x, x, 1.0), (EIGHT,), 8),
    "attention": (
        ops.dot_product_attention,
        (ones(*HEADS, scale=ITEMS), ones(*HEADS), ones(*HEADS, scale=ITEMS)),
        [2, 4],
    ),
}


def test_scales() -> None:
    found = compute({name: (op, *args) for name, (op, args, _) in SCALES.items()})
    for name, (*_, expected) in SCALES.items():
        with entry(name):
            scale = found[name].scale
            assert (scale is None) == (expected is None)
            if scale is not None:
                np.testing.assert_array_equal(np.squeeze(scale), expected)


OPS: dict[str, tuple[Callable[..., Any], *tuple[tuple[int, ...], ...]]] = {
    "dense": (ops.dense, (2, 4), (4, 3), (3,)),
    "readout": (ops.readout, (2, 4), (4, 3)),
    "matmul": (ops.matmul, (2, 4), (4, 3)),
    "einsum": (functools.partial(ops.einsum, "ab,bc->ac"), (2, 4), (4, 3)),
    "lora": (ops.lora, (2, 4), (4, 3), (3, 5)),
    "grouped_dense": (functools.partial(ops.grouped_dense, groups=GROUPS), (2, 4), (2, 4, 3)),
    "conv": (ops.conv, IMAGE, (3, 3, 4), (4,)),
    "avg_pool": (avg_pool, IMAGE),
    "max_pool": (max_pool, IMAGE),
    "gelu": (ops.gelu, (2, 4)),
    "relu": (ops.relu, (2, 4)),
    "silu_glu": (ops.silu_glu, (2, 4), (2, 4)),
    "softmax": (ops.softmax, (2, 4)),
    "dropout": (dropout, (2, 4)),
    "embed": (embed, (3, 2)),
    "rotary": (rotary, (3, 2, 4)),
    "add": (ops.add, (2, 4), (4,)),
    "residual_add": (branch, (2, 4), (2, 4)),
    "gated_update": (ops.gated_update, (2, 4), (2, 4), (2, 4)),
    "layer_norm": (ops.layer_norm, (2, 4), (4,), (4,)),
    "rms_norm": (ops.rms_norm, (2, 4), (4,)),
    "group_norm": (group_norm, (2, 4)),
    "batch_norm": (ops.batch_norm, (2, 4)),
    "dot_product_attention": (ops.dot_product_attention, HEADS, HEADS, HEADS),
    "route": (
        lambda x: ops.mixture(lambda rows, *_: rows, x, ops.route(x, jnp.eye(4), 2), ()),
        (1, 4),
    ),
}


FLAT = "softmax", "dot_product_attention"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_results_and_gradients_have_the_dtype_of_the_operands(dtype: str) -> None:
    """Results of 8-bit operands are bfloat16, and gradients in 8 bits saturate."""
    pull = functools.partial(pulled, cotangent=3e4)
    table = {
        name: (functools.partial(pull, op), *(ones(*s, dtype=dtype) for s in shapes))
        for name, (op, *shapes) in OPS.items()
    }
    narrow = dtype.startswith("float8")
    run = compute if narrow else lambda table: {n: jax.eval_shape(*row) for n, row in table.items()}
    for name, (y, grads) in run(table).items():
        with entry(name):
            assert y.dtype == (jnp.bfloat16 if narrow else dtype)
            assert {g.dtype for g in grads} == {jnp.dtype(dtype)}
            if narrow:
                most = [np.abs(np.float32(g)).max() for g in grads]
                assert np.isfinite(most).all()
                # A constant cotangent has no gradient through norms and softmax.
                assert set(most) == {448.0} or "norm" in name or name in FLAT


FLOAT32, FLOAT16, BYTE = np.float32, np.float16, jnp.float8_e4m3fn
MIXED: list[tuple[str, tuple[Any, ...], str]] = [
    *((op, (jnp.bfloat16, FLOAT32), "float32") for op in ("readout", "matmul")),
    *((op, (FLOAT16, jnp.bfloat16), "float32") for op in ("readout", "matmul")),
    *((op, (BYTE, FLOAT32), "float32") for op in ("readout", "matmul")),
    *((op, (jnp.float8_e5m2, FLOAT16), "float32") for op in ("readout", "matmul")),
    ("conv", (FLOAT16, FLOAT32, FLOAT32), "float16"),
    ("silu_glu", (jnp.bfloat16, FLOAT32), "float32"),
    ("add", (FLOAT16, FLOAT32), "float32"),
    # The stream's dtype is that of the skip connection.
    ("residual_add", (FLOAT16, FLOAT32), "float32"),
    ("residual_add", (FLOAT32, FLOAT16), "float16"),
    ("layer_norm", (FLOAT16, FLOAT32, FLOAT32), "float16"),
    ("dot_product_attention", (FLOAT32, FLOAT32, FLOAT16), "float16"),
]


def test_operands_of_several_dtypes() -> None:
    for name, dtypes, expected in MIXED:
        op, *shapes = OPS[name]
        args = [ones(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        with entry((name, *dtypes)):
            y, grads = jax.eval_shape(functools.partial(pulled, op), *args)
            assert y.dtype == expected
            assert [g.dtype for g in grads] == [jnp.dtype(dtype) for dtype in dtypes]


half = functools.partial(np.full, dtype=FLOAT16)
LARGE = np.concatenate([half((1, 3), 2048), half((49, 3), 1)])


def test_float16_is_summed_wide() -> None:
    """Sums beyond 65504, or of ones that 2048 would lose, are multiplied by the factor first."""

    def grad(op: Callable[..., Any], x: Any, cotangent: Any) -> Any:
        return pulled(op, x, cotangent=cotangent)[1][0]

    many = functools.partial(ops.add, ones(100, 2, dtype=FLOAT16), constraint=None)
    rows, one = functools.partial(ops.embed, np.zeros(50, int)), half((1, 3), 1)
    table = {
        "add": (lambda x: ops.add(x, x).data, half(2, 40000), 80000 * 0.5**0.5),
        "gradient of add": (functools.partial(grad, many), half(2, 1), half((100, 2), 1000), 1e4),
        "conv": (
            lambda x, w: ops.conv(x, w, padding="VALID").data,
            half((1, 8, 16), 50),
            half((3, 16, 1), 40),
            96000 * 48**-0.5,
        ),
        "pool": (lambda x: ops.avg_pool(x, (4,)).data, half((4, 1), 30000), 60000),
        "rows": (functools.partial(grad, rows), one, half((50, 3), 2000), 1e5 * 0.02**0.5),
        "ones": (functools.partial(grad, rows), one, LARGE, 2097 * 0.02**0.5),
    }
    for name, found in compute({name: row[:-1] for name, row in table.items()}).items():
        np.testing.assert_array_equal(found, FLOAT16(table[name][-1]), name)


def test_scales_that_vary_do_not_widen() -> None:
    each = np.float32([1, 2, 4, 8])
    for name in ("dense", "relu", "softmax", "rotary", "add", "layer_norm", "conv"):
        op, *shapes = OPS[name]
        args = [ones(*shape, dtype=FLOAT16) for shape in shapes]
        with entry(name):
            varying = ScaledArray(args[0], each[: shapes[0][-1]])
            assert jax.eval_shape(op, varying, *args[1:]).dtype == FLOAT16


LABELS = np.array([0, 2])
# Losses, and operands that are not the first.
REFUSED: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("readout", "kernel", lambda bad: ops.readout(X, bad)),
    ("embed", "table", lambda bad: ops.embed(IDS, bad)),
    ("dot_product_attention", "k", lambda bad: ops.dot_product_attention(ones(*HEADS), bad, X)),
    ("softmax_cross_entropy", "logits", lambda bad: ops.softmax_cross_entropy(bad, LABELS)),
    ("mse_loss", "target", lambda bad: ops.mse_loss(X, bad)),
    ("readout_cross_entropy", "x", lambda bad: ops.readout_cross_entropy(bad, W, LABELS)),
    *(
        (name, r"\w+", lambda bad, op=op, rest=rest: op(bad, *(ones(*shape) for shape in rest)))
        for name, (op, _, *rest) in OPS.items()
    ),
]


@pytest.mark.parametrize(
    ("bad", "got"), [(np.ones((2, 4), bool), "bool"), (None, "NoneType"), ("x", "str")]
)
def test_operands_that_are_not_floating(bad: Any, got: str) -> None:
    for op, name, call in REFUSED:
        match = rf"unitscale\.ops\.{op}: {name} must be a floating array or .* got {got}"
        with entry(op), pytest.raises(TypeError, match=match):
            call(bad)
