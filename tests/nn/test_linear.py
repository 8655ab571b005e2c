import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn, rules
from unitscale.core import ScaledArray


def test_dense_is_the_layer_of_flax_over_the_root_of_its_inputs() -> None:
    ours = nn.Dense(12, 7, rngs=nnx.Rngs(0))
    ours.bias.set_value(jnp.arange(7.0))
    flax = nnx.Linear(12, 7, rngs=nnx.Rngs(0))
    flax.kernel.set_value(ours.kernel.get_value() / 12**0.5)
    flax.bias.set_value(ours.bias.get_value())
    x = jax.random.normal(jax.random.key(0), (3, 5, 12))
    np.testing.assert_allclose(ours(x).data, flax(x), rtol=1e-5, atol=1e-5)


def test_readout_divides_by_its_inputs() -> None:
    layer = nn.Readout(12, 7, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 12))
    expected = np.asarray(x, np.float64) @ np.asarray(layer.kernel.get_value(), np.float64) / 12
    np.testing.assert_allclose(layer(x).data, expected, rtol=1e-5, atol=1e-6)
    assert layer.bias is None
    assert layer.constraint is None


@pytest.mark.parametrize("constraint", ["to_output_scale", "to_grad_input_scale", "gmean", None])
def test_the_constraint_reaches_the_factors(constraint, assert_rms) -> None:
    factors = rules.dense(64, 16, 32, constraint=constraint)
    assert_rms(
        lambda rngs: nn.Dense(64, 16, constraint=constraint, rngs=rngs),
        (32, 64),
        out=factors.fwd * 64**0.5,
        grad=factors.bwd[0] * 16**0.5,
    )


def test_scale_of_the_readout(assert_rms) -> None:
    """Logits shrink with the width; the gradient into the model does not."""
    assert_rms(lambda rngs: nn.Readout(64, 128, rngs=rngs), (32, 64), out=1 / 8)


def test_scale_of_parameter_gradients() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 256, 32))
    dy = jax.random.normal(jax.random.key(1), (4, 256, 64))
    graphdef, params = nnx.split(nn.Dense(32, 64, rngs=nnx.Rngs(0)))
    (grads,) = jax.vjp(lambda p: nnx.merge(graphdef, p)(x).data, params)[1](dy)
    for g in jax.tree.leaves(grads):
        # 64 or more normal sums: five standard errors of their mean square.
        assert abs(float(jnp.mean(g**2)) - 1) < 5 * (2 / g.size) ** 0.5


def test_a_scaled_kernel_and_bias_give_the_value_of_their_values() -> None:
    layer = nn.Dense(8, 4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 8))
    layer.bias.set_value(jnp.arange(4.0))
    expected = layer(x).value
    layer.kernel.set_value(ScaledArray(layer.kernel.get_value() * 16, 1 / 16))
    layer.bias.set_value(ScaledArray(jnp.arange(4.0) / 8, 8.0))
    y = layer(x)
    np.testing.assert_allclose(y.value, expected, rtol=1e-6, atol=1e-6)
    assert float(y.scale) == 1 / 16


@pytest.mark.parametrize("kind", [nn.Dense, nn.Readout])
def test_errors(kind) -> None:
    layer = kind(8, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"must be \(in, out\) .*x \(2, 9\).*kernel \(8, 4\)"):
        layer(jnp.ones((2, 9)))
    with pytest.raises(TypeError, match=r"must be a floating array or a ScaledArray; got .*int32"):
        layer(jnp.ones((2, 8), jnp.int32))
    wrong = kind(8, 4, constraint="gmaen", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"constraint must .*got 'gmaen'.*Did you mean 'gmean'"):
        wrong(jnp.ones((2, 8)))
    with pytest.raises(ValueError, match=r"'to_left_grad_scale' is for ops with 2"):
        kind(8, 4, constraint="to_left_grad_scale", rngs=nnx.Rngs(0))(jnp.ones((2, 8)))


def test_ranks_are_promoted_by_name() -> None:
    with jax.numpy_rank_promotion("raise"):
        x = nn.LayerNorm(8, rngs=nnx.Rngs(0))(nn.Dense(8, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 3, 8))))
        assert x.shape == (2, 3, 8)
