"""Readout and loss in one: the value and gradients of the two ops, whatever the chunks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.batching import chunks, compute, entry
from tests.parallel.devices import mesh_of, relative_error
from unitscale import batch_over, ops
from unitscale.core import ScaledArray
from unitscale.quant import Block, Delayed, Dynamic, MatmulConfig, QuantState, Static

from .conformance import TRANSFORMS, assert_close, check, normal

BATCH, IN, VOCAB = (2, 3), 6, 5
TOKENS = 6
LABELS = np.array([[0, 3, 1], [4, 4, 2]])
WHERE = np.array([[True, False, True], [False, False, True]])
FACTOR = VOCAB / (VOCAB - 1) ** 0.5  # of the loss
# Of the readout, backward over forward, for x and the kernel.
OF_X, OF_KERNEL = IN / VOCAB**0.5, IN / TOKENS**0.5


def reference(x, kernel, *, transposed=False, where=None, mult=1.0, reduction="mean"):
    """The loss in NumPy, in float64."""
    z = mult * (x @ (kernel.T if transposed else kernel)) / IN
    z = z - z.max(-1, keepdims=True)
    picked = np.take_along_axis(z, LABELS[..., None], -1)[..., 0]
    losses = np.log(np.exp(z).sum(-1)) - picked
    where = np.ones(LABELS.shape, bool) if where is None else where
    if reduction == "none":
        return np.where(where, losses, 0)
    return losses[where].sum() / (where.sum() if reduction == "mean" else 1)


def fused(x, kernel, **options):
    return ops.readout_cross_entropy(x, kernel, LABELS, **options)


# dtype, tied, where, tokens of a chunk (4 does not divide 6), scales, further options.
PER_TOKEN = np.float32([[[1], [2], [0.5]], [[4], [1], [2**-3]]])
PER_CLASS = np.float32([[1, 2, 4, 0.5, 1]])
TABLE: list[tuple[Any, ...]] = [
    ("float32", False, None, None, None, {}),
    ("float32", True, WHERE, 4, None, {}),
    ("float16", False, WHERE, 3, None, {}),
    ("bfloat16", True, None, 4, None, {}),
    ("float32", False, None, 2, (2.0**12, 2.0**-12), {}),
    ("float32", True, WHERE, 4, (2.0**-12, None), {}),
    ("float32", False, WHERE, 4, (PER_TOKEN, PER_CLASS), {}),
    ("float32", True, None, None, (None, PER_CLASS.T), {}),
    ("float32", False, WHERE, 4, None, {"mult": 0.25}),
    ("float32", True, WHERE, 4, None, {"reduction": "sum", "mult": 2.0}),
    ("float32", False, None, 1, None, {"reduction": "sum"}),
    ("float32", False, WHERE, 4, (4.0, 0.5), {"reduction": "none", "mult": 0.25}),
    ("float16", True, None, 2, None, {"reduction": "none"}),
]


@pytest.mark.parametrize(("dtype", "tied", "where", "chunk", "scales", "options"), TABLE)
def test_value_and_gradients(dtype, tied, where, chunk, scales, options) -> None:
    counted = TOKENS if where is None else where.sum()
    # The factor undoes mult; the 1/N of the mean is kept out of the backward.
    factor = FACTOR / options.get("mult", 1.0)
    factor *= counted if options.get("reduction", "mean") == "mean" else 1
    how = {"transposed": tied, "where": where, **options}
    check(
        functools.partial(fused, chunk_size=chunk, **how),
        functools.partial(reference, **how),
        normal("readout", (*BATCH, IN), (VOCAB, IN) if tied else (IN, VOCAB)),
        fwd=1.0,
        bwd=(factor * OF_X, factor * OF_KERNEL),
        dtype=dtype,
        scales=scales,
        transforms=TRANSFORMS["float32"] if not scales and chunk in (None, 4) else ("jit",),
        slack=4,
    )


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
POLICIES = [
    (config, dtype, tied, chunk)
    for config in CONFIGS
    for dtype, tied, chunk in [
        ("float32", True, 4),
        ("bfloat16", False, 3),
        ("bfloat16", False, None),
        ("float16", True, None),
    ]
]


def both(config: str, dtype: str, tied: bool, chunk: int | None) -> Any:
    """Value and gradients by x, kernel and state: in one op, and in two."""
    how = CONFIGS[config]
    stateful = how is not None and isinstance(how.strategy, Delayed)
    state = QuantState.create(how.strategy) if stateful else None
    where = WHERE if dtype == "float32" else None

    def one(x, kernel, state):
        return fused(
            x, kernel, where=where, chunk_size=chunk, transposed=tied, config=how, state=state
        )

    def two(x, kernel, state):
        logits = ops.readout(x, kernel.T if tied else kernel, config=how, state=state)
        return ops.softmax_cross_entropy(logits, LABELS, where=where)

    def run(x, kernel, state):
        kernel = kernel.T if tied else kernel
        return tuple(jax.value_and_grad(f, (0, 1, 2))(x, kernel, state) for f in (one, two))

    x, kernel = normal("policies", (*BATCH, IN), (IN, VOCAB))
    return run, jnp.asarray(x, dtype), jnp.asarray(kernel, jnp.float32 if how else dtype), state


@pytest.fixture
def undithered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients as of two ops, of which the loss does not know how its gradient is rounded."""
    monkeypatch.setattr("unitscale.ops._readout_cross_entropy._mantissa_bits", lambda config: None)


