"""Normalization layers and dropout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.refusals import refuses
from unitscale import nn
from unitscale.core import ScaledArray

PAIRS = {
    "layer": (nn.LayerNorm, nnx.LayerNorm),
    "rms": (nn.RMSNorm, nnx.RMSNorm),
    "group": (partial(nn.GroupNorm, num_groups=2), partial(nnx.GroupNorm, num_groups=2)),
    "batch": (nn.BatchNorm, nnx.BatchNorm),
}


@pytest.mark.parametrize(
    ("name", "use_scale"), [*((name, True) for name in PAIRS), ("layer", False)]
)
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


X = jnp.ones((64, 64))


def test_train_eval_and_the_argument_of_the_call() -> None:
    layer = nn.Dropout(0.75, rngs=nnx.Rngs(0))
    assert set(np.unique(layer(X).data)) == {0.0, 2.0}
    layer.eval()
    assert set(np.unique(layer(X).data)) == {0.5}
    assert set(np.unique(layer(X, deterministic=False).data)) == {0.0, 2.0}
    layer.train()
    assert set(np.unique(layer(X).data)) == {0.0, 2.0}
    assert set(np.unique(layer(X, deterministic=True).data)) == {0.5}


def test_rate_zero_needs_no_key_and_keeps_the_scale() -> None:
    y = nn.Dropout(0.0)(ScaledArray(X, 4.0))
    np.testing.assert_array_equal(y.data, X)
    assert float(y.scale) == 4.0
    assert not jax.tree.leaves(nnx.state(nn.Dropout(0.0, rngs=nnx.Rngs(0))))


def test_dimensions_that_are_dropped_together() -> None:
    y = nn.Dropout(0.5, broadcast_dims=(-1,), rngs=nnx.Rngs(0))(X).data
    np.testing.assert_array_equal(y, jnp.broadcast_to(y[:, :1], y.shape))
    assert len(np.unique(y)) == 2


def test_keys_from_another_stream_from_a_stream_and_alone() -> None:
    layer = nn.Dropout(0.5, rng_collection="noise", rngs=nnx.Rngs(noise=3))
    first = layer(X).data
    np.testing.assert_array_equal(first, nn.Dropout(0.5, rngs=nnx.Rngs(noise=3).noise)(X).data)
    key = nnx.Rngs(noise=3).noise.fork()()
    np.testing.assert_array_equal(first, layer(X, rngs=key).data)
    np.testing.assert_array_equal(first, layer(X, rngs=nnx.Rngs(noise=3).noise.fork()).data)


def test_masks_of_streams_layers_and_calls() -> None:
    rngs = nnx.Rngs(dropout=3)
    one, fork = nn.Dropout(0.5, rngs=rngs), nn.Dropout(0.5, rngs=rngs)
    two, jitted = (nn.Dropout(0.5, rngs=nnx.Rngs(dropout=3)) for _ in range(2))
    call = nnx.jit(lambda layer, x: layer(x).data)
    first = one(X).data
    assert abs(np.mean(first != 0) - 0.5) < 5 * 0.5 / X.size**0.5
    for same in (two(X).data, call(jitted, X)):
        np.testing.assert_array_equal(first, same)
    np.testing.assert_array_equal(second := one(X).data, call(jitted, X))
    given = one(X, rngs=nnx.Rngs(dropout=7)).data
    np.testing.assert_array_equal(given, nn.Dropout(0.5)(X, rngs=nnx.Rngs(dropout=7)).data)
    for other in (second, fork(X).data, given):
        assert not np.array_equal(first, other)


def test_options() -> None:
    assert nn.GroupNorm(64).num_groups == 32
    assert nn.GroupNorm(64, None, 16).num_groups == 4
    layer = nn.LayerNorm(8, use_bias=False, use_scale=False)
    assert not jax.tree.leaves(nnx.state(layer))
    np.testing.assert_array_equal(nn.RMSNorm(8).gain.get_value(), np.ones(8))
    np.testing.assert_array_equal(nn.LayerNorm(8).bias.get_value(), np.zeros(8))


test_errors = refuses(
    [
        *(
            (ValueError, lambda n=n, s=s: nn.GroupNorm(64, n, s), "num_groups and group_size")
            for n, s in ((3, None), (2, 32), (None, None), (None, 7), (0, None))
        ),
        (ValueError, lambda: nn.LayerNorm(8)(jnp.ones((2, 10))), "must be"),
        (ValueError, lambda: nn.RMSNorm(8, epsilon=-1.0)(jnp.ones((2, 8))), "eps must not"),
        *((ValueError, lambda r=r: nn.Dropout(r), "rate must be") for r in (-0.1, 1.0, np.nan)),
        (ValueError, lambda: nn.Dropout(0.5)(X), "give rngs="),
    ]
)
