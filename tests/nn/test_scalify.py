"""`nn.scalify` carries the state of NNX objects, as `nnx.jit` does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import unitscale
from unitscale import as_scaled, nn, to_array
from unitscale.core import is_scaled


class Net(nnx.Module):
    """Parameters, statistics and random state, with one layer used twice."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.again = self.first

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(self.norm(jax.nn.relu(self.first(x))))
        return self.last(self.again(x))


def step(net: Net, optimizer: nnx.Optimizer, batch: Any, power: int, *, average: Any) -> Any:
    def loss(net: Net) -> jax.Array:
        return ((net(batch["x"]) - batch["y"]) ** power).mean()

    value, grads = nnx.value_and_grad(loss)(net)
    optimizer.update(net, grads)
    average.set_value(0.5 * average.get_value() + 0.5 * value)
    return value, grads


def train(function: Any, dtype: Any, is_scalified: bool) -> tuple[list[float], Any]:
    """Return the losses of three steps, and the state after them."""
    net, average = Net(), nnx.Variable(jnp.float32(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    objects = [net, optimizer, average]
    batch: Any = {"x": jax.random.normal(jax.random.key(0), (16, 4)), "y": jnp.ones((16, 1))}
    if is_scalified:
        batch = as_scaled(batch, dtype=dtype)
        nnx.update(objects, as_scaled(nnx.state(objects), dtype=dtype))
    losses = []
    for _ in range(3):
        value, _ = function(net, optimizer, batch, 2, average=average)
        losses.append(float(to_array(value)))
    return losses, nnx.as_pure(nnx.state(objects))


@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float32", 1e-5), pytest.param("float16", 2e-3, marks=pytest.mark.slow)]
)
def test_a_step_updates_its_objects_as_under_jit(dtype: str, rtol: float) -> None:
    losses, exact = train(nnx.jit(step, static_argnums=3), None, False)
    found, state = train(nnx.jit(nn.scalify(step), static_argnums=3), dtype, True)
    np.testing.assert_allclose(found, losses, rtol=rtol)
    for ours, theirs in zip(
        jax.tree.leaves(state, is_leaf=is_scaled), jax.tree.leaves(exact), strict=True
    ):
        assert is_scaled(ours) == jnp.issubdtype(theirs.dtype, jnp.floating)
        if not is_scaled(ours):
            assert ours == theirs  # counts of steps and of random draws, and random keys
            continue
        assert ours.dtype == dtype
        size = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(to_array(ours, jnp.float32), theirs, atol=10 * rtol * size)


def test_options_arrays_and_plain_variables() -> None:
    layer, x = nnx.Linear(64, 2, rngs=nnx.Rngs(0)), as_scaled(jnp.ones((3, 64)))
    call = lambda layer, x: layer(x)  # noqa: E731
    y = nn.scalify(call)(layer, x)
    np.testing.assert_allclose(to_array(y), layer(jnp.ones((3, 64))), rtol=1e-5)
    assert isinstance(layer.kernel.get_value(), jax.Array)  # unchanged: it stays plain
    nnx.update(layer, as_scaled(nnx.state(layer)))
    free = nn.scalify(lambda layer, x: x @ layer.kernel, static_scaling="identity")(layer, x)
    np.testing.assert_allclose(
        to_array(free), x.value @ to_array(layer.kernel.get_value()), rtol=1e-5
    )


def test_changes_of_structure_and_returned_objects_are_refused() -> None:
    def freeze(net: Net) -> None:
        net.eval()

    def add(net: Net) -> None:
        net.extra = nnx.Param(jnp.ones(2))  # type: ignore[attr-defined]

    for function in (freeze, add):
        with pytest.raises(ValueError, match=r"unitscale\.nn\.scalify"):
            nn.scalify(function)(Net())
    with pytest.raises(TypeError, match=r"unitscale\.nn\.scalify"):
        nn.scalify(lambda net: net)(Net())
    with pytest.raises(TypeError, match=r"unitscale\.nn\.scalify"):
        nn.scalify(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unitscale\.nn\.scalify"):
        unitscale.scalify(lambda net, x: net(x).sum())(Net(), jnp.ones((2, 4)))
