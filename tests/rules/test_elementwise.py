"""Element-wise functions: published constants, exact integrals, use under transformations."""

import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from tests.refusals import refuses
from unitscale import rules
from unitscale.rules._elementwise import compile_time, correlation_kernel

PUBLISHED = [
    (jax.nn.gelu, 1.701, 1.481),
    (jax.nn.relu, 1.713, 1.414),
    (jnp.tanh, 1.593, 1.467),
    (jax.nn.sigmoid, 4.802, 4.723),
]


@pytest.mark.parametrize(("f", "fwd", "bwd"), PUBLISHED)
def test_published_constants(f, fwd, bwd) -> None:
    factors = rules.elementwise(f, constraint=None)
    # Half a unit of the last published digit, and what simulation left in the published ones.
    assert factors.fwd == pytest.approx(fwd, abs=1e-3)
    assert factors.bwd[0] == pytest.approx(bwd, abs=1e-3)


@pytest.mark.parametrize("mult", [1e-3, 0.1, 1.0, 7.0, 1000.0])
def test_relu_is_exact_for_every_mult(mult) -> None:
    factors = rules.elementwise(jax.nn.relu, mult=mult, constraint=None)
    variance = mult**2 * (0.5 - 1 / (2 * math.pi))
    assert factors.fwd == pytest.approx(variance**-0.5, rel=1e-6)
    assert factors.bwd[0] == pytest.approx(math.sqrt(2) / mult, rel=1e-6)


def test_smooth_functions_agree_with_gauss_hermite_in_float64() -> None:
    x, w = np.polynomial.hermite_e.hermegauss(150)
    w = w / w.sum()
    s = 1 / (1 + np.exp(-x))
    tables = {
        jax.nn.sigmoid: (s, s * (1 - s)),
        jax.nn.silu: (x * s, s + x * s * (1 - s)),
        jnp.sin: (np.sin(x), np.cos(x)),
        jnp.exp: (np.exp(x), np.exp(x)),
    }
    for f, (y, dy) in tables.items():
        factors = rules.elementwise(f, constraint=None)
        assert factors.fwd == pytest.approx((w @ (y - w @ y) ** 2) ** -0.5, rel=1e-6)
        assert factors.bwd[0] == pytest.approx((w @ dy**2) ** -0.5, rel=1e-6)


