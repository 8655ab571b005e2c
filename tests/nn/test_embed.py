import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn


def test_rows_of_the_table_in_the_compute_dtype() -> None:
    layer = nn.Embed(10, 4, policy="float16", rngs=nnx.Rngs(0))
    ids = jnp.array([[1, 2], [9, 1]])
    y = layer(ids)
    assert y.dtype == jnp.float16
    assert layer.embedding.dtype == jnp.float32
    np.testing.assert_array_equal(
        y.data, np.asarray(layer.embedding.get_value())[ids].astype(np.float16)
    )


def test_attend_is_the_readout_with_the_transposed_table() -> None:
    layer = nn.Embed(10, 4, rngs=nnx.Rngs(0))
    readout = nn.Readout(4, 10, rngs=nnx.Rngs(0))
    readout.kernel.set_value(layer.embedding.get_value().T)
    x = jax.random.normal(jax.random.key(0), (3, 4))
    np.testing.assert_array_equal(layer.attend(x).data, readout(x).data)


@pytest.mark.parametrize("policy", ["float32", "bfloat16", "fp8", "fp8_delayed"])
def test_tied_is_the_look_up_and_the_readout(policy: str) -> None:
    """Loss, logits and gradients are those of calling the layer, and then `attend` and its loss."""
    layer = nn.Embed(10, 4, pad_to_multiple_of=8, policy=policy, rngs=nnx.Rngs(0))
    ids = jnp.array([[1, 2, 9], [9, 1, 0]])

    def tied(layer):
        x, readout = layer.tied(ids)
        return readout.cross_entropy(x, ids), readout.attend(x).value

    def apart(layer):
        x = layer(ids)
        return layer.cross_entropy(x, ids), layer.attend(x).value

    (loss, logits), grads = nn.value_and_grad(tied, has_aux=True)(layer)
    (expected, whole), wanted = nn.value_and_grad(apart, has_aux=True)(layer)
    assert loss == expected
    np.testing.assert_array_equal(logits, whole)
    eps = float(jnp.finfo(layer.policy.compute_dtype).eps)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=4 * eps, atol=eps * np.abs(other).max())


def test_tied_uses_on_as_many_tokens_share_their_constant() -> None:
    """The gradients of look-up and readout, each over its true one, are the same multiple."""
    layer = nn.Embed(10, 4, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    ids = jax.random.randint(jax.random.key(0), (3, 5), 0, 10)
    r = jax.random.normal(jax.random.key(1), (3, 5, 10))

    def logits(p_in, p_out):
        return nnx.merge(graphdef, p_out).attend(nnx.merge(graphdef, p_in)(ids)).data

    def true(p_in, p_out):
        rows = p_in["embedding"].get_value()[ids]
        return rows @ p_out["embedding"].get_value().T / 4

    ours = jax.grad(lambda *p: jnp.sum(r * logits(*p)), (0, 1))(params, params)
    truth = jax.grad(lambda *p: jnp.sum(r * true(*p)), (0, 1))(params, params)
    used = np.unique(ids)
    ratios = [
        np.asarray(a)[used] / np.asarray(b)[used]
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True)
    ]
    np.testing.assert_allclose(ratios[0], 4 / 15**0.5, rtol=1e-3)
    np.testing.assert_allclose(ratios[1], 4 / 15**0.5, rtol=1e-3)


def test_scale_of_the_tables_gradient() -> None:
    """Unit over tokens that are spread evenly, from a unit cotangent."""
    vocab, features, tokens = 50, 32, 1000
    graphdef, params = nnx.split(nn.Embed(vocab, features, rngs=nnx.Rngs(0)))
    ids = jnp.arange(tokens) % vocab
    dy = jax.random.normal(jax.random.key(0), (tokens, features))
    (g,) = jax.vjp(lambda p: nnx.merge(graphdef, p)(ids).data, params)[1](dy)
    (g,) = jax.tree.leaves(g)
    assert abs(float(jnp.mean(g**2)) - 1) < 5 * (2 / g.size) ** 0.5


def test_positions_are_added_and_the_sum_is_unit(assert_rms) -> None:
    layer = nn.PositionalEmbed(8, 4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 5, 4))
    table = np.asarray(layer.embedding.get_value())
    np.testing.assert_allclose(layer(x).value, (x + table[:5]) / 2**0.5, rtol=1e-6, atol=1e-6)
    positions = jnp.array([[3, 4, 5, 6, 7], [0, 0, 1, 1, 2]])
    expected = (x + table[positions]) / 2**0.5
    np.testing.assert_allclose(layer(x, positions).value, expected, rtol=1e-6, atol=1e-6)
    assert_rms(lambda rngs: nn.PositionalEmbed(64, 16, rngs=rngs), (4, 64, 16), grad=2**-0.5)


def test_scale_of_the_position_tables_gradient() -> None:
    graphdef, params = nnx.split(nn.PositionalEmbed(64, 32, rngs=nnx.Rngs(0)))
    x, dy = jax.random.normal(jax.random.key(0), (2, 8, 64, 32))
    (g,) = jax.vjp(lambda p: nnx.merge(graphdef, p)(x).data, params)[1](dy)
    (g,) = jax.tree.leaves(g)
    # Half of the sum's variance is the table's.
    assert abs(2 * float(jnp.mean(g**2)) - 1) < 5 * (2 / g.size) ** 0.5


def test_a_token_or_position_outside_of_the_table_is_nan() -> None:
    assert np.isnan(nn.Embed(4, 2, rngs=nnx.Rngs(0))(jnp.array([7])).data).all()
    layer = nn.PositionalEmbed(4, 2, rngs=nnx.Rngs(0))
    y = layer(jnp.ones((1, 2, 2)), jnp.array([3, 4])).data
    assert np.isfinite(y[:, 0]).all()
    assert np.isnan(y[:, 1]).all()


def test_errors() -> None:
    with pytest.raises(TypeError, match="ids must be integers; got dtype float32"):
        nn.Embed(4, 2, rngs=nnx.Rngs(0))(jnp.ones(3))
    layer = nn.PositionalEmbed(4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the sequence must fit max_length 4; got 5 positions"):
        layer(jnp.ones((1, 5, 2)))
