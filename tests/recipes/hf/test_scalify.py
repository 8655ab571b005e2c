"""Imported models in float16 and FP8 under scalify: near the float32 logits, and trainable."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recipes.config import PrecisionConfig
from recipes.hf import load, save
from recipes.run.precision import plain, scaled
from tests.recipes.pretrained import FIXTURES, copied, one_layer, reference
from unitscale import ScaledArray, as_scaled, scalify, to_array

FLOAT16 = PrecisionConfig(scalify="float16")
FP8 = PrecisionConfig.model_validate("scalify_fp8")


def error(name: str, config: PrecisionConfig) -> tuple[float, int]:
    """RMS error of the logits over their RMS, and the number of operations behind them."""
    inputs, expected = reference(FIXTURES / name)
    pretrained = load(FIXTURES / name, precision=config)
    graphdef, params, rest = nnx.split(pretrained.model, nnx.Param, ...)

    def logits(params):
        return nnx.merge(graphdef, params, rest)(*inputs)

    operations = len(jax.make_jaxpr(logits)(params).eqns)
    found = to_array(jax.jit(scalify(logits))(as_scaled(params, dtype=jnp.float16)))
    difference = np.asarray(found, np.float64) - expected
    return float(np.sqrt(np.mean(difference**2) / np.mean(expected**2))), operations


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama3", "gemma3", "bert-classes", "modernbert-mlm"])
def test_logits_in_16_and_8_bits(name: str) -> None:
    """Each operation rounds to 2^-11 in float16, and rounding errors add in squares.

    In FP8 each operand of a product rounds to at most 2^-4, an RMS of that over sqrt(3); a sum of
    many such products has an error of sqrt(2) of it, and eight products of linear layers follow
    each other (two layers of values, output, up and down).
    """
    half, operations = error(name, FLOAT16)
    eighth, _ = error(name, FP8)
    assert half <= 2**-11 * operations**0.5
    assert eighth <= (2 / 3) ** 0.5 * 2**-4 * 8**0.5
    assert eighth > half, "FP8 has an effect"


@pytest.mark.slow
def test_a_step_of_fine_tuning(tmp_path) -> None:
    """The loss of a batch falls in FP8, all stays finite, and the folder is written again."""
    folder = one_layer(copied("bert-mlm", tmp_path))
    (ids, segments, mask), _ = reference(folder)
    labels = np.where(mask == 1, ids, -100)
    pretrained = load(folder, precision=FP8, dropout=0.0)
    graphdef, params, rest = nnx.split(pretrained.model, nnx.Param, ...)
    optimizer = optax.sgd(0.1)

    def step(params, state):
        def loss(params):
            return nnx.merge(graphdef, params, rest).loss(ids, segments, mask, labels)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    run = jax.jit(scalify(step))
    state = scaled(FP8, optimizer.init(params))
    params, losses = scaled(FP8, params), []
    for _ in range(3):
        params, state, value = run(params, state)
        losses.append(float(plain(FP8, value)))
    assert losses[0] == pytest.approx(np.log(pretrained.config.vocab), rel=0.5)
    assert losses[2] < losses[1] < losses[0]
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, ScaledArray))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float16")}
    assert all(np.isfinite(leaf.data).all() for leaf in leaves)
    save(pretrained, folder, params)
    again = load(folder).model
    tuned = nnx.merge(graphdef, plain(FP8, params), rest)
    np.testing.assert_array_equal(again(ids, segments, mask), tuned(ids, segments, mask))
