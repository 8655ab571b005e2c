"""Activations and gated linear units: factors, rounding, scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.refusals import refuses
from unitscale import ops, rules
from unitscale.core import ScaledArray
from unitscale.ops._elementwise import _gelu

from .conformance import (
    SCALES,
    assert_scales_are_constants,
    assert_unit,
    case,
    check,
    in_every_dtype,
    normal,
    pulled,
)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))


def silu(x):
    return x * sigmoid(x)


def relu(x):
    return np.maximum(x, 0)


sine = functools.partial(ops.elementwise, jnp.sin)

# op, reference, and the published forward factor and unconstrained backward factor.
ACTIVATIONS = {
    "gelu": (ops.gelu, gelu, 1.701, 1.481),
    "silu": (ops.silu, silu, 1.787, 1.623),
    "tanh": (ops.tanh, np.tanh, 1.593, 1.467),
    "sigmoid": (ops.sigmoid, sigmoid, 4.802, 4.723),
    "relu": (ops.relu, relu, 1.713, 1.414),
    # var(sin z) = (1 - e^-2) / 2 and E[cos^2 z] = (1 + e^-2) / 2 in closed form.
    "sine": (sine, np.sin, ((1 - np.exp(-2)) / 2) ** -0.5, ((1 + np.exp(-2)) / 2) ** -0.5),
}
JAX = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "sine": jnp.sin,
}
GATES = {"silu_glu": (ops.silu_glu, silu, "silu"), "gelu_glu": (ops.gelu_glu, gelu, "gelu")}


def factors(name: str, **kwargs) -> dict:
    found = rules.elementwise(JAX[name], **kwargs)
    return {"fwd": found.fwd, "bwd": found.bwd}


# The default constraint: the gradient is exactly the true derivative of the output.
TRUE = {
    name: case(op, reference, normal(name, (3, 4)), fwd=fwd, bwd=(fwd,))
    for name, (op, reference, *_) in ACTIVATIONS.items()
    for fwd in (factors(name)["fwd"],)
}
test_value_and_true_gradient = in_every_dtype(TRUE)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_published_constants(name: str) -> None:
    op, _, fwd, bwd = ACTIVATIONS[name]
    ones = jnp.ones(())
    plain, slope = jax.value_and_grad(JAX[name])(ones)
    y, vjp = jax.vjp(lambda x: op(x, constraint=None).data, ones)
    np.testing.assert_allclose(y / plain, fwd, rtol=4e-4)
    np.testing.assert_allclose(vjp(ones)[0] / slope, bwd, rtol=4e-4)


@pytest.mark.parametrize("constraint", ["to_grad_input_scale", "gmean", "hmean", "amean", None])
def test_constraint(constraint) -> None:
    op = functools.partial(ops.tanh, constraint=constraint)
    fwd, bwd = 1.59254, 1.46741
    mean = {
        "to_grad_input_scale": bwd,
        "gmean": (fwd * bwd) ** 0.5,
        "hmean": 2 / (1 / fwd + 1 / bwd),
        "amean": (fwd + bwd) / 2,
    }
    expected = (mean[constraint],) * 2 if constraint else (fwd, bwd)
    found = rules.elementwise(jnp.tanh, constraint=constraint)
    np.testing.assert_allclose((found.fwd, *found.bwd), expected, rtol=1e-4)
    check(op, np.tanh, normal("constraint", (2, 4)), fwd=found.fwd, bwd=found.bwd)


@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_mult(name: str) -> None:
    given = {"mult": 0.25, "constraint": None}
    op, reference, *_ = ACTIVATIONS[name]
    tried = case(
        functools.partial(op, **given), lambda x: reference(0.25 * x), normal(name, (3, 4))
    )
    tried(**factors(name, **given), dtype="float16")


@pytest.mark.parametrize("scale", [*SCALES, np.array([0.5, 1.0, 4.0, 64.0], np.float32)])
@pytest.mark.parametrize("name", ["gelu", "tanh", "relu"])
def test_scale(name: str, scale) -> None:
    TRUE[name](scales=(scale,), dtype="float16")
    op, (x,) = ACTIVATIONS[name][0], normal(name, (3, 4))
    y = op(ScaledArray(jnp.asarray(x, jnp.float16), scale))
    if name != "relu":
        assert y.scale is None  # folded in
    else:
        kept, given = jnp.broadcast_to(y.scale, x.shape), np.broadcast_to(scale, x.shape)
        np.testing.assert_array_equal(kept, given)
    assert_scales_are_constants(op, ScaledArray(jnp.asarray(x), scale))


def test_zero_array() -> None:
    zero = ScaledArray(jnp.zeros(3), 2.0)
    np.testing.assert_array_equal(ops.gelu(zero).value, 0)
    np.testing.assert_allclose(ops.sigmoid(zero).value, 0.5 * 4.802, rtol=1e-3)


def test_8_bit_data_gives_bfloat16_and_an_8_bit_gradient_saturates() -> None:
    x = jnp.full(3, 2.0, jnp.float8_e4m3fn)
    y, vjp = jax.vjp(lambda x: ops.relu(x).data, x)
    assert y.dtype == jnp.bfloat16
    (grad,) = vjp(jnp.full_like(y, 1e6))
    np.testing.assert_array_equal(np.asarray(grad, np.float32), 448)


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "sigmoid", "relu"])
def test_float16_is_rounded_once(name: str) -> None:
    """Every float16 in [-8, 8]: the exact value rounded, but for the error of float32."""
    op, reference, *_ = ACTIVATIONS[name]
    fwd = factors(name)["fwd"]
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


def test_backward_factor_is_applied_before_rounding() -> None:
    """A gradient below float16's range that the factor brings into it is kept."""
    x = jnp.asarray([-9.0], jnp.float16)
    slope = 4.802 * np.exp(-9.0) / (1 + np.exp(-9.0)) ** 2
    cotangent = jnp.asarray([6e-4], jnp.float16)
    (grad,) = jax.vjp(lambda x: ops.sigmoid(x).data, x)[1](cotangent)
    # Without the factor: 7.4e-8, one unit of the smallest subnormal; with it: six units.
    assert grad == np.float16(slope * np.float64(np.float16(6e-4)))


