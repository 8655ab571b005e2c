"""Embedding look-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.parallel.devices import explicit_mesh
from tests.refusals import refuses
from unitscale import ops
from unitscale.core import ScaledArray

from .conformance import assert_unit, in_every_dtype, linear, normal, under_scales

IDS = np.array([[0, 3, 3], [4, 0, 3]])
FACTOR = (5 / 6) ** 0.5


def embed(table):
    return ops.embed(IDS, table)


EMBED = linear(embed, lambda t: t[IDS], normal("embed", (5, 2)), fwd=1.0, bwd=(FACTOR,))
test_embed = in_every_dtype({"embed": EMBED})


SCALED = [
    2.0**12,
    2.0**-12,
    np.float32([[8]]),
    np.float32([1, 4]),
    np.float32([[1, 4]]),
    np.float32([[1], [2], [4], [8], [0.5]]),
    np.arange(1, 11, dtype=np.float32).reshape(5, 2),
]


test_scales = under_scales([(s,) for s in SCALED], {"embed": EMBED})


def test_rows_are_summed_wide() -> None:
    """Half of the 100 cotangents of 2000 sum to 100000 > 65504, times (2 / 100)^1/2 is 14142."""
    table = jnp.ones((2, 3), jnp.float16)
    ids = jnp.arange(100) % 2
    _, vjp = jax.vjp(lambda t: ops.embed(ids, t).data, table)
    (grad,) = vjp(jnp.full((100, 3), 2000.0, jnp.float16))
    np.testing.assert_array_equal(grad, np.float16(1e5 * 0.02**0.5))
    # 2048 + 1 is 2048 in float16: forty-nine ones after it would all be lost.
    cotangents = jnp.ones((100, 3), jnp.float16).at[0].set(2048)
    np.testing.assert_array_equal(vjp(cotangents)[0][0], np.float16((2048 + 49) * 0.02**0.5))


READOUT = np.random.default_rng(1).normal(size=(2, 3, 5)).astype(np.float32)


def _shared(table, look):
    """A table as what is looked up, and as what logits are made of."""
    rows, kept = look(table)
    logits = jnp.einsum("btf,vf->btv", rows.value, jnp.asarray(ops.scale(kept, 1.0, 2.0)))
    return jnp.sum(READOUT * jnp.tanh(logits))


@pytest.mark.parametrize("scale", [None, 4.0, np.float32([[1], [2], [4], [8], [0.5]])])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_tied_table_has_the_sum_of_both_gradients(dtype: str, scale) -> None:
    """As `embed` and a second use of the table, and rounded once less."""
    with jax.enable_x64(dtype == "float64"):
        data = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), dtype)

        def of(look):
            def value(data):
                table = data if scale is None else ScaledArray(data, jnp.asarray(scale))
                return _shared(table, look)

            return jax.jit(jax.value_and_grad(value))(data)

        found = of(lambda table: ops.tied_embed(IDS, table))
        wanted = of(lambda table: (ops.embed(IDS, table), table))
    eps = float(jnp.finfo(dtype).eps)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            np.float64(one), np.float64(other), rtol=2 * eps, atol=eps * np.abs(other).max()
        )


def test_a_tied_table_needs_no_other_array_of_its_size() -> None:
    """Only the gradient of its second use is one, and the rows' is added there."""

    def gradient(table, look):
        return jax.grad(lambda table: _shared(table, look))(table)

    def whole(look) -> int:
        text = str(jax.make_jaxpr(lambda t: gradient(t, look))(jnp.ones((5, 2))))
        return text.count("broadcast_in_dim[shape=(5, 2)") + text.count("f32[5,2] = add_any")

    assert whole(lambda table: ops.tied_embed(IDS, table)) == 0
    assert whole(lambda table: (ops.embed(IDS, table), table)) > 0


PLACES = [P(), P("model"), P(None, "model"), P(None, "data"), P(("data", "model"))]


