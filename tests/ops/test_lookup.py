"""Embedding look-up, and rotary position embedding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.batching import compute
from tests.parallel.devices import explicit_mesh
from unitscale import ops
from unitscale.core import ScaledArray

from .conformance import (
    assert_scales_are_constants,
    in_every_dtype,
    linear,
    normal,
    pulled,
    under_scales,
)

IDS = np.array([[0, 3, 3], [4, 0, 3]])
POSITIONS = np.array([0, 1, 700])


def rotate(x, positions=POSITIONS, base=10000.0):
    """Each pair of features as a complex number, turned."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    angles = np.asarray(positions)[..., None] * base ** (-np.arange(half) / half)
    z = z * np.exp(1j * angles)[..., None, :]
    return np.concatenate([z.real, z.imag], -1)


def embed(table):
    return ops.embed(IDS, table)


def rotary(x):
    return ops.rotary(x, POSITIONS)


CASES = {
    "embed": linear(embed, lambda t: t[IDS], normal("e", (5, 2)), fwd=1.0, bwd=((5 / 6) ** 0.5,)),
    # An angle of up to 700 radians is known to 2^-15 in float32.
    "rotary": linear(
        rotary,
        rotate,
        normal("rotary", (3, 2, 4)),
        fwd=1.0,
        bwd=(1.0,),
        slack={"float32": 64, "float16": 2, "bfloat16": 1},
    ),
}
test_value_and_gradients = in_every_dtype(CASES, mapped=CASES)
ROWS = np.float32([[1], [2], [4], [8], [0.5]])
SCALED = [2.0**12, 2.0**-12, np.float32([[8]]), np.float32([1, 4]), ROWS]
test_scales = under_scales([(s,) for s in SCALED], {"embed": CASES["embed"]})
SCALED = [2.0**12, np.float32([[[1]], [[2]], [[4]]]), np.float32([1, 2, 8, 0.5])]
test_scales_of_rotary = under_scales([(s,) for s in SCALED], {"rotary": CASES["rotary"]})


def test_scale_and_dtype_of_the_output() -> None:
    table = jnp.arange(6.0).reshape(3, 2)
    rows = ops.embed(jnp.array([2, 0]), ScaledArray(table, jnp.float32([[2, 8]])))
    np.testing.assert_array_equal(rows.value, [[8, 40], [0, 8]])
    rows = ops.embed(jnp.array([2, 0]), ScaledArray(table, jnp.float32([[1], [2], [8]])))
    np.testing.assert_array_equal(rows.scale, [[8], [1]])
    x = ScaledArray(jnp.ones((3, 2, 4), jnp.float16), 8.0)
    assert (rotary(x).scale, rotary(x).dtype) == (8, jnp.float16)
    assert rotary(ScaledArray(x.data, jnp.arange(1.0, 5.0))).dtype == jnp.float16
    assert rotary(x.data.astype(jnp.float8_e5m2)).dtype == jnp.bfloat16
    assert_scales_are_constants(rotary, x)
    y, (grad,) = pulled(embed, jnp.ones((5, 2), jnp.float8_e4m3fn), cotangent=1e3)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(grad)[:, 0], [448, 0, 0, 448, 448])


def test_rows_are_summed_wide() -> None:
    """Half of the 100 cotangents of 2000 sum to 100000 > 65504, times (2 / 100)^1/2 is 14142."""
    table, ids = jnp.ones((2, 3), jnp.float16), jnp.arange(100) % 2
    _, vjp = jax.vjp(lambda t: ops.embed(ids, t).data, table)
    (grad,) = vjp(jnp.full((100, 3), 2000.0, jnp.float16))
    np.testing.assert_array_equal(grad, np.float16(1e5 * 0.02**0.5))
    # 2048 + 1 is 2048 in float16: forty-nine ones after it would all be lost.
    cotangents = jnp.ones((100, 3), jnp.float16).at[0].set(2048)
    np.testing.assert_array_equal(vjp(cotangents)[0][0], np.float16((2048 + 49) * 0.02**0.5))


READOUT = np.float32(normal("readout", (2, 3, 5))[0])


def shared(table, look):
    """A table as what is looked up, and as what logits are made of."""
    rows, kept = look(table)
    logits = jnp.einsum("btf,vf->btv", rows.value, jnp.asarray(ops.scale(kept, 1.0, 2.0)))
    return jnp.sum(READOUT * jnp.tanh(logits))


def tied(table):
    return ops.tied_embed(IDS, table)


