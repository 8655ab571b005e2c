"""Losses: ordinary values and unit-scaled gradients, also with a readout in chunks."""

import dataclasses
import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.batching import compute, entry
from tests.parallel.devices import explicit_mesh, mesh_of, relative_error
from unitscale import ops
from unitscale.core import ScaledArray
from unitscale.ops._loss import in_one_pass, in_two_passes
from unitscale.quant import Block, Delayed, Dynamic, MatmulConfig, QuantState, Static

from .conformance import (
    assert_close,
    case,
    check_all,
    in_every_dtype,
    normal,
    pulled,
    slow,
    under_scales,
)

BATCH, IN, VOCAB, TOKENS = (2, 3), 6, 5, 6
LABELS = np.array([[0, 3, 1], [4, 4, 2]])
WHERE = np.array([[True, False, True], [False, False, True]])
FACTOR = VOCAB / (VOCAB - 1) ** 0.5
# Of the readout, backward over forward, for x and the kernel.
OF_X, OF_KERNEL = IN / VOCAB**0.5, IN / TOKENS**0.5


def cross_entropy(logits, mult=1.0, where=None, reduction="mean"):
    z = mult * logits
    z = z - z.max(-1, keepdims=True)
    picked = np.take_along_axis(z, LABELS[..., None], -1)[..., 0]
    losses = np.log(np.exp(z).sum(-1)) - picked
    where = np.ones(LABELS.shape, bool) if where is None else where
    if reduction == "none":
        return np.where(where, losses, 0)
    total = losses[where].sum()
    return total if reduction == "sum" else total / where.sum()


def through(x, kernel, *, transposed=False, **options):
    return cross_entropy(x @ (kernel.T if transposed else kernel) / IN, **options)


def loss(logits, **options):
    return ops.softmax_cross_entropy(logits, LABELS, **options)


def fused(x, kernel, **options):
    return ops.readout_cross_entropy(x, kernel, LABELS, **options)


def kept(where=None, reduction="mean", mult=1.0) -> float:
    """Return the gradient of the logits: without mult, and without the 1/N of the mean."""
    counted = TOKENS if where is None else where.sum()
    return FACTOR / mult * (counted if reduction == "mean" else 1)


LOGITS = normal("logits", (*BATCH, VOCAB))
X, KERNEL = (np.float32(a) for a in normal("readout", (*BATCH, IN), (IN, VOCAB)))
MEAN = case(loss, cross_entropy, LOGITS, fwd=1.0, bwd=(kept(),))
SQUARE = case(
    ops.mse_loss,
    lambda p, t: np.mean((p - t) ** 2),
    normal("mse", (3, 4), (3, 4)),
    fwd=1.0,
    bwd=(12 * 8**-0.5, 12 * 8**-0.5),
)
test_means = in_every_dtype({"cross_entropy": MEAN, "mse": SQUARE}, mapped=("cross_entropy", "mse"))
SCALED = [(2.0**-12, None), (None, 4.0), (np.float32([1, 2, 3, 4]), 2)]
test_scales_of_mse = under_scales(SCALED, {"mse": SQUARE})
SCALED = [2.0**-12, np.float32([[[1], [2], [0.5]]]), np.float32([3] * 5)]
test_scales = under_scales([(s,) for s in SCALED], {"cross_entropy": MEAN}, slack=4)


def test_reductions() -> None:
    cases = {}
    for where, reduction in ((WHERE, "mean"), (None, "sum"), (WHERE, "sum"), (WHERE, "none")):
        how = {"mult": 0.25, "where": where, "reduction": reduction}
        op, reference = (functools.partial(f, **how) for f in (loss, cross_entropy))
        name = reduction, where is None
        cases[name] = case(op, reference, LOGITS, fwd=1.0, bwd=(kept(**how),))
    check_all(cases)


