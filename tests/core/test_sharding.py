"""Batch sizes in factors, with sharded batches and several inputs; mesh axes of arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.batching import compute, entry
from tests.parallel.devices import explicit_mesh, mesh_of, relative_error
from unitscale import ops
from unitscale.core import (
    BATCH_AXES,
    CONTEXT_AXES,
    axes_size,
    batch_over,
    batch_size,
    constrain_sharding,
    global_batch_size,
    num_batch_shards,
    reshard,
    to_array,
)

BATCH, TIME, WIDTH, VOCAB = 16, 3, 4, 6
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


PARAMS = {
    "kernel": normal(WIDTH, VOCAB),
    "bias": normal(VOCAB),
    "table": normal(VOCAB, WIDTH),
    "positions": normal(TIME, WIDTH),
    "filter": normal(2, WIDTH, WIDTH),
    "gain": normal(WIDTH),
    "shift": normal(WIDTH),
}
DATA = {
    "x": normal(BATCH, TIME, WIDTH),
    "ids": RNG.integers(0, VOCAB, (BATCH, TIME)),
    "labels": RNG.integers(0, VOCAB, (BATCH, TIME)),
    "y": normal(BATCH, TIME, VOCAB),
}


def cross_entropy(logits: Any, d: Any) -> Any:
    return ops.softmax_cross_entropy(logits, d["labels"])


def squares(pred: Any, d: Any) -> Any:
    return jnp.mean((to_array(pred) - d["y"]) ** 2)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "conv": lambda p, d: cross_entropy(
        ops.readout(ops.conv(d["x"], p["filter"], p["shift"]), p["kernel"], p["bias"]), d
    ),
    "embed": lambda p, d: ops.mse_loss(
        ops.dense(ops.embed(d["ids"], p["table"]), p["kernel"]), d["y"]
    ),
    "norms": lambda p, d: cross_entropy(
        ops.dense(ops.rms_norm(ops.layer_norm(d["x"], p["gain"], p["shift"])), p["kernel"]), d
    ),
    "positions": lambda p, d: cross_entropy(
        ops.dense(ops.add(d["x"], p["positions"], constraint=None), p["kernel"]), d
    ),
    "matmul": lambda p, d: cross_entropy(ops.matmul(d["x"], p["kernel"], constraint="gmean"), d),
    "mask": lambda p, d: ops.softmax_cross_entropy(
        ops.dense(d["x"], p["kernel"]), d["labels"], where=d["labels"] > 1
    ),
    "a readout in chunks": lambda p, d: ops.readout_cross_entropy(
        ops.layer_norm(d["x"], p["gain"]),
        p["table"],
        d["labels"],
        where=d["labels"] > 1,
        transposed=True,
        chunk_size=4,
    ),
    "ours under a plain mean": lambda p, d: squares(ops.dense(d["x"], p["kernel"], p["bias"]), d),
    "both under our mean": lambda p, d: cross_entropy(
        to_array(ops.dense(jnp.tanh(d["x"] * p["gain"]), p["kernel"])) + p["bias"], d
    ),
    "one loss for each": lambda p, d: jnp.mean(
        ops.softmax_cross_entropy(ops.dense(d["x"], p["kernel"]), d["labels"], reduction="none")
    ),
}


def mean_of_losses(loss: Any, p: Any, d: Any) -> Any:
    """With varying axes checked, JAX sums gradients of replicated values."""
    return jax.grad(lambda p: lax.pmean(loss(p, d), "data"))(p)


def mean_of_gradients(loss: Any, p: Any, d: Any) -> Any:
    """With varying axes checked, and parameters that differ between devices."""
    return lax.pmean(jax.grad(loss)(lax.pcast(p, "data", to="varying"), d), "data")


def unchecked(loss: Any, p: Any, d: Any) -> Any:
    """Without varying axes checked, so the axes have to be named."""
    with batch_over("data"):
        return lax.pmean(jax.grad(loss)(p, d), "data")


def on_devices(local: Any, check: bool = True) -> Any:
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check}
    return lambda loss, devices: jax.shard_map(
        functools.partial(local, loss), mesh=mesh_of(data=devices, model=8 // devices), **specs
    )


def by_vmap(loss: Any, parts: int) -> Any:
    """Compute gradients of each part of the batch, like those of single examples."""
    each = jax.vmap(jax.grad(loss), (None, 0), axis_name="part")

    def whole(p, d):
        divided = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), d)
        with batch_over("part"):
            return jax.tree.map(lambda g: g.mean(0), each(p, divided))

    return whole


WAYS = {
    "mean of losses": (on_devices(mean_of_losses), 8),
    "mean of gradients": (on_devices(mean_of_gradients), 4),
    "unchecked": (on_devices(unchecked, check=False), 2),
    "vmap": (by_vmap, BATCH),
}


@functools.cache
def of_the_whole_batch() -> Any:
    return compute({name: (jax.grad(loss), PARAMS, DATA) for name, loss in LOSSES.items()})


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mean of losses", "mean of gradients", "unchecked", "vmap"])
def test_gradients_of_a_divided_batch(way: str) -> None:
    divide, parts = WAYS[way]
    ours = compute({name: (divide(loss, parts), PARAMS, DATA) for name, loss in LOSSES.items()})
    whole = of_the_whole_batch()
    for name in LOSSES:
        with entry(name):
            for key, expected in whole[name].items():
                if np.any(expected):
                    assert relative_error(ours[name][key], expected) < 2**-20, key
                else:
                    assert not np.any(ours[name][key])


def counted(axes: Any, spec: Any, **settings: Any) -> int:
    """Return into how many parts a spec divides an array's batch, on 4 x 2 devices."""
    seen = []

    def local(x):
        if axes is None:
            seen.append(num_batch_shards(x))
        else:
            with batch_over(axes):
                seen.append(num_batch_shards(x))
        return x

    mesh = mesh_of(data=4, tensor=2)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, **settings)
    jax.eval_shape(mapped, jnp.zeros((8, 8)))
    return seen[0]