@pytest.mark.usefixtures("undithered")
@pytest.mark.parametrize("rows", chunks(POLICIES, 12))
def test_every_policy_is_that_of_the_two_ops(rows) -> None:
    for row, (one, two) in compute({row: both(*row) for row in rows}).items():
        with entry(row):
            _, dtype, _, chunk = row
            (value, grads), (expected, wanted) = one, two
            np.testing.assert_allclose(value, expected, rtol=4 * 2**-23)
            for name, got, right in zip(("x", "kernel"), grads, wanted, strict=False):
                assert got.dtype == right.dtype
                if chunk is None:
                    np.testing.assert_array_equal(got, right)
                else:
                    assert_close(got, np.asarray(right, np.float64), dtype, name)


@pytest.mark.usefixtures("undithered")
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_in_a_dtype_of_their_own(chunk: int | None, reduction: Any) -> None:
    """The loss is that of plain products; gradients are quantized products of its cotangent."""
    config = MatmulConfig(cotangent="float8_e5m2")
    operands = normal("logits of their own", (*BATCH, IN), (IN, VOCAB))
    x, kernel = (jnp.asarray(operand, jnp.float32) for operand in operands)

    def mixed(x, kernel):
        how = {"chunk_size": chunk, "reduction": reduction, "config": config}
        return fused(x, kernel, logits_dtype="float32", **how).sum()

    def loss(logits):
        return ops.softmax_cross_entropy(logits, LABELS, reduction=reduction).sum()

    found, gradients = jax.value_and_grad(mixed, (0, 1))(x, kernel)
    plain = ops.readout(x, kernel)
    np.testing.assert_allclose(found, loss(plain), rtol=1e-6)
    assert abs(found - loss(ops.readout(x, kernel, config=config))) > 1e-3
    cotangent = jax.grad(lambda data: loss(plain.map_data(lambda _: data)))(plain.data)
    _, vjp = jax.vjp(lambda *args: ops.readout(*args, config=config).data, x, kernel)
    for one, other in zip(gradients, vjp(cotangent), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_the_state_sees_what_it_sees_of_the_two_ops() -> None:
    run, *args = both("delayed", "float32", True, 4)
    (_, (*_, one)), (_, (*_, two)) = jax.jit(run)(*args)
    for seen in (one, two):
        np.testing.assert_array_equal(seen.scale, 0)
    ours, theirs = (args[-1].advance(seen) for seen in (one, two))
    np.testing.assert_array_equal(ours.scale, theirs.scale)
    np.testing.assert_array_equal(ours.history, theirs.history)
    # Two chunks of three tokens have as many elements as one of six; the kernel is seen once.
    np.testing.assert_array_equal(ours.counts, theirs.counts)


def test_float64() -> None:
    with jax.enable_x64(True):
        x, kernel = normal("x64", (*BATCH, IN), (IN, VOCAB))
        f = functools.partial(fused, chunk_size=4)
        value, (dx, dkernel) = jax.jit(jax.value_and_grad(f, (0, 1)))(x, kernel)
        assert value.dtype == dx.dtype == dkernel.dtype == jnp.float64
        np.testing.assert_allclose(value, reference(x, kernel), rtol=1e-14)


PADDED = 8


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [None, 4])
def test_padding_has_no_probability_and_no_gradient(tied: bool, chunk: int | None) -> None:
    """Not even if it holds something."""
    x, kernel = (jnp.asarray(a, jnp.float32) for a in normal("pad", (*BATCH, IN), (IN, VOCAB)))
    wide = jnp.pad(kernel, ((0, 0), (0, PADDED - VOCAB)), constant_values=50.0)
    turned = (lambda a: a.T) if tied else (lambda a: a)

    def loss(x, kernel, vocab):
        return fused(x, kernel, transposed=tied, vocab=vocab, chunk_size=chunk)

    run = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    expected, (dx, dkernel) = run(x, turned(kernel), None)
    value, (own_dx, own) = run(x, turned(wide), VOCAB)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(own_dx, dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(turned(own)[:, :VOCAB], turned(dkernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(turned(own)[:, VOCAB:], 0)


def test_labels() -> None:
    """Of any integer type; negative ones from the end; no class, not even padding, is NaN."""
    x, kernel = (jnp.asarray(a, jnp.float32) for a in normal("labels", (3, IN), (IN, 300)))

    def loss(labels, **options):
        return ops.readout_cross_entropy(x, kernel, labels, reduction="none", **options)

    right = np.array([0, 1, 127])
    expected = loss(right)
    for dtype in ("uint8", "int8", "int16", "uint32", "int32"):
        np.testing.assert_array_equal(loss(right.astype(dtype)), expected)
    np.testing.assert_array_equal(loss(np.array([-300, -299, -173], np.int16)), expected)
    found = loss(np.array([299, 300, -301]))
    np.testing.assert_array_equal(np.isfinite(found), [True, False, False])
    found = loss(np.array([289, 290, -291]), vocab=290)
    np.testing.assert_array_equal(np.isfinite(found), [True, False, False])
    last = loss(np.array([-1] * 3), vocab=290), loss(np.array([289] * 3), vocab=290)
    np.testing.assert_array_equal(*last)


def test_no_token_counts() -> None:
    x, kernel = jnp.ones((*BATCH, IN)), jnp.ones((IN, VOCAB))
    nothing = jnp.zeros(LABELS.shape, bool)
    for reduction in ("mean", "sum", "none"):
        for chunk in (None, 4):
            f = functools.partial(fused, where=nothing, reduction=reduction, chunk_size=chunk)
            out = jax.value_and_grad(lambda *a, f=f: f(*a).sum(), (0, 1))(x, kernel)
            for array in jax.tree.leaves(out):
                np.testing.assert_array_equal(array, 0)


def test_tokens_that_do_not_count_may_have_any_label() -> None:
    x, kernel = (jnp.asarray(a, jnp.float32) for a in normal("any", (*BATCH, IN), (IN, VOCAB)))
    labels = np.where(WHERE, LABELS, -100)
    value, grads = jax.value_and_grad(ops.readout_cross_entropy, (0, 1))(
        x, kernel, labels, where=WHERE, chunk_size=4
    )
    expected = reference(np.asarray(x), np.asarray(kernel), where=WHERE)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(grads[0])[~WHERE], 0)


@pytest.mark.parametrize("checked", [True, False])
def test_over_devices(checked: bool) -> None:
    """The mean of the devices' gradients is that of the batch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3, IN)).astype(np.float32)
    kernel = rng.normal(size=(VOCAB, IN)).astype(np.float32)
    labels, where = rng.integers(0, VOCAB, (8, 3)), np.arange(24).reshape(8, 3) % 3 < 2

    def loss(x, kernel, labels, where):
        return ops.readout_cross_entropy(
            x, kernel, labels, where=where, transposed=True, chunk_size=2
        )

    by = (0, 1)

    def local(x, kernel, labels, where):
        if checked:
            mean = lambda *args: lax.pmean(loss(*args), "data")  # noqa: E731
            return jax.grad(mean, by)(x, kernel, labels, where)
        with batch_over("data"):
            dx, dkernel = jax.grad(loss, by)(x, kernel, labels, where)
        return dx / 4, lax.pmean(dkernel, "data")

    each = P("data")
    mapped = jax.shard_map(
        local,
        mesh=mesh_of(data=4),
        in_specs=(each, P(), each, each),
        out_specs=(each, P()),
        check_vma=checked,
    )
    whole = jax.jit(jax.grad(loss, by))(x, kernel, labels, where)
    for ours, expected in zip(jax.jit(mapped)(x, kernel, labels, where), whole, strict=True):
        assert relative_error(ours, expected) < 2**-20


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_divided_by_the_compiler(axes: dict[str, int]) -> None:
    """The batch over devices, and the classes too: the numbers of one device."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3, IN)).astype(np.float32)
    kernel, labels = rng.normal(size=(IN, 6)).astype(np.float32), rng.integers(0, 5, (8, 3))

    def loss(x, kernel, labels):
        return ops.readout_cross_entropy(x, kernel, labels, chunk_size=6, vocab=5)

    step, mesh = jax.value_and_grad(loss, (0, 1)), mesh_of(**axes)
    batch = NamedSharding(mesh, P("data"))
    columns = NamedSharding(mesh, P(None, "tensor" if "tensor" in axes else None))
    divided = jax.jit(step, in_shardings=(batch, columns, batch))
    found, expected = divided(x, kernel, labels), jax.jit(step)(x, kernel, labels)
    for ours, one in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(ours, one) < 2**-20


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_classes_that_devices_divide_are_not_sliced(axes: dict[str, int]) -> None:
    """Parts of what is on several devices would be sent from one to another."""

    def loss(x, kernel, labels):
        return ops.readout_cross_entropy(x, kernel, labels, vocab=5)

    shapes = jnp.ones((8, 3, IN)), jnp.ones((IN, 6)), jnp.zeros((8, 3), jnp.int32)
    with jax.set_mesh(mesh_of(**axes)):
        text = jax.jit(loss).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert ("stablehlo.slice" in text) == ("tensor" not in axes)


def test_scales_get_no_gradient() -> None:
    x, kernel = ScaledArray(jnp.ones((*BATCH, IN)), PER_TOKEN), ScaledArray(jnp.ones((IN, 5)), 4.0)
    for gradient in jax.grad(functools.partial(fused, chunk_size=4), (0, 1))(x, kernel):
        np.testing.assert_array_equal(gradient.scale, 0)


x, kernel = jnp.ones((*BATCH, IN)), jnp.ones((IN, VOCAB))
ERRORS = [
    (ValueError, lambda: fused(x, kernel, reduction="avg"), "reduction must .* got 'avg'"),
    (ValueError, lambda: fused(x[0], kernel), r"got x \(3, 6\), labels \(2, 3\).*class indices"),
    (ValueError, lambda: fused(x, kernel, where=WHERE[0]), r"where \(3,\)"),
    (ValueError, lambda: fused(x, kernel.T), r"kernel must be \(in, V\) .*Set transposed=True\?"),
    (ValueError, lambda: fused(x, kernel, transposed=True), r"\(V, in\) .*Set transposed=False\?"),
    (ValueError, lambda: fused(x, kernel[:4]), r"kernel \(4, 5\)"),
    (ValueError, lambda: fused(x, kernel[:, :1]), "vocab must be at least 2 .*; got 1"),
    (ValueError, lambda: fused(x, kernel, vocab=6), "at most the columns of the kernel; got 6"),
    (ValueError, lambda: fused(x, kernel, chunk_size=0), "chunk_size must .* got 0"),
    (ValueError, lambda: fused(x, kernel, chunk_size=2.5), "chunk_size must .* got 2.5"),
    (ValueError, lambda: fused(x, kernel, mult=0), "mult must be positive"),
    (ValueError, lambda: fused(x, kernel, constraint="gmaen"), "constraint must be .* got 'gmaen'"),
    (TypeError, lambda: fused(x, kernel, where=WHERE + 0), "where must be boolean; got dtype int"),
    (TypeError, lambda: ops.readout_cross_entropy(x, kernel, x[..., 0]), "labels must be integers"),
    (TypeError, lambda: fused(x > 0, kernel), "cross_entropy: x must be a floating array"),
    (TypeError, lambda: fused(x, kernel > 0), "cross_entropy: kernel must be a floating array"),
    (
        ValueError,
        lambda: fused(x, kernel, config=CONFIGS["delayed"]),
        "keeps its scales in a state",
    ),
]


@pytest.mark.parametrize(("error", "call", "match"), ERRORS)
def test_errors(error, call, match) -> None:
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("cotangent", ["float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_gradient_of_labels_is_right_on_average(cotangent: str, reduction: Any) -> None:
    """Though its size, about the same for each token, lies between numbers of the format.

    Rounded to the nearest it would be 1.9% too small, and nothing draws the logits of all classes
    together back, which a loss does not depend on.
    """
    tokens, classes = 2**13, 64
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(1, 0.02, (tokens, 16)), "bfloat16")
    kernel = 0.1 * jnp.asarray(rng.normal(size=(16, classes)), "float32").at[:, 0].set(30.0)

    def of_labels(cotangent: str) -> jax.Array:
        config = MatmulConfig(lhs="bfloat16", rhs="bfloat16", cotangent=cotangent)

        def loss(kernel: jax.Array) -> jax.Array:
            options: Any = {"reduction": reduction, "config": config}
            return ops.readout_cross_entropy(x, kernel, jnp.zeros(tokens, int), **options).sum()

        return jax.grad(loss)(kernel)[:, 0]

    np.testing.assert_allclose(of_labels(cotangent), of_labels("bfloat16"), rtol=3e-3)
