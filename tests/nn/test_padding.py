"""A vocabulary that is padded in the parameter: nothing but its size tells."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.optimizers import scaled
from unitscale import grad, nn, optim, to_array

VOCAB, WIDTH, MULTIPLE = 11, 8, 16


class Model(nnx.Module):
    """Tokens in, the loss of the next ones out; tied, or with a readout of its own."""

    def __init__(self, tied: bool, policy: Any = "float32", multiple: int = MULTIPLE) -> None:
        how: dict[str, Any] = {
            "pad_to_multiple_of": multiple,
            "policy": policy,
            "rngs": nnx.Rngs(0),
        }
        self.embed = nn.Embed(VOCAB, WIDTH, **how)
        self.dense = nn.Dense(WIDTH, WIDTH, policy=policy, rngs=nnx.Rngs(1))
        self.readout = nnx.data(None if tied else nn.Readout(WIDTH, VOCAB, **how))

    def states(self, ids: jax.Array) -> Any:
        return self.dense(self.embed(ids))

    def logits(self, ids: jax.Array) -> Any:
        x = self.states(ids)
        return self.embed.attend(x) if self.readout is None else self.readout(x)

    def loss(self, ids: jax.Array, **options: Any) -> jax.Array:
        head = self.readout or self.embed
        return head.cross_entropy(self.states(ids[:, :-1]), ids[:, 1:], **options)


def tables(params: Any) -> list[jax.Array]:
    """Values with padding, which lies last on the axis of the vocabulary."""
    found = []
    for path, leaf in nnx.to_flat_state(params):
        if path[-2:] == ("embed", "embedding"):
            found.append(to_array(leaf.get_value()))
        elif path[-2:] == ("readout", "kernel"):
            found.append(to_array(leaf.get_value()).T)
    assert all(table.shape == (MULTIPLE, WIDTH) for table in found)
    return found


IDS = np.random.default_rng(0).integers(0, VOCAB, (3, 6))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("policy", ["float32", "fp8"])
def test_losses_and_gradients_are_those_without_padding(tied: bool, policy: str) -> None:
    wide = nn.as_policy(policy)
    wide = wide if policy == "float32" else wide.with_quantized_readout()

    def run(multiple: int) -> Any:
        graphdef, params = nnx.split(Model(tied, wide, multiple))

        def both(params):
            model = nnx.merge(graphdef, params)
            grads = jax.grad(lambda p: nnx.merge(graphdef, p).loss(IDS, chunk_size=4))(params)
            return model.loss(IDS), model.logits(IDS).value, grads

        return jax.jit(both)(params)

    (loss, logits, grads), (expected, wanted, right) = run(MULTIPLE), run(1)
    assert logits.shape == wanted.shape == (3, 6, VOCAB)
    np.testing.assert_allclose(logits, wanted, rtol=1e-6)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for own, other in zip(jax.tree.leaves(grads), jax.tree.leaves(right), strict=True):
        cut = own[tuple(map(slice, other.shape))]
        np.testing.assert_allclose(cut, other, rtol=1e-5, atol=1e-6)
    for table in tables(grads):
        np.testing.assert_array_equal(table[VOCAB:], 0)


NARROW: dict[str, Any] = {
    "weights": "float16",
    "moments": ("float8_e4m3fn", "float16"),
    "rounding": "stochastic",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_padding_never_learns(tied: bool, narrow: bool) -> None:
    """Under Adam, weight decay and u-muP, in float32, and in 16 and 8 bits rounded at random."""
    graphdef, params = nnx.split(Model(tied))
    inner = optax.adamw(0.1, weight_decay=0.1)
    wide: dict[str, Any] = {"weights": None, "moments": (None, None)}
    formats = NARROW if narrow else wide
    tx = scaled(optim.umup(inner, params), **formats)
    params = tx.scale_params(params)
    state = tx.init(params)
    first = params

    @jax.jit
    def step(params, state):
        gradients = grad(lambda p: nnx.merge(graphdef, p).loss(IDS, chunk_size=4))(params)
        return tx.step(params, state, gradients)

    for _ in range(4):
        params, state = step(params, state)
    for before, after in zip(tables(first), tables(params), strict=True):
        np.testing.assert_array_equal(after[VOCAB:], 0)
        assert (np.asarray(before[:VOCAB]) != np.asarray(after[:VOCAB])).any()
    for leaf in jax.tree.leaves(to_array(state)):
        if leaf.shape in {(MULTIPLE, WIDTH), (WIDTH, MULTIPLE)}:
            table = leaf if leaf.shape[0] == MULTIPLE else leaf.T
            np.testing.assert_array_equal(np.asarray(table, np.float32)[VOCAB:], 0)


def test_a_token_of_the_padding_is_none() -> None:
    table = Model(True).embed
    rows = table(jnp.array([VOCAB - 1, VOCAB, MULTIPLE, -1])).data
    np.testing.assert_array_equal(np.isnan(rows).all(1), [False, True, True, True])


def test_parameters() -> None:
    """What is drawn is what is drawn without padding, and u-muP sees the vocabulary."""
    model, plain = Model(False), Model(False, multiple=1)
    for own, other in (
        (model.embed.embedding, plain.embed.embedding),
        (model.readout.kernel, plain.readout.kernel),
    ):
        np.testing.assert_array_equal(nn.unpadded(own), other.get_value())
        np.testing.assert_array_equal(nn.unpadded(other), other.get_value())
        assert (own.fan_in, own.fan_out) == (other.fan_in, other.fan_out)
    for kind in (nn.Embed, nn.Readout):
        with pytest.raises(ValueError, match="pad_to_multiple_of must be at least 1; got 0"):
            kind(4, 4, pad_to_multiple_of=0, rngs=nnx.Rngs(0))


def test_a_readout_with_a_bias_makes_whole_logits() -> None:
    layer = nn.Readout(WIDTH, VOCAB, use_bias=True, pad_to_multiple_of=MULTIPLE, rngs=nnx.Rngs(0))
    layer.bias.set_value(jnp.arange(VOCAB) / VOCAB)
    x, labels = jnp.ones((2, WIDTH)), jnp.array([0, 3])
    logits = np.asarray(layer(x).value, np.float64)
    expected = np.log(np.exp(logits).sum(-1)) - logits[[0, 1], [0, 3]]
    found = layer.cross_entropy(x, labels, reduction="none", chunk_size=1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_delayed_scales_of_the_readout_move() -> None:
    policy = nn.as_policy("fp8_delayed").with_quantized_readout()
    models = [Model(True, policy, multiple) for multiple in (MULTIPLE, 1)]
    for model, chunk in zip(models, (4, None), strict=True):
        nn.value_and_grad(lambda m, chunk=chunk: m.loss(IDS, chunk_size=chunk))(model)
    padded, plain = (model.embed.amax.get_value() for model in models)
    assert (np.asarray(padded.scale) != 1).any()
    np.testing.assert_array_equal(padded.scale, plain.scale)
