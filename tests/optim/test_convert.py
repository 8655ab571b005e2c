import functools

import jax
import numpy as np
import optax
import pytest

from tests.batching import compute
from tests.optimizers import scaled
from unitscale.core import format_of, to_array
from unitscale.optim import convert_state
from unitscale.optim._storage import is_stored, load

PARAMS = {"w": np.linspace(0.5, 2, 24).reshape(4, 6), "b": np.ones(6)}
PARAMS = {name: x.astype(np.float32) for name, x in PARAMS.items()}
GRADS = {"w": np.linspace(1, 2, 24).reshape(4, 6), "b": np.linspace(1, 2, 6)}
GRADS = {name: x.astype(np.float32) for name, x in GRADS.items()}
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


def start(name: str):
    """Parameters and the first state."""
    tx = make(name)
    params = PARAMS if name == "plain" else tx.scale_params(PARAMS)
    return params, tx.init(params)


@functools.cache
def stepped(name: str):
    """State after two steps."""
    tx = make(name)

    @jax.jit
    def run():
        params, state = start(name)
        for _ in range(2):
            _, state = tx.update(GRADS, state, params)
        return state

    return run()


def values(state):
    inner = state if isinstance(state, tuple) and not hasattr(state, "inner") else state.inner
    return jax.tree.map(load, inner, is_leaf=is_stored)


@pytest.mark.parametrize("target", FORMATS)
def test_numbers_are_those_of_the_source_rounded_once(target: str) -> None:
    def convert(before):
        params, like = start(target)
        after = convert_state(before, like)
        updates, _ = make(target).update(GRADS, after, params)  # it goes on
        return like, after, values(after), values(before), to_array(updates["w"])

    first, second = MOMENTS[target]
    table = {source: (convert, stepped(source)) for source in FORMATS}
    for like, after, mine, theirs, update in compute(table).values():
        assert jax.tree.structure(after) == jax.tree.structure(like)
        assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(like)]
        mine, theirs = mine[1][0], theirs[1][0]
        assert int(mine.count) == int(theirs.count) == 2
        for got, wanted, dtype, roots in [
            (mine.mu, theirs.mu, first, 1),
            (mine.nu, theirs.nu, second, 2),  # of a root, squared
        ]:
            rtol = roots * format_of(dtype).eps / 2 * 1.01
            for key, x in got.items():
                np.testing.assert_allclose(x, wanted[key], rtol=rtol)
        assert np.isfinite(update).all()


def test_there_and_back_is_exact() -> None:
    """What is in the formats already is not rounded again."""

    @jax.jit
    def there_and_back(state):
        plain = convert_state(state, INNER.init(PARAMS))
        return values(state), values(convert_state(plain, start("6 bytes")[1]))

    jax.tree.map(np.testing.assert_array_equal, *there_and_back(stepped("6 bytes")))


def test_the_key_is_part_of_the_state() -> None:

    @jax.jit
    def keys(state, plain):
        like = start("4 bytes")[1]
        assert convert_state(state, start("6 bytes")[1]).key is None
        found = (convert_state(state, like), state, convert_state(plain, like), like)
        return [jax.random.key_data(x.key) for x in found]

    converted, own, of_plain, fresh = map(np.asarray, keys(stepped("4 bytes"), stepped("plain")))
    assert (converted == own).all()
    assert (own != fresh).any()
    assert (of_plain == fresh).all()


def test_errors() -> None:
    other = {**PARAMS, "b": np.ones(5)}
    with pytest.raises(ValueError, match=r"convert_state: state must be of .*expected \(5,\)"):
        jax.eval_shape(lambda: convert_state(stepped("plain"), INNER.init(other)))
    momentum = optax.sgd(0.1, momentum=0.9)
    with pytest.raises(ValueError, match="convert_state: state must be of the transformation"):
        jax.eval_shape(lambda: convert_state(stepped("6 bytes"), momentum.init(PARAMS)))


def test_plain_state_comes_in_the_types_of_like() -> None:
    plain, narrow = optax.adam(0.1), optax.adam(0.1, mu_dtype="bfloat16")
    state = plain.init(PARAMS)
    assert convert_state(state, narrow.init(PARAMS))[0].mu["w"].dtype == "bfloat16"
    assert convert_state(state, narrow.init(PARAMS))[0].nu["w"].dtype == "float32"
