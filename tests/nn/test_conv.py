import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.gradients import jit
from unitscale import nn
from unitscale.core import ScaledArray

# arguments of both constructors, options, spatial shape of the input
CASES = {
    "1d": ((4, 6, 3), {}, (9,)),
    "sequence": ((4, 6, (3,)), {"strides": 2, "padding": "VALID"}, (9,)),
    "integer": ((4, 6, (3, 2), None), {"padding": 1, "kernel_dilation": None}, (6, 5)),
    "causal": ((4, 6, (3,)), {"padding": "CAUSAL", "kernel_dilation": 2}, (9,)),
    "circular": ((4, 6, (3, 2)), {"padding": "CIRCULAR", "kernel_dilation": 2}, (6, 5)),
    "reflected": ((4, 6, (4,)), {"padding": "REFLECT", "strides": 2}, (9,)),
    "pairs": ((4, 6, (3, 2)), {"padding": ((1, 0), (0, 2)), "kernel_dilation": (2, 1)}, (6, 5)),
    "grouped": ((4, 6, (3, 3)), {"feature_group_count": 2, "use_bias": False}, (6, 5)),
    "depthwise": ((4, 4, (3,)), {"feature_group_count": 4}, (9,)),
    "3d": ((4, 6, (2, 2, 2)), {}, (3, 3, 3)),
    "zeros between": ((4, 6, 4), {"input_dilation": 2, "padding": ((1, 2),)}, (9,)),
}


@pytest.mark.parametrize("name", CASES)
def test_conv_is_the_layer_of_flax_over_the_root_of_its_fan_in(name) -> None:
    args, options, spatial = CASES[name]
    ours = nn.Conv(*args, **options, rngs=nnx.Rngs(0))
    flax = nnx.Conv(*args, **options, rngs=nnx.Rngs(0))
    assert flax.kernel.shape == ours.kernel.shape
    flax.kernel.set_value(ours.kernel.get_value() / ours.kernel.fan_in**0.5)
    if ours.bias is not None:
        ours.bias.set_value(jnp.arange(float(args[1])))
        flax.bias.set_value(ours.bias.get_value())
    x = jax.random.normal(jax.random.key(0), (2, *spatial, 4))
    found, expected = jit(lambda x: (ours(x).data, flax(x)))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


TRANSPOSED = {
    "1d": ((4, 6, 3), {"strides": 2}, (9,)),
    "one tap": ((4, 6, 1), {"strides": 2}, (5,)),
    "even": ((4, 6, (4, 4), 2), {}, (6, 5)),
    "valid": ((4, 6, (3, 2)), {"padding": "VALID", "strides": (2, 3)}, (6, 5)),
    "dilated": ((4, 6, (3, 2)), {"kernel_dilation": (2, 1), "strides": 2}, (6, 5)),
    "pairs": ((4, 6, 3), {"padding": ((2, 1),), "strides": 2, "use_bias": False}, (9,)),
    "integer": ((4, 6, 3), {"padding": 1, "strides": None, "kernel_dilation": None}, (9,)),
    "3d": ((4, 6, (2, 2, 2)), {"strides": 2}, (3, 2, 3)),
}


@pytest.mark.parametrize("batch", [(2,), (), (2, 3)])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_is_the_layer_of_flax_over_the_root_of_its_fan_in(name, batch) -> None:
    args, options, spatial = TRANSPOSED[name]
    ours, flax = (
        kind.ConvTranspose(*args, **options, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal())
        for kind in (nn, nnx)
    )
    assert flax.kernel.shape == ours.kernel.shape
    strides = np.broadcast_to(
        args[3] if len(args) > 3 else options.get("strides") or 1, len(spatial)
    )
    fan_in = ours.kernel.get_value()[..., 0].size / np.prod(strides)
    flax.kernel.set_value(ours.kernel.get_value() / fan_in**0.5)
    if ours.bias is not None:
        flax.bias.set_value(ours.bias.get_value())
    x = jax.random.normal(jax.random.key(0), (*batch, *spatial, 4))
    found, expected = jit(lambda x: (ours(x).data, flax(x)))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (2, 3), (0, 2)])
def test_any_number_of_batch_dimensions(batch) -> None:
    ours, flax = (kind.Conv(4, 6, (3, 2), strides=2, rngs=nnx.Rngs(0)) for kind in (nn, nnx))
    flax.kernel.set_value(ours.kernel.get_value() / ours.kernel.fan_in**0.5)
    x = jax.random.normal(jax.random.key(0), (*batch, 6, 5, 4))
    y = ours(ScaledArray(x, 2.0))
    assert y.scale == 2
    assert y.shape == (*batch, 3, 3, 6)
    np.testing.assert_allclose(y.data, flax(x), rtol=1e-5, atol=1e-5)


def test_a_scale_per_example_stays_one() -> None:
    scale = jnp.array([1.0, 4.0])[:, None, None]
    y = nn.Conv(4, 6, 3, rngs=nnx.Rngs(0))(ScaledArray(jnp.ones((2, 5, 4)), scale))
    np.testing.assert_array_equal(y.scale, scale)


def test_a_causal_convolution_pads_on_the_left() -> None:
    layer = nn.Conv(3, 5, 4, padding="CAUSAL", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 6, 3))
    reached = jax.jacobian(lambda x: jnp.sum(layer(x).data, (0, 2)))(x)[:, 0]
    reached = np.abs(np.asarray(reached)).sum(-1) > 0
    time = np.arange(6)
    expected = (time[None] <= time[:, None]) & (time[None] > time[:, None] - 4)
    np.testing.assert_array_equal(reached, expected)


def test_unit_scale(assert_rms) -> None:
    """Without padding, whose zeros would leave fewer terms; the border has fewer taps back."""
    length, kernel, features = 64, 3, 16
    kept = (length - kernel + 1) / length
    assert_rms(
        lambda rngs: nn.Conv(features, features, (kernel,), padding="VALID", rngs=rngs),
        (4, length, features),
        grad=kept**0.5,
    )


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"feature_group_count must divide .*; got 3, 4, 6"):
        nn.Conv(4, 6, (3,), feature_group_count=3, rngs=nnx.Rngs(0))
    layer = nn.Conv(4, 6, (3,), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must be \(batch, \*spatial, in\)"):
        layer(jnp.ones((2, 9, 5)))
    with pytest.raises(ValueError, match=r"x must be \(batch, \*spatial, in\)"):
        layer(jnp.ones(4))
    with pytest.raises(ValueError, match=r"padding must be 'SAME', 'VALID', 'CAUSAL'.*got 'FULL'"):
        nn.Conv(4, 6, (3,), padding="FULL", rngs=nnx.Rngs(0))(jnp.ones((2, 9, 4)))
