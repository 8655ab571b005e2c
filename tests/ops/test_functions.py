"""Activations, gated linear units, softmax, dropout, and functions converted to ops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute
from unitscale import ops, rules
from unitscale.core import ScaledArray
from unitscale.ops._elementwise import _gelu

from .conformance import case, check_all, in_every_dtype, linear, normal, pulled, slow, under_scales

KEY = jax.random.key(3)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))


def silu(x):
    return x * sigmoid(x)


def softmax(x, axis=-1, mult=1.0):
    z = np.exp(mult * (x - x.max(axis, keepdims=True)))
    return z / z.sum(axis, keepdims=True)


# op, reference, JAX's own; the rules' tests compare factors with published ones.
ACTIVATIONS = {
    "gelu": (ops.gelu, gelu, jax.nn.gelu),
    "silu": (ops.silu, silu, jax.nn.silu),
    "tanh": (ops.tanh, np.tanh, jnp.tanh),
    "sigmoid": (ops.sigmoid, sigmoid, jax.nn.sigmoid),
    "relu": (ops.relu, lambda x: np.maximum(x, 0), jax.nn.relu),
    "sine": (functools.partial(ops.elementwise, jnp.sin), np.sin, jnp.sin),
}
GATES = {
    "silu_glu": (ops.silu_glu, silu, jax.nn.silu),
    "gelu_glu": (ops.gelu_glu, gelu, jax.nn.gelu),
    "sigmoid_glu": (ops.sigmoid_glu, sigmoid, jax.nn.sigmoid),
}
FWD = {name: rules.elementwise(row[2]).fwd for name, row in ACTIVATIONS.items()}
# The default constraint: the gradient is exactly the true derivative of the output.
CASES = {
    name: case(op, reference, normal(name, (3, 4)), fwd=FWD[name], bwd=(FWD[name],))
    for name, (op, reference, _) in ACTIVATIONS.items()
}
CASES |= {
    name: case(
        op,
        lambda x, gate, f=f: x * f(gate),
        normal(name, (3, 4), (3, 4)),
        fwd=rules.glu(base).fwd,
        bwd=(rules.glu(base).fwd,) * 2,
    )
    for name, (op, f, base) in GATES.items()
}
CASES |= {
    f"softmax {axis}": case(
        functools.partial(ops.softmax, axis=axis),
        functools.partial(softmax, axis=axis),
        normal("softmax", (4, 3)),
        fwd=rules.softmax((4, 3)[axis]).fwd,
        bwd=(rules.softmax((4, 3)[axis]).fwd,),
    )
    for axis in (-1, 0)
}
MASK = np.asarray(ops.dropout(jnp.ones((4, 5)), 0.75, key=KEY).data) != 0
CASES["dropout"] = linear(
    functools.partial(ops.dropout, rate=0.75, key=KEY),
    lambda x: x * MASK / 0.25,
    normal("dropout", (4, 5)),
    fwd=0.5,
    bwd=(0.5,),
)
CASES["expected dropout"] = linear(
    functools.partial(ops.dropout, rate=0.36, deterministic=True),
    lambda x: x,
    normal("dropout", (4, 5)),
    fwd=0.8,
    bwd=(0.8,),
)
test_value_and_gradients = in_every_dtype(
    CASES,
    mapped=("gelu", "relu", "silu_glu", "softmax -1", "dropout"),
    wide=("softmax 0", "expected dropout", "sigmoid_glu"),
)


OF_EACH = [(2.0**-12,), (np.float32([0.5, 1, 4, 64]),)]
test_scales = under_scales(OF_EACH, {n: CASES[n] for n in ("gelu", "relu")}, dtype="float16")
test_scales_of_gates = under_scales([(2.0**12, 2.0**-12), (None, 8.0)], {"glu": CASES["silu_glu"]})
test_scales_of_dropout = under_scales([(8.0,)], {"dropout": CASES["dropout"]})


LOGITS = {"softmax": CASES["softmax -1"]}
SCALED = [(np.float32([1, 8, 0.5]),), (np.float32([[1]] * 3 + [[9]]),)]
test_scales_of_logits = under_scales(SCALED, LOGITS, slack=4)
# A product of 2^12 and data is rounded at 2^12 epsilons of its exponential.
test_a_large_scale_of_logits = under_scales([(2.0**12,)], LOGITS, slack=2**6)


def test_constraint_and_mult() -> None:
    cases = {}
    for how in ("to_right_grad_scale", None):
        given = {"mult": 0.5, "constraint": how}
        glu, args = functools.partial(ops.silu_glu, **given), normal("glu", (3, 4), (3, 4))
        found = rules.glu(jax.nn.silu, **given)
        cases["glu", how] = case(
            glu, lambda x, gate: x * silu(0.5 * gate), args, fwd=found.fwd, bwd=found.bwd
        )
    for how in ("to_grad_input_scale", None):
        given = {"mult": 0.5, "constraint": how}
        for op, reference, found in (
            (ops.tanh, np.tanh, rules.elementwise(jnp.tanh, **given)),
            (ops.relu, ACTIVATIONS["relu"][1], rules.elementwise(jax.nn.relu, **given)),
            (ops.softmax, softmax, rules.softmax(4, **given)),
        ):
            half, args = functools.partial(op, **given), normal("constraint", (3, 4))
            cases[op, how] = case(
                half, lambda x, f=reference: f(0.5 * x), args, fwd=found.fwd, bwd=found.bwd
            )
    check_all(cases)


@pytest.mark.parametrize("name", ["gelu", "relu", *map(slow, ("silu", "tanh", "sigmoid"))])
def test_float16_is_rounded_once(name: str) -> None:
    """For every float16 in [-8, 8], the result is the exact value, rounded once."""
    op, reference, _ = ACTIVATIONS[name]
    fwd = FWD[name]
    bits = np.arange(2**15, dtype=np.uint16).view(np.float16)
    bits = bits[bits <= 8]
    x = np.concatenate([-bits[::-1], bits])
    y, (grad,) = pulled(op, jnp.asarray(x))
    exact = fwd * reference(x.astype(np.float64))
    h = 1e-4
    slope = fwd * (reference(x + np.float64(h)) - reference(x - np.float64(h))) / (2 * h)
    away = np.abs(x.astype(np.float64)) > h if name == "relu" else np.ones(x.shape, bool)
    for actual, expected in ((y, exact), (grad, slope)):
        actual = np.asarray(actual)
        nearest = expected.astype(np.float16)
        ulp = np.spacing(np.abs(nearest)).astype(np.float64)
        wide = 2.0**-20 * fwd  # a few float32 roundings and the finite difference
        error = np.abs(actual.astype(np.float64) - expected)[away]
        assert (error <= (0.5 * ulp + wide)[away]).all()
        assert np.mean(actual[away] == nearest[away]) > 0.95


def test_the_input_is_kept_for_the_backward_pass() -> None:
    kept = jax.eval_shape(
        lambda x: jax.vjp(lambda x: ops.gelu(x).data, x)[1], np.ones((4, 8), np.float16)
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(kept)} == {"float16"}


def test_the_second_derivative_of_gelu_is_finite() -> None:
    """It is finite also where the exponential in it overflows."""
    x = np.array([-1e3, -20.0, -9.7, -1.0, 0.0, 3.0, 20.0])
    found = jax.jit(jax.vmap(jax.grad(jax.grad(_gelu))))(np.float32(x))
    with jax.enable_x64(True):
        wanted = jax.jit(jax.vmap(jax.grad(jax.grad(jax.nn.gelu))))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_masked_logits() -> None:
    y, (grad,) = pulled(ops.softmax, jnp.float16([[0.0, -jnp.inf, 0.0]]))
    fwd = rules.softmax(3).fwd
    np.testing.assert_array_equal(y, [np.float16([fwd / 2, 0, fwd / 2])])
    assert np.isfinite(np.asarray(grad)).all()


def test_dropout_of_large_numbers_and_by_chance() -> None:
    inf = ScaledArray(np.full(8, np.inf, np.float16), 8.0)
    byte, n, rate = np.full(8, 448.0, jnp.float8_e4m3fn), 40000, 0.3
    table = {
        "inf": (inf, {"rate": 0.5}),
        "byte": (byte, {"rate": 0.5}),
        "nothing": (ScaledArray(np.ones(2), 8.0), {"rate": 0.0}),
        "chance": (np.ones(n), {"rate": rate}),
        "rows": (np.ones((64, 8)), {"rate": 0.5, "broadcast_dims": (1,)}),
    }
    found = compute(
        {k: (functools.partial(ops.dropout, key=KEY, **how), x) for k, (x, how) in table.items()}
    )
    assert (found["inf"].dtype, found["byte"].dtype) == (jnp.float16, jnp.bfloat16)
    assert set(np.asarray(found["inf"].data).tolist()) == {0.0, np.inf}
    assert np.isfinite(np.float32(found["byte"].data)).all()
    np.testing.assert_array_equal(found["nothing"].value, [8, 8])
    zeros = np.mean(np.asarray(found["chance"].data) == 0)
    assert abs(zeros - rate) < 5 * (rate * (1 - rate) / n) ** 0.5
    assert {len(set(row)) for row in np.asarray(found["rows"].data).tolist()} == {1}


JVP = {
    "wide_op": lambda x: ops.gelu(x).data,
    "matmul": lambda x: ops.dense(x, x).data,
}


def test_forward_mode_says_what_to_use_and_that_works() -> None:
    x, v = np.float32([[0.3, -1.2], [0.7, 2.0]]), np.float32([[1, 0.5], [-0.25, 2]])

    def both_ways(f, x, v):
        y, vjp = jax.vjp(f, x)
        (advised,) = jax.vjp(lambda u: jax.vjp(f, x)[1](u)[0], jnp.zeros_like(y))[1](v)
        # <1, J v> = <J^T 1, v>, with the backward factors in J.
        return jnp.sum(advised), jnp.sum(vjp(jnp.ones_like(y))[0] * v)

    for name, f in JVP.items():
        with pytest.raises(TypeError, match=rf"unitscale: {name} .*use jax.vjp, jax.grad or"):
            jax.jvp(f, (x,), (x,))
    np.testing.assert_allclose(*jax.jit(both_ways, static_argnums=0)(JVP["wide_op"], x, v), 1e-5)


def smooth(x, w):
    return jnp.cumsum(x @ w, axis=0)


def square(pred, target, labels):
    return jnp.mean(jnp.square(pred - target) * labels)


def test_a_loss_made_an_op() -> None:
    args = [np.float32(a) for a in (*normal("loss", (64,), (64,)), np.arange(64) % 2)]
    loss = ops.unit_scaled(square, args, seeds=8)
    assert loss.is_loss
    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args)
    np.testing.assert_allclose(value, np.mean((args[0] - args[1]) ** 2 * args[2]), rtol=1e-6)
    np.testing.assert_allclose(grads[0], -grads[1], rtol=1e-6)


def test_its_gradients_are_the_true_ones_and_cut_ones_a_multiple() -> None:
    x, w, g = (np.float32(a) for a in normal("cut", (8, 4), (4, 6), (8, 6)))
    op = ops.unit_scaled(smooth, [x, w], cut=[1])
    own, true, half, scaled, plain = compute(
        {
            "own": (functools.partial(pulled, op, cotangent=g), x, w),
            "true": (functools.partial(pulled, smooth, cotangent=g), x, w),
            "half": (op, x.astype(np.float16), w.astype(np.float16)),
            "scaled": (op, ScaledArray(x, 4.0), w),
            "plain": (op, 4 * x, w),
        }
    ).values()
    for found, expected, factor in zip(own[1], true[1], op.factors.bwd, strict=True):
        np.testing.assert_allclose(found, factor * np.asarray(expected), rtol=1e-5, atol=1e-6)
    assert op.factors.bwd[0] == op.factors.fwd != op.factors.bwd[1]
    assert (type(half), half.dtype) == (ScaledArray, jnp.float16)
    np.testing.assert_allclose(scaled.data, plain.data, rtol=1e-5)


def test_a_loss_without_a_constraint_keeps_its_own_factors() -> None:
    def loss(x, y):
        return jnp.mean(x**2) + 2 * jnp.mean(y)

    example = jnp.zeros((8, 4)), jnp.zeros((8, 4))
    free, tied = (ops.unit_scaled(loss, example, constraint=c).factors.bwd for c in (None, "gmean"))
    assert free[0] != free[1]
    np.testing.assert_allclose(tied, np.sqrt(free[0] * free[1]), rtol=1e-6)
