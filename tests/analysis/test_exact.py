"""Programs without rounding compute the same as in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import cast
from unitscale.analysis._program import evaluate
from unitscale.core import dithered
from unitscale.ops._loss import in_one_pass

X = np.linspace(-1.7, 2.3, 12).reshape(3, 4)


def scatter(x):
    return jnp.zeros((5, 4), x.dtype).at[jnp.array([0, 3, 3])].add(x * 0.125)


def rounded(x):
    return cast(cast(x, "E3M2"), "float8_e4m3fn").astype(x.dtype) * 3


def loops(x):
    y, ys = jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0] * 0, x, reverse=True)
    z = jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c * 2 + 1, jnp.abs(y))
    return jax.lax.cond(z[0] > 0, lambda a: jnp.sin(a), lambda a: a, ys + z)


def windows(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "VALID")


PROGRAMS = {
    "casts": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float16) / 3, lambda x: x / 3),
    "cast": (rounded, lambda x: 3 * x),
    "dithered": (lambda x: 3 * dithered(x, 2), lambda x: 3 * x),
    "scatter": (scatter, scatter),
    "loops": (loops, loops),
    "custom_jvp": (lambda x: jax.nn.relu(x) + jax.nn.logsumexp(x), None),
    "reduce": (lambda x: sum(in_one_pass(x)), lambda x: jax.nn.logsumexp(x, axis=-1)),
    "reduce_window": (windows, windows),
    "jit": (jax.jit(lambda x: jnp.linalg.norm(x, axis=0)), None),
    "ragged_dot": (
        lambda x: jax.lax.ragged_dot(
            x, x.T[None], jnp.array([3]), preferred_element_type=jnp.float32
        ),
        lambda x: x @ x.T,
    ),
    "product": (
        lambda x: jax.lax.dot(x, x.T, precision="BF16_BF16_F32"),
        lambda x: x @ x.T,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_derivatives_are_those_of_float64(name) -> None:
    program, exact = PROGRAMS[name]
    exact = exact or program
    closed = jax.make_jaxpr(program)(X.astype(np.float32))
    with jax.enable_x64(True):
        (found,) = evaluate(closed, X)
        np.testing.assert_allclose(found, exact(X), rtol=1e-13, atol=1e-15)
        if name == "loops":
            return  # a while loop has no reverse mode
        grad = jax.grad(lambda x: jnp.sum(jnp.sin(evaluate(closed, x)[0])))(X)
        expected = jax.grad(lambda x: jnp.sum(jnp.sin(exact(x))))(X)
        np.testing.assert_allclose(grad, expected, rtol=1e-12, atol=1e-14)


def test_operations_on_bits_see_the_stored_type() -> None:
    def exponent(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return x * jax.lax.bitcast_convert_type((bits >> 23) << 23, jnp.float32)

    closed = jax.make_jaxpr(exponent)(np.float32(0))
    with jax.enable_x64(True):
        assert float(evaluate(closed, np.float64(3.1))[0]) == 3.1 * 2.0


def test_a_rule_of_integers_too_is_kept() -> None:
    @jax.custom_jvp
    def rounded_to(x, n):
        return jnp.round(x * n) / n, n

    @rounded_to.defjvp
    def _(primals, tangents):
        no_tangent = np.zeros((), jax.dtypes.float0)
        return rounded_to(*primals), (tangents[0], no_tangent)

    closed = jax.make_jaxpr(lambda x, n: rounded_to(x, n)[0])(1.0, 3)
    with jax.enable_x64(True):
        assert float(jax.grad(lambda x: evaluate(closed, x, 3)[0])(1.2)) == 1.0


def test_dithering_has_no_derivative() -> None:
    closed = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(dithered(x, 2))))(X.astype(np.float32))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(evaluate(closed, X)[0], 0 * X)


def test_a_program_of_many_devices_gets_an_answer() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    fn = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    closed = jax.make_jaxpr(fn)(np.float32(1))
    with jax.enable_x64(True), pytest.raises(ValueError, match="expected a program on one device"):
        evaluate(closed, 1.0)