# dtype, tied, where, tokens of a chunk (4 does not divide 6), scales, further options.
PER_TOKEN = np.float32([[[1], [2], [0.5]], [[4], [1], [2**-3]]])
PER_CLASS = np.float32([[1, 2, 4, 0.5, 1]])
TABLE: list[tuple[Any, ...]] = [
    ("float32", False, None, None, None, {}),
    ("float32", True, WHERE, 4, None, {}),
    ("float16", False, WHERE, 3, None, {}),
    ("bfloat16", True, None, 4, None, {}),
    ("float32", False, None, 2, (2.0**12, 2.0**-12), {}),
    ("float32", False, WHERE, 4, (PER_TOKEN, PER_CLASS), {}),
    ("float32", True, None, None, (None, PER_CLASS.T), {}),
    ("float32", True, WHERE, 4, None, {"reduction": "sum", "mult": 2.0}),
    ("float32", False, WHERE, 4, (4.0, 0.5), {"reduction": "none", "mult": 0.25}),
    ("float16", True, None, 2, None, {"reduction": "none"}),
]


@pytest.mark.parametrize("rows", [(1, 2, 5), slow((0, 3, 4, 6, 7, 8, 9))])
def test_readout_cross_entropy(rows) -> None:
    cases = {}
    for index in rows:
        dtype, tied, where, chunk, scales, options = TABLE[index]
        how = {"where": where, **options}
        cases[index] = case(
            functools.partial(fused, chunk_size=chunk, transposed=tied, **how),
            functools.partial(through, transposed=tied, **how),
            normal("readout", (*BATCH, IN), (VOCAB, IN) if tied else (IN, VOCAB)),
            fwd=1.0,
            bwd=(kept(**how) * OF_X, kept(**how) * OF_KERNEL),
            dtype=dtype,
            scales=scales,
            mapped=index == 3,
            slack=4,
        )
    check_all(cases)


CONFIGS = {
    "plain": None,
    "unit": MatmulConfig(),
    "unit, e5m2": MatmulConfig(cotangent="float8_e5m2"),
    "dynamic": MatmulConfig(cotangent="float8_e5m2", strategy=Dynamic()),
    "channel": MatmulConfig(strategy=Dynamic("channel")),
    "static": MatmulConfig(strategy=Static(0.5)),
    "delayed": MatmulConfig(cotangent="float8_e5m2", strategy=Delayed()),
    "block": MatmulConfig(strategy=Block(4)),
}
# Config, dtype, tied, tokens of a chunk.
OFTEN = [
    ("delayed", "float32", True, 4),
    ("unit, e5m2", "bfloat16", False, 3),
    ("plain", "float16", True, None),
]
RARELY = [
    ("plain", "float32", True, 4),
    ("plain", "bfloat16", False, 3),
    ("delayed", "bfloat16", False, 3),
    ("delayed", "float16", True, None),
    ("unit, e5m2", "float32", True, 4),
    ("unit", "float32", True, 4),
    ("dynamic", "bfloat16", False, 3),
    ("channel", "float16", True, None),
    ("static", "float32", True, 4),
    ("block", "bfloat16", False, 3),
]


def both(config: str, dtype: str, tied: bool, chunk: int | None) -> Any:
    """Return value and gradients by x, kernel and state, in one op and in two."""
    how = CONFIGS[config]
    stateful = how is not None and isinstance(how.strategy, Delayed)
    state = QuantState.create(how.strategy) if stateful else None
    where = WHERE if dtype == "float32" else None

    def one(x, kernel, state):
        options = {"chunk_size": chunk, "transposed": tied, "config": how, "state": state}
        return fused(x, kernel, where=where, **options)

    def two(x, kernel, state):
        kernel = kernel.T if tied else kernel
        return loss(ops.readout(x, kernel, config=how, state=state), where=where)

    def run(x, kernel, state):
        kernel = kernel.T if tied else kernel
        return tuple(jax.value_and_grad(f, (0, 1, 2))(x, kernel, state) for f in (one, two))

    return run, jnp.asarray(X, dtype), jnp.asarray(KERNEL, jnp.float32 if how else dtype), state


