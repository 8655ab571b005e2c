"""Narrow in, wide inside, narrow out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ops
from unitscale.ops._operands import wide_op
from unitscale.rules import Factors

from .conformance import case, in_every_dtype, normal


def ratio(x, y, shift):
    return x / (y * y + 1) + (0.0 if shift is None else shift)


test_factors_forward_and_backward = in_every_dtype(
    {
        "ratio": case(
            lambda x, y: wide_op(ratio, x, y, factors=Factors(0.5, (3.0, 0.25)), constants=(None,)),
            lambda x, y: x / (y * y + 1),
            normal("wide", (3, 4), (3, 4)),
            fwd=0.5,
            bwd=(3.0, 0.25),
        )
    }
)


def test_inside_is_float32() -> None:
    def peek(x):
        assert x.dtype == jnp.float32
        return x * 1e5 * 1e-5

    x = jnp.asarray([1.0, -2.0], jnp.float16)
    y, vjp = jax.vjp(lambda x: wide_op(peek, x), x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(vjp(jnp.ones_like(x))[0], 1)


def test_constants_of_every_kind_have_no_gradient() -> None:
    x, scale, key = jnp.ones(3), jnp.float32(2), jax.random.key(0)

    def f(x, scale, index, key, nothing):
        assert nothing is None
        return x * scale * index + 0 * jax.random.normal(key)

    def loss(x, scale):
        constants = (scale, jnp.arange(3), key, None)
        return wide_op(f, x, constants=constants).sum()

    dx, dscale = jax.grad(loss, (0, 1))(x, scale)
    np.testing.assert_array_equal(dx, [0, 2, 4])
    assert dscale == 0


def test_out_dtype() -> None:
    for given, expected in (("float16", "float16"), ("float8_e5m2", "bfloat16")):
        y = wide_op(jnp.negative, jnp.ones(2, given))
        assert y.dtype.name == expected
    y = wide_op(jnp.negative, jnp.full(2, 1e3), out_dtype="float8_e4m3fn")
    np.testing.assert_array_equal(y.astype(jnp.float32), -448)


JVP = {
    "wide_op": lambda x: ops.gelu(x).data,
    "matmul": lambda x: ops.dense(x, x).data,
    "combine": lambda x: ops.add(x, x).data,
    "scale": lambda x: ops.scale_bwd(x, 2.0),
    "take": lambda x: ops.embed(jnp.arange(2), x).data,
    "cross_entropy": lambda x: ops.softmax_cross_entropy(x, jnp.arange(2)),
    "mean_square": lambda x: ops.mse_loss(x, x),
}


@pytest.mark.parametrize("name", JVP)
def test_forward_mode_says_what_to_use(name: str) -> None:
    x = jnp.eye(2)
    with pytest.raises(TypeError, match=rf"unitscale: {name} .*use jax.vjp, jax.grad or"):
        jax.jvp(JVP[name], (x,), (x,))
    # Inside jit the error is JAX's own: no code of an op runs when it is raised.
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(jax.jit(JVP[name]), (x,), (x,))


@pytest.mark.parametrize("name", JVP)
def test_the_advised_way_to_a_jacobian_vector_product_works(name: str) -> None:
    x, v = jnp.array([[0.3, -1.2], [0.7, 2.0]]), jnp.array([[1.0, 0.5], [-0.25, 2.0]])
    f = JVP[name]

    def both_ways(x, v):
        y, vjp = jax.vjp(f, x)
        (advised,) = jax.vjp(lambda u: jax.vjp(f, x)[1](u)[0], jnp.zeros_like(y))[1](v)
        # <1, J v> = <J^T 1, v>, with the backward factors in J.
        return jnp.sum(advised), jnp.sum(vjp(jnp.ones_like(y))[0] * v)

    np.testing.assert_allclose(*jax.jit(both_ways)(x, v), rtol=1e-5)


def attend(x):
    x = x.reshape(1, 2, 1, 2)
    return ops.dot_product_attention(x, x, x)


OF_8_BITS = {
    "dropout": lambda x: ops.dropout(x, 0.01, key=jax.random.key(0)),
    "attention": attend,
    "experts": lambda x: ops.mixture(
        lambda rows, params, groups: rows, x, ops.route(x, jnp.eye(4), 2), ()
    ),
}


@pytest.mark.parametrize("name", OF_8_BITS)
def test_cotangents_of_8_bit_inputs_saturate(name: str) -> None:
    y, vjp = jax.vjp(lambda x: OF_8_BITS[name](x).value, jnp.ones((1, 4), jnp.float8_e4m3fn))
    (found,) = vjp(jnp.full_like(y, 3000))
    assert found.dtype == jnp.float8_e4m3fn
    assert jnp.abs(found.astype(jnp.float32)).max() == 448


@pytest.mark.parametrize("fan", [lambda x: ops.residual_split(x, 1.0), lambda x: ops.fan_out(x, 3)])
def test_sums_of_8_bit_cotangents_saturate(fan) -> None:
    y, vjp = jax.vjp(lambda x: [each.data for each in fan(x)], jnp.ones(1, jnp.float8_e4m3fn))
    assert vjp([jnp.full(1, 320, jnp.float8_e4m3fn)] * len(y))[0].item() == 448
