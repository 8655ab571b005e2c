"""What is added up and joined over chunks is what one call gives, on a mesh too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.parallel.devices import mesh_of
from unitscale.ops import _readout_cross_entropy as readout

TOKENS, SIZE = 24, 3
X = np.random.default_rng(0).normal(size=(TOKENS, SIZE)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(SIZE, 4)).astype(np.float32)


def program(chunks: int) -> Any:
    """The gradient of a kernel by a sum of squares, and a number for each token."""

    def run(x: jax.Array, kernel: jax.Array) -> Any:
        def body(rows: dict[str, Any]) -> tuple[Any, Any]:
            y = rows["x"] @ kernel
            return (rows["x"].T @ y, None), (jnp.sum(y, 1), rows["index"])

        rows = {"x": x, "index": jnp.arange(x.shape[0]), "absent": None}
        return readout.over_chunks(body, rows, chunks)

    return jax.jit(run)


def check(found: Any, tokens: int = TOKENS) -> None:
    (total, none), (sums, index) = found
    y = X[:tokens].astype(float) @ KERNEL
    assert none is None
    np.testing.assert_allclose(total, X[:tokens].T @ y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums, y.sum(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(index, np.arange(tokens))


@pytest.mark.parametrize("chunks", [1, 2, 5, 24, 30])
@pytest.mark.parametrize("tokens", [24, 23, 1])
def test_one_device(tokens: int, chunks: int) -> None:
    check(program(chunks)(X[:tokens], KERNEL), tokens)


@pytest.mark.parametrize("chunks", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "axes", [{"data": 4}, {"fsdp": 2, "data": 2}, {"data": 2, "context": 2}, {"data": 5}], ids=str
)
def test_many_devices(axes: dict[str, int], chunks: int) -> None:
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, P("data" if axes != {"data": 5} else None))
        check(program(chunks)(jax.device_put(X, place), KERNEL))


@pytest.mark.parametrize(
    ("axes", "axis_names"),
    [
        ({"data": 4}, ("fsdp", "data")),
        ({"context": 4}, ("context", "fsdp", "data")),
        ({"fsdp": 2, "context": 2}, ("context", "fsdp", "data")),
        ({"context": 8}, ("fsdp", "data")),  # which does not divide 12 tokens
    ],
    ids=str,
)
def test_readoutof_a_device_are_joined(axes: dict[str, int], axis_names: tuple[str, ...]) -> None:
    lead, x = (4, 12), np.arange(4 * 12 * 3).reshape(4, 12, 3)
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        batch = "fsdp" if "fsdp" in axes else "data" if "data" in axes else None
        context = "context" if lead[1] % axes.get("context", 1) == 0 else None
        spec = P(batch, context if "context" in axes else None)
        program = jax.jit(lambda x: readout.join_tokens(x, lead)).lower(
            jax.device_put(x, NamedSharding(mesh, spec))
        )
        rows = jax.jit(lambda x: readout.join_tokens(x, lead))(x)
        back = jax.jit(lambda x: readout.split_tokens(readout.join_tokens(x, lead), lead))(x)
        assert readout.token_axes(lead) == axis_names
        over = tuple(name for name in axis_names if name in axes)
    np.testing.assert_array_equal(back, x)
    assert sorted(rows[:, 0].tolist()) == x[..., 0].ravel().tolist()
    if axes != {"context": 8}:
        assert rows.sharding.is_equivalent_to(NamedSharding(mesh, P(over)), 2)
    assert not collectives(program.compile())  # every device has its own


def test_nothing_to_join() -> None:
    assert readout.join_tokens(jnp.ones((0, 4, 3)), (0, 4)).shape == (0, 3)
    assert readout.split_tokens(jnp.ones((0, 3)), (0, 4)).shape == (0, 4, 3)
    with jax.set_mesh(mesh_of(context=2)):
        joined = jax.jit(readout.join_tokens, static_argnums=1)(jnp.ones((0, 4, 3)), (0, 4))
        assert joined.shape == (0, 3)


def test_devices_are_added_once() -> None:
    mesh = mesh_of(data=4)
    with jax.set_mesh(mesh):
        rows = jax.device_put(X, NamedSharding(mesh, P("data")))
        compiled = program(3).lower(rows, KERNEL).compile()
    assert [c.kind for c in collectives(compiled)].count("all-reduce") == 1
    # None stands in the body of the loop.
    bodies = [part for part in compiled.as_text().split("\n\n") if "ENTRY" not in part]
    assert not any("all-reduce(" in body for body in bodies)