@pytest.fixture
def undithered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute gradients with two ops, readout and loss."""
    monkeypatch.setattr("unitscale.ops._readout_cross_entropy._mantissa_bits", lambda config: None)


@pytest.mark.usefixtures("undithered")
@pytest.mark.parametrize("rows", [OFTEN, slow(RARELY)], ids=["often", "rarely"])
def test_every_policy_is_that_of_the_two_ops(rows) -> None:
    programs = {row: both(*row) for row in rows}
    for row, (one, two) in compute(programs).items():
        with entry(row):
            (value, (*grads, seen)), (expected, (*wanted, by_two)) = one, two
            np.testing.assert_allclose(value, expected, rtol=4 * 2**-23)
            for name, got, right in zip(("x", "kernel"), grads, wanted, strict=True):
                assert got.dtype == right.dtype
                if row[3] is None:
                    np.testing.assert_array_equal(got, right)
                else:
                    assert_close(got, np.asarray(right, np.float64), row[1], name)
            if row[0] == "delayed":
                np.testing.assert_array_equal((seen.scale, by_two.scale), 0)
                # Two chunks of three tokens have as many elements as one of six.
                ours, theirs = (programs[row][-1].advance(s) for s in (seen, by_two))
                same = functools.partial(np.testing.assert_allclose, rtol=2**-7)
                jax.tree.map(same, ours, theirs)


@pytest.mark.usefixtures("undithered")
def test_logits_in_a_dtype_of_their_own() -> None:
    """The loss uses plain matmuls; gradients use quantized matmuls of its cotangent."""
    config = MatmulConfig(cotangent="float8_e5m2")

    def both(chunk, reduction, x, kernel):
        def mixed(x, kernel):
            how = {"chunk_size": chunk, "reduction": reduction, "config": config}
            return fused(x, kernel, logits_dtype="float32", **how).sum()

        def total(data, plain):
            return loss(plain.map_data(lambda _: data), reduction=reduction).sum()

        plain = ops.readout(x, kernel)
        wanted, cotangent = jax.value_and_grad(total)(plain.data, plain)
        y, vjp = jax.vjp(lambda *args: ops.readout(*args, config=config).data, x, kernel)
        quantized = total(y, plain)
        return jax.value_and_grad(mixed, (0, 1))(x, kernel), (wanted, vjp(cotangent)), quantized

    ways = (None, "mean"), (4, "none")
    results = compute({how: (functools.partial(both, *how), X, KERNEL) for how in ways})
    for found, expected, quantized in results.values():
        assert abs(found[0] - quantized) > 1e-3
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_dtypes() -> None:
    x, half = np.zeros((*BATCH, VOCAB), jnp.bfloat16), np.full(100, 300, np.float16)
    (value, grad), (square, by_pred) = compute(
        {
            "entropy": (jax.value_and_grad(loss), x),
            "square": (jax.value_and_grad(ops.mse_loss), half, -half),
        }
    ).values()
    assert (value.dtype, value.shape, grad.dtype) == (jnp.float32, (), jnp.bfloat16)
    np.testing.assert_allclose(value, np.log(VOCAB), rtol=1e-6)
    assert (square, square.dtype) == (600.0**2, jnp.float32)
    np.testing.assert_array_equal(by_pred, np.float16(1200 * 8**-0.5))
    with jax.enable_x64(True):
        x, kernel = normal("x64", (*BATCH, IN), (IN, VOCAB))
        f = functools.partial(fused, chunk_size=4)
        value, (dx, dkernel) = jax.jit(jax.value_and_grad(f, (0, 1)))(x, kernel)
        assert value.dtype == dx.dtype == dkernel.dtype == jnp.float64
        np.testing.assert_allclose(value, through(x, kernel), rtol=1e-14)


def test_small_gradients_survive_float16() -> None:
    """A probability of 3e-8 underflows in float16, but not after the factor 224."""
    vocab = 50000
    z = jnp.zeros((1, vocab), jnp.float16).at[0, 0].set(6.5)
    grad = np.asarray(jax.jit(jax.grad(ops.softmax_cross_entropy))(z, jnp.array([0])))
    p = 1 / (np.exp(6.5) + vocab - 1)
    np.testing.assert_allclose(np.float64(grad[0, 1]), p * vocab / (vocab - 1) ** 0.5, rtol=2**-10)


def test_no_token_counts_or_is_there() -> None:
    absent, nothing = np.zeros((0, 3), np.int32), np.ones((0, 3, IN))
    none = {"where": np.zeros(BATCH, bool)}
    of_none = functools.partial(ops.readout_cross_entropy, labels=absent)
    programs = {
        "logits": (functools.partial(loss, **none), *LOGITS),
        "readout": (functools.partial(fused, **none), X, KERNEL),
        "chunks": (functools.partial(fused, chunk_size=4, **none), X, KERNEL),
        "each": (functools.partial(fused, chunk_size=4, reduction="none", **none), X, KERNEL),
        "no logits": (lambda z: ops.softmax_cross_entropy(z, absent), nothing[..., :VOCAB]),
        "no readout": (lambda x, k: of_none(x, k), nothing, KERNEL),
    }
    table = {
        k: (functools.partial(pulled, f), *map(np.float32, a)) for k, (f, *a) in programs.items()
    }
    for name, results in compute(table).items():
        for array in jax.tree.leaves(results):
            np.testing.assert_array_equal(array, 0, err_msg=name)


def test_tokens_that_do_not_count_may_hold_anything() -> None:
    x, labels = np.ones((2, VOCAB), np.float32), np.where(WHERE, LABELS, -100)
    x[1] = np.nan
    one, how = {"where": np.array([True, False])}, {"where": WHERE, "chunk_size": 4}
    plain, readout = compute(
        {
            "plain": (
                jax.value_and_grad(
                    lambda x: ops.softmax_cross_entropy(x, np.array([0, -100]), **one)
                ),
                x,
            ),
            "readout": (
                jax.value_and_grad(lambda x: ops.readout_cross_entropy(x, KERNEL, labels, **how)),
                X,
            ),
        }
    ).values()
    np.testing.assert_allclose(plain[0], np.log(VOCAB), rtol=1e-6)
    assert np.isfinite(np.asarray(plain[1])).all()
    np.testing.assert_array_equal(plain[1][1], 0)
    np.testing.assert_allclose(readout[0], through(X, KERNEL, where=WHERE), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(readout[1])[~WHERE], 0)


def test_infinite_logits() -> None:
    """A class masked by -inf has probability and gradient 0."""
    x = np.float16([[0.0, -np.inf, 0.0, -np.inf, 0.0]])
    run, scales = jax.value_and_grad(ops.softmax_cross_entropy), (None, 4.0, 0.25)
    table = {scale: (run, ScaledArray(x, scale), np.array([2])) for scale in scales}
    # A scale for each of as few as two classes.
    two = ScaledArray(np.ones((1, 2), np.float32), np.float32([[1, 4]]))
    found = compute(table | {"masked": (run, x, np.array([1])), "two": (run, two, np.array([0]))})
    assert np.isposinf(found["masked"][0])
    np.testing.assert_allclose(found["two"][0], np.log1p(np.exp(3)), rtol=1e-6)
    for scale in scales:
        value, grad = found[scale]
        np.testing.assert_allclose(value, np.log(3), rtol=1e-6)
        expected = FACTOR * (scale or 1) * np.array([[1 / 3, 0, -2 / 3, 0, 1 / 3]])
        np.testing.assert_allclose(grad.data, expected, rtol=2**-10)


def test_labels() -> None:
    """Labels may have any integer dtype or be negative; outside of the classes the loss is NaN."""
    x, kernel = (np.float32(a) for a in normal("labels", (3, IN), (IN, 300)))
    ends = functools.partial(ops.readout_cross_entropy, x, kernel, reduction="none")
    logits = functools.partial(
        ops.softmax_cross_entropy, jax.jit(ops.readout)(x, kernel), reduction="none"
    )
    right = np.array([0, 1, 127])
    same = {dtype: right.astype(dtype) for dtype in ("uint8", "int8", "int16", "uint32")}
    same |= {"int": right, "from the end": np.array([-300, -299, -173], np.int16)}
    for f in (ends, logits):
        table = {name: (f, labels) for name, labels in same.items()}
        found = compute(table | {"outside": (f, np.array([299, 300, -301]))})
        np.testing.assert_array_equal(np.isfinite(found["outside"]), [True, False, False])
        for name in same:
            np.testing.assert_array_equal(found[name], found["int"])
    few = jax.jit(functools.partial(ends, vocab=290))
    found = few(np.array([289, 290, -291]))
    np.testing.assert_array_equal(np.isfinite(found), [True, False, False])
    np.testing.assert_array_equal(few(np.array([-1] * 3)), few(np.array([289] * 3)))


@pytest.mark.parametrize(("tied", "chunk"), [(False, 4), slow(True, None)])
def test_padding_has_no_probability_and_no_gradient(tied: bool, chunk: int | None) -> None:
    """Also if padding has nonzero entries."""
    wide = jnp.pad(KERNEL, ((0, 0), (0, 8 - VOCAB)), constant_values=50.0)
    turned = (lambda a: a.T) if tied else (lambda a: a)
    run = functools.partial(fused, transposed=tied, chunk_size=chunk)
    run = jax.jit(jax.value_and_grad(run, (0, 1)), static_argnames="vocab")
    expected, (dx, dkernel) = run(X, turned(KERNEL))
    value, (own_dx, own) = run(X, turned(wide), vocab=VOCAB)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(own_dx, dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(turned(own)[:, :VOCAB], turned(dkernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(turned(own)[:, VOCAB:], 0)


@pytest.mark.parametrize("axes", [slow({"data": 4}), {"data": 2, "tensor": 2}], ids=str)
def test_divided_by_the_compiler(axes: dict[str, int]) -> None:
    """With batch and classes sharded by the compiler, results equal those of one device."""
    x, kernel = (np.float32(a) for a in normal("divided", (8, 3, IN), (IN, 6)))
    labels = np.arange(24).reshape(8, 3) % 5

    def own(x, kernel, labels):
        return ops.readout_cross_entropy(x, kernel, labels, chunk_size=6, vocab=5)

    step, mesh = jax.value_and_grad(own, (0, 1)), mesh_of(**axes)
    batch = NamedSharding(mesh, P("data"))
    columns = NamedSharding(mesh, P(None, "tensor" if "tensor" in axes else None))
    divided = jax.jit(step, in_shardings=(batch, columns, batch))
    found, expected = divided(x, kernel, labels), jax.jit(step)(x, kernel, labels)
    for ours, one in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(ours, one) < 2**-20
    # Parts of what is on several devices would be sent from one to another.
    whole = jax.jit(functools.partial(ops.readout_cross_entropy, vocab=5))
    with jax.set_mesh(mesh):
        text = whole.trace(x, kernel, labels).lower(lowering_platforms=("cuda",)).as_text()
    assert ("stablehlo.slice" in text) == ("tensor" not in axes)


@pytest.mark.parametrize("dtype", ["float8_e5m2", slow("float8_e4m3fn")])
def test_gradients_in_8_bits_are_right_on_average(dtype: str) -> None:
    # The gradient of labels is about the same for each token, between numbers of the format.
    x = (1 + 0.02 * normal("labels", (2**13, 16))[0]).astype(jnp.bfloat16)
    kernel = np.float32(0.1 * normal("dither", (16, 64))[0])
    kernel[:, 0] = 3

    def of_labels(cotangent: str, reduction: Any, kernel: jax.Array) -> jax.Array:
        config = MatmulConfig(lhs="bfloat16", rhs="bfloat16", cotangent=cotangent)
        how: Any = {"labels": np.zeros(2**13, int), "reduction": reduction, "config": config}
        f = lambda kernel: ops.readout_cross_entropy(x, kernel, **how).sum()  # noqa: E731
        return jax.grad(f)(kernel)[:, 0]

    ways = itertools.product((dtype, "bfloat16"), ("mean", "none"))
    found = compute({way: (functools.partial(of_labels, *way), kernel) for way in ways})
    for reduction in ("mean", "none"):
        wide = found["bfloat16", reduction]
        np.testing.assert_allclose(found[dtype, reduction], wide, rtol=3e-3)


def test_gradients_are_dithered_once() -> None:
    """Rounding to 4 bits before the division by a block's scale would bias the gradient."""
    (x, kernel), labels = normal("once", (256, 32), (32, 64)), np.arange(256) % 64
    wide = MatmulConfig(lhs="bfloat16", rhs="bfloat16", cotangent="bfloat16")
    block = Block(16, 1, "e4m3fn")
    narrow = dataclasses.replace(wide, cotangent="e2m1", strategy=block, dither=True)
    f = lambda w, c: ops.readout_cross_entropy(x, w, labels, mult=8.0, config=c)  # noqa: E731
    exact, found = jax.jit(lambda w: [jax.grad(f)(w, c) for c in (wide, narrow)])(kernel)
    np.testing.assert_allclose(np.vdot(found, exact) / np.vdot(exact, exact), 1, atol=0.01)