@pytest.mark.parametrize("ids_place", [P(), P("data"), P("data", "model")], ids=str)
@pytest.mark.parametrize("table_place", PLACES, ids=str)
def test_rows_on_a_mesh_whose_axes_are_part_of_the_type(table_place: P, ids_place: P) -> None:
    """Where JAX would have to be told what lies where."""
    table, ids = np.random.default_rng(0).normal(size=(8, 4)), np.arange(24).reshape(4, 6) % 8
    table = table.astype(np.float32)

    def gradient(table, ids):
        return jax.grad(lambda t: jnp.sum(jnp.sin(ops.embed(ids, t).value)))(table)

    def tied(table, ids):
        def value(table):
            rows, table = ops.tied_embed(ids, table)
            return jnp.sum(jnp.sin(rows.value)) + 0 * jnp.sum(table)

        return jax.grad(value)(table)

    with jax.set_mesh(explicit_mesh(data=2, model=2)):
        placed = jax.device_put(table, table_place), jax.device_put(ids, ids_place)
        rows = ops.embed(placed[1], placed[0]).value
        found = jax.jit(gradient)(*placed)
        both = jax.jit(tied)(*placed)
    assert jax.typeof(rows).sharding.spec[:2] == (*ids_place, None, None)[:2]
    assert jax.typeof(found).sharding == jax.typeof(placed[0]).sharding
    assert jax.typeof(both).sharding == jax.typeof(found).sharding
    np.testing.assert_array_equal(rows, table[ids])
    np.testing.assert_allclose(both, found, rtol=1e-6)
    np.testing.assert_allclose(found, gradient(jnp.asarray(table), ids), rtol=1e-6)


def test_unit_variance_of_the_table_gradient() -> None:
    ids = np.random.default_rng(0).integers(0, 64, (8, 32))
    assert_unit(lambda table: ops.embed(ids, table), (64, 16), unit=[False, True])


def test_8_bit_table() -> None:
    table = jnp.ones((4, 2), jnp.float8_e4m3fn)
    y, vjp = jax.vjp(lambda t: ops.embed(jnp.array([1, 1]), t).data, table)
    assert y.dtype == jnp.bfloat16
    (grad,) = vjp(jnp.full_like(y, 1e3))
    np.testing.assert_array_equal(np.float32(grad), [[0, 0], [448, 448], [0, 0], [0, 0]])


table = jnp.ones((4, 2))
ERRORS = [
    (TypeError, lambda: ops.embed(jnp.ones(2), table), "ids must be integers; got dtype float32"),
    (TypeError, lambda: ops.embed(IDS, table > 0), r"ops\.embed: table must be a floating"),
    (ValueError, lambda: ops.embed(IDS, table[0]), r"table must be \(vocab, features\); got table"),
    (ValueError, lambda: ops.embed(IDS, table, vocab=5), "at most the 4 rows of the table; got 5"),
]


test_errors = refuses(ERRORS)


def test_one_scale_per_row_travels_with_the_row() -> None:
    scaled = ScaledArray(table, jnp.array([[1.0], [2.0], [4.0], [8.0]]))
    y = ops.embed(jnp.array([3, 0]), scaled)
    np.testing.assert_array_equal(y.scale, [[8], [1]])


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_an_id_outside_gives_nan_and_no_gradient(dtype: str) -> None:
    ids = jnp.array([3, 4, 255] if dtype == "uint8" else [3, -1, 4]).astype(dtype)
    found = ops.embed(ids, jnp.ones((4, 2))).data
    np.testing.assert_array_equal(np.isnan(found), [[False] * 2, [True] * 2, [True] * 2])
    grad = jax.grad(lambda t: ops.embed(ids, t).data[0].sum())(jnp.ones((4, 2)))
    assert np.count_nonzero(grad) == 2


def test_rows_beyond_the_vocabulary_are_none() -> None:
    """Ids of them give NaN, and the gradient's factor counts the vocabulary alone."""
    wide = jnp.ones((8, 2))
    found = ops.embed(jnp.array([3, 4, 7]), wide, vocab=4).data
    np.testing.assert_array_equal(np.isnan(found[:, 0]), [False, True, True])
    ids = jnp.array([0, 3, 3])

    def total(table, **options):
        return ops.embed(ids, table, **options).data.sum()

    own, plain = jax.grad(total)(wide, vocab=4), jax.grad(total)(wide[:4])
    np.testing.assert_array_equal(own[:4], plain)
    np.testing.assert_array_equal(own[4:], 0)


def test_one_scale_per_feature() -> None:
    table = ScaledArray(jnp.arange(6.0).reshape(3, 2), jnp.float32([[2, 8]]))
    rows = ops.embed(jnp.array([2, 0]), table)
    np.testing.assert_array_equal(rows.value, [[8, 40], [0, 8]])
