import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn
from unitscale.core import ScaledArray

PAIRS = {"layer": (nn.LayerNorm, nnx.LayerNorm), "rms": (nn.RMSNorm, nnx.RMSNorm)}


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_the_layer_of_flax(name, use_scale) -> None:
    ours, flax = (
        kind(8, epsilon=0.1, use_scale=use_scale, rngs=nnx.Rngs(0)) for kind in PAIRS[name]
    )
    if use_scale:
        ours.gain.set_value(jnp.linspace(0.5, 2.0, 8))
        flax.scale.set_value(ours.gain.get_value())
    if name == "layer":
        ours.bias.set_value(jnp.arange(8.0))
        flax.bias.set_value(ours.bias.get_value())
    x = 3 * jax.random.normal(jax.random.key(0), (2, 5, 8)) + 1
    np.testing.assert_allclose(ours(x).data, flax(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_the_scale_of_the_input_is_dropped(name) -> None:
    layer = PAIRS[name][0](8, epsilon=1e-3, policy="float16")
    x = jax.random.normal(jax.random.key(0), (4, 8), jnp.float16)
    huge = layer(ScaledArray(x, 2.0**30))
    assert huge.scale is None
    exact = PAIRS[name][0](8, epsilon=0.0)(x.astype(jnp.float32))
    np.testing.assert_allclose(huge.value, exact.value, rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize("name", PAIRS)
def test_scale(name, assert_rms) -> None:
    """The gradient loses the projection onto the output (and the mean), 1 or 2 of 64 dimensions."""
    lost = 2 if name == "layer" else 1
    assert_rms(
        lambda rngs: PAIRS[name][0](64, rngs=rngs),
        (64, 64),
        grad=(1 - lost / 64) ** 0.5,
        bias=4 / 64,  # 1 / RMS of 64 samples has this mean square above 1
    )


def test_scale_of_parameter_gradients() -> None:
    graphdef, params = nnx.split(nn.LayerNorm(256))
    x, dy = jax.random.normal(jax.random.key(0), (2, 100, 256))
    (grads,) = jax.vjp(lambda p: nnx.merge(graphdef, p)(x).data, params)[1](dy)
    for g in jax.tree.leaves(grads):
        assert abs(float(jnp.mean(g**2)) - 1) < 5 * (2 / g.size) ** 0.5


def test_options_of_the_parameters() -> None:
    layer = nn.LayerNorm(8, use_bias=False, use_scale=False)
    assert layer.gain is None
    assert layer.bias is None
    assert not jax.tree.leaves(nnx.state(layer))
    np.testing.assert_array_equal(nn.RMSNorm(8).gain.get_value(), np.ones(8))
    np.testing.assert_array_equal(nn.LayerNorm(8).bias.get_value(), np.zeros(8))


def test_errors() -> None:
    for kind in (nn.LayerNorm, nn.RMSNorm):
        with pytest.raises(ValueError, match=r"must be \(features,\).*x \(2, 9\).*gain \(8,\)"):
            kind(8)(jnp.ones((2, 9)))
        with pytest.raises(ValueError, match="eps must not be negative; got -1"):
            kind(8, epsilon=-1.0)(jnp.ones((2, 8)))
