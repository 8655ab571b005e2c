"""Dot-product attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.refusals import refuses
from unitscale import ops, rules
from unitscale.core import ScaledArray
from unitscale.ops import _attention_kernels
from unitscale.parallel import make_mesh

from .conformance import (
    DTYPES,
    TRANSFORMS,
    assert_scales_are_constants,
    assert_unit,
    check,
    normal,
    pulled,
)

BATCH, TIME, HEADS, DIM = 1, 3, 2, 4
SHAPE = (BATCH, TIME, HEADS, DIM)
MASK = np.array([[True, False, True], [True, True, False], [False, True, True]])
# Logits, weights and result are each rounded to 16 bits.
SLACK = {"float32": 1, "float16": 4, "bfloat16": 4}


def attention(q, k, v, mask=None, is_causal=False, mult=1.0):
    groups = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    logits = mult / q.shape[-1] * np.einsum("bthd,bshd->bhts", q, k)
    allowed = np.ones(logits.shape, bool) if mask is None else np.broadcast_to(mask, logits.shape)
    if is_causal:
        allowed = allowed & np.tril(np.ones(logits.shape[-2:], bool))
    weights = np.exp(logits - logits.max(-1, keepdims=True)) * allowed
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "mask": {"mask": MASK, "mult": 4.0},
    "causal mask": {"mask": MASK | np.eye(3, dtype=bool), "is_causal": True, "mult": 2.0},
}


def factors(source: int = TIME, **kwargs):
    kwargs = {"is_causal": False, **kwargs}
    kwargs.pop("mask", None)
    return rules.dot_product_attention(DIM, source, **kwargs)


def attends(q, k, v, dtype="float32", mult=1.0, mask=None, is_causal=False, **options) -> None:
    """Checks attention against the reference; more options are those of `check`."""
    given = {"mask": mask, "is_causal": is_causal, "mult": mult}
    found = factors(k[1], mult=mult, is_causal=is_causal)
    check(
        functools.partial(ops.dot_product_attention, **given),
        functools.partial(attention, **given),
        normal("attends", q, k, v),
        fwd=found.fwd,
        bwd=(found.fwd,) * 3,
        dtype=dtype,
        **{"slack": SLACK[dtype], **options},
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, dtype: str) -> None:
    every_way = name == "causal mask" and dtype != "bfloat16"
    transforms = TRANSFORMS["float32"] if every_way else ("jit",)
    attends(SHAPE, SHAPE, SHAPE, dtype, transforms=transforms, **CASES[name])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "source", "dtype"),
    [(4, 2, 3, "float32"), (2, 1, 5, "float32"), (3, 3, 2, "float32"), (4, 2, 5, "float16")],
)
def test_grouped_queries_and_cross_attention(heads, kv_heads, source, dtype) -> None:
    kv = (BATCH, source, kv_heads, DIM)
    attends((BATCH, TIME, heads, DIM), kv, kv, dtype)


@pytest.mark.parametrize(
    ("constraint", "dtype"),
    [("to_output_scale", "float32"), ("gmean", "float32"), (None, "float32"), (None, "float16")],
)
def test_constraint(constraint, dtype) -> None:
    found = factors(mult=2.0, constraint=constraint)
    check(
        functools.partial(ops.dot_product_attention, mult=2.0, constraint=constraint),
        functools.partial(attention, mult=2.0),
        normal("constraint", SHAPE, SHAPE, SHAPE),
        fwd=found.fwd,
        bwd=found.bwd,
        dtype=dtype,
        slack=SLACK[dtype],
    )


SCALED = [
    (4.0, 0.5, 2.0**12),
    (2.0**-6, 2.0**6, None),
    (None, 2.0, 1),
    (np.float32([0.5, 1, 2, 4]), np.float32([[1], [0.5]]), np.float32([1, 2, 4, 8])),
]


@pytest.mark.parametrize(
    ("scales", "dtype"),
    [*((s, "float32") for s in SCALED), (SCALED[0], "float16"), (SCALED[-1], "float16")],
)
def test_scales(scales, dtype) -> None:
    attends(SHAPE, SHAPE, SHAPE, dtype, scales=scales, slack=2 * SLACK[dtype])


def test_scale_and_dtype_of_the_output() -> None:
    q = jnp.ones((2, *SHAPE[1:]), jnp.float16)
    per_item = jnp.array([2.0, 4.0]).reshape(2, 1, 1, 1)
    y = ops.dot_product_attention(ScaledArray(q, per_item), q, ScaledArray(q, per_item))
    np.testing.assert_array_equal(y.scale, per_item)
    assert y.dtype == jnp.float16
    per_head = ScaledArray(q, jnp.array([[1.0], [2.0]]))
    wide, byte = jnp.ones_like(q, jnp.float32), jnp.ones_like(q, jnp.float8_e4m3fn)
    for args, dtype in (
        ((per_head, q, q), jnp.float16),
        ((wide, wide, q), jnp.float16),
        ((byte, byte, byte), jnp.bfloat16),
    ):
        assert jax.eval_shape(ops.dot_product_attention, *args).dtype == dtype
    scaled = [ScaledArray(wide, s) for s in (2.0, 4.0, 8.0)]
    assert_scales_are_constants(ops.dot_product_attention, *scaled)


def test_scales_beyond_float16() -> None:
    """q.scale * q.data would be 2^24; the logits are one-hot, as those of float32."""
    (q,) = normal("q", SHAPE)
    scaled = [ScaledArray(jnp.asarray(q, jnp.float16), s) for s in (2.0**12, 2.0**12, 1)]
    y = ops.dot_product_attention(*scaled)
    values = [np.float64(np.float16(q)) * s for s in (2.0**12, 2.0**12, 1)]
    np.testing.assert_allclose(y.data, factors().fwd * attention(*values), rtol=2**-9)


@pytest.mark.parametrize(
    "kwargs", [{}, {"is_causal": True}, {"mask": MASK}, {"mask": MASK, "is_causal": True}], ids=str
)
def test_float16_takes_the_plain_path_to_the_same_result(kwargs) -> None:
    args = [np.float16(a) for a in normal("path", (2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8))]
    (ct,) = normal("ct", args[0].shape)
    results = []
    for dtype in (jnp.float16, jnp.float32):
        q, k, v = (jnp.asarray(a, dtype) for a in args)
        f = functools.partial(ops.dot_product_attention, **kwargs)
        y, grads = pulled(f, q, k, v, cotangent=jnp.asarray(ct, dtype))
        results.append([y, *grads])
    for half, single in zip(*results, strict=True):
        assert half.dtype == jnp.float16
        # Roundings of the weights, the result, its factor and the cotangent.
        scale = np.abs(single).max()
        np.testing.assert_allclose(np.float32(half), single, atol=4 * 2**-10 * scale, rtol=0)


@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"mask": MASK}], ids=str)
@pytest.mark.parametrize("implementation", ["plain", "chunked"])
def test_strict_promotion(implementation, kwargs) -> None:
    """Where it is lowered too: JAX's own attention then promotes bfloat16."""
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in normal("strict", *[(2, 3, 4, 8)] * 3))
    f = functools.partial(ops.dot_product_attention, implementation=implementation, **kwargs)
    expected = pulled(f, q, k, v)
    with jax.numpy_dtype_promotion("strict"):
        value, pull = jax.vjp(jax.jit(lambda *x: f(*x).value), q, k, v)
        found = [value, *pull(jnp.ones_like(value))]
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, e = (np.asarray(x, np.float32) for x in (a, e))
        np.testing.assert_allclose(a, e, rtol=0, atol=2**-6 * np.abs(e).max())


