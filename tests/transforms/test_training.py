"""Training under scalify follows training in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.optimizers import PARAMS, RUNS, STEPS, X, Y, loss
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.core import is_scaled
from unitscale.transforms import scalify


def check_scales(tree: Any) -> None:
    """Check that scales are powers of two within a factor of 4 of the RMS of the value.

    A measured scale is within a factor of 2; one step after it may add another.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
        if isinstance(leaf, ScaledArray) and np.any(leaf.data):
            name = jax.tree_util.keystr(path)
            scale = float(leaf.scale)
            assert np.frexp(scale)[0] == 0.5, name
            rms = float(np.sqrt(np.mean(np.square(np.asarray(leaf.data, np.float64)))))
            assert 0.25 <= rms <= 4.0, f"{name}: data has RMS {rms}, scale {scale}"


BF16 = pytest.param(jnp.bfloat16, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [jnp.float16, BF16])
def test_layer_norm_of_flax(dtype: Any) -> None:
    """Flax computes the variance as E[x^2] - E[x]^2."""
    mean = 32.0
    x = np.random.default_rng(0).normal(mean, 1, size=(16, 512)).astype(np.float32)
    given = as_scaled(jnp.asarray(x), dtype=dtype)
    exact = np.asarray(to_array(given), np.float64)
    graph, params = nnx.split(nnx.LayerNorm(512, rngs=nnx.Rngs(0)))
    state = as_scaled(params, dtype=dtype)
    found = to_array(jax.jit(scalify(lambda p, x: nnx.merge(graph, p)(x)))(state, given))
    expected = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    atol = 2 * float(jnp.finfo(dtype).eps) * np.max(np.abs(expected))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=atol)


def rounded(tree: Any, dtype: Any, offset: Any) -> Any:
    """Round each leaf at a scale near its RMS; the offset shifts the rounding."""

    def one(x: Any) -> Any:
        if not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        finite = jnp.where(jnp.isfinite(x), x, 0)
        size = jnp.sqrt(jnp.mean(jnp.square(finite / (jnp.max(jnp.abs(finite)) + 1e-37))))
        scale = jnp.exp2(jnp.round(jnp.log2(size * jnp.max(jnp.abs(finite)) + 1e-37))) * offset
        return (x / scale).astype(dtype).astype(x.dtype) * scale

    return jax.tree.map(one, tree)


def losses(step: Callable[..., Any], params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    """Return the loss of every step, and the final state."""
    found = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, batch)
        found.append(loss)
    return np.asarray([float(to_array(x)) for x in jax.device_get(found)]), (params, state)


def follows(name: str) -> Any:
    """Train in float32 and float16; return the losses of float32, and the final float16 state."""
    optimizer = RUNS[name].make()
    update = optax.with_extra_args_support(optimizer).update

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        extra = RUNS[name].extra(value, grads, lambda params: loss(params, batch))
        updates, state = update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def storing(params: Any, state: Any, batch: Any, offset: Any) -> Any:
        *kept, loss = step(params, state, batch)
        return *rounded(tuple(kept), jnp.float16, offset), loss

    params, batch = jax.tree.map(jnp.asarray, (PARAMS, (X, Y)))
    start = params, optimizer.init(params), batch
    plain, _ = losses(jax.jit(step), *start)
    assert plain[-20:].mean() < 0.9 * plain[0], "the plain program trains"
    stored = [
        losses(lambda *args, o=o: storing(*args, o), *start)[0]
        for o in np.asarray([1.0, 1.25, 1.5, 1.75], np.float32)
    ]
    found, end = losses(jax.jit(scalify(step)), *as_scaled(start, dtype=jnp.float16))
    assert np.all(np.isfinite(found))
    # Means over 20 steps, since two runs that follow each other swing apart.
    windows = [np.asarray(x).reshape(-1, 20).mean(1) for x in (plain, found, *stored)]
    apart = np.max([np.abs(w - windows[0]) for w in windows[2:]], axis=0)
    bound = 3 * np.maximum.accumulate(apart) + 0.02 * windows[0]
    assert np.all(np.abs(windows[1] - windows[0]) <= bound), (windows[:2], bound)
    return plain, end, step, start


@pytest.mark.slow
def test_adamw_in_float16_and_float32_and_scales_have_a_fixed_point() -> None:
    plain, end, step, start = follows("adamw")
    check_scales(end)
    floats = [x for x in jax.tree.leaves(end, is_leaf=is_scaled) if is_scaled(x)]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float16)}
    exact, _ = losses(jax.jit(scalify(step)), *as_scaled(start))
    np.testing.assert_allclose(exact[:50], plain[:50], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_training_in_float16_follows_float32(name: str) -> None:
    follows(name)


def test_a_step_that_changes_its_model_in_place_is_refused() -> None:
    def update(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(lambda model: model(x).sum())(model))

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"in place, at \[0\]\.bias.* `nnx\.merge\(graphdef"):
        nnx.jit(scalify(update))(model, optimizer, jnp.ones((1, 2)))
