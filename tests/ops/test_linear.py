"""Matmuls: dense, readout, matmul, einsum, lora and grouped dense layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute
from unitscale import ops
from unitscale.core import ScaledArray
from unitscale.quant import Block, Dynamic, MatmulConfig, Unit

from .conformance import (
    check_all,
    in_every_dtype,
    linear,
    normal,
    pulled,
    rounded,
    scaled,
    under_scales,
)

BATCH, IN, OUT, RANK = (2, 3), 5, 4, 3
ROWS = 6


def affine(x, kernel, bias=None, *, factor: float = 1.0):
    """Compute the layer; the bias is divided by the factor, as `check` multiplies by it."""
    y = x @ kernel
    return y if bias is None else y + bias / factor


def mean(constraint, *factors: float) -> float:
    a = np.asarray(factors)
    return {
        "to_grad_input_scale": a[1],
        "to_left_grad_scale": a[1],
        "to_right_grad_scale": a[-1],
        "gmean": np.prod(a) ** (1 / a.size),
        "hmean": 1 / np.mean(1 / a),
    }[constraint]


LAYERS = {
    # op, and the factors of the paper: forward, dx before the constraint, dkernel and dbias.
    "dense": (ops.dense, IN**-0.5, OUT**-0.5, ROWS**-0.5),
    "readout": (ops.readout, 1 / IN, OUT**-0.5, ROWS**-0.5),
}
# The reference divides the bias by fwd, and so does its derivative.
CASES = {
    f"{name}{', bias' * (count > 2)}": linear(
        op,
        functools.partial(affine, factor=fwd),
        normal(name, *((*BATCH, IN), (IN, OUT), (OUT,))[:count]),
        fwd=fwd,
        # The default constraints.
        bwd=(fwd if name == "dense" else dx, weight, weight * fwd)[:count],
    )
    for name, (op, fwd, dx, weight) in LAYERS.items()
    for count in (2, 3)
}
MATMUL = normal("matmul", (2, 2, 4), (2, 4, 3))
CASES["matmul"] = linear(ops.matmul, np.matmul, MATMUL, fwd=0.5, bwd=(0.5,) * 2)
OF_ITEMS = np.array([[[2.0]], [[4.0]]], np.float32), np.array([1, 0.5, 2], np.float32)
CASES["matmul, scales"] = functools.partial(CASES["matmul"], scales=OF_ITEMS)

# subscripts, x, kernel, bias; features in, out, rows
EINSUMS = {
    "dense": ("...a,ab->...b", (2, 3, 5), (5, 4), (4,), 5, 4, 6),
    "heads": ("btd,dhk->bthk", (2, 3, 5), (5, 2, 4), (2, 4), 5, 8, 6),
    "merge": ("bthk,hkd->btd", (2, 3, 2, 4), (2, 4, 5), (5,), 8, 5, 6),
    "turned": ("nta,hab->nthb", (2, 3, 5), (2, 5, 4), (2, 4), 5, 8, 6),
    "experts": ("ebi,eio->ebo", (2, 3, 5), (2, 5, 4), (2, 4), 5, 4, 3),
}


def einsum_case(name: str, count: int, **options):
    subscripts, x, kernel, bias, n_in, n_out, rows = EINSUMS[name]
    out = subscripts.partition("->")[2].replace("...", "xy")
    own = [c in subscripts.partition(",")[2].partition("->")[0] for c in out]

    def reference(x, w, b=None):
        y = np.einsum(subscripts, x, w)
        shape = [n if o else 1 for n, o in zip(y.shape, own, strict=True)]
        return y if b is None else y + b.reshape(shape) * n_in**0.5

    bwd = ((n_out if options else n_in) ** -0.5, rows**-0.5, (rows * n_in) ** -0.5)[:count]
    args = normal(name, x, kernel, bias)[:count]
    op = functools.partial(ops.einsum, subscripts, **options)
    return linear(op, reference, args, fwd=n_in**-0.5, bwd=bwd, slack=2)


CASES |= {f"einsum {name}": einsum_case(name, 2) for name in EINSUMS}
CASES |= {f"einsum {name}, bias": einsum_case(name, 3) for name in ("heads", "experts")}


def update(x, a, b, base=None):
    """Compute the layer; the base is divided by the factor, as `check` multiplies by it."""
    return x @ a @ b + (0 if base is None else base * (IN * RANK) ** 0.5)


UPDATE = (IN * RANK) ** -0.5
LORA = (*BATCH, IN), (IN, RANK), (RANK, OUT), (*BATCH, OUT)
CASES |= {
    name: linear(
        ops.lora,
        update,
        normal("lora", *LORA[:count]),
        fwd=UPDATE,
        bwd=(UPDATE, (ROWS * OUT) ** -0.5, (ROWS * IN) ** -0.5, UPDATE)[:count],
        slack=4,
    )
    for name, count in (("lora", 3), ("lora, base", 4))
}

SIZES, OF_ROWS = (3, 0, 2), [0, 0, 0, 2, 2]
GROUPS = ops.Groups(jnp.array(SIZES), rows=ROWS, groups=3)
GROUPED = (ROWS, IN), (3, IN, OUT), (3, OUT)


def grouped(x, kernel, bias=None):
    return ops.grouped_dense(x, kernel, GROUPS, bias)


def by_group(x, kernel, bias=None):
    """Compute the grouped layer; the last row belongs to no group."""
    y = np.einsum("ri,rio->ro", x[:5], kernel[OF_ROWS])
    y = y if bias is None else y + bias[OF_ROWS] * IN**0.5
    return np.concatenate([y, np.zeros((1, OUT))])


CASES |= {
    name: linear(
        grouped,
        by_group,
        normal("grouped", *GROUPED[:count]),
        fwd=IN**-0.5,
        bwd=(IN**-0.5, 0.5**0.5, (2 * IN) ** -0.5)[:count],
        slack=2,
    )
    for name, count in (("grouped", 2), ("grouped, bias", 3))
}
test_value_and_gradients = in_every_dtype(
    CASES,
    mapped=("dense, bias", "matmul", "einsum heads, bias", "lora, base", "grouped, bias"),
    wide=("dense", "readout", "lora", "grouped", *(name for name in CASES if "einsum" in name)),
)


SCALED = [(2.0**12, 2.0**-12, 0.25), (None, 8.0, 0.25), (0.25, None, 2.0)]
test_scales = under_scales(SCALED, {k: CASES[k] for k in ("dense, bias", "lora", "grouped")})
VARYING = [
    # Per row, per output channel: carried.
    ("dense", np.float32([[[0.5], [1], [2]]]), np.float32([1, 2, 4, 8])),
    # Per input channel, on either side: the largest is carried, the rest multiplied in.
    ("dense", np.float32([1, 2, 2**-12, 2**12, 0.75]), 2.0),
    ("dense", None, np.float32([[1], [0], [4], [2**-12], [2**12]])),
    ("einsum heads, bias", np.float32([1, 2, 4, 8, 16]), 2.0, None),
    ("lora, base", np.float32([[[1], [2], [64]]]), np.float32([1, 2, 4]), 2.0, 2.0),
    ("lora", None, None, np.float32([1, 2, 8, 4])),
    ("grouped, bias", np.float32([[1], [2], [64], [1], [8], [1]]), 0.5, np.float32([1, 2, 4, 1])),
    ("matmul", np.float32([1, 4, 0.5, 2]), None),
    ("matmul", None, np.float32([[1], [4], [0.5], [2]])),
]


def test_scales_that_vary() -> None:
    check_all(
        {
            (name, i): functools.partial(CASES[name], scales=scales)
            for i, (name, *scales) in enumerate(VARYING)
        }
    )


BATCHES = [((2,), ()), ((), (2,)), ((1, 3), (2, 1)), ((2, 1), (1,))]


def test_constraints_and_broadcasts() -> None:
    # The input gradient sums over the kernel's own axes.
    cases = {name: einsum_case(name, 2, constraint=None) for name in EINSUMS}
    for name, (op, output, dx, weight) in LAYERS.items():
        args = normal(name, (*BATCH, IN), (IN, OUT))
        for how in ("to_grad_input_scale", "hmean", None):
            factors = (output, dx) if how is None else (mean(how, output, dx),) * 2
            given = functools.partial(op, constraint=how)
            bwd = factors[1], weight
            cases[name, how] = linear(given, affine, args, fwd=factors[0], bwd=bwd)
    m, k, n = 2, 4, 3
    for left, right in BATCHES:
        size = np.prod(np.broadcast_shapes(left, right))
        factors = k**-0.5, (n * size / np.prod(left)) ** -0.5, (m * size / np.prod(right)) ** -0.5
        args = normal("matmul", (*left, m, k), (*right, k, n))
        op = functools.partial(ops.matmul, constraint=None)
        cases[left, right] = linear(op, np.matmul, args, fwd=factors[0], bwd=factors[1:])
    args = normal("matmul", (m, k), (k, n))
    for how in ("to_left_grad_scale", "to_right_grad_scale", "gmean"):
        fwd = mean(how, k**-0.5, n**-0.5, m**-0.5)
        op = functools.partial(ops.matmul, constraint=how)
        cases["matmul", how] = linear(op, np.matmul, args, fwd=fwd, bwd=(fwd, fwd))
    check_all(cases)


def test_scales_that_are_folded_into_the_data() -> None:
    x, w = np.ones((2, 4), np.float32), np.ones((4, 3), np.float32)
    row = ScaledArray(x.astype(np.float16), np.float32(2.0) ** np.array([14, 15, 15, 14]))
    operands = {
        "e8m0": (x, ScaledArray(w, np.asarray(8.0, jnp.float8_e8m0fnu))),
        "blocks": (x, ScaledArray(w, np.float32([[2, 4]]), block_shape=(4, 2))),
        # Along the contraction the scale goes into the data, which stays in the range of float16.
        "contraction": (row, w.astype(np.float16)),
    }
    found = compute({name: (ops.dense, *args) for name, args in operands.items()})
    np.testing.assert_array_equal(found["e8m0"].value, np.full((2, 3), 16))
    np.testing.assert_array_equal(found["blocks"].value[0], [4, 4, 8])
    assert found["contraction"].dtype == jnp.float16
    np.testing.assert_array_equal(found["contraction"].value, (2**15 + 2**16) * 0.5)


def test_einsum_with_a_column_and_in_fp8_is_dense() -> None:
    x, w = scaled(normal("column", (6, 4), (4,)), (None, None))
    a, b = scaled(normal("fp8", (2, 3, 16), (16, 2, 8)), (None, None), jnp.bfloat16)
    config = MatmulConfig()

    def in_fp8(op, *shape):
        return lambda x, w: op(x, w.reshape(shape), config=config).data.reshape(2, 3, 2, 8)

    column = functools.partial(ops.einsum, "ab,b->a")
    heads = functools.partial(ops.einsum, "btd,dhk->bthk")
    found = compute(
        {
            "column": (functools.partial(pulled, column), x, w),
            "dense": (functools.partial(pulled, lambda x, w: ops.dense(x, w[:, None])[:, 0]), x, w),
            "fp8 einsum": (in_fp8(heads, 16, 2, 8), a, b),
            "fp8 dense": (in_fp8(ops.dense, 16, 16), a, b),
            "fp8 matmul": (in_fp8(ops.matmul, 16, 16), a, b),
        }
    )
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(same, found["column"], found["dense"])
    for op in ("einsum", "matmul"):
        np.testing.assert_array_equal(found[f"fp8 {op}"], found["fp8 dense"])


def test_an_update_of_zero_leaves_the_base_as_it_is() -> None:
    x, a, b, base = (np.float16(v) for v in normal("zero", *LORA))
    given = {"plain": base, "scaled": ScaledArray(base, 2.0**9)}
    table = {name: (ops.lora, np.float32(x), a, 0 * b, value) for name, value in given.items()}
    for name, found in compute(table).items():
        assert found.dtype == jnp.float16
        np.testing.assert_array_equal(found.value, getattr(given[name], "value", base))


def test_groups_without_rows() -> None:
    x, kernel, bias = scaled(normal("empty", *GROUPED), (None,) * 3)
    loss = jax.grad(lambda *w: jnp.sum(grouped(x, *w).value ** 2), (0, 1))
    for grad in map(np.asarray, jax.jit(loss)(kernel, bias)):
        assert not np.any(grad[1])
        assert np.all(np.any(grad[::2], axis=-1))
    np.testing.assert_array_equal(GROUPS.of_rows(ROWS), [*OF_ROWS, 3])
    groups = ops.Groups(jnp.zeros(2, jnp.int32), rows=0, groups=2)
    none = functools.partial(ops.grouped_dense, groups=groups)
    assert jax.eval_shape(none, jnp.ones((0, 4)), jnp.ones((2, 4, 3))).shape == (0, 3)


def test_quantized_dense_against_a_manual_product() -> None:
    """Compare with the layer in float64 NumPy, with casts by ml_dtypes."""
    config = MatmulConfig(cotangent="float8_e5m2")
    x, w, b, dy = normal("fp8", (2, 3, 8), (8, 4), (4,), (2, 3, 4))
    x, dy = rounded(x, "bfloat16"), rounded(dy, "bfloat16")
    qx, qw = rounded(x, "float8_e4m3fn"), rounded(np.float32(w), "float8_e4m3fn")
    qdy = rounded(dy, "float8_e5m2")
    args = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32), jnp.asarray(b, jnp.float32)
    op = functools.partial(ops.dense, config=config)
    y, (dx, dw, db) = pulled(op, *args, cotangent=jnp.asarray(dy, jnp.bfloat16))
    assert [a.dtype.name for a in (y, dx, dw, db)] == ["bfloat16"] * 2 + ["float32"] * 2
    fwd, weight = 8**-0.5, 6**-0.5
    half = {"rtol": 2**-7, "atol": 2**-7}
    np.testing.assert_allclose(np.float64(y), fwd * (qx @ qw) + b, **half)
    np.testing.assert_allclose(np.float64(dx), fwd * (qdy @ qw.T), **half)
    expected = weight * np.einsum("bti,bto->io", qx, qdy)
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5)
    # The bias's gradient is a sum, not a product: its cotangent is not quantized.
    np.testing.assert_allclose(db, weight * dy.sum((0, 1)), rtol=1e-5, atol=1e-5)


STRATEGIES = {"unit": Unit(), "dynamic": Dynamic(), "block": Block()}


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        ("bfloat16", (None, 8.0)),
        ("float16", (2.0**-60, 2.0**100)),
        pytest.param("bfloat16", (2.0**-60, 2.0**100), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_kernels_scale_in_a_quantized_product(dtype: str, scales) -> None:
    """The scale is a factor of all three matmuls, except in float16."""
    x, w, dy = (jnp.asarray(a) for a in normal("fp8", (2, 16, 32), (32, 32), (2, 16, 32)))
    x, dy = x.astype(dtype), dy.astype(dtype)
    x_scale, w_scale = (None if s is None else jnp.float32(s) for s in scales)
    inside = dtype != "float16"

    def run(strategy, x, w, dy, x_scale, scale):
        def data(x, w):
            config = MatmulConfig(strategy=strategy)
            y = ops.dense(ScaledArray(x, x_scale), ScaledArray(w, scale), config=config)
            return y.data, y.scale

        y, vjp, scale = jax.vjp(data, x, w, has_aux=True)
        return scale, (y, *vjp(dy))

    found = compute(
        {
            (name, scale is None): (functools.partial(run, how), x, w, dy, x_scale, scale)
            for name, how in STRATEGIES.items()
            for scale in (w_scale, None)
        }
    )
    for name in STRATEGIES:
        scale, results = found[name, False]
        expected = x_scale if inside else w_scale * (1 if x_scale is None else x_scale)
        np.testing.assert_array_equal(1.0 if scale is None else scale, expected or 1.0)
        factor = np.float64(w_scale if inside else 1)
        for one, other in zip(results, found[name, True][1], strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(np.float64(one), np.float64(other) * factor, rtol=2**-7)


PRODUCTS = {
    "dense": (lambda x, w: ops.dense(x, w, jnp.zeros(2)), (3, 4), (4, 2)),
    "matmul": (ops.matmul, (2, 3, 4), (4, 5)),
    "conv": (ops.conv, (1, 5, 4), (3, 4, 2)),
}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_scales_of_products_stay_in_range(dtype: str) -> None:
    """The product of two scales, 2^200 or 2^-200, is out of float32's range; the values are not."""
    table = {}
    for name, (op, *shapes) in PRODUCTS.items():
        x, w = (a.astype(jnp.dtype(dtype)) for a in normal(name, *shapes))
        x[0] = 0  # and zeros stay zeros
        table[name, 0, 0] = op, ScaledArray(x), ScaledArray(w)
        for powers in ((100, 100), (-100, -100), (100, -100)):
            shift = x.dtype.type(2.0 ** float(-50 * np.sign(sum(powers))))
            moved = (ScaledArray(a * shift, 2.0**p) for a, p in zip((x, w), powers, strict=True))
            table[name, *powers] = op, *moved
    found = compute(table)
    for (name, *powers), y in found.items():
        total = sum(powers)
        if any(powers):
            assert float(y.scale) == 2.0 ** min(max(total, -126), 126)
        plain = np.asarray(found[name, 0, 0].value, np.float64)
        expected = plain * 2.0 ** (total - 100 * np.sign(total))
        np.testing.assert_array_equal(np.asarray(y.value, np.float64), expected)