@pytest.mark.parametrize("mult", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("f", [jax.nn.gelu, jnp.tanh, jax.nn.leaky_relu, jax.nn.softplus])
def test_output_and_gradient_are_unit(f, mult, assert_unit) -> None:
    factors = rules.elementwise(f, mult=mult, constraint=None)
    apply = jax.jit(jax.vmap(jax.value_and_grad(lambda x: f(mult * x))))

    def trial(rng):
        value, slope = map(np.asarray, apply(rng.standard_normal(5000, np.float32)))
        return factors.fwd * (value - value.mean()), factors.bwd[0] * slope

    assert_unit(trial, bias=1e-4)


@pytest.mark.parametrize("f", [jax.nn.silu, jax.nn.gelu])
def test_glu_is_unit(f, assert_unit) -> None:
    mult = 1.5
    factors = rules.glu(f, mult=mult, constraint=None)
    apply = jax.jit(jax.vmap(jax.value_and_grad(lambda gate: f(mult * gate))))

    def trial(rng):
        x, gate, g = rng.standard_normal((3, 5000), np.float32)
        value, slope = map(np.asarray, apply(gate))
        return factors.fwd * x * value, factors.bwd[0] * g * value, factors.bwd[1] * g * x * slope

    assert_unit(trial, trials=100)
    assert factors.bwd[0] == factors.fwd


def test_constraints() -> None:
    ideal = rules.elementwise(jnp.tanh, constraint=None)
    assert rules.elementwise(jnp.tanh).bwd == (ideal.fwd,)
    assert rules.elementwise(jnp.tanh, constraint="to_grad_input_scale").fwd == ideal.bwd[0]
    ideal = rules.glu(jax.nn.silu, constraint=None)
    shared = rules.glu(jax.nn.silu, constraint="to_right_grad_scale")
    assert shared == rules.Factors(ideal.bwd[1], (ideal.bwd[1],) * 2)
    with pytest.raises(ValueError, match="use 'to_left_grad_scale'"):
        rules.glu(jax.nn.silu, constraint="to_grad_input_scale")


def test_is_concrete_under_jit_grad_vmap_and_scan() -> None:
    def f(x):
        return jnp.where(x > 0, x, 0.1 * x)

    def apply(x):
        # A fresh function every call, so that nothing comes from the cache.
        return x * rules.elementwise(lambda x: f(x), mult=3.0).fwd

    expected = rules.elementwise(f, mult=3.0).fwd
    ones = jnp.ones(3)
    for run in (
        lambda: jax.jit(apply)(1.0),
        lambda: jax.grad(apply)(1.0),
        lambda: jax.jit(jax.vmap(jax.grad(apply)))(ones),
        lambda: jax.lax.scan(lambda c, x: (c, apply(x)), 0.0, ones)[1],
        lambda: jax.jit(jax.checkpoint(apply))(1.0),
    ):
        np.testing.assert_allclose(run(), expected, rtol=1e-6)


def test_is_computed_once_per_function_and_mult() -> None:
    calls = []

    def f(x):
        calls.append(None)
        return jnp.sin(x)

    rules.elementwise(f)
    first = len(calls)
    rules.elementwise(f, constraint=None)
    rules.glu(f)
    assert len(calls) == first
    rules.elementwise(f, mult=2.0)
    assert len(calls) > first


def test_does_not_keep_a_function_and_what_it_holds() -> None:
    held = []
    for scale in (1.0, 2.0):
        array = np.full(3, scale)
        held.append(weakref.ref(array))
        rules.elementwise(lambda x, a=array: jnp.tanh(a[0] * x))
        del array
    gc.collect()
    assert all(ref() is None for ref in held)


def test_accepts_functions_that_cannot_be_cached_and_scalar_control_flow() -> None:
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return jax.lax.cond(x > 0, lambda x: x, jnp.zeros_like, x)

    class WithoutWeakReferences:
        __slots__ = ()

        def __call__(self, x):
            return 2 * x

    assert rules.elementwise(Unhashable()).fwd == pytest.approx(1.7129, abs=1e-4)
    assert rules.elementwise(WithoutWeakReferences()).fwd == pytest.approx(0.5, rel=1e-6)
    partial = functools.partial(jax.nn.leaky_relu, negative_slope=1.0)
    assert rules.elementwise(partial).fwd == pytest.approx(1, rel=1e-6)


def test_function_without_gradient_takes_the_forward_factor() -> None:
    factors = rules.elementwise(jnp.sign, constraint=None)
    assert factors.fwd == pytest.approx(1, rel=1e-12)
    assert factors.bwd == (factors.fwd,)


test_errors = refuses(
    [
        (ValueError, lambda: rules.elementwise(lambda x: 0 * x + 3.7), "is constant"),
        (ValueError, lambda: rules.elementwise(jnp.log), "log.* is not finite .*at mult"),
        (ValueError, lambda: rules.elementwise(jnp.sqrt), "sqrt.* is not finite"),
        (ValueError, lambda: rules.elementwise(jnp.exp, mult=6.5), "grows too fast"),
        (TypeError, lambda: rules.elementwise(lambda x: jnp.stack([x, x])), "real scalar"),
        (TypeError, lambda: rules.elementwise(lambda x: x + 1j), "real scalar"),
        (ValueError, lambda: rules.elementwise(jnp.tanh, mult=0.0), "mult must be positive"),
        (ValueError, lambda: rules.glu(jnp.zeros_like), "is zero"),
    ]
)


def test_glu_accepts_a_constant_gate() -> None:
    assert rules.glu(lambda g: 0 * g + 2.0).fwd == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_is_unit(rate, assert_unit) -> None:
    factors = rules.dropout(rate)

    def trial(rng):
        x, g = rng.standard_normal((2, 10000))
        kept = (rng.random(10000) >= rate) / (1 - rate)
        return factors.fwd * x * kept, factors.bwd[0] * g * kept

    assert_unit(trial)
    assert factors.fwd == factors.bwd[0]


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rejects_rates_outside_the_interval(rate) -> None:
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\)"):
        rules.dropout(rate)