LOWEST = float(np.finfo(np.float32).min)
ROWS_OF_LOGITS = [
    np.linspace(-90, 90, 1000),
    np.linspace(90, -90, 1000),
    [300.0, -300.0, 299.0, 0.0],
    [-300.0, -301.0, -1e30],
    [-3.0, -2.0, LOWEST, LOWEST],
    [5.0] * 7,
    [-2.5],
    [1.0, -np.inf, 2.0, -np.inf],
    [-np.inf, -np.inf],
    [1.0, np.inf, 2.0],
    [np.inf, 0.0, np.inf],
    [1.0, np.nan, 2.0],
    [np.nan, np.inf],
]


def test_the_normalizer_of_one_pass_is_that_of_two() -> None:
    """Each new maximum adds one rounding to the sum."""
    rows = {i: np.float32([row, row[::-1]]) for i, row in enumerate(ROWS_OF_LOGITS)}
    passes = lambda z: (in_one_pass(z), in_two_passes(z))  # noqa: E731
    for i, (one, two) in compute({i: (passes, z) for i, z in rows.items()}).items():
        np.testing.assert_array_equal(one.largest, two.largest)
        eps = np.finfo(np.float32).eps
        atol = 4 * rows[i].shape[1] * eps
        np.testing.assert_allclose(one.log_total, two.log_total, rtol=eps, atol=atol)


