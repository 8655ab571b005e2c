from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from unitscale.core import format_of, to_array
from unitscale.optim import convert_state, scaled
from unitscale.optim._moments import is_stored, load

PARAMS = {"w": jnp.linspace(0.5, 2, 24).reshape(4, 6), "b": jnp.ones(6)}
GRADS = {"w": jnp.linspace(1, 2, 24).reshape(4, 6), "b": jnp.linspace(1, 2, 6)}
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.0, 9)))
FORMATS = {
    "plain": None,
    "float32": {"weights": None, "moments": ("float32", "float32")},
    "6 bytes": {},
    "4 bytes": {"moments": ("e4m3fn", "e4m3fn"), "rounding": "stochastic", "key": 5},
    "blocks": {"moments": ("e5m2", "bfloat16"), "block": 4},
}

MOMENTS = {
    "plain": ("float32", "float32"),
    "float32": ("float32", "float32"),
    "6 bytes": ("e4m3fn", "float16"),  # the default of scaled
    "4 bytes": ("e4m3fn", "e4m3fn"),
    "blocks": ("e5m2", "bfloat16"),
}


def make(name: str):
    settings = FORMATS[name]
    return INNER if settings is None else scaled(INNER, **settings)


def stepped(name: str):
    """State after two steps, and the values of the parameters."""
    tx, params = make(name), PARAMS
    if name != "plain":
        params = tx.scale_params(params)
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(GRADS, state, params)
    return state


def values(state):
    inner = state if isinstance(state, tuple) and not hasattr(state, "inner") else state.inner
    return jax.tree.map(load, inner, is_leaf=is_stored)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_numbers_are_those_of_the_source_rounded_once(source: str, target: str) -> None:
    before, tx = stepped(source), make(target)
    params = PARAMS if target == "plain" else tx.scale_params(PARAMS)
    like = tx.init(params)
    after = convert_state(before, like)
    assert jax.tree.structure(after) == jax.tree.structure(like)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(like)]
    first, second = MOMENTS[target]
    mine, theirs = values(after)[1][0], values(before)[1][0]
    assert int(mine.count) == int(theirs.count) == 2
    for got, wanted, dtype, roots in [
        (mine.mu, theirs.mu, first, 1),
        (mine.nu, theirs.nu, second, 2),  # of a root, squared
    ]:
        jax.tree.map(
            lambda a, b, d=dtype, n=roots: np.testing.assert_allclose(
                a, b, rtol=n * format_of(d).eps / 2 * 1.01
            ),
            got,
            wanted,
        )
    # It goes on.
    updates, _ = tx.update(GRADS, after, params)
    assert np.isfinite(np.asarray(to_array(updates["w"]))).all()


def test_there_and_back_is_exact() -> None:
    """What is in the formats already is not rounded again."""
    state = stepped("6 bytes")
    plain = convert_state(state, INNER.init(PARAMS))
    tx = make("6 bytes")
    again = convert_state(plain, tx.init(tx.scale_params(PARAMS)))
    jax.tree.map(np.testing.assert_array_equal, values(state), values(again))


def test_the_key_is_part_of_the_state() -> None:
    state, tx = stepped("4 bytes"), make("4 bytes")
    like = tx.init(tx.scale_params(PARAMS))
    data = jax.random.key_data
    assert (data(convert_state(state, like).key) == data(state.key)).all()
    assert not (data(state.key) == data(like.key)).all()
    assert (data(convert_state(stepped("plain"), like).key) == data(like.key)).all()
    tx = make("6 bytes")
    assert convert_state(state, tx.init(tx.scale_params(PARAMS))).key is None


def test_errors() -> None:
    other = {**PARAMS, "b": jnp.ones(5)}
    with pytest.raises(ValueError, match=r"convert_state: state must be of .*expected \(5,\)"):
        convert_state(stepped("plain"), INNER.init(other))
    with pytest.raises(ValueError, match="convert_state: state must be of the transformation"):
        convert_state(stepped("6 bytes"), optax.sgd(0.1, momentum=0.9).init(PARAMS))
