"""Normalization layers and dropout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.refusals import refuses
from unitscale import nn, to_array
from unitscale.core import ScaledArray


def test_options() -> None:
    assert nn.GroupNorm(64).num_groups == 32
    assert nn.GroupNorm(64, None, 16).num_groups == 4
    layer, x = nn.LayerNorm(8, use_bias=False, use_scale=False), jnp.arange(8.0)
    assert not jax.tree.leaves(nnx.state(layer))
    np.testing.assert_allclose(layer(x).value, (x - 3.5) / 5.25**0.5, rtol=1e-5)


def test_running_averages_are_those_of_flax() -> None:
    """In training and evaluation, and under a transformation that returns changed state."""
    ours, flax = (
        kind(4, momentum=0.7, epsilon=0.1, rngs=nnx.Rngs(0))
        for kind in (nn.BatchNorm, nnx.BatchNorm)
    )
    x = 3 * jax.random.normal(jax.random.key(0), (3, 2, 5, 4)) + 1

    @nnx.jit
    def step(model, x):
        return nnx.value_and_grad(lambda model: jnp.sum(jnp.sin(to_array(model(x)))))(model)

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
    near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    near(ours(x[0], use_running_average=True).value, flax(x[0], use_running_average=True))
    ours.eval()
    flax.eval()
    near(to_array(ours(ScaledArray(x[0], 4.0))), flax(4 * x[0]))
    np.testing.assert_array_equal(ours.mean[...], before)
    ours.train()
    ours(x[0])
    assert not np.array_equal(ours.mean[...], before)


X = jnp.ones((64, 64))


def test_dropout_in_training_and_evaluation() -> None:
    layer = nn.Dropout(0.75, rngs=nnx.Rngs(0))
    for mode, deterministic, kept in (
        (layer.train, None, {0.0, 2.0}),
        (layer.eval, None, {0.5}),
        (layer.eval, False, {0.0, 2.0}),
        (layer.train, True, {0.5}),
        (layer.train, None, {0.0, 2.0}),
    ):
        mode()
        options = {} if deterministic is None else {"deterministic": deterministic}
        assert set(np.unique(layer(X, **options).data)) == kept
    # Rate zero needs no key and keeps the scale.
    y = nn.Dropout(0.0)(ScaledArray(X, 4.0))
    np.testing.assert_array_equal(y.data, X)
    assert float(y.scale) == 4.0
    assert not jax.tree.leaves(nnx.state(nn.Dropout(0.0, rngs=nnx.Rngs(0))))
    # Dimensions that are dropped together.
    y = nn.Dropout(0.5, broadcast_dims=(-1,), rngs=nnx.Rngs(0))(X).data
    np.testing.assert_array_equal(y, jnp.broadcast_to(y[:, :1], y.shape))
    assert len(np.unique(y)) == 2


def test_keys_and_masks_of_dropout() -> None:
    """Keys come from several kinds of streams; each layer and each call has its own mask."""
    layer = nn.Dropout(0.5, rng_collection="noise", rngs=nnx.Rngs(noise=3))
    first = layer(X).data
    assert abs(np.mean(first != 0) - 0.5) < 5 * 0.5 / X.size**0.5
    stream = lambda: nnx.Rngs(noise=3).noise  # noqa: E731
    for same in (
        nn.Dropout(0.5, rngs=stream())(X),
        layer(X, rngs=stream().fork()()),
        layer(X, rngs=stream().fork()),
        nn.Dropout(0.5)(X, rngs=stream().fork()),
    ):
        np.testing.assert_array_equal(first, same.data)
    rngs = nnx.Rngs(dropout=3)
    one, fork = nn.Dropout(0.5, rngs=rngs), nn.Dropout(0.5, rngs=rngs)
    jitted = nn.Dropout(0.5, rngs=nnx.Rngs(dropout=3))
    call = nnx.jit(lambda layer, x: layer(x).data)
    first, second = one(X).data, one(X).data
    np.testing.assert_array_equal(first, call(jitted, X))
    np.testing.assert_array_equal(second, call(jitted, X))
    for other in (second, fork(X).data, one(X, rngs=nnx.Rngs(dropout=7)).data):
        assert not np.array_equal(first, other)


test_errors = refuses(
    [
        *(
            (ValueError, lambda n=n, s=s: nn.GroupNorm(64, n, s), "num_groups and group_size")
            for n, s in ((3, None), (2, 32), (None, None), (None, 7), (0, None))
        ),
        *((ValueError, lambda r=r: nn.Dropout(r), "rate must be") for r in (-0.1, 1.0, np.nan)),
        (ValueError, lambda: nn.Dropout(0.5)(X), "give rngs="),
    ]
)
