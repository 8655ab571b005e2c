"""Indexing and rearrangement: the same elements as NumPy's, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale.core import ScaledArray, as_scaled

from .arrays import KINDS, exact, make, stored

REARRANGE = {
    "int": lambda x: x[1],
    "slice": lambda x: x[1:3, ::2],
    "ellipsis": lambda x: x[..., -1],
    "newaxis": lambda x: x[:, None],
    "array": lambda x: x[np.array([0, 2, 2])],
    "mask": lambda x: x[np.array([True, False, True, True])],
    "element": lambda x: x[2, 3],
    "reshape": lambda x: x.reshape(2, 12),
    "reshape tuple": lambda x: x.reshape((3, -1)),
    "T": lambda x: x.T,
    "transpose": lambda x: x.transpose(1, 0),
    "transpose tuple": lambda x: x.transpose((1, 0)),
    "swapaxes": lambda x: x.swapaxes(0, -1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "squeeze all": lambda x: x[:1].squeeze(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_elements(kind: str) -> None:
    x = make(kind, "float16")
    for name, got in compute({name: (fn, x) for name, fn in REARRANGE.items()}).items():
        with entry(name):
            expected = REARRANGE[name](exact(x))
            assert got.dtype == jnp.float16
            assert got.shape == expected.shape
            np.testing.assert_array_equal(exact(got), expected)
            if kind in ("none", "one", "tensor"):
                assert np.shape(got.scale) == ()


@pytest.mark.parametrize("kind", ["channel", "row", "e8m0"])
def test_transposed_scales_stay_small(kind: str) -> None:
    x = make(kind, "float32")
    assert x.T.scale.shape == x.scale.shape[::-1]
    assert x.T.scale.dtype == x.scale.dtype


def test_transposed_stacks_stay_stacks() -> None:
    """Of one layer too, which `jax.lax.scan` still has to find."""
    for layers in (1, 2):
        x = as_scaled(jnp.ones((layers, 2, 3)), stack_axes=1)
        assert x.transpose(0, 2, 1).scale.shape == x.swapaxes(1, 2).scale.shape == (layers, 1, 1)
    features = ScaledArray(jnp.ones((2, 3)), jnp.array([1.0, 2.0, 4.0]))
    np.testing.assert_array_equal(features.T.value, np.asarray(features.value).T)


def test_transposed_blocks_stay_blocks() -> None:
    scale = stored(2.0 ** np.arange(12).reshape(2, 3, 2), "float8_e8m0fnu")
    x = ScaledArray(jnp.ones((2, 5, 4)), scale, block_shape=(1, 2, 2))
    for axes in ((), (1, 2, 0), ((2, 0, -2),), (None,)):
        y = x.transpose(*axes)
        assert y.scale.dtype == scale.dtype
        assert y.block_shape == tuple(np.ones(x.block_shape).transpose(*axes).shape)
        np.testing.assert_array_equal(y.value, np.asarray(x.value).transpose(*axes))
    stack = jax.tree.map(lambda leaf: leaf[None], x)
    for y in (jax.vmap(lambda x: x.T)(stack), stack.transpose(0, 3, 2, 1)):
        assert y.block_shape == (1, 2, 2, 1)
        np.testing.assert_array_equal(y.value[0], x.value.T)
    one = ScaledArray(jnp.ones((1, 4)), jnp.ones((1, 1)), block_shape=(1, 4))
    assert one.T.block_shape == (4, 1)


def test_iteration_ends() -> None:
    x = make("row", "float32")
    rows = list(x)
    assert len(rows) == len(x) == 4
    np.testing.assert_array_equal(np.stack([exact(r) for r in rows]), exact(x))
    with pytest.raises(TypeError):
        iter(x[0, 0])


def test_length_is_that_of_arrays() -> None:
    x = make("row", "float32")
    assert len(x) == len(jax.eval_shape(lambda: x)) == 4
    with pytest.raises(TypeError, match="ScaledArray without dimensions"):
        len(x[0, 0])
