"""Programs of many devices: operands agree on a scale first."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from tests.parallel.devices import explicit_mesh
from unitscale import ScaledArray, as_scaled, grad, to_array
from unitscale.transforms import scalify

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
COLLECTIVES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "psum": (lambda x: lax.psum(x, "d"), P()),
    "pmean": (lambda x: lax.pmean(x * 2, "d"), P()),
    "pmax": (lambda x: lax.pmax(x, "d"), P()),
    "ppermute": (lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]), P("d")),
    "all_gather": (lambda x: jnp.sum(lax.all_gather(x, "d"), 0), P("d")),
    "reduce_scatter": (lambda x: lax.psum_scatter(x, "d", tiled=True), P("d")),
    "all_to_all": (lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), P("d")),
    "index": (lambda x: x * (1 + lax.axis_index("d")), P("d")),
}


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_inside_shard_map(name: str, mesh: Mesh) -> None:
    """In float16, too, of small numbers that functions made, larger on one of the devices."""
    function, out = COLLECTIVES[name]
    specs = {"mesh": mesh, "in_specs": P("d"), "out_specs": out, "check_vma": False}
    program = jax.shard_map(lambda x: function(lax.erf(x)), **specs)
    run, expected = jax.jit(scalify(program)), program(X)
    for scale in (1.0, 2.0**12):
        actual = to_array(run(ScaledArray(X / scale, jnp.float32(scale))))
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    x = X * jnp.where(jnp.arange(8) < 4, 2.0**-20, 2.0**-25)[:, None]
    actual = to_array(run(as_scaled(x, dtype=jnp.float16)))
    np.testing.assert_allclose(actual, program(x), atol=2e-3 * np.abs(program(x)).max())


HALVES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "a sum of 8 bits": (
        lambda x: x * lax.psum(x, "d"),
        ScaledArray(jnp.asarray([1.875, -0.0546875], jnp.float8_e4m3fn), jnp.float32(4.0)),
    ),
    "a large sum": (
        lambda x: x / lax.psum(x * 2, "d"),
        as_scaled(jnp.full((2, 4), 60000.0), dtype=jnp.float16),
    ),
    "a mean": (
        lambda x: x / lax.pmean(1 + abs(x), "d"),
        as_scaled(jnp.asarray([1.0, 2.0]), dtype=jnp.float16),
    ),
}


@pytest.mark.parametrize("name", HALVES)
def test_narrow_sums_over_devices_and_their_gradients(name: str, mesh: Mesh) -> None:
    function, x = HALVES[name]
    program = jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    weights = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
    both = lambda x: (program(x), jax.grad(lambda x: jnp.sum(weights * program(x)))(x))  # noqa: E731
    found = to_array(jax.jit(scalify(both))(x))
    for actual, expected in zip(found, both(x.value.astype(jnp.float32)), strict=True):
        atol = 2.0**-8 * np.abs(expected).max()
        np.testing.assert_allclose(np.float32(actual), expected, rtol=0, atol=atol)


SPREADING: dict[str, Callable[[Any], Any]] = {
    "where": lambda x: jnp.where(x > 1, 2 * x, 9.0),
    "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1),
    "gradient": jax.grad(lambda x: jnp.sum(jax.nn.softmax(jax.nn.relu(x)) ** 2)),
    "matmul with itself": lambda x: jnp.einsum("ij,kj->ik", x, x, out_sharding=P("d")),
    "gather": lambda x: x.at[:, jnp.asarray([2, 0])].get(out_sharding=P("d")),
    "take": lambda x: jnp.take(jnp.arange(6.0) * x.sum(), jnp.asarray([1, 4])),
    "scan over items": lambda x: lax.scan(lambda c, v: (c + v, c * v), 0 * x[:, 0], x.T)[1].T,
    "while": lambda x: lax.while_loop(lambda c: jnp.sum(c) < 90, lambda c: c * 2 + 1, jnp.abs(x)),
    "cond": lambda x: lax.cond(jnp.sum(x) > 0, lambda a: a * 3, jnp.sin, x),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 2)), constant_values=7.0),
    "reshape": lambda x: x.reshape(8, 2, 2).sum(1),
    "remat": jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.tanh(x @ jnp.ones((4, 4)))))),
    "shard_map": lambda x: jax.shard_map(
        lambda v: lax.psum(v * 2, "d") + v.sum(), out_specs=P("d"), in_specs=P("d")
    )(x),
}


@pytest.mark.parametrize("name", SPREADING)
def test_shardings_that_are_part_of_the_type(name: str) -> None:
    program = jax.jit(SPREADING[name])
    mesh = explicit_mesh(d=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        expected = program(x)
        run = jax.jit(scalify(program))
        for scale in (1.0, 2.0**12):
            actual = to_array(run(ScaledArray(x / scale, jnp.float32(scale))))
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
            assert jax.typeof(actual).sharding == jax.typeof(expected).sharding


def test_a_scale_of_each_device_makes_data_vary_before_the_program_does(mesh: Mesh) -> None:
    def vary(x: Any) -> Any:
        return lax.pcast(jnp.sin(x), "d", to="varying") * 2 + lax.axis_index("d")

    def shard(x: Any, scale: Any) -> Any:
        return to_array(scalify(vary)(ScaledArray(x, scale[0])))

    scales = jnp.asarray([0.5, 2.0])
    program = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    actual = jax.jit(program)(X, scales)
    expected = [np.sin(np.asarray(X) * scale) * 2 + i for i, scale in enumerate([0.5, 2.0])]
    np.testing.assert_allclose(actual, np.concatenate(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_inside_shard_map_operands_may_vary_differently(dtype: Any, mesh: Mesh) -> None:
    def local(w: jax.Array, x: jax.Array) -> Any:
        loss = lambda w: lax.pmean(jnp.tanh(jax.nn.relu(x @ w) + 1).sum(), "d")  # noqa: E731
        return jax.value_and_grad(loss)(w)

    def inside(w: ScaledArray, x: ScaledArray) -> Any:
        return to_array(scalify(local)(w, x))

    w = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
    scaled = as_scaled((w, X), dtype=dtype)
    specs = jax.tree.map(lambda leaf: P("d") if leaf.ndim else P(), scaled[1])
    expected = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(
        *(to_array(s, jnp.float32) for s in scaled)
    )
    found = jax.shard_map(inside, mesh=mesh, in_specs=(P(), specs), out_specs=P())(*scaled)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=8 * jnp.finfo(dtype).eps * np.abs(e).max())


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x


clipped.defvjp(lambda x: (x, x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * jnp.sign(x),))


@pytest.mark.parametrize("function", [jax.nn.relu, jax.nn.softplus, clipped])
def test_gradients_of_a_scalified_function_on_explicit_axes(function: Any) -> None:
    mesh = explicit_mesh(d=2)
    loss = lambda w, x: function(x @ w).sum()  # noqa: E731
    w = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
    half = as_scaled((w, X), dtype=jnp.float16)
    expected = jax.grad(loss)(*(to_array(h, jnp.float32) for h in half))
    with jax.set_mesh(mesh):
        x = ScaledArray(jax.device_put(half[1].data, P("d")), half[1].scale)
        found = jax.jit(grad(lambda w: to_array(scalify(loss)(w, x))))(half[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3 * np.abs(expected).max())