COUNTS = [  # axes of the context, spec of the array, account kept, parts
    (None, P(), True, 1),
    (None, P("data"), True, 4),
    (None, P("data", "tensor"), True, 8),
    ("data", P("data", "tensor"), True, 4),
    ("data", P(None, "tensor"), True, 1),
    ((), P("data"), True, 1),
    (("data", "tensor"), P(("data", "tensor")), True, 8),
    (None, P("data"), False, 1),
    ("data", P("data"), False, 4),
    (("data", "tensor"), P("data"), False, 8),
    (("data", "absent"), P("data"), False, 4),
    ("absent", P("data"), True, 1),
]


def test_parts_that_are_counted() -> None:
    for axes, spec, check, parts in COUNTS:
        with entry((axes, spec, check)):
            assert counted(axes, spec, check_vma=check) == parts
    with batch_over(("data", "tensor")):
        assert num_batch_shards(jnp.ones(3)) == 1  # nothing is divided outside


def test_what_was_traced_inside_is_not_used_outside() -> None:
    """The contexts are part of the keys of JAX's caches."""
    grad = jax.jit(jax.grad(lambda w, x: ops.dense(x, w).data.sum()))
    each = jax.vmap(grad, (None, 0), axis_name="part")
    w, x = jnp.ones((2, 2)), jnp.ones((4, 1, 2))
    plain = each(w, x)
    with batch_over("part"):
        inside = each(w, x)
    with batch_size(16):
        larger = each(w, x)
        assert global_batch_size(3) == 16
    np.testing.assert_array_equal(plain, np.ones((4, 2, 2)))
    np.testing.assert_array_equal(inside, np.full((4, 2, 2), 0.5))
    np.testing.assert_array_equal(larger, np.full((4, 2, 2), 0.25))
    np.testing.assert_array_equal(each(w, x), plain)
    assert (global_batch_size(3), global_batch_size(0)) == (3, 1)
    with batch_over((4, 2)):  # micro-batches of micro-batches
        assert (global_batch_size(3), num_batch_shards(jnp.ones(3))) == (24, 8)


X = np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)


