"""Programs on several devices, which first agree on a common scale."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests.batching import compute, entry
from tests.parallel.devices import explicit_mesh
from unitscale import ScaledArray, as_scaled, grad, to_array
from unitscale.transforms import cast_data, scalify

from .agreement import HALF, close, narrow, scaled
from .table import clipped_gradient

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
MESH = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))


# XLA cannot compile ragged_all_to_all for a CPU. If no rows are sent, it returns `out`.
lowering = mlir.lower_fun(lambda x, out, *sizes, **params: out, multiple_results=False)
mlir.register_lowering(lax.ragged_all_to_all_p, lowering, platform="cpu")
NONE = [np.zeros(2, np.int32)] * 4

COLLECTIVES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "psum": (lambda x: lax.psum(x, "d"), P()),
    "pmean": (lambda x: lax.pmean(x * 2, "d"), P()),
    "pmax": (lambda x: lax.pmax(x, "d"), P()),
    "ppermute": (lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)]), P("d")),
    "all_gather": (lambda x: jnp.sum(lax.all_gather(x, "d"), 0), P("d")),
    "reduce_scatter": (lambda x: lax.psum_scatter(x, "d", tiled=True), P("d")),
    "all_to_all": (lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), P("d")),
    "ragged": (lambda x: lax.ragged_all_to_all(x, 9 * x, *NONE, axis_name="d"), P("d")),
    "index": (lambda x: x * (1 + lax.axis_index("d")), P("d")),
}


def test_collectives_inside_shard_map() -> None:
    """Also in float16, with small numbers that are larger on one device."""
    uneven = X * jnp.where(jnp.arange(8) < 4, 2.0**-20, 2.0**-25)[:, None]
    args = X, ScaledArray(X / 2.0**12, jnp.float32(2.0**12)), as_scaled(uneven, dtype=jnp.float16)

    def check(function: Any, out: Any) -> Any:
        specs = {"mesh": MESH, "in_specs": P("d"), "out_specs": out, "check_vma": False}
        program = jax.shard_map(lambda x: function(lax.erf(x)), **specs)
        run = lambda x: to_array(scalify(program)(x), jnp.float32)  # noqa: E731
        return lambda x, wide, half: (program(x), run(wide), program(half.value), run(half))

    table = {name: (check(*row), *args) for name, row in COLLECTIVES.items()}
    for name, (plain, wide, plain_half, half) in jax.device_get(compute(table)).items():
        with entry(name):
            np.testing.assert_allclose(wide, plain, rtol=1e-6, atol=1e-6)
            close(half, np.float32(plain_half), atol=2 * HALF)


HALVES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "8 bits": (lambda x: x * lax.psum(x, "d"), scaled([1.875, -0.0546875], 4.0, "float8_e4m3fn")),
    "a large sum": (lambda x: x / lax.psum(x * 2, "d"), narrow(np.full((2, 4), 60000.0))),
    "zeros": (lambda x: x + lax.psum(jnp.sin(x), "d"), scaled([1.0, 0.0], 2.0**-30)),
    "a ring": (
        lambda x: lax.fori_loop(0, 2, lambda i, c: lax.ppermute(c, "d", [(0, 1), (1, 0)]) * 3, x),
        narrow([1.0, 2.0]),
    ),
    "a mean": (lambda x: x / lax.pmean(1 + abs(x), "d"), narrow([1.0, 2.0])),
}


def test_narrow_sums_over_devices_and_their_gradients() -> None:
    def check(function: Any) -> Any:
        program = jax.shard_map(function, mesh=MESH, in_specs=P("d"), out_specs=P("d"))

        def both(x: Any) -> Any:
            weights = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
            return program(x), jax.grad(lambda x: jnp.sum(weights * program(x)))(x)

        return lambda x: (both(to_array(x, jnp.float32)), to_array(scalify(both)(x)))

    table = {name: (check(function), x) for name, (function, x) in HALVES.items()}
    for name, (expected, found) in jax.device_get(compute(table)).items():
        with entry(name):
            close(found, expected, atol=4 * HALF)


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


def test_shardings_that_are_part_of_the_type() -> None:
    mesh = explicit_mesh(d=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        ours = ScaledArray(jax.device_put(X / 2.0**12, x.sharding), jnp.float32(2.0**12))
        results = compute(
            {
                name: (lambda x, s, f=f: (f(x), to_array(scalify(f)(s))), x, ours)
                for name, f in SPREADING.items()
            }
        )
    for name, (expected, found) in results.items():
        with entry(name):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
            assert jax.typeof(found).sharding == jax.typeof(expected).sharding


def test_a_scale_of_each_device_makes_data_vary_before_the_program_does() -> None:
    def vary(x: Any) -> Any:
        return lax.pcast(jnp.sin(x), "d", to="varying") * 2 + lax.axis_index("d")

    def shard(x: Any, scale: Any) -> Any:
        return to_array(scalify(vary)(ScaledArray(x, scale[0])))

    program = jax.shard_map(shard, mesh=MESH, in_specs=(P(), P("d")), out_specs=P("d"))
    actual = jax.jit(program)(X, jnp.asarray([0.5, 2.0]))
    expected = [np.sin(np.asarray(X) * scale) * 2 + i for i, scale in enumerate([0.5, 2.0])]
    np.testing.assert_allclose(actual, np.concatenate(expected), rtol=1e-6, atol=1e-6)


def test_inside_shard_map_operands_may_vary_differently() -> None:
    def local(w: jax.Array, x: jax.Array) -> Any:
        loss = lambda w: lax.pmean(jnp.tanh(jax.nn.relu(x @ w) + 1).sum(), "d")  # noqa: E731
        return jax.value_and_grad(loss)(w)

    def both(w: ScaledArray, x: ScaledArray) -> Any:
        values = to_array((w, x), jnp.float32)
        return local(*values), to_array(scalify(local)(w, x), jnp.float32)

    args = [as_scaled((W, X), dtype=dtype) for dtype in (jnp.float32, jnp.float16)]
    specs = jax.tree.map(lambda leaf: P("d") if leaf.ndim else P(), args[0][1])
    run = jax.shard_map(both, mesh=MESH, in_specs=(P(), specs), out_specs=P())
    results = jax.jit(lambda args: [run(*a) for a in args])(args)
    for (_, x), (expected, found) in zip(args, results, strict=True):
        close(found, expected, atol=8 * float(jnp.finfo(x.dtype).eps))


@pytest.mark.parametrize("function", [jax.nn.softplus, clipped_gradient])
def test_gradients_of_a_scalified_function_on_explicit_axes(function: Any) -> None:
    mesh = explicit_mesh(d=2)
    loss = lambda w, x: function(x @ w).sum()  # noqa: E731
    half = as_scaled((W, X), dtype=jnp.float16)
    expected = jax.jit(jax.grad(loss))(*(to_array(h, jnp.float32) for h in half))
    with jax.set_mesh(mesh):
        x = ScaledArray(jax.device_put(half[1].data, P("d")), half[1].scale)
        found = jax.jit(grad(lambda w: to_array(scalify(loss)(w, x))))(half[0])
    close(found, expected, atol=4 * HALF)


def test_sums_of_8_bit_data_are_exact() -> None:
    def summed(x):
        return jax.shard_map(lambda x: lax.psum(x, "d"), mesh=MESH, in_specs=P("d"), out_specs=P())(
            cast_data(x, jnp.float8_e4m3fn)
        )

    x = jnp.array([1.125, 1.0])
    np.testing.assert_array_equal(to_array(jax.jit(scalify(summed))(ScaledArray(x, 1.0))), 2.125)