def test_rejects_an_array_of_rates() -> None:
    with pytest.raises(TypeError, match="rate must be a static real number"):
        rules.dropout([0.1, 0.2])


RHO = np.asarray([-0.9, -0.3, 0.0, 0.2, 0.7, 0.95])


def kernel_at(f, rho, mult=1.0):
    return np.polynomial.polynomial.polyval(rho, correlation_kernel(f, mult))


def test_relu_has_the_arc_cosine_kernel() -> None:
    # Cho and Saul, 2009, order 1, divided by the variance of relu.
    angle = np.arccos(RHO)
    expected = (np.sin(angle) + (math.pi - angle) * RHO) / (2 * math.pi)
    expected /= 0.5 - 1 / (2 * math.pi)
    # The terms beyond the 24th hold 2e-4 of relu's power.
    assert kernel_at(jax.nn.relu, RHO) == pytest.approx(expected, abs=3e-4)


@pytest.mark.parametrize("mult", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("f", [jax.nn.gelu, jax.nn.silu, jnp.tanh])
def test_smooth_functions_agree_with_a_two_dimensional_integral(f, mult) -> None:
    x, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()
    y = np.asarray(f(mult * x), np.float64)
    variance = w @ y**2 - (w @ y) ** 2
    for rho in RHO:
        partner = rho * x[:, None] + math.sqrt(1 - rho**2) * x
        expected = w @ (y[:, None] * np.asarray(f(mult * partner), np.float64)) @ w / variance
        assert kernel_at(f, rho, mult) == pytest.approx(expected, abs=1e-4)


def test_the_first_coefficient_is_the_mean_and_all_together_the_power() -> None:
    kernel = correlation_kernel(jax.nn.relu)
    mean_square, variance = 1 / (2 * math.pi), 0.5 - 1 / (2 * math.pi)
    assert kernel[0] == pytest.approx(mean_square / variance, rel=1e-6)
    assert kernel.sum() == pytest.approx(0.5 / variance, rel=1e-6)


def test_a_linear_function_keeps_the_correlation() -> None:
    assert kernel_at(lambda x: 3 * x, RHO) == pytest.approx(RHO, abs=1e-6)


# By itself each of these calls evaluates a function on arrays.
EVALUATE = {
    "sum": lambda f: float(jnp.sum(f(jnp.arange(3.0)))),
    "elementwise": lambda f: rules.elementwise(f).fwd,
    "simulate": lambda f: rules.simulate(f, [jnp.zeros(8)], seeds=2).factors.fwd,
    "correlation_kernel": lambda f: correlation_kernel(f)[1],
}


@pytest.mark.parametrize("name", EVALUATE)
def test_inside_of_shard_map_over_some_axes(name) -> None:
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (AxisType.Auto,) * 2, devices=devices)

    def number() -> float:
        def f(x):  # another function in each trace, which nothing remembers
            return jnp.sin(x) ** 3

        if name == "sum":
            with compile_time():
                return EVALUATE[name](f)
        return EVALUATE[name](f)

    traced = jax.shard_map(
        lambda x: x * number(), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        found = jax.jit(traced)(jnp.ones(4))
    np.testing.assert_allclose(found, number(), rtol=1e-6)