def primitives(f: Any, *args: Any) -> list[str]:
    return [equation.primitive.name for equation in jax.make_jaxpr(f)(*args).eqns]


@pytest.mark.parametrize(
    ("axes", "start", "dimensions", "spec"),
    [
        ({"data": 4}, P(), (BATCH_AXES,), P("data")),
        ({"data": 2, "fsdp": 2}, P(), (BATCH_AXES,), P(("fsdp", "data"))),
        ({"fsdp": 2, "context": 2}, P(), (BATCH_AXES, CONTEXT_AXES), P("fsdp", "context")),
        ({"fsdp": 2, "tensor": 2}, P(), (BATCH_AXES, CONTEXT_AXES), P("fsdp")),
        ({"data": 2, "context": 2}, P(), (None, ("context",)), P(None, "context")),
        ({"context": 8}, P(), (BATCH_AXES, CONTEXT_AXES), None),  # 8 does not divide 4
        ({"tensor": 2}, P(), (BATCH_AXES,), None),
        ({"tensor": 2}, P(), ((),), P(None)),
        ({"data": 1}, P(), (BATCH_AXES,), None),
        # A dimension may be whole, or stay as it is.
        (
            {"data": 2, "context": 2},
            P("data", "context"),
            (BATCH_AXES, (), CONTEXT_AXES),
            P("data", None, "context"),
        ),
        ({"data": 2, "context": 2}, P("data"), (None, ("context",)), P("data", "context")),
    ],
    ids=str,
)
def test_dimensions_lie_over_the_axes_that_divide_them(axes, start, dimensions, spec) -> None:
    """The result and the gradient have the same sharding."""
    mesh = mesh_of(**axes)

    def f(x: Any) -> Any:
        return jnp.sin(constrain_sharding(x, *dimensions))

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, start))
        y = jax.jit(f)(x)
        asked = primitives(f, x)
        gradient = primitives(jax.grad(lambda x: jnp.sum(f(x))), x)
    np.testing.assert_allclose(y, np.sin(X), rtol=1e-6, atol=1e-6)
    assert asked == [*["sharding_constraint"] * (spec is not None), "sin"]
    assert gradient.count("sharding_constraint") == 2 * (spec is not None)
    if spec is not None:
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)


def test_mapped_functions() -> None:
    mesh = mesh_of(data=2, fsdp=2)
    with jax.set_mesh(mesh):
        each = jax.jit(jax.vmap(lambda x: constrain_sharding(x, ("data",)) * 2))(X)
        local = jax.jit(
            jax.shard_map(
                lambda x: constrain_sharding(x, BATCH_AXES) * axes_size(BATCH_AXES),
                in_specs=P("fsdp"),
                out_specs=P("fsdp"),
                axis_names={"fsdp"},
            )
        )(X)
    np.testing.assert_array_equal(each, 2 * X)
    np.testing.assert_array_equal(local, 2 * X)


@pytest.mark.parametrize("explicit", [False, True])
def test_what_is_left_alone(explicit: bool) -> None:
    np.testing.assert_array_equal(constrain_sharding(jnp.asarray(X), BATCH_AXES), X)
    assert primitives(lambda x: constrain_sharding(x, BATCH_AXES), X) == []
    mesh = (explicit_mesh if explicit else mesh_of)(data=2)
    with jax.set_mesh(mesh):
        x = jnp.asarray(X)
        assert constrain_sharding(x, BATCH_AXES) is x  # not traced
        assert axes_size(BATCH_AXES) == (1 if explicit else 2)
        if explicit:
            assert primitives(lambda x: constrain_sharding(x, BATCH_AXES), x) == []


def test_resharding_to_the_sharding_of_a_call() -> None:
    x = jnp.asarray(X)
    assert reshard(x, None) is x
    for make_mesh in (explicit_mesh, mesh_of):
        mesh = make_mesh(data=2)
        with jax.set_mesh(mesh):
            for sharding in (P("data"), NamedSharding(mesh, P("data"))):
                y = jax.jit(lambda x: reshard(x, sharding) * 1)(x)  # noqa: B023
                assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 3)
                np.testing.assert_array_equal(y, X)