# Memory of logits in chunks, and sums that devices keep until the end.

WIDTH, CLASSES, CHUNK, DELAYED = 8, 4096, 32, Delayed()
READOUT = "unitscale.ops._readout_cross_entropy."
entropy = functools.partial(ops.readout_cross_entropy, transposed=True)


def compiled(tokens: int, chunk: int | None, config: MatmulConfig | None = None) -> Any:
    f = functools.partial(entropy, chunk_size=chunk, config=config)
    shapes = (
        jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((CLASSES, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    return jax.jit(jax.value_and_grad(f, (0, 1))).lower(*shapes).compile()


def largest(program: Any) -> int:
    """Return the size of the largest array in an optimized program."""
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\w*\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("config", [None, slow(MatmulConfig())], ids=["float32", "fp8"])
def test_memory_does_not_grow_with_the_logits(config: MatmulConfig | None) -> None:
    few, many = (compiled(n * CHUNK, CHUNK, config) for n in (4, 64))
    bytes_of = [program.memory_analysis().temp_size_in_bytes for program in (few, many)]
    # Only arrays with one row per token grow: x, dx, and one or two numbers for each token.
    own = 60 * CHUNK * (4 * WIDTH + 4) * 4
    assert bytes_of[1] <= bytes_of[0] + own
    assert own < 60 * CHUNK * CLASSES  # a byte of each logit
    assert largest(many) < CHUNK * CLASSES * 2
    whole = compiled(64 * CHUNK, 64 * CHUNK, config)
    assert largest(whole) >= 64 * CHUNK * CLASSES
    assert whole.memory_analysis().temp_size_in_bytes > 10 * bytes_of[1]


@pytest.mark.usefixtures("optimized")
def test_large_logits_are_cut_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 64 * CLASSES
    monkeypatch.setattr(READOUT + "MOST_LOGITS", limit)
    monkeypatch.setattr(READOUT + "LEAST_TOKENS", (1, 1))
    assert largest(compiled(1024, None)) == limit


@pytest.mark.parametrize(
    ("explicit", "spec", "count"),
    # Axes that are left to the compiler say no more than what they are called.
    [slow(False, P("data"), 2), (True, P("data", "context"), 4)],
    ids=str,
)
def test_every_device_has_as_many_logits_as_one_would(
    monkeypatch: pytest.MonkeyPatch, explicit: bool, spec: P, count: int
) -> None:
    """Chunks are fewer on several devices, because each adds to a sum over all devices."""
    monkeypatch.setattr(READOUT + "MOST_LOGITS", 8 * CLASSES)
    monkeypatch.setattr(READOUT + "LEAST_TOKENS", (1, 1))
    x, table, labels = jnp.ones((8, 8, WIDTH)), jnp.ones((CLASSES, WIDTH)), jnp.zeros((8, 8), int)
    grad = jax.grad(functools.partial(entropy, labels=labels), argnums=(0, 1))

    def chunks(*args: Any) -> int:
        # Functions are traced once; a new one each time.
        text = str(jax.make_jaxpr(lambda *args: grad(*args))(*args))
        return 1 + int((re.findall(r"length=(\d+)", text) or ["0"])[0])

    assert chunks(x, table) == 8
    mesh = (explicit_mesh if explicit else mesh_of)(data=2, context=2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec)), jax.device_put(table, P())
        assert chunks(*placed) == count
        found = jax.jit(grad)(*placed)
    for a, e in zip(found, jax.jit(grad)(x, table), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "reduction", "axes", "spec"),
    [
        (None, "mean", {"data": 4}, P("data")),
        (None, "none", {"context": 8}, P()),  # which does not divide 6 tokens
        (MatmulConfig(cotangent="e5m2"), "none", {"fsdp": 2, "context": 2}, P("fsdp", "context")),
        (MatmulConfig(strategy=DELAYED), "mean", {"data": 2, "context": 2}, P("data")),
        (None, "mean", {"fsdp": 4}, P("fsdp")),  # which divides classes
    ],
    ids=str,
)
def test_chunks_of_every_device_give_what_one_device_gives(
    config: MatmulConfig | None, reduction: Any, axes: dict[str, int], spec: P
) -> None:
    """Devices keep their sums, and the amax of delayed scaling, until the end."""
    is_delayed = config is not None and config.strategy == DELAYED
    state = QuantState.create(DELAYED) if is_delayed else None
    rng = np.random.default_rng(0)
    classes = 96 if axes == {"fsdp": 4} else 64
    x, table = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 6, 16), (classes, 16)))
    labels = rng.integers(0, classes, (8, 6))

    @jax.jit
    def gradients(x: Any, table: Any, state: Any) -> Any:
        def loss(x: Any, table: Any, state: Any) -> jax.Array:
            how: dict[str, Any] = {"config": config, "state": state, "reduction": reduction}
            losses = entropy(x, table, labels, chunk_size=16, **how)
            return jnp.sum(losses * jnp.arange(1.0, 7.0) if reduction == "none" else losses)

        value, (*grads, seen) = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, table, state)
        return value, grads, None if state is None else state.advance(seen)

    expected = gradients(x, table, state)
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        found = gradients(jax.device_put(x, NamedSharding(mesh, spec)), table, state)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        most = np.max(np.abs(e), where=np.isfinite(e), initial=0)
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4 * most)


@pytest.mark.usefixtures("optimized")
def test_devices_are_added_once() -> None:
    """The loop's body has no sum over devices."""
    mesh = mesh_of(data=4)
    x, labels = jnp.ones((8, 6, WIDTH)), jnp.zeros((8, 6), int)
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, P("data")))
        grad = jax.jit(jax.grad(functools.partial(entropy, labels=labels, chunk_size=16), (0, 1)))
        compiled = grad.lower(rows, jnp.ones((64, WIDTH))).compile()
    assert "all-reduce" in {c.kind for c in collectives(compiled)}
    parts = compiled.as_text().split("\n\n")
    assert any("while(" in part for part in parts)
    assert not any("all-reduce(" in part for part in parts if "ENTRY" not in part)
