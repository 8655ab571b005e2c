import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn
from unitscale.core import ScaledArray

X = jnp.ones((64, 64))


def test_same_stream_same_mask_and_every_call_another() -> None:
    one, two = (nn.Dropout(0.5, rngs=nnx.Rngs(dropout=3)) for _ in range(2))
    first = one(X).data
    np.testing.assert_array_equal(first, two(X).data)
    assert not np.array_equal(first, one(X).data)
    other = nn.Dropout(0.5, rngs=nnx.Rngs(dropout=4))
    assert not np.array_equal(first, other(X).data)


def test_layers_fork_the_stream() -> None:
    """A stack of layers made from one Rngs draws a mask each."""
    rngs = nnx.Rngs(dropout=3)
    a, b = nn.Dropout(0.5, rngs=rngs), nn.Dropout(0.5, rngs=rngs)
    assert not np.array_equal(a(X).data, b(X).data)


def test_rngs_of_the_call_win() -> None:
    layer = nn.Dropout(0.5)
    a = layer(X, rngs=nnx.Rngs(dropout=7)).data
    b = layer(X, rngs=nnx.Rngs(dropout=7)).data
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, layer(X, rngs=nnx.Rngs(dropout=8)).data)


def test_train_eval_and_the_argument_of_the_call() -> None:
    layer = nn.Dropout(0.75, rngs=nnx.Rngs(0))
    assert set(np.unique(layer(X).data)) == {0.0, 2.0}
    layer.eval()
    assert set(np.unique(layer(X).data)) == {0.5}
    assert set(np.unique(layer(X, deterministic=False).data)) == {0.0, 2.0}
    layer.train()
    assert set(np.unique(layer(X).data)) == {0.0, 2.0}
    assert set(np.unique(layer(X, deterministic=True).data)) == {0.5}


def test_jit_advances_the_stream_as_eager_calls_do() -> None:
    eager, jitted = (nn.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2))
    call = nnx.jit(lambda layer, x: layer(x).data)
    for _ in range(2):
        np.testing.assert_array_equal(eager(X).data, call(jitted, X))


def test_unit_scale(assert_rms) -> None:
    assert_rms(lambda rngs: nn.Dropout(0.3, rngs=rngs), (64, 64))


def test_the_share_of_zeros_is_the_rate() -> None:
    kept = np.mean(nn.Dropout(0.3, rngs=nnx.Rngs(0))(jnp.ones(40_000)).data != 0)
    assert abs(kept - 0.7) < 5 * (0.3 * 0.7 / 40_000) ** 0.5


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


def test_errors() -> None:
    for rate in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"rate must be in \[0, 1\); got"):
            nn.Dropout(rate)
    with pytest.raises(ValueError, match="give rngs= to the constructor or the call, or set"):
        nn.Dropout(0.5)(X)