def test_float16_gradients_overflow_only_where_they_are_beyond_its_range() -> None:
    """The weights' gradient, a sum over the head, is larger than those of q, k and v."""
    shape = (1, 64, 2, 64)
    q, k, v, ct = (np.float16(a) for a in normal("range", shape, shape, shape, shape))
    v, ct = np.float16(2) * abs(v), np.float16(400) * abs(ct)
    grads = []
    for dtype in (jnp.float16, jnp.float32):
        inputs = [jnp.asarray(a, dtype) for a in (3 * q, 3 * k, v)]
        ct = jnp.asarray(ct, dtype)
        grads.append(pulled(ops.dot_product_attention, *inputs, cotangent=ct)[1])
    for half, single in zip(*grads, strict=True):
        largest = np.abs(single).max()
        assert 1000 < largest < jnp.finfo(jnp.float16).max
        np.testing.assert_allclose(np.float32(half), single, atol=4 * 2**-10 * largest, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_fully_masked_rows_are_finite(dtype: str, is_causal: bool) -> None:
    mask = np.ones((TIME, TIME), bool)
    mask[0] = mask[1, :2] = False  # under a causal mask, row 1 sees nothing either
    q, k, v = (jnp.asarray(a, dtype) for a in normal("masked", SHAPE, SHAPE, SHAPE))
    f = functools.partial(ops.dot_product_attention, mask=mask, is_causal=is_causal)
    y, grads = pulled(f, q, k, v)
    assert all(np.isfinite(np.float32(a)).all() for a in (y, *grads))
    empty = (0, 1) if is_causal else (0,)
    mean = np.float32(v).mean(1) * factors(is_causal=is_causal).fwd
    for row in empty:
        np.testing.assert_allclose(np.float32(y)[:, row], mean, atol=2**-6)


MASKS = [(3, 3), (1, 3), (2, 1, 3), (4, 3, 3), (2, 1, 1, 3), (2, 4, 3, 3), (1, 1, 3, 3)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_broadcast(shape, dtype) -> None:
    q, k, v = normal("masks", (2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8))
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[..., 0] = True
    if len(shape) == 3:  # (heads or 1, time, source)
        mask = mask[:1] if shape[0] not in (1, 4) else mask
    f = jax.jit(functools.partial(ops.dot_product_attention, mask=mask))
    y = f(*(jnp.asarray(a, dtype) for a in (q, k, v)))
    expected = rules.dot_product_attention(8, 3, is_causal=False).fwd * attention(q, k, v, mask)
    np.testing.assert_allclose(
        np.float64(y.data), expected, atol=1e-5 if dtype == "float32" else 0.02
    )


def test_causality_seen_through_gradients() -> None:
    for dtype in ("float32", "float16"):
        q, k, v = (jnp.asarray(a, dtype) for a in normal("causal", SHAPE, SHAPE, SHAPE))

        def f(k, v, q=q, t=1):
            y = ops.dot_product_attention(q, k, v, is_causal=True)
            return jnp.sum(y.data[:, t].astype(jnp.float32))

        for grad in map(np.asarray, jax.jit(jax.grad(f, (0, 1)))(k, v)):
            assert (grad[:, :2] != 0).any()
            np.testing.assert_array_equal(grad[:, 2:], 0)


def test_scale_length_and_scale_causal() -> None:
    q, k, v = (jnp.asarray(a, jnp.float32) for a in normal("length", SHAPE, SHAPE, SHAPE))
    plain = ops.dot_product_attention(q, k, v, is_causal=True).data
    fixed = ops.dot_product_attention(q, k, v, is_causal=True, scale_length=64).data
    ratio = factors(64, is_causal=True).fwd / factors(TIME, is_causal=True).fwd
    np.testing.assert_allclose(fixed, ratio * plain, rtol=1e-5)
    # Causality that comes in through the mask, as with a cache of keys.
    mask = np.tril(np.ones((TIME, TIME), bool))
    masked = ops.dot_product_attention(q, k, v, mask=mask, scale_causal=True).data
    np.testing.assert_allclose(masked, plain, rtol=1e-5)


def test_dropout() -> None:
    q, k, v = (jnp.asarray(a, jnp.float32) for a in normal("dropout", *[(2, 8, 2, 4)] * 3))
    key, rate = jax.random.key(0), 0.36
    f = functools.partial(ops.dot_product_attention, q, k, dropout_rate=rate)
    plain = ops.dot_product_attention(q, k, v).data
    # Evaluation gives the expected value, which training averages to.
    np.testing.assert_allclose(f(v).data, 0.8 * plain, rtol=1e-5)
    keys = jax.random.split(key, 64)
    draws = jax.jit(jax.vmap(lambda key: f(v, dropout_key=key, deterministic=False).data))(keys)
    error = draws.std(0, ddof=1) / 8
    assert (np.abs(draws.mean(0) - 0.8 * plain) < 6 * error).all()
    assert (np.asarray(error) > 0.01).any()
    no_rate = ops.dot_product_attention(q, k, v, deterministic=False)
    np.testing.assert_array_equal(no_rate.data, plain)


@pytest.mark.parametrize(
    ("dtype", "rate", "implementation"),
    [
        ("float16", 0.0, "plain"),
        ("float32", 0.5, "plain"),
        ("bfloat16", 0.5, "plain"),
        ("float32", 0.0, "chunked"),
        ("bfloat16", 0.0, "chunked"),
    ],
)
def test_operands_that_vary_differently_in_shard_map(
    dtype: str, rate: float, implementation: ops.Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries of each device meet the values of all, whose gradient is summed over the devices."""
    monkeypatch.setattr(_attention_kernels, "_CHUNK", {"cpu": 2})
    q, v = (jnp.asarray(a, dtype) for a in normal("shard", (2, 4, 2, 4), (1, 4, 2, 4)))
    key = jax.random.key(0)
    options = {"is_causal": not rate, "dropout_rate": rate, "implementation": implementation}

    def grads(q, v):
        f = functools.partial(
            ops.dot_product_attention, dropout_key=key, deterministic=False, **options
        )
        return jax.grad(lambda *args: f(q, *args).data.astype("float32").sum(), (0, 1))(v, v)

    mesh = make_mesh({"d": 2}, devices=jax.devices()[:2])
    mapped = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=(P("d"), P()), out_specs=P()))
    each = [jax.jit(grads)(q[i : i + 1], v) for i in range(2)]
    for found, *parts in zip(mapped(q, v), *each, strict=True):
        expected = sum(np.asarray(part, np.float32) for part in parts)
        tolerance = 4 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_unit_variance(is_causal: bool) -> None:
    f = functools.partial(ops.dot_product_attention, is_causal=is_causal, constraint=None)
    # At this width the logits are normal up to terms of order 1 / d.
    assert_unit(f, *[(1, 16, 2, 64)] * 3, bias=2 / 64)


x = jnp.ones(SHAPE)
three = jnp.ones((BATCH, TIME, 3, DIM))
call = ops.dot_product_attention
ERRORS = [
    (ValueError, lambda: call(x[0], x, x), r"q must be .*got q \(3, 2, 4\)"),
    (ValueError, lambda: call(x, three, three), "kv_heads dividing heads"),
    (ValueError, lambda: call(x, x, x[:, :2]), r"dot_product_attention: q must be"),
    (ValueError, lambda: call(x, x[..., :2], x[..., :2]), "q must be"),
    (TypeError, lambda: call(x, x > 0, x), r"dot_product_attention: k must be a floating array"),
    (TypeError, lambda: call(x, x, x, mask=jnp.ones((3, 3))), "mask must .* dtype float"),
    (
        ValueError,
        lambda: call(x, x, x, mask=jnp.ones((3, 4), bool)),
        r"\(1, 2, 3, 3\); got mask \(3, 4\)",
    ),
    (ValueError, lambda: call(x, x, x, mask=jnp.ones((1,) * 5, bool)), "mask must broadcast"),
    (ValueError, lambda: call(x, x, x, dropout_rate=0.1, deterministic=False), "dropout_key"),
    (ValueError, lambda: call(x, x, x, dropout_rate=1.0), r"rate must be in \[0, 1\)"),
    (ValueError, lambda: call(x, x, x, mult=-1.0), "mult must be positive"),
    (ValueError, lambda: call(x, x, x, scale_length=0), "key_length must be at least 1"),
    (ValueError, lambda: call(x, x, x, constraint="to_left_grad_scale"), "to_left_grad_scale"),
]


test_errors = refuses(ERRORS)


FAR = [(100, -100, 0, "float32"), (100, -100, 0, "float16"), (100, -100, 0, "bfloat16")]
FAR += [(p, p, -p, dtype) for p in (100, -100) for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("q_power", "k_power", "shift", "dtype"), FAR)
def test_scales_far_from_1(q_power: int, k_power: int, shift: int, dtype: str) -> None:
    """Their product may be out of float32's range where the logits are not."""
    q, k, v = (jnp.asarray(a, dtype) for a in normal("far", SHAPE, SHAPE, SHAPE))
    wanted = ops.dot_product_attention(q, k, v).value
    far = (
        ScaledArray(a * 2.0 ** float(shift), jnp.float32(2.0**power))
        for a, power in ((q, q_power), (k, k_power))
    )
    found = jax.jit(ops.dot_product_attention)(*far, v).value
    # What is compiled in one program is rounded as what is run op by op up to the last place.
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=4 * eps, atol=4 * eps
    )
