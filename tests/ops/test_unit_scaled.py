"""An op made of a function: unit results and gradients, and the true gradient where constrained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.draws import check_unit
from unitscale import as_scaled, ops
from unitscale.core import ScaledArray

from .conformance import pulled


def zeros(*shape):
    return np.zeros(shape, np.float32)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed + 100), shape)


def smooth(x, w):
    return jnp.cumsum(x @ w, axis=0)


def test_result_and_gradients_are_unit() -> None:
    example = [zeros(64, 32), zeros(32, 48)]
    op = ops.unit_scaled(smooth, example, constraint=None)
    check_unit(lambda x, w: op(x, w).data, example, seeds=32)


def test_constrained_gradients_are_the_true_ones_and_cut_ones_a_multiple() -> None:
    op = ops.unit_scaled(smooth, [zeros(8, 4), zeros(4, 6)], cut=[1])
    x, w, g = normal(0, 8, 4), normal(1, 4, 6), normal(2, 8, 6)
    own, true = (pulled(f, x, w, cotangent=g)[1] for f in (op, smooth))
    np.testing.assert_allclose(own[0], op.factors.fwd * true[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own[1], op.factors.bwd[1] * true[1], rtol=1e-5, atol=1e-6)
    assert op.factors.bwd[0] == op.factors.fwd
    assert op.factors.bwd[1] != op.factors.fwd


def test_a_loss_keeps_its_value_and_one_factor_for_its_arguments() -> None:
    def loss(pred, target, labels):
        return jnp.mean(jnp.square(pred - target) * labels)

    example = [zeros(256), zeros(256), np.ones(256, np.int32)]
    op = ops.unit_scaled(loss, example)
    args = normal(0, 256), normal(1, 256), np.ones(256, np.int32)
    assert op.is_loss
    np.testing.assert_allclose(op(*args), loss(*args), rtol=1e-6)
    grads = jax.jit(jax.grad(op, argnums=(0, 1)))(*args)
    check_unit(op, example, seeds=32)
    np.testing.assert_allclose(grads[0], -grads[1], rtol=1e-6)


def test_arrays_of_every_kind() -> None:
    op = ops.unit_scaled(jnp.cumsum, [zeros(16)])
    x = normal(0, 16)
    y = op(x.astype(jnp.float16))
    assert isinstance(y, ScaledArray)
    assert y.dtype == jnp.float16
    scaled = as_scaled(4 * x)
    np.testing.assert_allclose(jax.jit(op)(scaled).data, op(4 * x).data, rtol=1e-5, atol=1e-5)
    assert op(jnp.ones((2, 16))).shape == (32,)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cut": [1]}, r"cut must name floating arguments, of \[0\]; got \[1\]"),
        ({"constraint": "to_left_grad_scale"}, "is for ops with 2"),
        ({"constraint": "gmaen"}, "Did you mean 'gmean'"),
        ({"seeds": 0}, r"unitscale\.ops\.unit_scaled: seeds must be at least 2"),
    ],
)
def test_bad_arguments(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        ops.unit_scaled(jnp.cumsum, [zeros(8)], **kwargs)


def test_other_arguments_than_the_example() -> None:
    op = ops.unit_scaled(jnp.cumsum, [zeros(8)])
    with pytest.raises(TypeError, match=r"arguments \[0\] must be floating, as in the example"):
        op(jnp.arange(3))
