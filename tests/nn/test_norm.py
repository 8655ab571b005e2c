from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn
from unitscale.core import ScaledArray

PAIRS = {
    "layer": (nn.LayerNorm, nnx.LayerNorm),
    "rms": (nn.RMSNorm, nnx.RMSNorm),
    "group": (partial(nn.GroupNorm, num_groups=2), partial(nnx.GroupNorm, num_groups=2)),
    "batch": (nn.BatchNorm, nnx.BatchNorm),
}


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_the_layer_of_flax(name, use_scale) -> None:
    ours, flax = (
        kind(8, epsilon=0.1, use_scale=use_scale, rngs=nnx.Rngs(0)) for kind in PAIRS[name]
    )
    if use_scale:
        ours.gain.set_value(jnp.linspace(0.5, 2.0, 8))
        flax.scale.set_value(ours.gain.get_value())
    if name != "rms":
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
    lost = 1 if name == "rms" else 2
    assert_rms(
        lambda rngs: PAIRS[name][0](128 if name == "group" else 64, rngs=rngs),
        (64, 128 if name == "group" else 64),
        grad=(1 - lost / 64) ** 0.5,
        bias=4 / 64,  # 1 / RMS of 64 samples has this mean square above 1
    )


@pytest.mark.parametrize("name", ["layer", "group", "batch"])
def test_scale_of_parameter_gradients(name) -> None:
    graphdef, params, rest = nnx.split(PAIRS[name][0](256), nnx.Param, ...)
    x, dy = jax.random.normal(jax.random.key(0), (2, 100, 256))

    def apply(p):
        return nnx.merge(graphdef, p, rest, copy=True)(x).data

    (grads,) = jax.vjp(apply, params)[1](dy)
    for g in jax.tree.leaves(grads):
        assert abs(float(jnp.mean(g**2)) - 1) < 5 * (2 / g.size) ** 0.5


def test_running_averages_are_those_of_flax() -> None:
    """In training and after, through a transformation that returns what a call has changed."""
    ours, flax = (
        kind(4, momentum=0.7, epsilon=0.1, rngs=nnx.Rngs(0))
        for kind in (nn.BatchNorm, nnx.BatchNorm)
    )
    x = 3 * jax.random.normal(jax.random.key(0), (3, 2, 5, 4)) + 1

    @nnx.jit
    def step(model, x):
        return nnx.value_and_grad(lambda model: jnp.sum(jnp.sin(_value(model(x)))))(model)

    scaled, _ = nn.value_and_grad(lambda model: jnp.sum(jnp.sin(model(x[0]).value)))(ours)
    assert float(scaled) == pytest.approx(float(step(flax, x[0])[0]), rel=1e-5)
    for batch in x[1:]:
        for model in (ours, flax):
            step(model, batch)
    for name in ("mean", "var"):
        found, expected = getattr(ours, name), getattr(flax, name)
        assert isinstance(found, nnx.BatchStat)
        np.testing.assert_allclose(found[...], expected[...], rtol=1e-5)
    before = ours.mean[...]
    np.testing.assert_allclose(
        ours(x[0], use_running_average=True).value,
        flax(x[0], use_running_average=True),
        rtol=1e-5,
        atol=1e-5,
    )
    ours.eval()
    flax.eval()
    np.testing.assert_allclose(
        _value(ours(ScaledArray(x[0], 4.0))), flax(4 * x[0]), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(ours.mean[...], before)
    ours.train()
    ours(x[0])
    assert not np.array_equal(ours.mean[...], before)


def _value(y):
    return y.value if isinstance(y, ScaledArray) else y


def test_groups() -> None:
    assert nn.GroupNorm(64).num_groups == 32
    assert nn.GroupNorm(64, None, 16).num_groups == 4
    for number, size in ((3, None), (2, 32), (None, None), (None, 7), (0, None)):
        with pytest.raises(ValueError, match="give one of num_groups and group_size"):
            nn.GroupNorm(64, number, size)


def test_options_of_the_parameters() -> None:
    layer = nn.LayerNorm(8, use_bias=False, use_scale=False)
    assert layer.gain is None
    assert layer.bias is None
    assert not jax.tree.leaves(nnx.state(layer))
    np.testing.assert_array_equal(nn.RMSNorm(8).gain.get_value(), np.ones(8))
    np.testing.assert_array_equal(nn.LayerNorm(8).bias.get_value(), np.zeros(8))


def test_errors() -> None:
    for kind, _ in PAIRS.values():
        with pytest.raises(ValueError, match=r"must be \(features,\).*x \(2, 10\).*gain \(8,\)"):
            kind(8)(jnp.ones((2, 10)))
        with pytest.raises(ValueError, match="eps must not be negative; got -1"):
            kind(8, epsilon=-1.0)(jnp.ones((2, 8)))
