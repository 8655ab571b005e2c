"""Layers with a kernel or a table: dense, readout, einsum, LoRA, convolutions, embeddings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.gradients import jit
from tests.nn.table import normal, of, parameters
from tests.optimizers import scaled
from tests.refusals import refuses
from unitscale import grad, nn, optim, to_array


def test_lora_is_that_of_flax_over_the_roots_of_fan_in_and_rank() -> None:
    b = nnx.initializers.normal(1.0)
    ours, flax = (
        kind.LoRALinear(5, 4, lora_rank=3, b_initializer=b, rngs=nnx.Rngs(0)) for kind in (nn, nnx)
    )
    ours.bias.set_value(jnp.arange(4.0))
    flax.bias.set_value(ours.bias[...])
    flax.kernel.set_value(ours.kernel[...] / 5**0.5)
    for name, size in (("lora_a", 5), ("lora_b", 3)):
        own = getattr(ours.lora, name)
        assert (type(own), own.role, own.fan_in) == (nnx.LoRAParam, "weight", size)
        getattr(flax.lora, name).set_value(own[...] / size**0.5)
    alone, base = nn.LoRA(5, 3, 4, rngs=nnx.Rngs(0)), nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    wrapped = nn.LoRA(5, 3, 4, base_module=base, rngs=nnx.Rngs(0))
    layers = ours, flax, alone, wrapped, base
    found, expected, none, *pair = jit(lambda x: [to_array(f(x)) for f in layers])(
        normal(0, 2, 3, 5)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not np.any(none)
    np.testing.assert_array_equal(*pair)


# Tables and readouts.


def test_rows_of_the_table_and_positions_that_are_added() -> None:
    """Outputs are in the compute dtype; ids or positions outside of the table give NaN."""
    embed = nn.Embed(10, 4, policy="float16", pad_to_multiple_of=16, rngs=nnx.Rngs(0))
    layer, x = nn.PositionalEmbed(8, 4, rngs=nnx.Rngs(0)), normal(0, 2, 5, 4)
    ids = np.array([[1, 2, 9, 10], [9, 1, 16, -1]])
    places = np.array([[3, 4, 5, 6, 7], [0, 0, 1, 8, 2]])
    y, first, chosen = jit(lambda ids, x: (embed(ids), layer(x[None]), layer(x, places)))(ids, x)
    assert (y.dtype, embed.embedding.dtype) == (jnp.float16, jnp.float32)
    table = np.asarray(embed.embedding.get_value())
    np.testing.assert_array_equal(y.data[:, :2], table[ids[:, :2]].astype(np.float16))
    outside = [[False] * 3 + [True], [False, False, True, True]]
    np.testing.assert_array_equal(np.isnan(y.data).all(-1), outside)

    table = np.asarray(layer.embedding.get_value())
    np.testing.assert_allclose(first.value[0], (x + table[:5]) / 2**0.5, rtol=1e-6, atol=1e-6)
    table = np.concatenate([table, np.full((1, 4), np.nan)])
    np.testing.assert_allclose(chosen.value, (x + table[places]) / 2**0.5, rtol=1e-6, atol=1e-6)


def test_readouts_divide_by_their_inputs() -> None:
    embed, layer = nn.Embed(7, 12, rngs=nnx.Rngs(0)), nn.Readout(12, 7, rngs=nnx.Rngs(0))
    assert (layer.bias, layer.constraint) == (None, None)
    layer.kernel.set_value(embed.embedding.get_value().T)
    x = normal(0, 3, 12)
    expected = np.float64(x) @ np.float64(layer.kernel.get_value()) / 12
    found, tied = jit(lambda x: (layer(x).data, embed.attend(x).data))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(tied, found)


VOCAB, WIDTH, MULTIPLE = 11, 8, 16
IDS = np.random.default_rng(0).integers(0, VOCAB, (3, 6))
STATES = normal(1, 3, 6, WIDTH)


def padded(tied: bool, policy: Any = "float32", multiple: int = MULTIPLE) -> Any:
    """Make a tied embedding, or a readout."""
    kind, sizes = (nn.Embed, (VOCAB, WIDTH)) if tied else (nn.Readout, (WIDTH, VOCAB))
    return kind(*sizes, pad_to_multiple_of=multiple, policy=policy, rngs=nnx.Rngs(0))


def loss(layer: Any, **options: Any) -> jax.Array:
    x = STATES + layer(IDS).value if isinstance(layer, nn.Embed) else STATES
    return layer.cross_entropy(x, IDS, **options)


def rows(array: Any) -> np.ndarray:
    """Move the vocabulary axis, with its padding, to the front."""
    array = np.asarray(to_array(array), np.float32)
    return array if array.shape == (MULTIPLE, WIDTH) else array.T


def some(argnames: str, *cases: Any, slow: Any = ()) -> Any:
    cases += tuple(pytest.param(*case, marks=pytest.mark.slow) for case in slow)
    return pytest.mark.parametrize(argnames.split(), cases, ids=str)


@some("tied policy", (False, "fp8"), (True, "float32"), slow=[(False, "float32"), (True, "fp8")])
def test_losses_and_gradients_are_those_without_padding(tied: bool, policy: str) -> None:
    wide = nn.as_policy(policy)
    wide = wide if policy == "float32" else wide.with_quantized_readout()
    layers = [padded(tied, wide, multiple) for multiple in (MULTIPLE, 1)]

    def run(layer):
        logits = (layer.attend if tied else layer)(STATES).value
        return loss(layer), logits, nnx.grad(lambda m: loss(m, chunk_size=4))(layer)

    (value, logits, grads), (expected, wanted, right) = nnx.jit(
        lambda *layers: list(map(run, layers))
    )(*layers)
    assert logits.shape == wanted.shape == (3, 6, VOCAB)
    np.testing.assert_allclose(logits, wanted, rtol=1e-6)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    (own,), (other,) = map(jax.tree.leaves, (grads, right))
    cut = own[tuple(map(slice, other.shape))]
    np.testing.assert_allclose(cut, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rows(own)[VOCAB:], 0)


def test_a_readout_with_a_bias_makes_whole_logits() -> None:
    layer = nn.Readout(WIDTH, VOCAB, use_bias=True, pad_to_multiple_of=MULTIPLE, rngs=nnx.Rngs(0))
    layer.bias.set_value(jnp.arange(VOCAB) / VOCAB)
    x, labels = jnp.ones((2, WIDTH)), jnp.array([0, 3])
    logits, found = jit(
        lambda x: (layer(x).value, layer.cross_entropy(x, labels, reduction="none", chunk_size=1))
    )(x)
    logits = np.asarray(logits, np.float64)
    expected = np.log(np.exp(logits).sum(-1)) - logits[[0, 1], [0, 3]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


NARROW = {"weights": "float16", "moments": ("e4m3fn", "float16"), "rounding": "stochastic"}
WIDE = {"weights": None, "moments": (None, None)}


@some("tied formats", (False, NARROW), slow=[(True, WIDE)])
def test_padding_never_learns(tied: bool, formats: dict[str, Any]) -> None:
    """With Adam, weight decay and u-muP, in float32 and in stochastically rounded 16 and 8 bits."""
    (own,), (other,) = (parameters(padded(tied, multiple=n)).values() for n in (MULTIPLE, 1))
    # Padding does not change the initial values, nor the fan-in and fan-out that u-muP sees.
    np.testing.assert_array_equal(nn.unpadded(own), other.get_value())
    assert (own.fan_in, own.fan_out) == (other.fan_in, other.fan_out)
    graphdef, params = nnx.split(padded(tied))
    tx = scaled(optim.umup(optax.adamw(0.1, weight_decay=0.1), params), **formats)
    params = tx.scale_params(params)
    state, before = tx.init(params), rows(own.get_value())

    @jit
    def step(params, state):
        gradients = grad(lambda p: loss(nnx.merge(graphdef, p), chunk_size=4))(params)
        return tx.step(params, state, gradients)

    for _ in range(4):
        params, state = step(params, state)
    (after,) = jax.tree.leaves(to_array(params))
    assert (rows(after)[:VOCAB] != before[:VOCAB]).any(1).all()
    for leaf in (after, *jax.tree.leaves(to_array(state))):
        if leaf.size == MULTIPLE * WIDTH:
            np.testing.assert_array_equal(rows(leaf)[VOCAB:], 0)


@some("policy", ("fp8_delayed",), slow=[("float32",)])
def test_tied_is_the_look_up_and_the_readout(policy: str) -> None:
    """Loss, logits and gradients equal those of calling the layer, `attend` and the loss."""
    wide = nn.as_policy(policy)
    wide = wide if policy == "float32" else wide.with_quantized_readout()

    def tied(layer):
        x, readout = layer.tied(IDS)
        return readout.cross_entropy(x, IDS), readout.attend(x).value

    def apart(layer):
        x = layer(IDS)
        return layer.cross_entropy(x, IDS), layer.attend(x).value

    layers = [
        nn.Embed(VOCAB, 4, pad_to_multiple_of=8, policy=wide, rngs=nnx.Rngs(0)) for _ in range(2)
    ]
    both = (nn.value_and_grad(f, has_aux=True) for f in (tied, apart))
    run = nnx.jit(lambda *layers: [f(layer) for f, layer in zip(both, layers, strict=True)])
    ((loss, logits), grads), ((expected, whole), wanted) = run(*layers)
    eps = float(jnp.finfo(wide.compute_dtype).eps)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_array_equal(logits, whole)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=4 * eps, atol=eps * np.abs(other).max())
    if policy != "float32":
        scales = [layer.amax.get_value().scale for layer in layers]
        assert (np.asarray(scales[0]) != 1).any()
        np.testing.assert_array_equal(*scales)


test_errors = refuses(
    [
        (ValueError, lambda: of(nn.Einsum, "ab,bc", (4, 4)), "einsum_str must be"),
        (ValueError, lambda: of(nn.Einsum, "ab,bc->ac", (4, 4, 4)), "the kernel is"),
        (ValueError, lambda: of(nn.PositionalEmbed, 4, 9)(np.ones((1, 5, 9))), "got 5"),
        (ValueError, lambda: of(nn.Embed, 4, 4, pad_to_multiple_of=0), "pad_to_multiple_of"),
        (ValueError, lambda: of(nn.Conv, 4, 6, 3, feature_group_count=3), "feature_group_count"),
    ]
)