@pytest.mark.parametrize("name", GATES)
def test_glu_has_the_true_gradients(name: str) -> None:
    found = rules.glu(JAX[GATES[name][2]])
    assert found.bwd == (found.fwd, found.fwd)


test_glu = in_every_dtype(
    {
        name: case(
            op,
            lambda x, gate, f=f: x * f(gate),
            normal(name, (3, 4), (3, 4)),
            fwd=rules.glu(JAX[base]).fwd,
            bwd=rules.glu(JAX[base]).bwd,
        )
        for name, (op, f, base) in GATES.items()
    }
)


@pytest.mark.parametrize("scales", [(2.0**12, 2.0**-12), (None, 8.0), (0.25, None)])
@pytest.mark.parametrize("constraint", ["to_output_scale", "to_right_grad_scale", None])
def test_glu_scales_and_constraints(scales, constraint) -> None:
    found = rules.glu(JAX["silu"], mult=0.5, constraint=constraint)
    op = functools.partial(ops.silu_glu, mult=0.5, constraint=constraint)
    tried = case(op, lambda x, gate: x * silu(0.5 * gate), normal("glu", (3, 4), (3, 4)))
    tried(fwd=found.fwd, bwd=found.bwd, scales=scales)


def test_glu_promotes() -> None:
    x, gate = jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float32)
    y, vjp = jax.vjp(lambda *a: ops.gelu_glu(*a).data, x, gate)
    assert y.dtype == jnp.float32
    assert [g.dtype for g in vjp(y)] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "relu", "sine"])
def test_unit_variance(name: str) -> None:
    op = functools.partial(ACTIVATIONS[name][0], constraint=None)

    def centred(x):
        # Factors divide by the standard deviation, and leave the mean where it is.
        y = op(x).data
        return y - jax.lax.stop_gradient(y.mean())

    assert_unit(centred, (1024,), bias=1 / 1024)


@pytest.mark.parametrize("name", GATES)
def test_glu_unit_variance(name: str) -> None:
    assert_unit(functools.partial(GATES[name][0], constraint=None), (1024,), (1024,))


def test_residuals_are_the_narrow_inputs() -> None:
    x = jnp.ones((4, 8), jnp.float16)
    _, vjp = jax.vjp(lambda x: ops.gelu(x).data, x)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(vjp)} == {"float16"}


ERRORS = [
    (TypeError, lambda x: ops.gelu(x.astype(jnp.int32)), r"ops\.gelu: x must be a floating.*int32"),
    (TypeError, lambda x: ops.silu(None), r"ops\.silu: x must be a floating.*NoneType"),
    (TypeError, lambda x: ops.relu(x > 0), r"ops\.relu: x must be a floating array.*bool"),
    (TypeError, lambda x: ops.tanh(x.astype(int)), r"ops\.tanh: x must be a floating.*int32"),
    (ValueError, lambda x: ops.tanh(x, mult=0.0), "mult must be positive"),
    (ValueError, lambda x: ops.sigmoid(x, constraint="to_ouput_scale"), "mean 'to_output_scale'"),
    (ValueError, lambda x: ops.gelu(x, constraint="to_left_grad_scale"), "to_left_grad_scale"),
    (ValueError, lambda x: ops.elementwise(jnp.ones_like, x), "constant"),
    (ValueError, lambda x: ops.elementwise(jnp.log, x), "not finite"),
    (ValueError, lambda x: ops.silu_glu(x, x[:1]), r"ops\.silu_glu: .*same shape.*\(3,\).*\(1,\)"),
    (TypeError, lambda x: ops.gelu_glu(x, x > 0), r"ops\.gelu_glu: gate must be a floating"),
    (ValueError, lambda x: ops.gelu_glu(x, x, constraint="mean"), "constraint"),
]


test_errors = refuses(ERRORS, jnp.ones(3))


@pytest.mark.parametrize("x", [-1e3, -20.0, -9.7, -1.0, 0.0, 3.0, 20.0])
def test_the_second_derivative_of_gelu_is_finite(x: float) -> None:
    """Also where the exponential in it is not."""
    found = jax.grad(jax.grad(_gelu))(x)
    with jax.enable_x64(True):
        wanted = jax.grad(jax.grad(jax.nn.gelu))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
