"""`check_gradients` evaluates programs without rounding: values are those of float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import cast
from unitscale.analysis import check_gradients
from unitscale.core import dithered
from unitscale.ops._loss import in_one_pass

X = np.linspace(-1.7, 2.3, 12).reshape(3, 4)


def scatter(x):
    return jnp.zeros((5, 4), x.dtype).at[jnp.array([0, 3, 3])].add(x * 0.125)


def rounded(x):
    return cast(cast(x, "E3M2"), "float8_e4m3fn").astype(x.dtype) * 3


def loops(x):
    y, ys = jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0] * 0, x, reverse=True)
    start = jnp.abs(jax.lax.stop_gradient(y))  # a while loop has no reverse mode
    z = jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c * 2 + 1, start)
    return jax.lax.cond(z[0] > 0, lambda a: jnp.sin(a), lambda a: a, ys + y + z)


def windows(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "VALID")


def ragged(x):
    return jax.lax.ragged_dot(x, x.T[None], jnp.array([3]), preferred_element_type=jnp.float32)


def by_bits(x):
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return x * jax.lax.bitcast_convert_type((bits >> 23) << 23, jnp.float32)


@jax.custom_jvp
def steps(x, n):
    return jnp.round(x * n) / n, n


@steps.defjvp
def _(primals, tangents):
    return steps(*primals), (tangents[0], np.zeros((), jax.dtypes.float0))


# Programs, and what they compute in float64 if not the same.
PROGRAMS = {
    "casts": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float16) / 3, lambda x: x / 3),
    "cast": (rounded, lambda x: 3 * x),
    "dithered": (lambda x: 3 * dithered(x, 2), lambda x: 3 * x),
    "scatter": (scatter, None),
    "loops": (loops, None),
    "custom_jvp": (lambda x: jax.nn.relu(x) + jax.nn.logsumexp(x), None),
    "custom_jvp of integers too": (lambda x: steps(x, 3)[0], lambda x: np.round(x * 3) / 3),
    "reduce": (lambda x: sum(in_one_pass(x)), lambda x: jax.nn.logsumexp(x, axis=-1)),
    "reduce_window": (windows, None),
    "jit": (jax.jit(lambda x: jnp.linalg.norm(x, axis=0)), None),
    "ragged_dot": (ragged, lambda x: x @ x.T),
    "product": (lambda x: jax.lax.dot(x, x.T, precision="BF16_BF16_F32"), lambda x: x @ x.T),
    # Operations on bits see the stored type.
    "bits": (by_bits, lambda x: np.abs(x) * 2.0 ** np.floor(np.log2(np.abs(x)))),
}


@pytest.mark.slow
def test_values_and_derivatives_are_those_of_float64() -> None:
    x = X.astype(np.float32).astype(np.float64)

    def loss(parts):
        return sum(jnp.sum(jnp.sin(PROGRAMS[name][0](x))) for name, x in parts.items())

    report = check_gradients(loss, dict.fromkeys(PROGRAMS, np.float32(X)))
    with jax.enable_x64(True):
        exact = {name: np.asarray((other or f)(x)) for name, (f, other) in PROGRAMS.items()}
    assert report.loss == pytest.approx(sum(np.sin(y).sum() for y in exact.values()), rel=1e-13)
    for parameter in report.parameters:
        # These two round cotangents, or have no gradient.
        if parameter.name not in ("cast", "dithered"):
            assert parameter.verdict == "right", str(report)
            assert parameter.constant == pytest.approx(1, rel=1e-12), str(report)


def test_a_program_of_many_devices_gets_an_answer() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    fn = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match="one device"):
        check_gradients(fn, np.float32(1))