def apart(table):
    return ops.embed(IDS, table), table


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_tied_table_has_the_sum_of_both_gradients(dtype: str) -> None:
    """As `embed` and a second use of the table, and rounded once less."""
    with jax.enable_x64(dtype == "float64"):
        data = jnp.asarray(normal("tied", (5, 2))[0], dtype)

        def run(look, scale, data):
            def value(data):
                return shared(data if scale is None else ScaledArray(data, scale), look)

            return jax.value_and_grad(value)(data)

        found = compute(
            {
                (look, scale is None): (functools.partial(run, look), scale, data)
                for look in (tied, apart)
                for scale in (None, jnp.asarray(ROWS))
            }
        )
    eps = float(jnp.finfo(dtype).eps)
    for plain, part in itertools.product((True, False), range(2)):
        one, other = found[tied, plain][part], found[apart, plain][part]
        assert one.dtype == other.dtype
        one, other = np.float64(one), np.float64(other)
        np.testing.assert_allclose(one, other, rtol=2 * eps, atol=eps * np.abs(other).max())


def test_a_tied_table_needs_no_other_array_of_its_size() -> None:
    """Only the gradient of its second use is one, and the rows' is added there."""

    def whole(look) -> int:
        text = str(jax.make_jaxpr(jax.grad(lambda t: shared(t, look)))(jnp.ones((5, 2))))
        return text.count("broadcast_in_dim[shape=(5, 2)") + text.count("f32[5,2] = add_any")

    assert whole(tied) == 0
    assert whole(apart) > 0


PLACES = [
    (P(), P("data")),
    (P("model"), P("data", "model")),
    (P(None, "model"), P("data")),
    (P(None, "data"), P("data", "model")),
    (P(("data", "model")), P("data")),
]


@pytest.mark.parametrize(("table_place", "ids_place"), PLACES, ids=str)
def test_rows_on_a_mesh_whose_axes_are_part_of_the_type(table_place: P, ids_place: P) -> None:
    """Where JAX would have to be told what lies where."""
    table, ids = np.float32(normal("mesh", (8, 4))[0]), np.arange(24).reshape(4, 6) % 8

    def gradients(table, ids):
        def by_both(table):
            rows, table = ops.tied_embed(ids, table)
            return jnp.sum(jnp.sin(rows.value)) + 0 * jnp.sum(table)

        one = jax.grad(lambda t: jnp.sum(jnp.sin(ops.embed(ids, t).value)))(table)
        return ops.embed(ids, table).value, (one, jax.grad(by_both)(table))

    with jax.set_mesh(explicit_mesh(data=2, model=2)):
        placed = jax.device_put(table, table_place), jax.device_put(ids, ids_place)
        rows, found = jax.jit(gradients)(*placed)
    assert jax.typeof(rows).sharding.spec[:2] == (*ids_place, None, None)[:2]
    np.testing.assert_array_equal(rows, table[ids])
    expected = (8 / ids.size) ** 0.5 * 3 * np.cos(table)  # each row is looked up three times
    for gradient in found:
        assert jax.typeof(gradient).sharding == jax.typeof(placed[0]).sharding
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_an_id_outside_gives_nan_and_no_gradient(dtype: str) -> None:
    """Rows beyond the vocabulary are outside, and the factor counts the vocabulary alone."""
    ids = jnp.array([3, 4, 255] if dtype == "uint8" else [3, -1, 4]).astype(dtype)
    for table, options in ((jnp.ones((4, 2)), {}), (jnp.ones((8, 2)), {"vocab": 4})):
        look = functools.partial(ops.embed, ids, **options)
        np.testing.assert_array_equal(np.isnan(look(table).data[:, 0]), [False, True, True])
        grad = jax.grad(lambda t, look=look: look(t).data[0].sum())(table)
        np.testing.assert_allclose(grad[3], (4 / 3) ** 0.5, rtol=1e-6)
        assert np.count_nonzero(grad) == 2


def test_positions_broadcast_and_products_depend_on_the_distance() -> None:
    (x,) = normal("rotary", (2, 3, 1, 4))
    positions = np.array([[0, 1, 2], [5, 6, 7]])
    for p in (positions, positions[:1], positions[0]):
        y = ops.rotary(jnp.asarray(x, jnp.float32), p, base=100.0)
        np.testing.assert_allclose(y.data, rotate(x, p, base=100.0), rtol=1e-5, atol=1e-5)
    q, k = (jnp.asarray(a, jnp.float32) for a in normal("qk", (1, 1, 8), (1, 1, 8)))
    near, far = (
        jnp.sum(ops.rotary(q, jnp.array([i])).data * ops.rotary(k, jnp.array([j])).data)
        for i, j in ((3, 1), (42, 40))
    )
    np.testing.assert_allclose(near, far, rtol=1e-4)
