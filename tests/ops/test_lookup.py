"""Embedding lookup, and rotary position embedding."""

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

from .conformance import in_every_dtype, linear, normal, slow, under_scales

IDS = np.array([[0, 3, 3], [4, 0, 3]])
POSITIONS = np.array([0, 1, 700])


def rotate(x, positions=POSITIONS, base=10000.0):
    """Rotate pairs of features as complex numbers."""
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
test_value_and_gradients = in_every_dtype(CASES, mapped=tuple(CASES))
ROWS = np.float32([[1], [2], [4], [8], [0.5]])
SCALED = [2.0**12, 2.0**-12, np.float32([[8]]), np.float32([1, 4]), ROWS]
test_scales = under_scales([(s,) for s in SCALED], {"embed": CASES["embed"]})
SCALED = [2.0**12, np.float32([[[1]], [[2]], [[4]]]), np.float32([1, 2, 8, 0.5])]
test_scales_of_rotary = under_scales([(s,) for s in SCALED], {"rotary": CASES["rotary"]})


READOUT = np.float32(normal("readout", (2, 3, 5))[0])


def shared(table, look):
    """Use a table both for lookup and for logits."""
    rows, kept = look(table)
    logits = jnp.einsum("btf,vf->btv", rows.value, jnp.asarray(ops.scale(kept, 1.0, 2.0)))
    return jnp.sum(READOUT * jnp.tanh(logits))


def tied(table):
    return ops.tied_embed(IDS, table)


def apart(table):
    return ops.embed(IDS, table), table


@pytest.mark.parametrize("dtype", [slow("float32"), "float16", slow("bfloat16"), "float64"])
def test_a_tied_table_has_the_sum_of_both_gradients(dtype: str) -> None:
    """The gradient is that of both uses, with one rounding less."""
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
    """The lookup's gradient is added into that of the second use of the table."""

    def whole(look) -> int:
        text = str(jax.make_jaxpr(jax.grad(lambda t: shared(t, look)))(jnp.ones((5, 2))))
        return text.count("broadcast_in_dim[shape=(5, 2)") + text.count("f32[5,2] = add_any")

    assert whole(tied) == 0
    assert whole(apart) > 0


PLACES = [
    slow(P(), P("data")),
    (P("model"), P("data", "model")),
    (P(None, "model"), P("data")),
    slow(P(None, "data"), P("data", "model")),
    slow(P(("data", "model")), P("data")),
]


@pytest.mark.parametrize(("table_place", "ids_place"), PLACES, ids=str)
def test_rows_on_a_mesh_whose_axes_are_part_of_the_type(table_place: P, ids_place: P) -> None:
    """With explicit axis types, where JAX by itself would need the sharding of the result."""
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


def test_an_id_outside_gives_nan_and_no_gradient() -> None:
    """Padding rows count as outside; the factor depends on the vocabulary without padding."""

    def look(ids, options, table):
        y, vjp = jax.vjp(lambda t: ops.embed(ids, t, **options).data, table)
        return y, vjp(jnp.zeros_like(y).at[0].set(1))[0]

    ids = np.int32([3, -1, 4]), np.uint8([3, 4, 255])
    tables = (np.ones((4, 2), np.float32), {}), (np.ones((8, 2), np.float32), {"vocab": 4})
    table = {
        (i, j): (functools.partial(look, given, options), rows)
        for i, given in enumerate(ids)
        for j, (rows, options) in enumerate(tables)
    }
    for y, grad in compute(table).values():
        np.testing.assert_array_equal(np.isnan(y[:, 0]), [False, True, True])
        np.testing.assert_allclose(grad[3], (4 / 3) ** 0.5, rtol=1e-6)
        assert np.count_nonzero(grad) == 2


def test_positions_broadcast() -> None:
    (x,) = normal("rotary", (2, 3, 1, 4))
    given = np.array([[0, 1, 2], [5, 6, 7]])
    positions = {"each": given, "first": given[:1], "flat": given[0]}
    turn = functools.partial(ops.rotary, base=100.0)
    found = compute({name: (turn, np.float32(x), p) for name, p in positions.items()})
    for name, y in found.items():
        expected = rotate(x, positions[name], base=100.0)
        np.testing.assert_allclose(y.data, expected, rtol=1e-5, atol=1e-5)
