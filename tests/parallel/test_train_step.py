"""Training on many devices against training on one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import scaled
from tests.parallel.devices import mesh_of, relative_error
from unitscale import ops
from unitscale.core import ScaledArray, to_array
from unitscale.parallel import AutoScale, ParallelState, param_shardings, shard_batch, train_step

WIDTH, HIDDEN, BATCH, STEPS = 16, 64, 32, 5
SGD = optax.sgd(0.1)


def first_params() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, WIDTH)}
    return {k: 0.3 * random.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    xs = random.normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)
    return [(x, np.tanh(x[:, ::-1])) for x in xs]


def loss(params: Any, batch: Any) -> jax.Array:
    params = to_array(params)
    x, y = batch
    return jnp.mean(jnp.square(jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - y))


def run(step: Any, state: Any, keys: bool = False) -> tuple[Any, list[float]]:
    losses = []
    for i, batch in enumerate(batches()):
        extra = (jax.random.key(i),) if keys else ()
        state, value = step(state, batch, *extra)
        losses.append(float(value))
    return state, losses


def distance(params: Any, wanted: Any) -> float:
    """Return the difference of two results, relative to what training changed."""
    first = first_params()
    moved = {k: np.asarray(params[k]) - first[k] for k in first}
    return max(relative_error(moved[k], wanted[k] - first[k]) for k in first)


# Tells gradients from multiples of them, and norms of shards from those of the whole.
EXACT = optax.chain(optax.adam(0.1, eps=0.5), optax.clip_by_global_norm(0.5))


def unit_loss(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    hidden = ops.layer_norm(ops.dense(x, params["up"], params["bias"]))
    return ops.mse_loss(ops.readout(ops.gelu(hidden), params["down"]), y)


@jax.jit
def unit_step(params: Any, batch: Any) -> Any:
    grads = jax.grad(unit_loss)(params, batch)
    updates, _ = EXACT.update(grads, EXACT.init(params), params)
    return optax.apply_updates(params, updates)


def by_compiler(mesh: Any) -> Any:
    params = jax.device_put(first_params(), param_shardings(first_params(), mesh))
    return unit_step(params, shard_batch(batches()[0], mesh))


def by_shard_map(mesh: Any) -> Any:
    axes = ("data", "fsdp") if "fsdp" in mesh.shape else "data"
    step = train_step(unit_loss, EXACT, mesh, axis_name=axes, dtype="float32")
    state = ParallelState(first_params(), EXACT.init(first_params()))
    return step(state, batches()[0])[0].params


@pytest.mark.parametrize(
    "axes",
    [{"data": 4}, pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("divide", [by_compiler, by_shard_map])
def test_a_unit_scaled_step_is_that_of_one_device(divide: Any, axes: dict[str, int]) -> None:
    found, wanted = divide(mesh_of(**axes)), unit_step(first_params(), batches()[0])
    for key, first in first_params().items():
        error, moved = (np.linalg.norm(x - wanted[key]) for x in (np.asarray(found[key]), first))
        # Sums in another order, and two results that are each rounded by half a unit at most.
        assert error < 2**-20 * moved + 2**-23 * np.linalg.norm(wanted[key]), key
        assert moved > 2**-10 * np.linalg.norm(first)


@pytest.mark.parametrize("names", [("first", "second"), ("up", "down")])
def test_gradients_of_matrices_in_a_row(names: tuple[str, str]) -> None:
    """A regression test: sharding the batch over data before fsdp was wrong; see `batch_axes`."""
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 16, 64)).astype(np.float32)
    params = [random.normal(size=(64, n)).astype(np.float32) / 8 for n in (64, 256)]

    def total(params, x):
        return jnp.sum(jnp.sin(x @ params[0] @ params[1]))

    grads = jax.jit(jax.grad(total, (0, 1)))
    named = dict(zip(names, params, strict=True))
    placed = jax.device_put(named, param_shardings(named, mesh))
    found = jax.tree.leaves(grads([placed[name] for name in names], shard_batch(x, mesh)))
    for got, wanted in zip(found, jax.tree.leaves(grads(params, x)), strict=True):
        assert relative_error(got, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounding", "auto"),
    [("nearest", False), ("stochastic", True)],
)
def test_fp8_exchange_trains_alike(rounding: Any, auto: bool) -> None:
    """With SGD, changes of weights have the relative error of the gradients.

    Rounding to E4M3 has an RMS error of 2.6% over a binade (spacing 1/8, uniform numbers), and
    stochastic rounding sqrt(2) times as much. There are two roundings.
    """
    start = ParallelState(first_params(), SGD.init(first_params()))
    exact, wanted_losses = run(train_step(loss, SGD, mesh_of(data=8), dtype="float32"), start)
    step = train_step(loss, SGD, mesh_of(data=8), rounding=rounding, small=0)
    scale = AutoScale.create(first_params()) if auto else None
    state = ParallelState(first_params(), SGD.init(first_params()), scale)
    state, losses = run(step, state, keys=rounding == "stochastic")
    assert 0 < distance(state.params, exact.params) < (0.04 if rounding == "nearest" else 0.06)
    np.testing.assert_allclose(losses, wanted_losses, rtol=0.01)
    if auto:
        mu = 2.0 ** (STEPS / 1000)
        np.testing.assert_allclose(list(jax.tree.leaves(state.auto)), mu, rtol=1e-5)


@pytest.mark.slow
def test_scaled_optimizer() -> None:
    """Weights are float16 ScaledArrays; moments and the exchange of gradients are in FP8."""
    optimizer = scaled(optax.adam(1e-2))

    @jax.jit
    def start(params):
        params = optimizer.scale_params(params)
        return ParallelState(params, optimizer.init(params))

    step = train_step(loss, optimizer, mesh_of(data=4), donate=False)
    state, _ = run(step, start(first_params()))
    assert state.params["up"].dtype == jnp.float16
    before, after = (loss(params, batches()[0]) for params in (first_params(), state.params))
    assert after < 0.9 * before


def test_refusals() -> None:
    mesh, sgd = mesh_of(data=4), optax.sgd(0.1)
    step, given = train_step(loss, sgd, mesh), {"dtype": "float64"}
    params = scaled(sgd).scale_params(first_params())
    six = np.ones((6, WIDTH)), np.ones((6, WIDTH))
    for error, match, call in (
        (TypeError, "optimizer", lambda: train_step(loss, 3, mesh)),
        (ValueError, "axis_name", lambda: train_step(loss, sgd, mesh, axis_name="fsdp")),
        (ValueError, "dtype", lambda: train_step(loss, sgd, mesh, **given)),
        (ValueError, "divisible", lambda: step(ParallelState(first_params(), ()), six)),
        (TypeError, "optim.scaled", lambda: step(ParallelState(params, ()), batches()[0])),
    ):
        with pytest.raises(error, match=match):
            call()


def test_the_loss_is_its_value_in_float32() -> None:
    mesh = mesh_of(data=2)
    batch = np.float32([[1.4], [48.0]])

    def scaled_loss(w: Any, x: Any) -> ScaledArray:
        size = jnp.where(jnp.sum(x) > 8, 16.0, 0.5)  # another on each device
        return ScaledArray(jnp.sum(w * x) / size, size)

    for loss in (scaled_loss, lambda w, x: jnp.sum(w * x).astype("float16")):
        step, params = train_step(loss, optax.sgd(0.0), mesh), jnp.float32(1)
        _, value = step(ParallelState(params, optax.sgd(0.0).init(params)), batch)
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, 24.7, rtol=1e-3)
