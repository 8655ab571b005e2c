"""The gradient of a divided batch is that of the whole one, whoever divides it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.batching import compute, entry
from tests.parallel.devices import mesh_of, relative_error
from unitscale import ops
from unitscale.core import batch_over, num_batch_shards, to_array

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
    "dense": lambda p, d: cross_entropy(ops.dense(d["x"], p["kernel"], p["bias"]), d),
    "readout": lambda p, d: cross_entropy(ops.readout(d["x"], p["kernel"], p["bias"]), d),
    "mse": lambda p, d: ops.mse_loss(ops.dense(d["x"], p["kernel"]), d["y"]),
    "embed": lambda p, d: cross_entropy(ops.dense(ops.embed(d["ids"], p["table"]), p["kernel"]), d),
    "conv": lambda p, d: cross_entropy(
        ops.dense(ops.conv(d["x"], p["filter"], p["shift"]), p["kernel"]), d
    ),
    "layer norm": lambda p, d: cross_entropy(
        ops.dense(ops.layer_norm(d["x"], p["gain"], p["shift"]), p["kernel"]), d
    ),
    "rms norm": lambda p, d: cross_entropy(
        ops.dense(ops.rms_norm(d["x"], p["gain"]), p["kernel"]), d
    ),
    "positions": lambda p, d: cross_entropy(
        ops.dense(ops.add(d["x"], p["positions"], constraint=None), p["kernel"]), d
    ),
    "matmul": lambda p, d: cross_entropy(ops.matmul(d["x"], p["kernel"], constraint="gmean"), d),
    "mask": lambda p, d: ops.softmax_cross_entropy(
        ops.dense(d["x"], p["kernel"]), d["labels"], where=d["labels"] > 1
    ),
    "ours under a plain mean": lambda p, d: squares(ops.dense(d["x"], p["kernel"], p["bias"]), d),
    "plain under our mean": lambda p, d: cross_entropy(d["x"] @ p["kernel"] + p["bias"], d),
    "both under our mean": lambda p, d: cross_entropy(
        to_array(ops.dense(jnp.tanh(d["x"] * p["gain"]), p["kernel"])) + p["bias"], d
    ),
    "plain": lambda p, d: squares(d["x"] @ p["kernel"], d),
    "one loss for each": lambda p, d: jnp.mean(
        ops.softmax_cross_entropy(ops.dense(d["x"], p["kernel"]), d["labels"], reduction="none")
    ),
}


def by_mean_of_losses(loss: Any, devices: int) -> Any:
    """JAX keeps account, and sums the gradients of what all devices share."""
    whole = jax.grad(lambda p, d: lax.pmean(loss(p, d), "data"))
    mesh = mesh_of(data=devices)
    return jax.shard_map(whole, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())


def by_mean_of_gradients(loss: Any, devices: int) -> Any:
    """JAX keeps account, and parameters are each device's own."""

    def local(p, d):
        p = lax.pcast(p, "data", to="varying")
        return lax.pmean(jax.grad(loss)(p, d), "data")

    mesh = mesh_of(data=devices)
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())


def unchecked(loss: Any, devices: int) -> Any:
    """JAX keeps no account, so the axes are named."""

    def local(p, d):
        with batch_over("data"):
            return lax.pmean(jax.grad(loss)(p, d), "data")

    return jax.shard_map(
        local,
        mesh=mesh_of(data=devices, model=8 // devices),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )


def by_vmap(loss: Any, parts: int) -> Any:
    """Gradients of each part of the batch, as those of examples."""
    each = jax.vmap(jax.grad(loss), (None, 0), axis_name="part")

    def whole(p, d):
        divided = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), d)
        with batch_over("part"):
            return jax.tree.map(lambda g: g.mean(0), each(p, divided))

    return whole


WAYS = {
    "mean of losses": (by_mean_of_losses, 8),
    "mean of gradients": (by_mean_of_gradients, 4),
    "unchecked": (unchecked, 2),
    "vmap": (by_vmap, BATCH),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_a_divided_batch(way: str) -> None:
    divide, parts = WAYS[way]
    ours = compute({name: (divide(loss, parts), PARAMS, DATA) for name, loss in LOSSES.items()})
    whole = compute({name: (jax.grad(loss), PARAMS, DATA) for name, loss in LOSSES.items()})
    for name in LOSSES:
        with entry(name):
            for key, expected in whole[name].items():
                if np.any(expected):
                    assert relative_error(ours[name][key], expected) < 2**-20, key
                else:
                    assert not np.any(ours[name][key])


def counted(axes: Any, spec: Any, **settings: Any) -> int:
    """Number of parts that an array of a spec counts as, on 4 x 2 devices."""
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


@pytest.mark.parametrize(("axes", "spec", "check", "parts"), COUNTS)
def test_parts_that_are_counted(axes: Any, spec: Any, check: bool, parts: int) -> None:
    assert counted(axes, spec, check_vma=check) == parts


def test_nothing_is_divided_outside() -> None:
    assert num_batch_shards(jnp.ones(3)) == 1
    with batch_over(("data", "tensor")):
        assert num_batch_shards(jnp.ones(3)) == 1


def test_what_was_traced_inside_is_not_used_outside() -> None:
    """The context is a part of the keys of JAX's caches."""
    grad = jax.jit(jax.grad(lambda w, x: ops.dense(x, w).data.sum()))
    each = jax.vmap(grad, (None, 0), axis_name="part")
    w, x = jnp.ones((2, 2)), jnp.ones((4, 1, 2))
    plain = each(w, x)
    with batch_over("part"):
        inside = each(w, x)
    np.testing.assert_array_equal(plain, np.ones((4, 2, 2)))
    np.testing.assert_array_equal(inside, np.full((4, 2, 2), 0.5))
    np.testing.assert_array_equal(each(w, x), plain)
